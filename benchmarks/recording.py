"""Output of a benchmark: a table on the screen and a JSON file.

Handles rows and goals, independent of how they were measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import describe_machine, is_quiet, load_average

RESULTS = Path(__file__).resolve().parent / "results"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Goal:
    """A measured number and its upper limit or, with `at_least`, its lower limit."""

    name: str
    value: float
    limit: float
    at_least: bool = False

    @property
    def is_met(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """The outcome of one benchmark.

    Attributes:
      name: name of the benchmark and of its JSON file.
      rows: measured rows in the order of the table; rows may lack some of the columns.
      goals: ratios and their limits, printed last.
      notes: explanations of the numbers.
    """

    name: str
    rows: Sequence[Mapping[str, Any]]
    goals: Sequence[Goal] = ()
    notes: Sequence[str] = ()


def parse_arguments(description: str, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the two options that every benchmark has."""
    parser = argparse.ArgumentParser(description=description.strip().splitlines()[0])
    add_arguments(parser)
    return parser.parse_args(argv)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--smoke", action="store_true", help="tiny sizes; times mean nothing")
    parser.add_argument("--out", type=Path, help=f"folder of the JSON file; default {RESULTS.name}")


def write_record(
    record: Record, arguments: argparse.Namespace, load_before: float, **more: Any
) -> Path:
    """Prints the table, the notes and the goals, and writes the JSON file; returns its path.

    A smoke run without `--out` writes to a temporary folder, so it never overwrites a measurement.
    """
    record, load = _with_load(record, arguments, load_before)
    print(f"\n{record.name}" + " (smoke: times mean nothing)" * arguments.smoke)
    print(format_table(record.rows))
    for note in record.notes:
        print(f"  note: {note}")
    for goal in record.goals:
        sign = ">=" if goal.at_least else "<="
        verdict = "" if arguments.smoke else "  ok" if goal.is_met else "  MISSED"
        print(f"  {goal.name}: {goal.value:.4g} (goal {sign} {goal.limit:g}){verdict}")
    path = _write(record, arguments, load, more)
    print(f"  written to {path}", flush=True)
    return path


def save_so_far(
    record: Record, arguments: argparse.Namespace, load_before: float, **more: Any
) -> Path:
    """Writes the JSON file of a benchmark that continues, and prints its newest row as one line.

    If a time limit ends the benchmark, the rows measured so far are in the file.
    """
    record, load = _with_load(record, arguments, load_before)
    if record.rows:
        cells = [f"{key}={_cell(value)}" for key, value in record.rows[-1].items()]
        print(f"  {record.name}: " + ", ".join(cells), flush=True)
    return _write(record, arguments, load, more)


def _with_load(
    record: Record, arguments: argparse.Namespace, load_before: float
) -> tuple[Record, dict[str, float]]:
    notes = list(record.notes)
    if not is_quiet(load_before) and not arguments.smoke:
        notes.append(
            f"the machine was not quiet (load {load_before} before): read the ratios, not the times"
        )
    load = {"before": load_before, "after": load_average()}
    return dataclasses.replace(record, notes=notes), load


def _write(
    record: Record,
    arguments: argparse.Namespace,
    load: Mapping[str, float],
    more: Mapping[str, Any],
) -> Path:
    folder = arguments.out
    if folder is None:
        folder = Path(tempfile.mkdtemp(prefix="smoke-")) if arguments.smoke else RESULTS
        arguments.out = folder
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{record.name}.json"
    content = {
        "name": record.name,
        "smoke": arguments.smoke,
        "machine": describe_machine(),
        "load_average": dict(load),
        "rows": [dict(row) for row in record.rows],
        "goals": [dataclasses.asdict(goal) | {"met": goal.is_met} for goal in record.goals],
        "notes": list(record.notes),
        **more,
    }
    # Written by a rename, since a time limit may end the process at any moment.
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(path)
    return path


def format_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Formats rows as a table: columns in the order of first appearance, numbers to four digits."""
    if not rows:
        return "  nothing was measured"
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [columns, *([_cell(row.get(column)) for column in columns] for row in rows)]
    widths = [max(len(line[index]) for line in cells) for index in range(len(columns))]
    lines = []
    for line in cells:
        first, *rest = zip(line, widths, strict=True)
        aligned = [first[0].ljust(first[1]), *(text.rjust(width) for text, width in rest)]
        lines.append("  " + "  ".join(aligned).rstrip())
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 10_000 else f"{value:.0f}"
    return str(value)
