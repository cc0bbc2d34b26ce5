"""Builds known pipeline schedules (1F1B, GPipe, interleaved, zero-bubble) by name, others from CSV.

The papers let a stage start as soon as its input arrives. In one compiled program the stages run in
lockstep, so here a tick has one F slot and one B slot and stages fill both (see `Schedule`). This
takes more memory: `1f1b` holds 2(p-1-s)+1 microbatches at stage s of p, where the paper's holds
p-s.

A CSV file has one line per tick and one column per stage:

    # name: mine
    # placement: loop
    tick,stage 0,stage 1
    0,F0,.
    1,F1,F0+B0
    2,B0,F1+B1
    3,B1,.

The lines with `#` and the heading are optional; without the heading there is no column of ticks.
"""

from __future__ import annotations

import csv
import difflib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from zerojax.config.loader import user_path
from zerojax.config.regular_files import UnreadableError, decode_text
from zerojax.runtime.bounded_json import read_bytes
from zerojax.runtime.user_files import replace_text
from zerojax.schedules.schedule_table import (
    Operation,
    Schedule,
    ScheduleError,
    check_schedule,
    format_cell,
    locate,
    parse_cell,
)

SCHEDULES = {
    "1f1b": "one forward and one backward in every tick; memory does not grow with microbatches",
    "gpipe": "all forwards, then all backwards; every stage stores all microbatches",
    "interleaved": "1f1b with several chunks on each stage; the smallest bubble in lockstep",
    "zb_h1": "1f1b with the gradient of the weights as a separate operation",
    "zb_v": "as zb_h1, with two chunks placed like a V; all stages need the same memory",
    "1f1b_classic": "1f1b as published, for comparison; half of its slots are idle in lockstep",
}
"""{name of a schedule: line that says what it is good for}."""

MAX_OPERATIONS = 50_000
"""Largest number of forward operations in one table; larger tables cannot be compiled in
practice."""

MAX_STAGES = 256
"""Largest number of stages in one table, whose size grows with their square."""

_EXAMPLE = "`zerojax schedule 1f1b --stages 4 --microbatches 8 --csv mine.csv`"
"""Command that writes an example of a table."""

_WITH_CHUNKS = re.compile(r"(\w+)\((\d+)\)")

Ticks = Mapping[tuple[str, int, int], int]
"""{(kind, virtual stage, microbatch): tick}."""


