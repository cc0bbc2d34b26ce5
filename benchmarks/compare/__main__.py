"""The comparison: `python -m benchmarks.compare [--torch PYTHON] [--deepspeed PYTHON] [--smoke]`.

Finds the Python interpreters and writes the record; `turns` measures the programs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.compare.catalogue import WINDOWS
from benchmarks.compare.probing import FRAMEWORKS, probe
from benchmarks.compare.tables import Measured, make_record
from benchmarks.compare.turns import PATIENCE, ROOT, Taken, measure
from benchmarks.machine import load_average
from benchmarks.recording import add_arguments, write_record


def main(argv: list[str] | None = None) -> int:
    """Measures all installed programs; returns 1 if one failed or losses differ."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare", description=(__doc__ or "").splitlines()[0]
    )
    add_arguments(parser)
    for name in FRAMEWORKS:
        parser.add_argument(
            f"--{name}",
            metavar="PYTHON",
            default=sys.executable,
            help=f"the Python that has {name}; default: this one",
        )
    parser.add_argument(
        "--windows",
        nargs="+",
        choices=list(WINDOWS),
        default=list(WINDOWS),
        help="only these windows: one process, or two processes under a ZeRO stage",
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=PATIENCE,
        metavar="SECONDS",
        help="time limit of the steps of a turn, in seconds; default %(default)g",
    )
    arguments = parser.parse_args(argv)
    load_before = load_average()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="compare-") as name:
        folder = Path(name)
        _export(folder, arguments.smoke)
        pythons = {"jax": sys.executable} | {key: getattr(arguments, key) for key in FRAMEWORKS}
        found = {key: probe(key, python) for key, python in pythons.items()}
        measured = Measured(found=found, windows={})
        for window in arguments.windows:
            _say(f"window {window}", began)
            ways = [way for way in WINDOWS[window] if found[way.needs].versions]
            measured.windows[window] = measure(
                ways, pythons, folder, smoke=arguments.smoke, patience=arguments.patience
            )
            _show_failures(measured.windows[window])
    record = make_record(measured, smoke=arguments.smoke)
    more: dict[str, Any] = {
        "seconds": round(time.monotonic() - began),
        "pythons": {key: one.versions or one.reason for key, one in found.items()},
    }
    write_record(record, arguments, load_before, **more)
    return 1 if measured.failed or not record.goals[0].is_met else 0


def _export(folder: Path, smoke: bool) -> None:
    """Exports in a separate process, so that this process stays small and without JAX's threads."""
    code = (
        "import sys, json, pathlib; from benchmarks.compare.export import export; "
        "export(pathlib.Path(sys.argv[1]), json.loads(sys.argv[2]))"
    )
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, str(folder), json.dumps(smoke)]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=300)


def _show_failures(taken: dict[str, Taken]) -> None:
    for name, one in taken.items():
        if one.failure:
            print(f"  {name} failed: {one.failure}", file=sys.stderr, flush=True)


def _say(what: str, began: float) -> None:
    print(f"[{time.monotonic() - began:4.0f} s] {what}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
