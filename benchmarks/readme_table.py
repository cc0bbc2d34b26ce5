"""The comparison tables of README.md and docs/comparison.md.

`python -m benchmarks.readme_table` writes both from results/compare.json; it measures nothing.
README.md has the rows of `SHORT`, the page all rows.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "compare.json"
README = ROOT / "README.md"
PAGE = ROOT / "docs" / "comparison.md"
BEGIN, END = "<!-- comparison: begin -->\n", "<!-- comparison: end -->\n"

LEFT_OUT = ("optax + nnx.jit", "torch.compile", "optax + nnx, data parallel")
"""Ways that are only in the result file."""

SHORT = (
    "optax + nnx, jax.jit",
    "zerojax",
    "torch eager",
    "zerojax ZeRO 1",
    "DeepSpeed ZeRO 1",
    "zerojax ZeRO 3",
    "DeepSpeed ZeRO 3",
    "torch FSDP2",
)
"""Ways that README.md shows."""

COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("processes", "processes", "{:d}"),
    ("steps/s", "steps/s", "{:.2f}"),
    ("cpu/bare", "CPU time / its own bare step", "{:.2f}"),
    ("peak_MB", "peak MB per process", "{:.0f}"),
    ("sent/unit", "sent", "{:.2f}"),
    ("max_loss_diff", "loss differs by", "{:.0e}"),
    ("lines", "lines", "{:d}"),
)
"""Columns as (key of a row, heading, format)."""


def comparison(record: Mapping[str, Any], ways: Sequence[str] = ()) -> str:
    """Returns machine, one line per way, and the ratios in words, as Markdown.

    Args:
      record: result of `benchmarks.compare`.
      ways: ways to show, without the ratios; if empty, all ways except `LEFT_OUT`, with the ratios.

    Returns:
      The Markdown, or "" for a smoke run, whose figures mean nothing.
    """
    if record["smoke"]:
        return ""
    machine = record["machine"]
    head = (
        f"{machine['cores']} cores of an {machine['cpu']}, {machine['date']}, "
        f"JAX {machine['versions']['jax']}, load before {record['load_average']['before']:.1f}:\n\n"
    )
    headings = "".join(f" {heading} |" for _, heading, _ in COLUMNS)
    lines = [f"| |{headings}", "|---|" + "---|" * len(COLUMNS)]
    for row in record["rows"]:
        if row["way"] in LEFT_OUT or (ways and row["way"] not in ways):
            continue
        cells = ["" if row.get(key) is None else form.format(row[key]) for key, _, form in COLUMNS]
        lines.append(f"| {row['way']} | " + " | ".join(cells) + " |")
    said = ". ".join(note for note in record["notes"] if note.startswith("zerojax takes"))
    words = "\n" + textwrap.fill(f"{said}.", 118) + "\n" if said and not ways else ""
    return head + "\n".join(lines) + "\n" + words


def with_comparison(page: str, part: str) -> str:
    """Returns the page with `part` between its two marks.

    Raises:
      ValueError: a mark is missing.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page has no lines {BEGIN.strip()!r} and {END.strip()!r}")
    return f"{before}{BEGIN}{part}{END}{after}"


def main() -> None:
    record = json.loads(RESULT.read_text())
    for path, ways in ((README, SHORT), (PAGE, ())):
        path.write_text(with_comparison(path.read_text(), comparison(record, ways)))


if __name__ == "__main__":
    main()
