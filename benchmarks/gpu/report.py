"""Converts results of a GPU to Markdown, and derives what `impl="auto"` should select.

`python -m benchmarks.gpu.report gpu.json ...` reads the files of one or several runs, oldest first,
and `tuned.json` of a user's cache, which has the same form. It measures and changes nothing.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.collect import read_runs
from benchmarks.gpu.summary import speed_rows

AHEAD, BEHIND = 0.97, 1.01
"""A kernel is selected if it takes at most AHEAD of XLA's time in a case, and in no case above
BEHIND."""
KERNELS = {"adamw": "adamw", "lion": "lion", "adam8bit": "adam8bit", "stats": "gradient_stats"}
"""{kind of update: name of the kernel for `pallas_kernels.choice.choose`}."""

Parts = Mapping[str, Mapping[str, Any]]
Columns = Sequence[tuple[str, str, str]]


@dataclasses.dataclass(frozen=True)
class Decision:
    """Implementation that one kind of update should use.

    Attributes:
      kind: kind of update.
      takes_kernel: whether `"auto"` should select the kernel; None if nothing was measured.
      reason: reason with the figures.
    """

    kind: str
    takes_kernel: bool | None
    reason: str

    @property
    def kernel(self) -> str:
        return KERNELS[self.kind]


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the report of the given files."""
    print(report(read_runs([Path(name) for name in (sys.argv[1:] if argv is None else argv)])))


def report(parts: Parts) -> str:
    """Returns all sections of the report that have measurements."""
    sections = [_machine(parts), _speeds(parts), _optimizers(parts)]
    sections += [_tuned(parts), _decisions(parts), _memory(parts), _offload(parts)]
    sections += [_features(parts), _experts(parts), _decoding(parts), _goals(parts)]
    return "\n\n".join(section for section in sections if section)


def decide(rows: Sequence[Mapping[str, Any]]) -> list[Decision]:
    """Returns the decision for each kind of update, from the rows of part "optimizer"."""
    return [_decide(kind, [row for row in rows if row["kind"] == kind]) for kind in KERNELS]


def _decide(kind: str, rows: Sequence[Mapping[str, Any]]) -> Decision:
    ratios = {}
    for layout in dict.fromkeys(row["leaves"] for row in rows):
        times = {row["way"]: row["ms"] for row in rows if row["leaves"] == layout and row.get("ms")}
        if "kernel" in times and "XLA" in times:
            ratios[layout] = times["kernel"] / times["XLA"]
    if not ratios:
        return Decision(kind, None, "the kernel was not measured beside XLA")
    figures = ", ".join(f"{ratio:.3f} in {layout}" for layout, ratio in ratios.items())
    wins = min(ratios.values()) <= AHEAD and max(ratios.values()) <= BEHIND
    return Decision(kind, wins, f"the kernel needs of XLA's time {figures}")


# --- sections -------------------------------------------------------------------------------------


def _machine(parts: Parts) -> str:
    if "environment" not in parts:
        return ""
    part = parts["environment"]
    machine, driver = part["machine"], (part.get("nvidia_smi") or {}).get("driver_version")
    versions = ", ".join(
        f"{name} {machine['versions'][name]}"
        for name in ("jax", "torch")
        if name in machine["versions"]
    )
    product, copy = (row[key] for row, key in zip(part["rows"], ("TFLOP/s", "TB/s"), strict=True))
    return (
        f"{part['device_kind']}, driver {driver}, {machine['date']}, {versions}: bf16 product "
        f"{product:.0f} TFLOP/s, copy {copy:.2f} TB/s"
    )


def _speeds(parts: Parts) -> str:
    environment = parts.get("environment")
    product = environment["rows"][0]["TFLOP/s"] if environment else None
    columns = [
        ("model", "model", "{}"),
        ("way", "way", "{}"),
        ("step_ms", "ms per step", "{:.1f}"),
        ("expected_ms", "expected before", "{:.1f}"),
        ("tokens_per_s", "tokens/s", "{:,.0f}"),
        ("MFU", "MFU", "{:.3f}"),
        ("/product", "of the product", "{:.3f}"),
        ("zerojax.train/this", "zerojax.train / this", "{:.3f}"),
        ("note", "", "{}"),
    ]
    return _table(speed_rows(dict(parts), product), columns)


def _optimizers(parts: Parts) -> str:
    columns = [
        ("leaves", "leaves", "{}"),
        ("kind", "work", "{}"),
        ("way", "way", "{}"),
        ("ms", "ms", "{:.3f}"),
        ("busy_ms", "busy ms", "{:.3f}"),
        ("TB/s", "TB/s", "{:.2f}"),
        ("/copy", "of the copy", "{:.3f}"),
        ("launches", "launches", "{:.0f}"),
        ("needs_MB", "MB", "{:,.0f}"),
        ("temp_MB", "temporary MB", "{:,.1f}"),
        ("max_ulp", "ulp", "{:.0f}"),
        ("note", "", "{}"),
    ]
    return _table(parts.get("optimizer", {}).get("rows", []), columns)


