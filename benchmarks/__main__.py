"""Runs the benchmarks, each in a process of its own: `python -m benchmarks [NAME ...] [--smoke]`.

Contains only the names and the order of the benchmarks.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.recording import add_arguments

ROOT = Path(__file__).resolve().parent.parent
NAMES = (
    "overhead",
    "host_time",
    "batch_copies",
    "two_processes",
    "state_bytes",
    "deterministic",
    "start_up",
    "first_step",
    "second_start",
    "planning_time",
    "step_time",
    "compile_time",
    "rolled_layers",
    "default_run",
    "mixture",
    "rounding",
    "plans",
    "foresight",
    "overlap",
    "search",
    "questions",
    "hand_made",
    "scaling",
    "attention",
    "sequences",
    "optimizer",
    "one_bit",
    "wire",
    "learning",
    "batch_size",
    "update_phase",
    "pipeline",
    "offload_disk",
    "checkpoint_faults",
    "paged_faults",
    "checkpoint_cost",
)


def main(argv: list[str] | None = None) -> int:
    """Runs the named benchmarks, or all of them; returns 1 if a benchmark failed to run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    add_arguments(parser)
    arguments = parser.parse_args(argv)
    unknown = [name for name in arguments.names if name not in NAMES]
    if unknown:
        parser.error(f"there is no benchmark {unknown[0]!r}; there are {', '.join(NAMES)}")
    options = ["--smoke"] * arguments.smoke
    if arguments.out:
        options += ["--out", str(arguments.out.resolve())]
    environment = {"JAX_PLATFORMS": "cpu", **os.environ, "PYTHONPATH": str(ROOT)}
    failed = []
    for name in arguments.names or NAMES:
        command = [sys.executable, "-m", f"benchmarks.{name}", *options]
        if subprocess.run(command, cwd=ROOT, env=environment).returncode:
            failed.append(name)
    if failed:
        print(f"\ndid not run to the end: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
