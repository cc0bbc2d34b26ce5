"""Combines the files of all parts of a run: `python -m benchmarks.gpu.collect FOLDER FILE`.

Reads and writes files; needs only the standard library and measures nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def main(argv: Sequence[str] | None = None) -> None:
    """Writes FILE from FOLDER/PART.json and FOLDER/PART.status."""
    folder, target = map(Path, sys.argv[1:] if argv is None else argv)
    unfinished = target.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(collect(folder), indent=1) + "\n", encoding="utf-8")
    unfinished.replace(target)


def collect(folder: Path) -> dict[str, Any]:
    """Returns {"name": "gpu", "smoke", "status": {part: exit status}, "parts": {part: record}}."""
    status = {path.stem: path.read_text() for path in sorted(folder.glob("*.status"))}
    parts = {}
    for path in sorted(folder.glob("*.json")):
        parts[path.stem] = json.loads(path.read_text(encoding="utf-8"))
    smoke = any(record["smoke"] for record in parts.values())
    return {"name": "gpu", "smoke": smoke, "status": status, "parts": parts}


def rows_of_cache(cache: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns a row for each choice that `zerojax tune` has stored in a user's cache
    (`tuned.json`).

    Args:
      cache: {key as JSON: entry}; keys without the name of a choice are left out.
    """
    rows = []
    for text, entry in cache.items():
        key = json.loads(text)
        if not isinstance(key, dict) or "what" not in key or "ways" not in key:
            continue
        rows.append(
            {
                "what": key["what"],
                "device": key.get("device"),
                "driver": key.get("driver"),
                "elements": key.get("elements"),
                "choice": entry["choice"],
                "ways": " or ".join(key["ways"]),
                "reference_ms": 1e3 * entry["seconds"],
                "other_ms": 1e3 * entry["other_seconds"],
                "date": entry["date"],
            }
        )
    return rows


def read_runs(paths: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """Returns {part: record} of one or several runs; the last successful record of a part counts.

    Args:
      paths: paths of files that this module wrote, oldest first, or of a user's `tuned.json`.
    """
    found: dict[str, dict[str, Any]] = {}
    ended_well: dict[str, bool] = {}
    for path in paths:
        run = json.loads(path.read_text())
        if "parts" not in run:
            found["cache"] = {"rows": rows_of_cache(run), "goals": []}
            continue
        for name, record in run["parts"].items():
            is_well = run["status"].get(name, "").startswith("ok")
            if is_well or not ended_well.get(name, False):
                found[name], ended_well[name] = record, is_well
    return found


if __name__ == "__main__":
    main()
