"""Catalogue of schedules: lookup by name, table or file."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerojax.plan.schedules import building
from zerojax.plan.schedules.checks import check_schedule
from zerojax.plan.schedules.files import read_csv
from zerojax.plan.schedules.table import Schedule, ScheduleError

SCHEDULES = {
    "1f1b": "one forward and one backward in every tick; memory does not grow with microbatches",
    "gpipe": "all forwards, then all backwards; every stage holds all microbatches",
    "interleaved": "1f1b with several chunks on each stage; the smallest bubble in step",
    "zb_h1": "1f1b with the gradient of the weights as an operation of its own",
    "zb_v": "the same, two chunks folded like a V; all stages hold equally much",
    "1f1b_classic": "1f1b as published, for comparison; half of its slots idle in step",
}
"""Name -> one line on what it is good for."""

MAX_OPERATIONS = 50_000
"""Most forwards in one table; more would be a table nobody can compile."""

MAX_STAGES = 256
"""Most stages in one table, which grows with their square."""

_WITH_CHUNKS = re.compile(r"(\w+)\((\d+)\)")


def make_schedule(
    source: str | Path | Schedule | Mapping[str, Any],
    *,
    stages: int | None = None,
    microbatches: int | None = None,
    chunks: int | None = None,
) -> Schedule:
    """A checked schedule.

    Args:
      source: a name of `SCHEDULES` (`interleaved(4)` sets chunks), the path of a CSV file, or a
        `Schedule` of the user's own, also as the mapping of its fields that a run's config holds.
      stages: number of pipeline stages; a table of one's own has it already and must agree.
      microbatches: number of microbatches in a step; the same.
      chunks: pieces of the model on each stage; None takes 2 for interleaved and zb_v, else 1.

    Raises:
      ScheduleError: unknown name, numbers the schedule cannot do, or a table that cannot run.
      OSError: the file cannot be read.

    >>> make_schedule("1f1b", stages=4, microbatches=8).num_ticks
    14
    """
    if isinstance(source, Mapping):
        source = Schedule.from_dict(source)
    if isinstance(source, Schedule):
        schedule = check_schedule(source)
    elif isinstance(source, Path) or source.endswith(".csv") or "/" in source:
        schedule = read_csv(source)
    else:
        return _make_named(source, stages, microbatches, chunks)
    _check_agreement(schedule, stages, microbatches, chunks)
    return schedule


def forward_schedule(schedule: Schedule, num_microbatches: int) -> Schedule:
    """A schedule over the same stages and chunks whose forwards run without a pause.

    For evaluation, with any number of microbatches: see `building.build_forward`.
    """
    return building.build_forward(
        schedule.num_stages, num_microbatches, schedule.num_chunks, schedule.placement
    )


def _check_agreement(
    schedule: Schedule, stages: int | None, microbatches: int | None, chunks: int | None
) -> None:
    for name, wanted, found in (
        ("stages", stages, schedule.num_stages),
        ("microbatches", microbatches, schedule.num_microbatches),
        ("chunks", chunks, schedule.num_chunks),
    ):
        if wanted is not None and wanted != found:
            raise ScheduleError(
                f"{name}={wanted}, but the table of schedule {schedule.name!r} has {found}; "
                f"use {name}={found} or another table"
            )


def _make_named(
    source: str, stages: int | None, microbatches: int | None, chunks: int | None
) -> Schedule:
    name, chunks = _split_name(source, chunks)
    if stages is None or microbatches is None:
        raise ScheduleError(
            f"schedule {name!r} needs the number of stages and of microbatches, such as stages=4 "
            "and microbatches=8 (--stages 4 --microbatches 8)"
        )
    chunks = _check_numbers(name, stages, microbatches, chunks)
    if name == "interleaved":
        return check_schedule(building.build_interleaved(stages, microbatches, chunks))
    build = {
        "1f1b": building.build_1f1b,
        "gpipe": building.build_gpipe,
        "zb_h1": building.build_zb_h1,
        "zb_v": building.build_zb_v,
        "1f1b_classic": building.build_1f1b_classic,
    }[name]
    return check_schedule(build(stages, microbatches))


def _split_name(source: str, chunks: int | None) -> tuple[str, int | None]:
    """`interleaved(4)` says how many chunks; any name must be known."""
    name, match = source, _WITH_CHUNKS.fullmatch(source)
    if match is not None:
        name, written = match[1], int(match[2])
        if chunks not in (None, written):
            raise ScheduleError(f"{source} and chunks={chunks} disagree; say it once")
        chunks = written
    if name not in SCHEDULES:
        nearest = difflib.get_close_matches(name, SCHEDULES, 1, 0.5)
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"known: {', '.join(SCHEDULES)}"
        raise ScheduleError(f"no schedule {name!r}; {hint} A file of one's own ends in .csv")
    return name, chunks


def _check_numbers(name: str, stages: int, microbatches: int, chunks: int | None) -> int:
    """The number of chunks, after refusing what `name` cannot do."""
    own = {"interleaved": 2, "zb_v": 2}.get(name, 1)
    chunks = own if chunks is None else chunks
    for what, value in (("stages", stages), ("microbatches", microbatches), ("chunks", chunks)):
        if value < 1:
            raise ScheduleError(f"{what}={value} must be at least 1")
    if name == "interleaved":
        _check_interleaved(stages, microbatches, chunks)
    elif chunks != own:
        raise ScheduleError(
            f"chunks={chunks}, but schedule {name!r} has {own} on each stage; "
            f"use chunks={own} or interleaved({max(chunks, 2)})"
        )
    if stages > MAX_STAGES:
        raise ScheduleError(f"stages={stages}, the limit is {MAX_STAGES}; use fewer stages")
    number = stages * microbatches * chunks
    if number > MAX_OPERATIONS:
        raise ScheduleError(
            f"{stages} stages x {microbatches} microbatches x {chunks} chunks = {number:,} "
            f"forwards, the limit is {MAX_OPERATIONS:,}; use fewer microbatches"
        )
    return chunks


def _check_interleaved(stages: int, microbatches: int, chunks: int) -> None:
    if chunks < 2:
        raise ScheduleError(
            f"interleaved needs at least 2 chunks, not {chunks}; use interleaved(2) or 1f1b"
        )
    if microbatches < stages:
        raise ScheduleError(
            f"microbatches={microbatches} are fewer than the {stages} stages, and interleaved "
            f"sends groups of {stages}; use {stages} microbatches or 1f1b"
        )
    if microbatches % stages:
        below = microbatches - microbatches % stages
        raise ScheduleError(
            f"microbatches={microbatches} is not divisible by the {stages} stages, and interleaved "
            f"sends groups of {stages}; use {below} or {below + stages} microbatches, or 1f1b"
        )
