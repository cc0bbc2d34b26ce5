"""Schedules as CSV files: one line per tick, one column per stage.

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
from collections.abc import Iterator
from pathlib import Path

from zerojax.plan.schedules.checks import check_schedule
from zerojax.plan.schedules.table import Schedule, ScheduleError, format_cell, parse_cell


def write_csv(schedule: Schedule, path: str | Path) -> Path:
    """Writes what `read_csv` reads; returns the path."""
    path = Path(path)
    lines = [f"# name: {schedule.name}", f"# placement: {schedule.placement}"]
    lines.append(",".join(["tick", *(f"stage {stage}" for stage in range(schedule.num_stages))]))
    for tick, row in enumerate(schedule.table):
        lines.append(",".join([str(tick), *map(format_cell, row)]))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def read_csv(path: str | Path) -> Schedule:
    """Reads and checks a table.

    Raises:
      ScheduleError: the text names the file and, wherever one is to blame, the line.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ScheduleError(
            f"{path}: {error.strerror or error}; give a table (`zerojax schedule 1f1b "
            "--stages 4 --microbatches 8 --csv mine.csv` writes one), or the name of a schedule"
        ) from None
    except UnicodeDecodeError as error:
        raise ScheduleError(
            f"{path}: not a text file in UTF-8 (byte {error.start}); save it as CSV, UTF-8"
        ) from None
    facts, lines = _split_facts(path, text)
    numbered = list(_read_rows(path, lines))
    if not numbered:
        raise ScheduleError(f"{path}: no ticks; write one line for each, such as 0,F0,.")
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
    """The `# key: value` lines, and the other lines that are not empty with their numbers."""
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
    """(line, cells) of each tick."""
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
                f"{path}:{number}: {len(fields)} columns where the first line has {num_cells}; "
                "write . for an idle stage"
            )
        tick = place - has_ticks
        if has_ticks and fields.pop(0) != str(tick):
            raise ScheduleError(
                f"{path}:{number}: tick {line.partition(',')[0].strip()!r} where tick {tick} is "
                "next; ticks count from 0 without gaps"
            )
        yield number, tuple(_read_cell(path, number, stage, f) for stage, f in enumerate(fields))


def _read_cell(path: Path, number: int, stage: int, field: str):
    try:
        return parse_cell(field)
    except ScheduleError as error:
        raise ScheduleError(f"{path}:{number}: stage {stage}: {error}") from None
