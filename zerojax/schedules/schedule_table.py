"""Schedule tables (operations in ticks x stages), and checks that a table can run.

A table that passes `check_schedule` has every operation once, in existing slots, after the
operations whose results it needs, and within the memory of its buffers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from zerojax.config.late_dataclasses import dataclass

KINDS = ("F", "B", "W")
PLACEMENTS = ("loop", "v")
_OPERATION = re.compile(r"([FBW])(\d{1,9})(?:\.(\d{1,9}))?")


class ScheduleError(ValueError):
    """Error for a schedule that cannot be built, read or run; the message states the place and the
    remedy.

    Args:
      text: the message.
      tick: tick of the broken rule; None if it concerns the whole table.
    """

    def __init__(self, text: str, *, tick: int | None = None):
        super().__init__(text)
        self.tick = tick


class Operation(NamedTuple):
    """One operation of one stage on one microbatch.

    Attributes:
      kind: F (forward), B (backward; if the table has W operations, only the gradient of the input)
        or W (gradient of the weights).
      microbatch: number of the microbatch, from 0.
      chunk: number of the part of the model on this stage, from 0.
    """

    kind: str
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")


Cell = tuple[Operation, ...]


class Event(NamedTuple):
    """One operation of a schedule table, with its tick and stage."""

    tick: int
    stage: int
    virtual_stage: int
    operation: Operation


def parse_cell(text: str) -> Cell:
    """Parses a cell of a schedule table; returns its operations.

    Args:
      text: text such as `F4`, `F4+B0` or `F4.1+B0.1+W0`; empty or `.` is idle. The number after the
        point is the chunk.

    Raises:
      ScheduleError: a part of the text is not an operation.

    >>> parse_cell("F4+B0.1")
    (Operation(kind='F', microbatch=4, chunk=0), Operation(kind='B', microbatch=0, chunk=1))
    """
    text = text.strip()
    if text in ("", "."):
        return ()
    operations = []
    for word in text.split("+"):
        match = _OPERATION.fullmatch(word.strip())
        if match is None:
            raise ScheduleError(
                f"{text!r} is not a cell; write F, B or W, the microbatch and, after a point, the "
                "chunk, joined by +, such as F4.1+B0, or . for idle"
            )
        kind, microbatch, chunk = match.groups()
        operations.append(Operation(kind, int(microbatch), int(chunk or 0)))
    return tuple(sorted(operations, key=lambda operation: KINDS.index(operation.kind)))


def format_cell(cell: Cell) -> str:
    """Formats a cell as the text that `parse_cell` reads; `.` for an idle cell."""
    return "+".join(map(str, cell)) or "."


def virtual_stage(placement: str, num_stages: int, stage: int, chunk: int) -> int:
    """Returns the position in the model, counted from its input, of a chunk of a stage.

    `loop` distributes the parts of the model round-robin. `v` assigns chunk 0 of all stages in
    order and then chunk 1 in reverse order, so that stage 0 has both the first and the last part.
    """
    if placement == "v":
        return stage if chunk == 0 else 2 * num_stages - 1 - stage
    return chunk * num_stages + stage


def locate(placement: str, num_stages: int, virtual: int) -> tuple[int, int]:
    """Returns (stage, chunk) of a virtual stage; the inverse of `virtual_stage`."""
    if placement == "v":
        return (virtual, 0) if virtual < num_stages else (2 * num_stages - 1 - virtual, 1)
    return virtual % num_stages, virtual // num_stages


@dataclass(frozen=True)
class Schedule:
    """A table of cells, `table[tick][stage]`, and the placement of its chunks.

    A tick has three slots, F, B and W in this order, which all stages run in lockstep. A cell has
    at most one operation for each slot. The result of F or B is sent in the same tick and may be
    used one tick later. The last virtual stage computes a gradient from its activation inside its F
    slot, so its B may follow in the same tick.

    The constructor checks nothing; `check_schedule` does.
    """

    name: str
    table: tuple[tuple[Cell, ...], ...]
    placement: str = "loop"

    @classmethod
    def from_cells(
        cls, name: str, rows: Sequence[Sequence[str]], *, placement: str = "loop"
    ) -> Schedule:
        """Makes a schedule from the texts of a user's own table.

        Args:
          name: name of the schedule in plans and pictures.
          rows: one sequence per tick with one text per stage, as `parse_cell` reads them.
          placement: `loop` or `v`, see `virtual_stage`.

        Raises:
          ScheduleError: a cell cannot be read; the message states tick and stage.
        """
        table = []
        for tick, row in enumerate(rows):
            cells = []
            for stage, text in enumerate(row):
                try:
                    cells.append(parse_cell(text))
                except ScheduleError as error:
                    raise ScheduleError(f"tick {tick}, stage {stage}: {error}", tick=tick) from None
            table.append(tuple(cells))
        return cls(name, tuple(table), placement)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Schedule:
        """Makes a schedule from its fields, as stored in JSON.

        Args:
          fields: `name`, `table` and `placement`; each operation is a list of kind, microbatch and
            chunk.

        Raises:
          ScheduleError: the mapping does not have the fields of a schedule.
        """
        try:
            table = tuple(
                tuple(tuple(Operation(*operation) for operation in cell) for cell in row)
                for row in fields["table"]
            )
            return cls(fields["name"], table, fields["placement"])
        except (KeyError, TypeError) as error:
            raise ScheduleError(
                f"a mapping with {', '.join(fields)} is not a schedule ({error}); it has name, "
                "table and placement, as dataclasses.asdict of a Schedule gives them"
            ) from None

    @property
    def num_ticks(self) -> int:
        """Number of ticks: rows of the table."""
        return len(self.table)

    @property
    def num_stages(self) -> int:
        """Number of stages: columns of the table's first row."""
        return len(self.table[0]) if self.table else 0

    @cached_property
    def num_microbatches(self) -> int:
        """Number of microbatches: one more than the largest microbatch in the table."""
        return 1 + max((event.operation.microbatch for event in self.events()), default=-1)

    @cached_property
    def num_chunks(self) -> int:
        """Number of chunks per stage: one more than the largest chunk in the table; at least 2 if
        the placement is `v`."""
        largest = max((event.operation.chunk for event in self.events()), default=0)
        return max(largest + 1, 2 if self.placement == "v" else 1)

    @property
    def num_virtual_stages(self) -> int:
        """Number of parts of the model: stages times chunks per stage."""
        return self.num_stages * self.num_chunks

    @cached_property
    def splits_backward(self) -> bool:
        """Whether the gradient of the weights is a separate operation (W)."""
        return any(event.operation.kind == "W" for event in self.events())

    @cached_property
    def tick_of(self) -> dict[tuple[str, int, int], int]:
        """{(kind, virtual stage, microbatch): tick}."""
        return {
            (event.operation.kind, event.virtual_stage, event.operation.microbatch): event.tick
            for event in self.events()
        }

    def events(self) -> Iterator[Event]:
        """Yields every operation in the order of ticks, within a tick in the order of slots, then
        of stages."""
        for tick, row in enumerate(self.table):
            for kind in KINDS:
                for stage, cell in enumerate(row):
                    for operation in cell:
                        if operation.kind == kind:
                            virtual = virtual_stage(
                                self.placement, self.num_stages, stage, operation.chunk
                            )
                            yield Event(tick, stage, virtual, operation)

    def locate(self, virtual: int) -> tuple[int, int]:
        """Returns (stage, chunk) of a virtual stage."""
        return locate(self.placement, self.num_stages, virtual)


