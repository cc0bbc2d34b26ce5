"""Broken tables and impossible numbers are refused with the right reason."""

from __future__ import annotations

import dataclasses
import random

import pytest

from zerojax.schedules import (
    SCHEDULES,
    Operation,
    Schedule,
    ScheduleError,
    check_schedule,
    make_schedule,
)
from zerojax.schedules.known_schedules import MAX_OPERATIONS
from zerojax.schedules.schedule_table import locate, parse_cell

# Broken tables


def edit(schedule: Schedule, *changes: tuple[int, int, str]) -> Schedule:
    """The schedule with other texts in some (tick, stage) cells."""
    table = [list(row) for row in schedule.table]
    for tick, stage, text in changes:
        table[tick][stage] = tuple(Operation(*o) for o in parse_cell(text))
    return dataclasses.replace(schedule, table=tuple(map(tuple, table)))


SMALL = make_schedule("1f1b", stages=2, microbatches=2)  # F0 . | F1 F0+B0 | B0 F1+B1 | B1 .
SPLIT = make_schedule("zb_h1", stages=2, microbatches=2)


@pytest.mark.parametrize(
    ("schedule", "changes", "reason"),
    [
        (SMALL, [(3, 0, "B1.1")], "stage 0 never runs B1:.* chunks 0 to 1"),
        (
            SMALL,
            [(0, 0, "F1"), (1, 0, "F0")],
            "tick 1, stage 1: F0 needs the result of F0 of stage 0, which "
            "runs at tick 1, whose activation "
            "arrives one tick later; put F0 at tick 2 or later",
        ),
        (
            SMALL,
            [(1, 1, "F0+B1"), (2, 1, "F1+B0")],
            "tick 1, stage 1: B1 needs the result of F1 of stage 1, which "
            "runs at tick 2, in the slot before",
        ),
        (SPLIT, [(3, 1, ".")], "stage 1 never runs W1"),
        (
            SPLIT,
            [(2, 0, "B0+W1"), (3, 0, "B1+W0")],
            "tick 2, stage 0: W1 needs the result of B1 of stage 0, which "
            "runs at tick 3, in the slot before",
        ),
        (SMALL, [(0, 1, "W0")], "stage 0 never runs W0"),
    ],
)
def test_a_broken_table_is_refused_with_its_reason(schedule, changes, reason):
    with pytest.raises(ScheduleError, match=reason):
        check_schedule(edit(schedule, *changes))


@pytest.mark.parametrize(
    ("schedule", "reason"),
    [
        (Schedule("empty", ()), "'empty' is empty"),
        (Schedule("empty", ((),)), "'empty' is empty"),
        (Schedule("none", (((), ()),)), "'none' has no operation"),
        (dataclasses.replace(SMALL, placement="w"), "placement 'w' is unknown; use loop or v"),
        (dataclasses.replace(SMALL, placement="v"), "never runs F0.1"),
        (Schedule("x", (((Operation("F", 0),), ()), ((),))), "tick 1: 1 cells, but"),
        (Schedule("x", (((Operation("Q", 0),),),)), "kind 'Q' is unknown"),
        (Schedule("x", (((Operation("F", -1),),),)), "cannot be negative"),
        (Schedule("x", (((Operation("F", 0, 2),),),), "v"), "chunk 2 does not exist"),
    ],
)
def test_a_misshapen_table_is_refused_with_its_reason(schedule, reason):
    with pytest.raises(ScheduleError, match=reason):
        check_schedule(schedule)


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_operation_may_run_earlier_than_its_inputs(name):
    """Any operation, moved in front of what it needs, makes the table refused.

    What may come first is worked out here from the definition, not from `check_schedule`.
    """
    schedule = make_schedule(name, stages=4, microbatches=4)
    tick, last = schedule.tick_of, schedule.num_virtual_stages - 1
    events = list(schedule.events())
    random.Random(0).shuffle(events)
    for event in events[:40]:
        kind, microbatch = event.operation.kind, event.operation.microbatch
        virtual = event.virtual_stage
        if kind == "F":
            earliest = tick["F", virtual - 1, microbatch] + 1 if virtual else 0
        elif kind == "B":
            after = tick["B", virtual + 1, microbatch] + 1 if virtual < last else 0
            earliest = max(after, tick["F", virtual, microbatch])
        else:
            earliest = tick["B", virtual, microbatch]
        if earliest == 0:
            continue
        table = [list(row) for row in schedule.table]
        cell = table[event.tick][event.stage]
        table[event.tick][event.stage] = tuple(o for o in cell if o != event.operation)
        target = table[earliest - 1][event.stage]
        table[earliest - 1][event.stage] = (*(o for o in target if o.kind != kind), event.operation)
        moved = dataclasses.replace(schedule, table=tuple(map(tuple, table)))
        with pytest.raises(ScheduleError):
            check_schedule(moved)


# Names and numbers


@pytest.mark.parametrize(
    ("source", "numbers", "reason"),
    [
        ("1flb", (4, 8, None), "no schedule '1flb'; did you mean '1f1b'?"),
        ("xyzzy", (4, 8, None), "use 1f1b, gpipe, interleaved"),
        ("1f1b", (None, 8, None), "needs the number of stages and of microbatches"),
        ("1f1b", (0, 8, None), "stages=0 must be at least 1"),
        ("1f1b", (4, 0, None), "microbatches=0 must be at least 1"),
        ("1f1b", (4, 8, 2), "chunks=2, but schedule '1f1b' has 1.*interleaved.2."),
        ("zb_v", (4, 8, 3), "chunks=3, but schedule 'zb_v' has 2"),
        ("interleaved", (4, 8, 1), r"at least 2 chunks, not 1; use interleaved\(2\) or 1f1b"),
        (
            "interleaved",
            (4, 2, 2),
            "microbatches=2 are fewer than the 4 stages.*use 4 microbatches",
        ),
        ("interleaved", (4, 10, 2), "microbatches=10 is not divisible by the 4.*use 8 or 12"),
        ("interleaved(3)", (4, 8, 2), "chunks=2 disagree"),
        ("1f1b", (1000, 1, None), "stages=1000 is above the limit 256; use fewer stages"),
        ("1f1b", (4, MAX_OPERATIONS, None), "200,000 forwards, above the limit 50,000"),
    ],
)
def test_what_a_schedule_cannot_do_is_refused_with_the_remedy(source, numbers, reason):
    stages, microbatches, chunks = numbers
    with pytest.raises(ScheduleError, match=reason):
        make_schedule(source, stages=stages, microbatches=microbatches, chunks=chunks)


def test_the_number_of_chunks_may_stand_in_the_name():
    schedule = make_schedule("interleaved(3)", stages=2, microbatches=4)
    assert schedule == make_schedule("interleaved", stages=2, microbatches=4, chunks=3)
    assert locate("loop", 2, 5) == (1, 2)
