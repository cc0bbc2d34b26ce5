"""Validation of a schedule: shape, slots, completeness, dependencies and memory."""

from __future__ import annotations

from collections.abc import Sequence

from zerojax.plan.schedules.table import (
    KINDS,
    PLACEMENTS,
    Event,
    Operation,
    Schedule,
    ScheduleError,
    format_cell,
)


def check_schedule(schedule: Schedule, *, max_in_flight: int | None = None) -> Schedule:
    """Returns `schedule` if it can run.

    Args:
      schedule: any table.
      max_in_flight: most activations (one microbatch in one chunk) that a stage may hold at a
        time; None is no limit.

    Raises:
      ScheduleError: the first rule that is broken: which tick, stage and operation, and the remedy.
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
    """Most activations that each stage holds at a time.

    One activation is what one microbatch leaves behind in one chunk. It is held from its F up to
    its B, or up to its W where the table has W, both included.

    Returns:
      One number for each stage; divided by `num_chunks` it is in microbatches of a whole stage.
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
                f"tick {tick}: {len(row)} cells where the first tick has {schedule.num_stages}, "
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
                f"{_where(event)} is there twice, first at tick {found[key].tick}; "
                "every operation runs exactly once, remove one",
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
                        f"stage {stage} never does {missing}: the table has microbatches 0 to "
                        f"{schedule.num_microbatches - 1} and chunks 0 to "
                        f"{schedule.num_chunks - 1}, and every stage does "
                        f"{_join(kinds)} once for each; add it"
                    )


def _join(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}"


def _check_dependencies(schedule: Schedule, event: Event) -> None:
    """An operation comes after what it needs: one tick after a neighbour, or in a later slot."""
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
        f"{_where(event)} needs {Operation(kind, microbatch, chunk)} of stage {stage}, which is at "
        f"tick {tick}, {reason}; put {event.operation} at tick {tick + delay} or later",
        tick=event.tick,
    )


def _check_memory(in_flight: tuple[int, ...], limit: int) -> None:
    most = max(in_flight)
    if most > limit:
        raise ScheduleError(
            f"stage {in_flight.index(most)} holds {most} activations at a time, the limit is "
            f"{limit}; start its forwards later or its backwards earlier"
        )