def check_schedule(schedule: Schedule, *, max_in_flight: int | None = None) -> Schedule:
    """Raises if a schedule cannot run; otherwise returns it.

    Args:
      schedule: any schedule.
      max_in_flight: largest number of activations (one microbatch in one chunk) on a stage at a
        time; None: no limit.

    Raises:
      ScheduleError: the first broken rule, with tick, stage, operation and the remedy.
    """
    _check_shape(schedule)
    _check_cells(schedule)
    _check_complete(schedule)
    for event in schedule.events():
        _check_dependencies(schedule, event)
    if max_in_flight is not None:
        _check_memory(count_in_flight(schedule), max_in_flight)
    return schedule


def count_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Returns the largest number of activations that each stage stores at a time.

    One activation is the data of one microbatch in one chunk. It is stored from its F to its B, or
    to its W if the table has W operations, both included.

    Returns:
      One number for each stage. Divided by `num_chunks` it is the number of microbatches of a whole
      stage.
    """
    last = "W" if schedule.splits_backward else "B"
    held, most = [0] * schedule.num_stages, [0] * schedule.num_stages
    for event in schedule.events():
        if event.operation.kind == "F":
            held[event.stage] += 1
            most[event.stage] = max(most[event.stage], held[event.stage])
        elif event.operation.kind == last:
            held[event.stage] -= 1
    return tuple(most)


def _where(event: Event) -> str:
    return f"tick {event.tick}, stage {event.stage}: {event.operation}"


def _check_shape(schedule: Schedule) -> None:
    if schedule.placement not in PLACEMENTS:
        raise ScheduleError(
            f"placement {schedule.placement!r} is unknown; use {' or '.join(PLACEMENTS)}"
        )
    if not schedule.num_stages:
        raise ScheduleError(f"schedule {schedule.name!r} is empty; it needs one row for each tick")
    if not any(cell for row in schedule.table for cell in row):
        raise ScheduleError(f"schedule {schedule.name!r} has no operation; write some, such as F0")
    for tick, row in enumerate(schedule.table):
        if len(row) != schedule.num_stages:
            raise ScheduleError(
                f"tick {tick}: {len(row)} cells, but the first tick has {schedule.num_stages}, "
                "one for each stage; write . for an idle stage",
                tick=tick,
            )


def _check_cells(schedule: Schedule) -> None:
    for tick, row in enumerate(schedule.table):
        for stage, cell in enumerate(row):
            kinds = [operation.kind for operation in cell]
            where = f"tick {tick}, stage {stage}"
            for operation in cell:
                _check_operation(schedule, operation, where, tick)
            for operation in cell:
                if cell.count(operation) > 1:
                    raise ScheduleError(
                        f"{where}: {operation} appears twice, but every operation runs exactly "
                        "once; remove one",
                        tick=tick,
                    )
            for kind in KINDS:
                if kinds.count(kind) > 1:
                    raise ScheduleError(
                        f"{where}: {format_cell(cell)} has {kinds.count(kind)} operations in the "
                        f"{kind} slot, which takes 1; move one to another tick",
                        tick=tick,
                    )


def _check_operation(schedule: Schedule, operation: Operation, where: str, tick: int) -> None:
    if operation.kind not in KINDS:
        raise ScheduleError(
            f"{where}: kind {operation.kind!r} is unknown; use F, B or W", tick=tick
        )
    if operation.microbatch < 0 or operation.chunk < 0:
        raise ScheduleError(
            f"{where}: microbatch {operation.microbatch}, chunk {operation.chunk}: both count "
            "from 0 and cannot be negative",
            tick=tick,
        )
    if schedule.placement == "v" and operation.chunk > 1:
        raise ScheduleError(
            f"{where}: chunk {operation.chunk} does not exist, placement v has the 2 chunks 0 and "
            "1; use placement loop for more",
            tick=tick,
        )


def _check_complete(schedule: Schedule) -> None:
    found: dict[tuple[str, int, int], Event] = {}
    for event in schedule.events():
        key = (event.operation.kind, event.virtual_stage, event.operation.microbatch)
        if key in found:
            raise ScheduleError(
                f"{_where(event)} appears twice, first at tick {found[key].tick}, but every "
                "operation runs exactly once; remove one",
                tick=event.tick,
            )
        found[key] = event
    kinds = KINDS if schedule.splits_backward else KINDS[:2]
    for virtual in range(schedule.num_virtual_stages):
        stage, chunk = schedule.locate(virtual)
        for microbatch in range(schedule.num_microbatches):
            for kind in kinds:
                if (kind, virtual, microbatch) not in found:
                    missing = Operation(kind, microbatch, chunk)
                    raise ScheduleError(
                        f"stage {stage} never runs {missing}: the table has microbatches 0 to "
                        f"{schedule.num_microbatches - 1} and chunks 0 to "
                        f"{schedule.num_chunks - 1}, and every stage must run {_join(kinds)} once "
                        "for each; add the missing operation"
                    )


def _join(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}"


def _check_dependencies(schedule: Schedule, event: Event) -> None:
    """Raises if an operation runs before its input exists: at least one tick after a neighbouring
    stage's operation, or in a later slot of the same stage."""
    kind, microbatch = event.operation.kind, event.operation.microbatch
    virtual = event.virtual_stage
    if kind == "F" and virtual > 0:
        _require(schedule, event, ("F", virtual - 1, microbatch), 1)
    if kind == "B":
        _require(schedule, event, ("F", virtual, microbatch), 0)
        if virtual + 1 < schedule.num_virtual_stages:
            _require(schedule, event, ("B", virtual + 1, microbatch), 1)
    if kind == "W":
        _require(schedule, event, ("B", virtual, microbatch), 0)


def _require(schedule: Schedule, event: Event, needed: tuple[str, int, int], delay: int) -> None:
    kind, virtual, microbatch = needed
    tick = schedule.tick_of[needed]
    if event.tick >= tick + delay:
        return
    stage, chunk = schedule.locate(virtual)
    what = "activation" if kind == "F" else "gradient"
    reason = f"whose {what} arrives one tick later" if delay else "in the slot before"
    raise ScheduleError(
        f"{_where(event)} needs the result of {Operation(kind, microbatch, chunk)} of stage "
        f"{stage}, which runs at "
        f"tick {tick}, {reason}; put {event.operation} at tick {tick + delay} or later",
        tick=event.tick,
    )


def _check_memory(in_flight: tuple[int, ...], limit: int) -> None:
    most = max(in_flight)
    if most > limit:
        raise ScheduleError(
            f"stage {in_flight.index(most)} stores {most} activations at a time, but the limit is "
            f"{limit}; start its forwards later or its backwards earlier"
        )
