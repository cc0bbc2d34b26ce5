"""The executor's columns, played through with names instead of arrays.

The player below knows only columns, buffers, runs and neighbours. Everything it computes is a text
that says what it was computed from, so that a wrong slot, a lost message or a value overwritten too
early shows as a wrong text.
"""

import dataclasses

import numpy as np
import pytest

from zerojax.schedules import (
    SCHEDULES,
    ExecutorTable,
    Schedule,
    count_in_flight,
    lower,
    make_schedule,
)
from zerojax.schedules.schedule_table import virtual_stage

SHIFTS = {"right": 1, "left": -1, "local": 0}


def activation(virtual: int, microbatch: int) -> str:
    return f"activation into {virtual} of {microbatch}"


def gradient(virtual: int, microbatch: int) -> str:
    return f"gradient for {virtual} of {microbatch}"


class Player:
    """Goes through a table tick by tick, as one device for each stage would."""

    def __init__(self, table: ExecutorTable):
        self.table = table
        self.p = table.schedule.num_stages
        sizes = {
            "input": table.num_inputs,
            "gradient": table.num_gradients,
            "residual": table.num_residuals,
        }
        self.buffers = {
            name: [[None] * (size + 1) for _ in range(self.p)] for name, size in sizes.items()
        }
        self.sent_gradient = [None] * self.p
        self.done = []

    def column(self, name: str, tick: int, stage: int) -> int:
        return int(self.table.columns[name][tick, stage])

    def play(self) -> list[tuple[str, int, int]]:
        """(kind, virtual stage, microbatch) of everything that was done, in order."""
        for run in self.table.runs:
            for tick in range(run.start, run.stop):
                self.receive("gradient", tick, self.sent_gradient, run)
                sent = [self.forward(tick, s) if run.forward else None for s in range(self.p)]
                self.sent_gradient = [
                    self.backward(tick, s) if run.backward else None for s in range(self.p)
                ]
                for stage in range(self.p):
                    if run.weight:
                        self.weight(tick, stage)
                self.receive("activation", tick, sent, run)
        return self.done

    def receive(self, what: str, tick: int, sent: list, run) -> None:
        buffer = self.buffers["input" if what == "activation" else "gradient"]
        for direction, shift in SHIFTS.items():
            if (what, direction) in run.receives:
                for stage in range(self.p):
                    slot = self.column(f"receive_{what}_{direction}", tick, stage)
                    buffer[stage][slot] = sent[(stage - shift) % self.p]

    def work(self, slot: str, tick: int, stage: int) -> tuple[int, int]:
        microbatch = self.column(f"{slot}_microbatch", tick, stage)
        chunk = self.column(f"{slot}_chunk", tick, stage)
        placement = self.table.schedule.placement
        return virtual_stage(placement, self.p, stage, chunk), microbatch

    def cell(self, buffer: str, slot: str, tick: int, stage: int):
        return self.buffers[buffer][stage][self.column(f"{slot}_{buffer}", tick, stage)]

    def store(self, buffer: str, slot: str, tick: int, stage: int, value) -> None:
        place = self.column(f"{slot}_{buffer}", tick, stage)
        self.buffers[buffer][stage][place] = value

    def forward(self, tick: int, stage: int) -> str | None:
        active = self.column("forward_active", tick, stage)
        item = self.work("forward", tick, stage)
        if active:
            virtual, _ = item
            assert self.column("forward_first", tick, stage) == (virtual == 0)
            if virtual:
                assert self.cell("input", "forward", tick, stage) == activation(*item)
            elif self.table.stash == "input":
                self.store("input", "forward", tick, stage, activation(*item))
            is_last = virtual == self.table.schedule.num_virtual_stages - 1
            assert self.column("forward_last", tick, stage) == is_last
            if is_last:
                self.store("gradient", "forward", tick, stage, gradient(*item))
            self.done.append(("F", *item))
        if self.table.stash == "residuals":  # an idle stage writes too, into the spare slot
            self.store("residual", "forward", tick, stage, item if active else "garbage")
        return activation(item[0] + 1, item[1]) if active else "garbage"

    def read(self, slot: str, tick: int, stage: int) -> tuple[int, int]:
        """What B and W both need."""
        item = self.work(slot, tick, stage)
        assert self.cell("gradient", slot, tick, stage) == gradient(*item)
        if self.table.stash == "input":
            assert self.cell("input", slot, tick, stage) == activation(*item)
        else:
            assert self.cell("residual", slot, tick, stage) == item
        return item

    def backward(self, tick: int, stage: int) -> str | None:
        if not self.column("backward_active", tick, stage):
            return "garbage"
        item = self.read("backward", tick, stage)
        assert self.column("backward_first", tick, stage) == (item[0] == 0)
        self.done.append(("B", *item))
        return gradient(item[0] - 1, item[1])

    def weight(self, tick: int, stage: int) -> None:
        if self.column("weight_active", tick, stage):
            self.done.append(("W", *self.read("weight", tick, stage)))


