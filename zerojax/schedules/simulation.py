"""Simulates a pipeline schedule: its time, idle share (bubble), activations in flight and
messages."""

from __future__ import annotations

import itertools
import math

from zerojax.config.late_dataclasses import dataclass
from zerojax.schedules.schedule_table import (
    KINDS,
    Schedule,
    ScheduleError,
    check_schedule,
    count_in_flight,
)


@dataclass(frozen=True)
class Costs:
    """Times of F, B and W (forward, gradient of the input, gradient of the weights) for one
    microbatch in one whole stage, in any unit.

    A table without W does B and W in one operation, which costs their sum. A chunk costs its share
    of the stage.
    """

    forward: float = 1.0
    backward: float = 1.0
    weight: float = 1.0

    def __post_init__(self):
        for name in ("forward", "backward", "weight"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ScheduleError(f"cost {name}={value} is not a number of at least 0; use 1,1,1")
        if self.forward + self.backward + self.weight == 0:
            raise ScheduleError("costs 0,0,0 make every operation free; use 1,1,1")

    def of(self, schedule: Schedule) -> dict[str, float]:
        """Returns {kind of operation: its time for one chunk in this schedule}."""
        split = schedule.splits_backward
        whole = {
            "F": self.forward,
            "B": self.backward if split else self.backward + self.weight,
            "W": self.weight if split else 0.0,
        }
        return {kind: time / schedule.num_chunks for kind, time in whole.items()}


@dataclass(frozen=True)
class Simulation:
    """Results of simulating a schedule with given costs. Times have the unit of the costs."""

    num_ticks: int
    time: float
    """Time in lockstep: a slot that any stage uses takes its time on every stage."""
    bubble: float
    """Idle share in lockstep: 1 - work / time, with the computation of one stage, equal for all
    stages, as work."""
    asynchronous_time: float
    """Time if every stage starts an operation of its column as soon as its input arrives."""
    asynchronous_bubble: float
    """Idle share as papers count it: 1 - work / asynchronous_time."""
    in_flight: tuple[int, ...]
    """Largest number of activations that each stage stores at a time."""
    num_messages: int
    """Number of activations and gradients that different stages send to each other."""


def simulate(schedule: Schedule, costs: Costs | None = None) -> Simulation:
    """Simulates a schedule with the given costs.

    Raises:
      ScheduleError: the schedule cannot run.
    """
    check_schedule(schedule)
    costs = costs or Costs()
    times = costs.of(schedule)
    work = schedule.num_microbatches * schedule.num_chunks * sum(times.values())
    time = tick_starts(schedule, costs)[-1]
    asynchronous_time = _run_without_waiting(schedule, times)
    return Simulation(
        num_ticks=schedule.num_ticks,
        time=time,
        bubble=_idle_share(work, time),
        asynchronous_time=asynchronous_time,
        asynchronous_bubble=_idle_share(work, asynchronous_time),
        in_flight=count_in_flight(schedule),
        num_messages=_count_messages(schedule),
    )


def _idle_share(work: float, time: float) -> float:
    return max(0.0, 1 - work / time)  # rounding may make it -1e-16


def used_slots(schedule: Schedule) -> list[tuple[str, ...]]:
    """Returns, for each tick, the kinds of operations that at least one stage runs."""
    return [
        tuple(
            kind
            for kind in KINDS
            if any(operation.kind == kind for cell in row for operation in cell)
        )
        for row in schedule.table
    ]


def tick_starts(schedule: Schedule, costs: Costs) -> list[float]:
    """Returns the start time of each tick with all stages in lockstep, followed by the end time of
    the last tick."""
    times, starts = costs.of(schedule), [0.0]
    for kinds in used_slots(schedule):
        starts.append(starts[-1] + sum(times[kind] for kind in kinds))
    return starts


def _run_without_waiting(schedule: Schedule, times: dict[str, float]) -> float:
    """Returns the end time of the last operation if stages wait only for their inputs, not for each
    other."""
    ends: dict[tuple[str, int, int], float] = {}
    free = [0.0] * schedule.num_stages
    # In the order of ticks and slots every input is computed before it is needed.
    for event in schedule.events():
        kind, microbatch = event.operation.kind, event.operation.microbatch
        neighbour = event.virtual_stage + (1 if kind == "B" else -1)
        arrival = ends.get((kind, neighbour, microbatch), 0.0) if kind != "W" else 0.0
        end = max(free[event.stage], arrival) + times[kind]
        ends[kind, event.virtual_stage, microbatch] = free[event.stage] = end
    return max(free)


def _count_messages(schedule: Schedule) -> int:
    places = [schedule.locate(virtual)[0] for virtual in range(schedule.num_virtual_stages)]
    borders = sum(here != there for here, there in itertools.pairwise(places))
    return 2 * borders * schedule.num_microbatches


def bubble_formula(
    name: str, *, stages: int, microbatches: int, chunks: int = 1, costs: Costs | None = None
) -> float:
    """Returns the share of time in which a stage is idle, with all stages in lockstep, by a closed
    formula.

    With p stages, m microbatches and v chunks it is (p-1)/(vm+p-1) for gpipe (arXiv:1811.06965),
    1f1b and interleaved (arXiv:2104.04473), for any costs. For zb_h1 and zb_v all stages run W at
    the same time, so only F and B cause idle time. 1f1b_classic has no formula in lockstep: half of
    its slots are empty.
    """
    costs = costs or Costs()
    p, m = stages, microbatches
    if name in ("zb_h1", "zb_v"):
        lost = (p - 1) * (costs.forward + costs.backward)
        return lost / (m * (costs.forward + costs.backward + costs.weight) + lost)
    return (p - 1) / (chunks * m + p - 1)
