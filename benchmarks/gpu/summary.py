"""The table at the end: speed and MFU of all sides, and every goal, from the file of all parts.

Reads files; measures nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from benchmarks.gpu.collect import read_runs
from benchmarks.recording import format_table


def main(argv: list[str] | None = None) -> None:
    """Prints the summary of the given files, oldest first."""
    arguments = sys.argv[1:] if argv is None else argv
    print(summarise(read_runs([Path(name) for name in arguments])))


def summarise(parts: dict[str, dict[str, Any]]) -> str:
    """Returns the summary as text: environment, speeds, goals."""
    lines = []
    product = None
    if "environment" in parts:
        environment = parts["environment"]
        product = environment["rows"][0]["TFLOP/s"]
        copy = environment["rows"][1]["TB/s"]
        rates = f"bf16 product {product:.4g} TFLOP/s, copy {copy:.3g} TB/s"
        lines.append(f"{environment['device_kind']}: {rates}")
    speeds = speed_rows(parts, product)
    if speeds:
        lines.append(format_table(speeds))
        lines.append("  MFU against the card's published rate; /product: against the product above")
    for name in ("offload", "largest"):
        if name in parts:
            lines.append(format_table([_short(row) for row in parts[name]["rows"]]))
    for name, record in parts.items():
        for goal in record["goals"]:
            sign = ">=" if goal["at_least"] else "<="
            verdict = "" if record["smoke"] else "ok" if goal["met"] else "MISSED"
            text = f"  {name}: {goal['name']}: {goal['value']:.4g} (goal {sign} {goal['limit']:g})"
            lines.append(f"{text} {verdict}".rstrip())
    return "\n".join(lines)


def _short(row: dict[str, Any]) -> dict[str, Any]:
    """Returns a row without values that are too long for a line."""
    return {
        key: value[:60] if isinstance(value, str) else value
        for key, value in row.items()
        if key not in ("at_s", "least_ms", "shares", "last_loss")
    }


def speed_rows(parts: dict[str, dict[str, Any]], product: float | None) -> list[dict[str, Any]]:
    """Returns a row per model and way, with its speed relative to `zerojax.train`."""
    rows = []
    for model in ("gpt2", "llama"):
        ways = list(parts.get(model, {}).get("rows", []))
        ours = next((row["tokens_per_s"] for row in ways if row["way"] == "zerojax.train"), None)
        for row in parts.get("torch", {}).get("rows", []):
            if row["model"] == model:
                name = "torch.compile" if row.get("compiled", True) else "torch eager"
                ways.append({**row, "way": f"{name}, {row['precision']}"})
        for row in ways:
            speed = row.get("tokens_per_s")
            shown: dict[str, Any] = {"model": model, "way": row["way"]}
            if speed is None:
                shown["note"] = row.get("note", "")[:60]
            else:
                keys = ("step_ms", "expected_ms", "tokens_per_s", "MFU")
                shown |= {key: row[key] for key in keys if key in row}
                shown["/product"] = row["TFLOP/s"] / product if product else None
                shown["zerojax.train/this"] = ours / speed if ours else None
            rows.append(shown)
    return rows


if __name__ == "__main__":
    main()
