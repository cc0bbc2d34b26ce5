"""Converts a schedule to arrays for the executor: integer columns, buffer slots, and directions of
messages.

In a tick every stage works in this order: it receives the gradients that neighbours sent in the
previous tick; runs the F slot, the B slot and the W slot; and receives the activations that were
sent after the F slot, which may be in transit during B. Each buffer has one spare slot, the last,
which an idle stage reads and writes.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from zerojax.config.late_dataclasses import dataclass
from zerojax.schedules.schedule_table import Event, Schedule, ScheduleError, check_schedule

STASHES = ("residuals", "input")
DIRECTIONS = ("right", "left", "local")
_RECEIVE_GRADIENT, _F, _B, _W, _RECEIVE_ACTIVATION, _MOMENTS = range(6)

_Item = tuple[int, int]
"""An item in a buffer: (virtual stage, microbatch)."""


class TickRun(NamedTuple):
    """Ticks from start to stop - 1, which one loop runs with the same slots in its body.

    A gradient that is sent in the last tick of a run is received in the first tick of the next run.

    Attributes:
      start, stop: first tick of the run, and the tick after its last.
      forward, backward, weight: whether the loop body has this slot.
      embed, head: whether the first and the last virtual stage run a forward operation in the run.
      embed_backward: whether the first virtual stage runs a backward operation in the run.
      receives: {(what, direction)} of the messages in the body, with what = activation or gradient.
    """

    start: int
    stop: int
    forward: bool
    backward: bool
    weight: bool
    embed: bool
    head: bool
    embed_backward: bool
    receives: frozenset[tuple[str, str]]


@dataclass(frozen=True, eq=False)
class ExecutorTable:
    """A schedule as integer arrays for the executor.

    Attributes:
      schedule: schedule from which the table was made.
      stash: `residuals`: the values for the backward pass of a chunk are stored from F on; or
        `input`: only the chunk's input is stored, and B recomputes F.
      columns: {name: int32 [ticks, stages]}. For x in forward, backward, weight: `x_active` (0 or
        1), `x_microbatch`, `x_chunk` (0 if idle), `x_input`, `x_residual`, `x_gradient` (slots; the
        spare slot if idle or not used). `forward_first`, `forward_last`, `backward_first`: 1 where
        the first or last virtual stage works. The embedding computes the input of the first virtual
        stage; with stash `input` it is written to `forward_input`, for other stages that slot is
        read. The head of the last virtual stage writes `forward_gradient`; all other gradients are
        read. `receive_activation_D` and `receive_gradient_D` for D in right, left, local: slot for
        a value received in this tick that moves to the right (from stage s - 1, around the ring),
        to the left, or within the stage.
      num_inputs, num_gradients, num_residuals: number of slots of each buffer without the spare
        slot, whose index is this number. num_residuals is 0 with stash `input`.
      runs: ticks in groups that use the same slots.
    """

    schedule: Schedule
    stash: str
    columns: Mapping[str, np.ndarray]
    num_inputs: int
    num_gradients: int
    num_residuals: int
    runs: tuple[TickRun, ...]

    @property
    def directions(self) -> frozenset[tuple[str, str]]:
        """(what, direction) of all messages that any tick receives."""
        return frozenset().union(*(run.receives for run in self.runs))

    @property
    def wraps(self) -> bool:
        """Whether the last pipeline stage and the first send messages to each other, which a
        schedule with several chunks in a loop needs."""
        chunks, placement = self.schedule.num_chunks, self.schedule.placement
        return placement == "loop" and chunks > 1 and self.schedule.num_stages > 1


def lower(
    schedule: Schedule, *, stash: str = "residuals", max_runs: int | None = 8
) -> ExecutorTable:
    """Converts a schedule into the executor's table.

    Args:
      schedule: any schedule; it is checked.
      stash: `residuals` or `input`, the values that are stored for the backward pass.
      max_runs: largest number of runs, each of which is compiled separately. If the table changes
        its slots more often, neighbouring runs are joined and use masked slots; None joins none.

    Raises:
      ScheduleError: the schedule cannot run, or stash or max_runs is not valid.
    """
    if stash not in STASHES:
        raise ScheduleError(f"stash={stash!r} is unknown; use {' or '.join(STASHES)}")
    if max_runs is not None and max_runs < 1:
        raise ScheduleError(f"max_runs={max_runs} must be at least 1, or None")
    check_schedule(schedule)
    lives = _lifetimes(schedule, stash)
    slots, sizes = {}, {}
    for buffer, intervals in lives.items():
        allocated = [_allocate(of_stage) for of_stage in intervals]
        slots[buffer] = {item: slot for found, _ in allocated for item, slot in found.items()}
        sizes[buffer] = max(number for _, number in allocated)
    columns = _empty_columns(schedule, sizes)
    for event in schedule.events():
        _write_operation(columns, schedule, event, slots, stash)
        _write_message(columns, schedule, event, slots)
    runs = _cut(columns, sizes)
    if max_runs is not None:
        runs = _join(runs, max_runs)
    for column in columns.values():
        column.setflags(write=False)
    return ExecutorTable(
        schedule,
        stash,
        columns,
        sizes["input"],
        sizes["gradient"],
        sizes["residual"],
        tuple(runs),
    )


def _moment(tick: int, phase: int) -> int:
    return tick * _MOMENTS + phase


def _lifetimes(schedule: Schedule, stash: str) -> dict[str, list[list[tuple[int, int, _Item]]]]:
    """Returns {buffer: for each stage [(first write, last read, item)] of all its items}."""
    lives: dict[str, list[list[tuple[int, int, _Item]]]] = {
        buffer: [[] for _ in range(schedule.num_stages)]
        for buffer in ("input", "gradient", "residual")
    }
    last_virtual = schedule.num_virtual_stages - 1
    tick = schedule.tick_of
    for virtual in range(schedule.num_virtual_stages):
        stage, _ = schedule.locate(virtual)
        for microbatch in range(schedule.num_microbatches):
            item = virtual, microbatch
            forward = _moment(tick["F", *item], _F)
            last = (
                _moment(tick["W", *item], _W)
                if schedule.splits_backward
                else _moment(tick["B", *item], _B)
            )
            arrival = (
                _moment(tick["F", virtual - 1, microbatch], _RECEIVE_ACTIVATION)
                if virtual
                else forward
            )
            if virtual or stash == "input":
                end = last if stash == "input" else forward
                lives["input"][stage].append((arrival, end, item))
            if stash == "residuals":
                lives["residual"][stage].append((forward, last, item))
            gradient = (
                forward
                if virtual == last_virtual
                else _moment(tick["B", virtual + 1, microbatch] + 1, _RECEIVE_GRADIENT)
            )
            lives["gradient"][stage].append((gradient, last, item))
    return lives


def _allocate(intervals: list[tuple[int, int, _Item]]) -> tuple[dict[_Item, int], int]:
    """Assigns a slot to each item so that items with overlapping lifetimes have different slots;
    returns the slots and their number.

    In the order of first writes each item takes the lowest free slot. The number of slots is then
    the minimum: the largest number of items that exist at the same time.
    """
    free: list[int] = []
    busy: list[tuple[int, int]] = []
    slots: dict[_Item, int] = {}
    number = 0
    for start, end, item in sorted(intervals):
        while busy and busy[0][0] < start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            slot = heapq.heappop(free)
        else:
            slot, number = number, number + 1
        slots[item] = slot
        heapq.heappush(busy, (end, slot))
    return slots, number


_SLOTS = {"F": "forward", "B": "backward", "W": "weight"}


def _empty_columns(schedule: Schedule, sizes: dict[str, int]) -> dict[str, np.ndarray]:
    """Returns the columns of an `ExecutorTable` in which all stages are idle in every tick."""
    spare = {"forward_first": 0, "forward_last": 0, "backward_first": 0}
    for slot in _SLOTS.values():
        spare |= {f"{slot}_active": 0, f"{slot}_microbatch": 0, f"{slot}_chunk": 0}
        spare |= {f"{slot}_{buffer}": number for buffer, number in sizes.items()}
    for direction in DIRECTIONS:
        spare[f"receive_activation_{direction}"] = sizes["input"]
        spare[f"receive_gradient_{direction}"] = sizes["gradient"]
    shape = (schedule.num_ticks, schedule.num_stages)
    return {name: np.full(shape, value, np.int32) for name, value in spare.items()}


def _write_operation(
    columns: dict[str, np.ndarray],
    schedule: Schedule,
    event: Event,
    slots: dict[str, dict[_Item, int]],
    stash: str,
) -> None:
    kind, microbatch, chunk = event.operation
    slot, place = _SLOTS[kind], (event.tick, event.stage)
    item = event.virtual_stage, microbatch
    is_first = event.virtual_stage == 0
    is_last = event.virtual_stage == schedule.num_virtual_stages - 1
    columns[f"{slot}_active"][place] = 1
    columns[f"{slot}_microbatch"][place] = microbatch
    columns[f"{slot}_chunk"][place] = chunk
    if kind == "F":
        columns["forward_first"][place] = is_first
        columns["forward_last"][place] = is_last
    if kind == "B":
        columns["backward_first"][place] = is_first
    for buffer, found in slots.items():
        if buffer == "input" and kind != "F" and stash != "input":
            continue  # the input is freed by then
        if buffer == "gradient" and kind == "F" and not is_last:
            continue
        if item in found:
            columns[f"{slot}_{buffer}"][place] = found[item]


def _write_message(
    columns: dict[str, np.ndarray],
    schedule: Schedule,
    event: Event,
    slots: dict[str, dict[_Item, int]],
) -> None:
    """Writes into `columns` the slot in which the receiving stage stores the result of `event`.

    It writes nothing for W, and for results that no other virtual stage receives.
    """
    kind, microbatch, chunk = event.operation
    step = {"F": 1, "B": -1, "W": 0}[kind]
    target = event.virtual_stage + step
    if not step or not 0 <= target < schedule.num_virtual_stages:
        return
    stage, _ = schedule.locate(target)
    if stage == event.stage:
        direction = "local"
    else:
        # In a loop activations always move right and gradients left; in a V the second
        # chunk reverses both. With two stages both directions lead to the same neighbour.
        goes_right = (kind == "F") != (schedule.placement == "v" and chunk == 1)
        direction = "right" if goes_right else "left"
    item = target, microbatch
    if kind == "F":
        columns[f"receive_activation_{direction}"][event.tick, stage] = slots["input"][item]
    else:
        columns[f"receive_gradient_{direction}"][event.tick + 1, stage] = slots["gradient"][item]


def _cut(columns: dict[str, np.ndarray], sizes: dict[str, int]) -> list[TickRun]:
    """Splits the ticks into the longest runs that use the same slots in every tick."""
    used = np.stack([columns[f"{slot}_active"].any(axis=1) for slot in _SLOTS.values()], axis=1)
    changes = np.flatnonzero((used[1:] != used[:-1]).any(axis=1)) + 1
    borders = [0, *changes.tolist(), len(used)]
    runs = []
    for start, stop in itertools.pairwise(borders):
        rows = slice(start, stop)
        receives = frozenset(
            (what, direction)
            for what, buffer in (("activation", "input"), ("gradient", "gradient"))
            for direction in DIRECTIONS
            if (columns[f"receive_{what}_{direction}"][rows] != sizes[buffer]).any()
        )
        forward, backward, weight = map(bool, used[start])
        embed = bool(columns["forward_first"][rows].any())
        head = bool(columns["forward_last"][rows].any())
        embed_backward = bool(columns["backward_first"][rows].any())
        runs.append(
            TickRun(start, stop, forward, backward, weight, embed, head, embed_backward, receives)
        )
    return runs


def _join(runs: list[TickRun], max_runs: int) -> list[TickRun]:
    """Joins neighbouring runs until there are at most `max_runs`, first those that add the fewest
    masked slots."""
    runs = list(runs)
    while len(runs) > max_runs:
        place = min(range(len(runs) - 1), key=lambda i: _masked(runs[i], runs[i + 1]))
        runs[place : place + 2] = [_merge(runs[place], runs[place + 1])]
    return runs


def _merge(left: TickRun, right: TickRun) -> TickRun:
    return TickRun(
        left.start,
        right.stop,
        forward=left.forward or right.forward,
        backward=left.backward or right.backward,
        weight=left.weight or right.weight,
        embed=left.embed or right.embed,
        head=left.head or right.head,
        embed_backward=left.embed_backward or right.embed_backward,
        receives=left.receives | right.receives,
    )


def _masked(left: TickRun, right: TickRun) -> int:
    """Returns the number of masked slots, summed over ticks, that joining the two runs would
    add."""
    merged = sum(_merge(left, right)[2:5])
    return sum((run.stop - run.start) * (merged - sum(run[2:5])) for run in (left, right))
