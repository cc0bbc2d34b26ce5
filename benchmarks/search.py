"""Duration and result of `zerojax plan RUN --search` for run files of 7, 70 and 405 billion
parameters, each in a process of its own, without a GPU and without cached results.

Every time of a step is the expected time of the compiled program; nothing here is a measurement of
a GPU. Needs the extra `plan`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from benchmarks.machine import load_average
from benchmarks.plans import run_file
from benchmarks.recording import Goal, Record, parse_arguments, write_record
from zerojax.hardware import compile_client

CASES = (
    ("llama_7b_zero2_8xh100", "h100", 8),
    ("llama_70b_zero3_64xh200", "h200", 64),
    ("llama_405b_zero3_512xh200", "h200", 512),
)
SMOKE = ("tiny_shakespeare", "h100", 1)
SECONDS_LIMIT = {"llama_7b_zero2_8xh100": 60.0}
"""Longest search in seconds; 300 for other run files."""
STEP_LIMIT = {"llama_7b_zero2_8xh100": 25.5}
"""Longest step, in seconds at best, that the search may choose."""


def main(argv: list[str] | None = None) -> None:
    """Searches all cases and writes the record."""
    arguments = parse_arguments(__doc__ or "", argv)
    load_before = load_average()
    rows = [search_run(*case) for case in ((SMOKE,) if arguments.smoke else CASES)]
    goals = []
    for row in rows:
        name = row["config"]
        limit = SECONDS_LIMIT.get(name, 300.0)
        goals.append(Goal(name=f"{name}: seconds of the search", value=row["wall_s"], limit=limit))
        if name in STEP_LIMIT:
            step = row["at_best_s"]
            text = f"{name}: step at best, seconds"
            goals.append(Goal(name=text, value=step, limit=STEP_LIMIT[name]))
    compiler = compile_client.missing() or compile_client.compiler_version(fast=True)
    record = Record(name="search", rows=rows, goals=goals, notes=[f"compiled with {compiler}"])
    write_record(record, arguments, load_before, compiler=compiler)


def search_run(
    name: str,
    gpu: str,
    devices: int,
    words: Sequence[str] = (),
    *,
    is_cached: bool = False,
    budget: float = 300.0,
) -> dict[str, Any]:
    """Searches for the settings of one run file, and returns the row of the record.

    Args:
      name: name of the run file (`run_file`).
      gpu, devices: the GPUs.
      words: KEY=VALUE words beside the run file.
      is_cached: whether the search uses the cache of forecasts.
      budget: seconds of the search.
    """
    cache = {} if is_cached else {"ZEROJAX_CACHE": "off"}
    began, used = time.monotonic(), os.times()
    command = [sys.executable, "-m", "zerojax", "plan", str(run_file(name)), *words]
    result = subprocess.run(
        [
            *command,
            *("--gpu", gpu, "--devices", str(devices)),
            *("--search", "--json", "--budget", str(budget)),
        ],
        env={**os.environ, **cache, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        text=True,
        check=False,  # 1: nothing was found that fits
    )
    assert result.returncode in (0, 1), result.returncode
    wall, after = time.monotonic() - began, os.times()
    found = json.loads(result.stdout)
    chosen = (found["forecast"] or {}).get("estimate", {})
    trials = found["trials"]
    compiled = [trial for trial in trials if trial["peak"] is not None]
    return {
        "config": name,
        "gpu": gpu,
        "devices": devices,
        "candidates": len(trials),
        "compiled": len(compiled),
        "statuses": dict(Counter(trial["status"] for trial in trials)),
        "chosen": found["words"],
        "chosen_step_s": (chosen.get("expected") or {}).get("seconds"),
        "at_best_s": chosen.get("step_seconds"),
        "certain": found["certain"],
        "wall_s": wall,
        "cpu_s": after.children_user
        - used.children_user
        + (after.children_system - used.children_system),
    }


if __name__ == "__main__":
    main()