def make_schedule(
    source: str | Path | Schedule | Mapping[str, Any],
    *,
    stages: int | None = None,
    microbatches: int | None = None,
    chunks: int | None = None,
) -> Schedule:
    """Makes a pipeline schedule and checks that it can run.

    Args:
      source: a name in `SCHEDULES` (`interleaved(4)` sets chunks), the path of a CSV file, or a
        user's own `Schedule`, which may also be a mapping of its fields as in a run's config.
      stages: number of pipeline stages; for a user's own table it must agree with the table.
      microbatches: number of microbatches in a step; for a user's own table it must agree with the
        table.
      chunks: number of parts of the model on each stage; None: 2 for interleaved and zb_v, else 1.

    Raises:
      ScheduleError: an unknown name, unsupported numbers, a file that cannot be read or has a
        mistake, or a table that cannot run.

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
    """Returns a schedule for evaluation over the same stages and chunks, with any number of
    microbatches; its forward passes run without gaps."""
    return build_forward(
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
        return check_schedule(build_interleaved(stages, microbatches, chunks))
    build = {
        "1f1b": build_1f1b,
        "gpipe": build_gpipe,
        "zb_h1": build_zb_h1,
        "zb_v": build_zb_v,
        "1f1b_classic": build_1f1b_classic,
    }[name]
    return check_schedule(build(stages, microbatches))


def _split_name(source: str, chunks: int | None) -> tuple[str, int | None]:
    """Splits a text such as `interleaved(4)` into the schedule's name and its number of chunks.

    Without parentheses the number is the given `chunks`.

    Raises:
      ScheduleError: the name is not in `SCHEDULES`, or text and `chunks` have different numbers.
    """
    name, match = source, _WITH_CHUNKS.fullmatch(source)
    if match is not None:
        name, written = match[1], int(match[2])
        if chunks not in (None, written):
            raise ScheduleError(
                f"{source} and chunks={chunks} disagree; use {source} without chunks, or "
                f"{name} with chunks={chunks}"
            )
        chunks = written
    if name not in SCHEDULES:
        nearest = difflib.get_close_matches(name, SCHEDULES, 1, 0.5)
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"use {_or(list(SCHEDULES))}."
        raise ScheduleError(
            f"no schedule {name!r}; {hint} The name of a file with your own schedule must end in "
            ".csv"
        )
    return name, chunks


def _check_numbers(name: str, stages: int, microbatches: int, chunks: int | None) -> int:
    """Returns the number of chunks; raises if the schedule `name` does not support the numbers."""
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
        raise ScheduleError(f"stages={stages} is above the limit {MAX_STAGES}; use fewer stages")
    number = stages * microbatches * chunks
    if number > MAX_OPERATIONS:
        raise ScheduleError(
            f"{stages} stages x {microbatches} microbatches x {chunks} chunks = {number:,} "
            f"forwards, above the limit {MAX_OPERATIONS:,}; {_fewer(name, stages, chunks)}"
        )
    return chunks


def _or(words: list[str]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}"


def _fewer(name: str, stages: int, chunks: int) -> str:
    """Returns the text of the remedy for a table with more than `MAX_OPERATIONS` forwards: fewer
    microbatches, fewer chunks, or `1f1b`."""
    group = stages if name == "interleaved" else 1
    most = MAX_OPERATIONS // (stages * chunks) // group * group
    if most:
        return f"use at most {most} microbatches"
    most = MAX_OPERATIONS // stages**2
    if most > 1:
        return f"use {stages} microbatches and at most {most} chunks"
    return f"use 1f1b with at most {MAX_OPERATIONS // stages} microbatches"


def _check_interleaved(stages: int, microbatches: int, chunks: int) -> None:
    if chunks < 2:
        raise ScheduleError(
            f"interleaved needs at least 2 chunks, not {chunks}; use interleaved(2) or 1f1b"
        )
    if microbatches < stages:
        raise ScheduleError(
            f"microbatches={microbatches} are fewer than the {stages} stages, but interleaved "
            f"sends groups of {stages}; use {stages} microbatches or 1f1b"
        )
    if microbatches % stages:
        below = microbatches - microbatches % stages
        raise ScheduleError(
            f"microbatches={microbatches} is not divisible by the {stages} stages, but interleaved "
            f"sends groups of {stages}; use {below} or {below + stages} microbatches, or 1f1b"
        )


def assemble(name: str, ticks: Ticks, num_stages: int, placement: str = "loop") -> Schedule:
    """Builds a schedule from the tick of every operation."""
    cells: list[list[list[Operation]]] = [
        [[] for _ in range(num_stages)] for _ in range(1 + max(ticks.values()))
    ]
    for (kind, virtual, microbatch), tick in ticks.items():
        stage, chunk = locate(placement, num_stages, virtual)
        cells[tick][stage].append(Operation(kind, microbatch, chunk))
    order = "FBW".index
    return Schedule(
        name,
        tuple(
            tuple(tuple(sorted(cell, key=lambda operation: order(operation.kind))) for cell in row)
            for row in cells
        ),
        placement,
    )


def build_gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """Builds GPipe: all forwards, then all backwards in the opposite order (arXiv:1811.06965).

    With p stages and m microbatches the bubble is (p-1)/(m+p-1), and every stage stores all m
    microbatches.
    """
    p, m = num_stages, num_microbatches
    ticks = {}
    for stage in range(p):
        for microbatch in range(m):
            ticks["F", stage, microbatch] = microbatch + stage
            ticks["B", stage, microbatch] = (m + p - 1) + (m - 1 - microbatch) + (p - 1 - stage)
    return assemble("gpipe", ticks, p)


def build_1f1b(num_stages: int, num_microbatches: int) -> Schedule:
    """Builds 1F1B with one forward and one backward in every tick, which is the default schedule.

    With p stages and m microbatches the bubble is that of 1F1B (arXiv:2104.04473), (p-1)/(m+p-1),
    also in lockstep. Stage s stores min(m, 2(p-1-s)+1) microbatches.
    """
    p, m = num_stages, num_microbatches
    ticks = {}
    for stage in range(p):
        for microbatch in range(m):
            ticks["F", stage, microbatch] = microbatch + stage
            ticks["B", stage, microbatch] = microbatch + 2 * (p - 1) - stage
    return assemble("1f1b", ticks, p)


def build_1f1b_classic(num_stages: int, num_microbatches: int) -> Schedule:
    """Builds 1F1B as published (arXiv:2104.04473), with one operation per tick.

    With p stages and m microbatches stage s stores min(m, p-s) microbatches. The bubble is
    (p-1)/(m+p-1) only if stages do not wait for each other; in lockstep half of all slots are
    empty.
    """
    p, m = num_stages, num_microbatches
    orders = []
    for stage in range(p):
        ahead = min(p - 1 - stage, m)
        order = [("F", microbatch) for microbatch in range(ahead)]
        for microbatch in range(m):
            if ahead + microbatch < m:
                order.append(("F", ahead + microbatch))
            order.append(("B", microbatch))
        orders.append(order)
    ticks: dict[tuple[str, int, int], int] = {}
    # The table follows from every stage running its order as early as possible.
    free = [0] * p
    while any(orders):
        for stage, order in enumerate(orders):
            while order:
                kind, microbatch = order[0]
                needed = _input_of(kind, stage, microbatch, p)
                if needed is not None and needed not in ticks:
                    break
                earliest = 0 if needed is None else ticks[needed] + 1
                ticks[kind, stage, microbatch] = max(free[stage], earliest)
                free[stage] = ticks[kind, stage, microbatch] + 1
                order.pop(0)
    return assemble("1f1b_classic", ticks, p)


def _input_of(kind: str, stage: int, microbatch: int, p: int) -> tuple[str, int, int] | None:
    """Returns the operation whose result an operation needs: of a neighbouring stage, or of the
    last stage itself; None if there is none."""
    if kind == "F":
        return ("F", stage - 1, microbatch) if stage else None
    return ("B", stage + 1, microbatch) if stage < p - 1 else ("F", stage, microbatch)


def build_interleaved(num_stages: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """Builds 1F1B with v chunks on each stage (arXiv:2104.04473, section 2.2).

    With p stages and m microbatches the bubble is (p-1)/(vm+p-1). Stage s stores min(vm,
    2(p-1-s)+(v-1)p+1) activations, each of 1/v of its layers. Microbatches are processed in groups
    of p, so m must be a multiple of p.
    """
    p, m, v = num_stages, num_microbatches, num_chunks
    ticks = {}
    for virtual in range(p * v):
        chunk, stage = divmod(virtual, p)
        for microbatch in range(m):
            group, place = divmod(microbatch, p)
            start = group * p * v + place
            ticks["F", virtual, microbatch] = start + chunk * p + stage
            ticks["B", virtual, microbatch] = (
                (p * v - 1) + start + (v - 1 - chunk) * p + (p - 1 - stage)
            )
    return assemble("interleaved", ticks, p)


def build_zb_h1(num_stages: int, num_microbatches: int) -> Schedule:
    """Builds 1F1B whose backward pass is split into B (gradient of the input) and W (gradient of
    the weights): ZB-H1, arXiv:2401.10241.

    Stage s delays its W operations by s ticks, so that all stages run W in the same m ticks. In
    lockstep the bubble is (p-1)(F+B)/(m(F+B+W)+(p-1)(F+B)); if stages do not wait for each other it
    is the paper's, with (p-1)(F+B-W). Stage s stores min(m, 2p-1-s) microbatches, at most as many
    as `1f1b`.
    """
    p, m = num_stages, num_microbatches
    ticks = {}
    for stage in range(p):
        for microbatch in range(m):
            ticks["F", stage, microbatch] = microbatch + stage
            ticks["B", stage, microbatch] = microbatch + 2 * (p - 1) - stage
            ticks["W", stage, microbatch] = microbatch + 2 * (p - 1)
    return assemble("zb_h1", ticks, p)


def build_zb_v(num_stages: int, num_microbatches: int) -> Schedule:
    """Builds a schedule with split backward pass for a model folded in a V over the stages
    (arXiv:2405.15362).

    A microbatch enters every second tick. The two chunks of a stage then never collide, because one
    is an even and the other an odd number of stages from the input. All stages run W in the same 2m
    ticks and store the same number of activations, 3p-1 of half a stage. In lockstep the bubble is
    that of `zb_h1`, and no schedule in a V has a smaller one: the last stage runs 2m forwards, of
    which the first is p-1 ticks after the input and the last p-1 ticks before the end of the model.
    """
    p, m = num_stages, num_microbatches
    ticks = {}
    for virtual in range(2 * p):
        for microbatch in range(m):
            ticks["F", virtual, microbatch] = 2 * microbatch + virtual
            ticks["B", virtual, microbatch] = 2 * microbatch + 4 * p - 2 - virtual
    for stage in range(p):
        backwards = sorted(
            (ticks["B", virtual, microbatch], virtual, microbatch)
            for virtual in (stage, 2 * p - 1 - stage)
            for microbatch in range(m)
        )
        for place, (_, virtual, microbatch) in enumerate(backwards):
            ticks["W", virtual, microbatch] = 4 * p - 3 + place
    return assemble("zb_v", ticks, p, "v")


def build_forward(
    num_stages: int, num_microbatches: int, num_chunks: int, placement: str
) -> Schedule:
    """Builds a schedule that runs all forwards as early as possible, for evaluation; backwards
    follow in mirror order.

    In every tick a stage runs a ready operation: first of the lowest group of p microbatches, then
    of the lowest chunk, then of the lowest microbatch.
    """
    p, last = num_stages, num_stages * num_chunks - 1
    ready = {(0, microbatch) for microbatch in range(num_microbatches)}
    done: dict[tuple[int, int], int] = {}
    tick = 0
    while len(done) < (last + 1) * num_microbatches:
        chosen: dict[int, tuple[tuple[int, int, int], tuple[int, int]]] = {}
        for virtual, microbatch in ready:
            stage, chunk = locate(placement, p, virtual)
            rank = microbatch // p, chunk, microbatch
            if stage not in chosen or rank < chosen[stage][0]:
                chosen[stage] = rank, (virtual, microbatch)
        for _, (virtual, microbatch) in chosen.values():
            done[virtual, microbatch] = tick
            ready.remove((virtual, microbatch))
            if virtual < last:
                ready.add((virtual + 1, microbatch))
        tick += 1
    ticks = {("F", *item): at for item, at in done.items()}
    ticks |= {("B", *item): 2 * tick - 1 - at for item, at in done.items()}
    return assemble("forward", ticks, p, placement)


def write_csv(schedule: Schedule, path: str | Path) -> Path:
    """Writes a schedule to a CSV file that `read_csv` reads; returns the path."""
    path = user_path(path)
    lines = [f"# name: {schedule.name}", f"# placement: {schedule.placement}"]
    lines.append(",".join(["tick", *(f"stage {stage}" for stage in range(schedule.num_stages))]))
    for tick, row in enumerate(schedule.table):
        lines.append(",".join([str(tick), *map(format_cell, row)]))
    replace_text(path, "\n".join(lines) + "\n")
    return path


def read_csv(path: str | Path) -> Schedule:
    """Reads a schedule from a CSV file, and checks that it can run.

    Raises:
      ScheduleError: the file cannot be read or has a mistake; the message states the file and the
        line.
    """
    path = user_path(path)
    try:
        text = decode_text(read_bytes(path))
    except UnreadableError as error:
        raise ScheduleError(f"{path}: {error.what}; give a table ({_EXAMPLE} writes one)") from None
    except OSError as error:
        raise ScheduleError(
            f"{path}: {error.strerror or error}; pass a table file ({_EXAMPLE} writes one), or "
            "the name "
            "of a schedule"
        ) from None
    facts, lines = _split_facts(path, text)
    numbered = list(_read_rows(path, lines))
    if not numbered:
        line = "0,F0,." if lines else "F0,."  # after a heading, or without one
        raise ScheduleError(
            f"{path}: no ticks; write one line for each, with a cell for each stage, such as "
            f"{line} ({_EXAMPLE} writes a whole table)"
        )
    schedule = Schedule(
        facts.get("name", path.stem),
        tuple(cells for _, cells in numbered),
        facts.get("placement", "loop"),
    )
    try:
        return check_schedule(schedule)
    except ScheduleError as error:
        line = "" if error.tick is None else f":{numbered[error.tick][0]}"
        raise ScheduleError(f"{path}{line}: {error}", tick=error.tick) from None


def _split_facts(path: Path, text: str) -> tuple[dict[str, str], list[tuple[int, str]]]:
    """Splits the text of a CSV file into facts and lines of the table.

    Returns:
      ({"name" and "placement" if a `# key: value` line gives them}, [(line number, line) of each
      non-empty line without `#`]). Other lines with `#` are ignored.

    Raises:
      ScheduleError: the placement is neither loop nor v.
    """
    facts, lines = {}, []
    for number, line in enumerate(text.splitlines(), 1):
        key, colon, value = line.strip().removeprefix("#").partition(":")
        if not line.strip().startswith("#"):
            if line.strip():
                lines.append((number, line))
        elif colon and key.strip() in ("name", "placement"):
            facts[key.strip()] = value.strip()
            if key.strip() == "placement" and value.strip() not in ("loop", "v"):
                raise ScheduleError(
                    f"{path}:{number}: placement {value.strip()!r} is unknown; use loop or v"
                )
    return facts, lines


def _read_rows(path: Path, lines: list[tuple[int, str]]) -> Iterator[tuple[int, tuple]]:
    """Yields (line number, parsed cells of all stages) of each tick.

    Raises:
      ScheduleError: a line has another number of columns than the first, a wrong tick, or a cell
        that is no list of operations; or the heading has no column for a stage.
    """
    has_ticks, num_cells = False, None
    for place, (number, line) in enumerate(lines):
        fields = [field.strip() for field in next(csv.reader([line]))]
        if place == 0 and fields[0].lower().startswith("tick"):
            if len(fields) < 2:
                raise ScheduleError(
                    f"{path}:{number}: the heading {line.strip()!r} has no column for a stage; "
                    "separate columns by commas"
                )
            has_ticks, num_cells = True, len(fields)
            continue
        num_cells = num_cells or len(fields)
        if len(fields) != num_cells:
            raise ScheduleError(
                f"{path}:{number}: {len(fields)} columns, but the first line has {num_cells}; "
                "write . for an idle stage"
            )
        tick = place - has_ticks
        if has_ticks and fields.pop(0) != str(tick):
            raise ScheduleError(
                f"{path}:{number}: tick {line.partition(',')[0].strip()!r}, but tick {tick} is "
                "next; ticks count from 0 without gaps"
            )
        yield number, tuple(_read_cell(path, number, stage, f) for stage, f in enumerate(fields))


def _read_cell(path: Path, number: int, stage: int, field: str):
    try:
        return parse_cell(field)
    except ScheduleError as error:
        raise ScheduleError(f"{path}:{number}: stage {stage}: {error}") from None