def _tuned(parts: Parts) -> str:
    """Returns the section on the choices of `zerojax tune` on this card and in a user's cache."""
    columns = [
        ("what", "measured as zerojax tune does", "{}"),
        ("device", "card", "{}"),
        ("driver", "driver", "{}"),
        ("elements", "elements", "{:,}"),
        ("choice", "choice", "{}"),
        ("ways", "of", "{}"),
        ("reference_ms", "ms of the first", "{:.3f}"),
        ("other_ms", "of the second", "{:.3f}"),
        ("ms", "ms per step", "{:.2f}"),
        ("date", "date", "{}"),
        ("reason", "", "{}"),
    ]
    tables = [_table(parts.get(part, {}).get("rows", []), columns) for part in ("tune", "cache")]
    return "\n\n".join(table for table in tables if table)


def _decisions(parts: Parts) -> str:
    if "optimizer" not in parts:
        return ""
    rows = parts["optimizer"]["rows"]
    lines = ['`impl="auto"`, by KERNELS_THAT_WIN in pallas_kernels/choice.py:', ""]
    for one in decide(rows):
        what = {None: "undecided", True: "take the kernel", False: "stay with XLA"}
        lines.append(f"- `{one.kernel}`: {what[one.takes_kernel]}; {one.reason}")
        if one.takes_kernel:
            lines.append(f'  - the line: `"{one.kernel}": "{one.reason}",`')
    return "\n".join(lines)


def _memory(parts: Parts) -> str:
    columns = [
        ("program", "program", "{}"),
        ("zero", "zero", "{}"),
        ("predicted_MB", "compiled MB", "{:,.0f}"),
        ("measured_MB", "measured MB", "{:,.0f}"),
        ("measured/predicted", "measured / compiled", "{:.3f}"),
        ("predicted/forecast", "compiled / forecast", "{:.3f}"),
        ("note", "", "{}"),
    ]
    return _table(parts.get("memory", {}).get("rows", []), columns)


def _offload(parts: Parts) -> str:
    columns = [
        ("what", "what", "{}"),
        ("way", "way", "{}"),
        ("in_GB/s", "GB/s in", "{:.1f}"),
        ("out_GB/s", "GB/s out", "{:.1f}"),
        ("both_GB/s", "GB/s both", "{:.1f}"),
        ("step_ms", "ms per step", "{:.1f}"),
        ("expected_ms", "expected before", "{:.1f}"),
        ("of_link", "of the link", "{:.3f}"),
        ("/none", "of the step without", "{:.3f}"),
        ("overlap", "overlap", "{:.3f}"),
        ("note", "", "{}"),
    ]
    return _table(parts.get("offload", {}).get("rows", []), columns)


def _features(parts: Parts) -> str:
    columns = [
        ("feature", "feature of a run", "{}"),
        ("last_loss", "last loss", "{:.4f}"),
        ("difference", "largest difference from the CPU's loss", "{:.2g}"),
        ("note", "", "{}"),
    ]
    return _table(parts.get("features", {}).get("rows", []), columns)


def _experts(parts: Parts) -> str:
    columns = [
        ("case", "layer of experts", "{}"),
        ("load", "loads", "{}"),
        ("way", "products", "{}"),
        ("ms", "ms forward and backward", "{:.2f}"),
        ("TFLOP/s of rows", "TFLOP/s of rows", "{:.0f}"),
    ]
    return _table(parts.get("experts", {}).get("rows", []), columns)


def _decoding(parts: Parts) -> str:
    columns = [
        ("weights", "weights", "{}"),
        ("cache", "cache", "{}"),
        ("batch", "rows", "{}"),
        ("GB", "GB per position", "{:.2f}"),
        ("ms", "ms per position", "{:.2f}"),
        ("of_bound", "share of the bound", "{:.2f}"),
        ("tokens_per_s", "tokens/s", "{:,.0f}"),
    ]
    return _table(parts.get("decoding", {}).get("rows", []), columns)


def _goals(parts: Parts) -> str:
    lines = []
    for name, record in parts.items():
        for goal in record["goals"]:
            limit = f"{'>=' if goal['at_least'] else '<='} {goal['limit']:g}"
            verdict = "met" if goal["met"] else "missed"
            lines.append(f"- {name}: {goal['name']}: {goal['value']:.4g} ({limit}, {verdict})")
    return "\n".join(["Goals:", "", *lines]) if lines else ""


def _table(rows: Sequence[Mapping[str, Any]], columns: Columns) -> str:
    """Formats a Markdown table, without columns that no row has."""
    shown = [column for column in columns if any(row.get(column[0]) is not None for row in rows)]
    if not rows or not shown:
        return ""
    lines = ["| " + " | ".join(title for _, title, _ in shown) + " |", "|---" * len(shown) + "|"]
    for row in rows:
        cells = ["" if row.get(key) is None else form.format(row[key]) for key, _, form in shown]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