def all_tables() -> list[Schedule]:
    tables = []
    for stages, microbatches in [(1, 2), (2, 2), (2, 5), (3, 6), (4, 4), (4, 8), (4, 3)]:
        for name in SCHEDULES:
            if name == "interleaved":
                tables += [
                    make_schedule(name, stages=stages, microbatches=microbatches, chunks=chunks)
                    for chunks in (2, 3)
                    if microbatches % stages == 0
                ]
            else:
                tables.append(make_schedule(name, stages=stages, microbatches=microbatches))
    return tables


@pytest.mark.sampled(12)
@pytest.mark.parametrize("max_runs", [None, 8, 1])
@pytest.mark.parametrize("stash", ["residuals", "input"])
@pytest.mark.parametrize(
    "schedule",
    all_tables(),
    ids=lambda s: f"{s.name}-{s.num_stages}-{s.num_microbatches}-{s.num_chunks}",
)
def test_every_operation_finds_what_it_needs(schedule, stash, max_runs):
    table = lower(schedule, stash=stash, max_runs=max_runs)
    done = Player(table).play()
    assert sorted(done) == sorted(schedule.tick_of)
    assert len(done) == len(set(done))
    assert max_runs is None or len(table.runs) <= max_runs


SIZES = {"input": "num_inputs", "gradient": "num_gradients", "residual": "num_residuals"}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("stash", ["residuals", "input"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_one_slot_less_is_too_few(name, stash):
    """Two slots made one: something is overwritten before it has been read."""
    table = lower(make_schedule(name, stages=4, microbatches=8), stash=stash)
    for buffer, size in SIZES.items():
        last = getattr(table, size) - 1
        if last < 1:
            continue
        what = "receive_activation" if buffer == "input" else f"receive_{buffer}"
        columns = {
            column: np.where(values == last, 0, values)
            if column.endswith(f"_{buffer}") or column.startswith(what)
            else values
            for column, values in table.columns.items()
        }
        with pytest.raises(AssertionError):
            Player(dataclasses.replace(table, columns=columns)).play()


def test_a_lost_message_is_seen():
    table = lower(make_schedule("1f1b", stages=2, microbatches=4))
    columns = {name: column.copy() for name, column in table.columns.items()}
    columns["receive_gradient_left"][2] = table.num_gradients
    with pytest.raises(AssertionError):
        Player(dataclasses.replace(table, columns=columns)).play()


def test_residuals_take_as_many_slots_as_are_in_flight():
    for schedule in all_tables():
        table = lower(schedule)
        assert table.num_residuals == max(count_in_flight(schedule))
        assert lower(schedule, stash="input").num_residuals == 0


def test_slots_of_1f1b_do_not_grow_with_microbatches():
    for microbatches in (8, 16, 64):
        schedule = make_schedule("1f1b", stages=4, microbatches=microbatches)
        table = lower(schedule)
        assert (table.num_inputs, table.num_gradients, table.num_residuals) == (1, 1, 7)
        table = lower(schedule, stash="input")
        assert (table.num_inputs, table.num_gradients, table.num_residuals) == (7, 1, 0)


def test_1f1b_is_three_runs_that_permute_only_where_they_must():
    table = lower(make_schedule("1f1b", stages=4, microbatches=8))
    forward, both, backward = table.runs
    assert [run[:5] for run in table.runs] == [
        (0, 3, True, False, False),
        (3, 11, True, True, False),
        (11, 14, False, True, False),
    ]
    assert forward.receives == {("activation", "right")}
    assert both.receives == {("activation", "right"), ("gradient", "left")}
    assert backward.receives == {("gradient", "left")}
    assert (forward.embed, forward.head) == (True, False)
    assert (both.embed, both.head) == (True, True)
    assert (backward.embed, backward.head) == (False, False)
    assert not table.wraps


@pytest.mark.parametrize("stages", [2, 4])
def test_directions(stages):
    """With two stages the right and the left neighbour are one; the directions stay apart."""
    loop = {("activation", "right"), ("gradient", "left")}
    for name in ("gpipe", "1f1b", "interleaved", "zb_h1"):
        table = lower(make_schedule(name, stages=stages, microbatches=8))
        assert table.directions == loop
        assert table.wraps == (name == "interleaved")
    folded = lower(make_schedule("zb_v", stages=stages, microbatches=8))
    assert folded.directions == {(what, d) for what in ("activation", "gradient") for d in SHIFTS}
    assert not folded.wraps
    assert lower(make_schedule("1f1b", stages=1, microbatches=8)).directions == set()


def test_runs_cover_all_ticks_and_use_every_slot_of_theirs():
    for schedule in all_tables():
        table = lower(schedule, max_runs=None)
        assert table.runs[0].start == 0
        assert table.runs[-1].stop == schedule.num_ticks
        for run, following in zip(table.runs, table.runs[1:], strict=False):
            assert run.stop == following.start
            assert run[2:5] != following[2:5]
        for run in table.runs:
            for name in ("forward", "backward", "weight"):
                used = table.columns[f"{name}_active"][run.start : run.stop].any(axis=1)
                assert (used == getattr(run, name)).all()


def test_columns_are_int32_of_the_tables_shape_and_read_only():
    schedule = make_schedule("zb_v", stages=4, microbatches=8)
    for column in lower(schedule).columns.values():
        assert column.dtype == np.int32
        assert column.shape == (schedule.num_ticks, 4)
        with pytest.raises(ValueError, match="read-only"):
            column[0, 0] = 1
