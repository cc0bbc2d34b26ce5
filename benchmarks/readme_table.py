"""The comparison as README.md shows it: `python -m benchmarks.readme_table` writes it there anew.

Reads results/compare.json; measures nothing and knows no figure.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "compare.json"
README = ROOT / "README.md"
BEGIN, END = "<!-- comparison: begin -->\n", "<!-- comparison: end -->\n"

LEFT_OUT = ("optax + nnx.jit", "torch.compile", "optax + nnx, data parallel")
"""Ways that stand in the result only, so that the README stays short."""

COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("processes", "processes", "{:d}"),
    ("steps/s", "steps/s", "{:.2f}"),
    ("cpu/bare", "CPU time / its own bare step", "{:.2f}"),
    ("peak_MB", "peak MB per process", "{:.0f}"),
    ("sent/unit", "sent", "{:.2f}"),
    ("max_loss_diff", "loss differs by", "{:.0e}"),
    ("lines", "lines", "{:d}"),
)
"""(key of a row, heading, format)."""


def comparison(record: Mapping[str, Any]) -> str:
    """Machine, one line per way, and what it comes to in words, as Markdown.

    "" for a run that only shows that it runs.
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
        if row["way"] in LEFT_OUT:
            continue
        cells = ["" if row.get(key) is None else form.format(row[key]) for key, _, form in COLUMNS]
        lines.append(f"| {row['way']} | " + " | ".join(cells) + " |")
    said = ". ".join(note for note in record["notes"] if note.startswith("zerojax takes"))
    words = "\n" + textwrap.fill(f"In words: {said}.", 118) + "\n" if said else ""
    return head + "\n".join(lines) + "\n" + words


def with_comparison(readme: str, part: str) -> str:
    """The README with `part` between its two marks.

    Raises:
      ValueError: a mark is missing.
    """
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"README.md has no lines {BEGIN.strip()!r} and {END.strip()!r}")
    return f"{before}{BEGIN}{part}{END}{after}"


def main() -> None:
    part = comparison(json.loads(RESULT.read_text()))
    README.write_text(with_comparison(README.read_text(), part))


if __name__ == "__main__":
    main()
