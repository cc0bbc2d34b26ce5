"""Pipeline schedules: tables by hand, formulas of the papers, memory."""

import dataclasses
import math
import random

import pytest

from tests.support.schedule_formulas import asynchronous_bubble_formula, in_flight_formula
from zerojax.schedules import (
    SCHEDULES,
    Costs,
    Operation,
    Schedule,
    ScheduleError,
    check_schedule,
    count_in_flight,
    make_schedule,
    simulate,
)
from zerojax.schedules.schedule_table import format_cell, locate, parse_cell, virtual_stage
from zerojax.schedules.simulation import bubble_formula, tick_starts

SIZES = [
    (1, 1),
    (1, 4),
    (2, 2),
    (2, 3),
    (2, 8),
    (3, 5),
    (3, 6),
    (4, 2),
    (4, 4),
    (4, 8),
    (4, 16),
    (8, 16),
]
CHUNKS = [2, 3, 4]


def cases() -> list[tuple[str, int, int, int]]:
    """(name, stages, microbatches, chunks) of every schedule and size that goes together."""
    found = []
    for stages, microbatches in SIZES:
        for name in SCHEDULES:
            if name == "interleaved":
                if microbatches % stages == 0:
                    found += [(name, stages, microbatches, chunks) for chunks in CHUNKS]
            else:
                found.append((name, stages, microbatches, 2 if name == "zb_v" else 1))
    return found


@pytest.fixture(params=cases(), ids=lambda case: "-".join(map(str, case)))
def case(request) -> tuple[Schedule, dict[str, int]]:
    """A schedule and the numbers it was made from."""
    name, stages, microbatches, chunks = request.param
    numbers = {"stages": stages, "microbatches": microbatches, "chunks": chunks}
    return make_schedule(name, **numbers), numbers


def written(schedule: Schedule) -> list[str]:
    """One text for each tick, such as `F1 F0+B0`."""
    return [" ".join(map(format_cell, row)) for row in schedule.table]


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("gpipe", ["F0 .", "F1 F0", ". F1", ". B1", "B1 B0", "B0 ."]),
        ("1f1b", ["F0 .", "F1 F0+B0", "B0 F1+B1", "B1 ."]),
        ("1f1b_classic", ["F0 .", "F1 F0", ". B0", "B0 F1", ". B1", "B1 ."]),
        ("zb_h1", ["F0 .", "F1 F0+B0", "B0+W0 F1+B1+W0", "B1+W1 W1"]),
        (
            "interleaved",
            [
                "F0 .",
                "F1 F0",
                "F0.1 F1",
                "F1.1 F0.1+B0.1",
                "B0.1 F1.1+B1.1",
                "B1.1 B0",
                "B0 B1",
                "B1 .",
            ],
        ),
        (
            "zb_v",
            [
                "F0 .",
                ". F0",
                "F1 F0.1",
                "F0.1+B0.1 F1",
                ". F1.1+B0.1",
                "F1.1+B1.1+W0.1 B0+W0.1",
                "B0+W1.1 B1.1+W0",
                "W0 B1+W1.1",
                "B1+W1 W1",
            ],
        ),
    ],
)
def test_small_tables_are_what_one_writes_by_hand(name, rows):
    assert written(make_schedule(name, stages=2, microbatches=2)) == rows


@pytest.mark.sampled(12)
def test_a_known_schedule_can_run_and_has_the_size_it_was_asked_for(case):
    schedule, numbers = case
    check_schedule(schedule)
    assert schedule.num_stages == numbers["stages"]
    assert schedule.num_microbatches == numbers["microbatches"]
    assert schedule.num_chunks == numbers["chunks"]
    kinds = 3 if schedule.name.startswith("zb") else 2
    assert sum(1 for _ in schedule.events()) == kinds * math.prod(numbers.values())
    assert schedule.splits_backward == (kinds == 3)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("costs", [Costs(), Costs(1, 0.7, 1.3), Costs(2, 5, 1)], ids=str)
def test_the_bubble_in_step_is_that_of_the_formula(case, costs):
    schedule, numbers = case
    expected = bubble_formula(schedule.name, **numbers, costs=costs)
    bubble = simulate(schedule, costs).bubble
    if schedule.name == "1f1b_classic" and numbers["stages"] > 1 < numbers["microbatches"]:
        assert bubble > expected  # the published table is not made for stages in step
    else:
        # 1e-12: a few hundred additions of float64.
        assert bubble == pytest.approx(expected, abs=1e-12)


@pytest.mark.sampled(12)
def test_the_asynchronous_bubble_is_that_of_the_papers(case):
    schedule, numbers = case
    expected = asynchronous_bubble_formula(schedule.name, **numbers)
    bubble = simulate(schedule).asynchronous_bubble
    if schedule.name.startswith("zb") and numbers["microbatches"] < numbers["stages"]:
        assert bubble > expected  # W alone cannot fill the wait for the first gradient
    else:
        assert bubble == pytest.approx(expected, abs=1e-12)


def test_the_bubble_of_zb_h1_is_the_papers_for_a_cheaper_w_too():
    """arXiv:2401.10241: (p-1)(F+B-W) of time in which nothing is done."""
    schedule = make_schedule("zb_h1", stages=4, microbatches=12)
    simulation = simulate(schedule, Costs(1, 1, 0.5))
    assert simulation.asynchronous_time - 12 * 2.5 == pytest.approx(3 * 1.5, abs=1e-12)


@pytest.mark.sampled(12)
def test_the_activations_in_flight_are_those_of_the_formula(case):
    schedule, numbers = case
    assert count_in_flight(schedule) == in_flight_formula(schedule.name, **numbers)


@pytest.mark.sampled(12)
def test_stages_that_do_not_wait_are_never_slower(case):
    schedule, _ = case
    simulation = simulate(schedule, Costs(1, 1.5, 0.5))
    assert simulation.asynchronous_time <= simulation.time + 1e-12
    assert 0 <= simulation.asynchronous_bubble <= simulation.bubble + 1e-12 < 1


@pytest.mark.sampled(12)
def test_virtual_stages_and_places_are_inverse(case):
    schedule, numbers = case
    seen = set()
    for virtual in range(schedule.num_virtual_stages):
        stage, chunk = schedule.locate(virtual)
        assert 0 <= stage < numbers["stages"]
        assert 0 <= chunk < numbers["chunks"]
        assert virtual_stage(schedule.placement, numbers["stages"], stage, chunk) == virtual
        seen.add((stage, chunk))
    assert len(seen) == schedule.num_virtual_stages


def test_times_by_hand():
    """1f1b, 2 stages, 2 microbatches, F=2, B=3, W=1: ticks of 2, 6, 6 and 4."""
    schedule, costs = make_schedule("1f1b", stages=2, microbatches=2), Costs(2, 3, 1)
    assert tick_starts(schedule, costs) == [0, 2, 8, 14, 18]
    simulation = simulate(schedule, costs)
    assert simulation.num_ticks == 4
    assert simulation.time == simulation.asynchronous_time == 18
    assert simulation.bubble == pytest.approx(1 - 12 / 18)
    assert simulation.num_messages == 4  # one activation and one gradient for each microbatch


def test_messages_that_stay_on_a_stage_are_not_counted():
    numbers = {"stages": 4, "microbatches": 8}
    assert simulate(make_schedule("1f1b", **numbers)).num_messages == 2 * 3 * 8
    assert simulate(make_schedule("interleaved", **numbers)).num_messages == 2 * 7 * 8
    assert simulate(make_schedule("zb_v", **numbers)).num_messages == 2 * 6 * 8
    assert simulate(make_schedule("interleaved", stages=1, microbatches=2)).num_messages == 0


def test_cells_are_read_in_any_order_and_written_in_one():
    cell = parse_cell(" B0.1 + F12 ")
    assert cell == (Operation("F", 12), Operation("B", 0, 1))
    assert format_cell(cell) == "F12+B0.1"
    assert parse_cell("") == parse_cell(".") == ()


@pytest.mark.parametrize("text", ["F", "G1", "F1,B1", "F-1", "f1", "F1.", "F1++B0", "F1 B0", "1F"])
def test_what_is_no_cell_is_refused(text):
    with pytest.raises(ScheduleError, match="is not a cell; write F, B or W"):
        parse_cell(text)


def test_a_table_of_ones_own():
    schedule = Schedule.from_cells("mine", [["F0", ""], [".", "F0+B0"], ["B0", "."]])
    assert make_schedule(schedule) is schedule
    assert simulate(schedule).num_ticks == 3
    with pytest.raises(ScheduleError, match="tick 1, stage 0: 'X' is not a cell"):
        Schedule.from_cells("mine", [["F0", ""], ["X", ""]])


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


def test_the_number_of_chunks_may_stand_in_the_name():
    schedule = make_schedule("interleaved(3)", stages=2, microbatches=4)
    assert schedule == make_schedule("interleaved", stages=2, microbatches=4, chunks=3)
    assert locate("loop", 2, 5) == (1, 2)
