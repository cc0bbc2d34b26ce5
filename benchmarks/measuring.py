"""Times two or more ways to compute the same, in alternation.

Contains clocks, the order of samples and fresh processes, but nothing that is timed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


@dataclasses.dataclass(frozen=True)
class Sample:
    """A sample of several steps: seconds per step of wall time, and of this process's CPU time."""

    wall: float
    cpu: float


Side = Callable[[int], Sample]
"""Runs the given number of steps, waits for the last step, and returns the sample."""


def sample(run: Callable[[], object], steps: int = 1) -> Sample:
    """Times `run`, which must take `steps` steps and wait for them."""
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return Sample((time.perf_counter() - wall) / steps, (time.process_time() - cpu) / steps)


def interleave(
    sides: Mapping[str, Side], *, warm_up: int, steps: int, rounds: int
) -> dict[str, list[Sample]]:
    """Takes samples of all sides in alternation (A B, B A, ...), so that drift affects all.

    Args:
      sides: {name: side}.
      warm_up: number of steps of each side before the first sample.
      steps: number of steps per sample.
      rounds: number of samples per side.
    """
    for side in sides.values():
        side(warm_up)
    samples: dict[str, list[Sample]] = {name: [] for name in sides}
    for index in range(rounds):
        names = list(sides) if index % 2 == 0 else list(reversed(sides))
        for name in names:
            samples[name].append(sides[name](steps))
    return samples


def median_of(samples: Sequence[Sample], clock: str) -> float:
    """Returns the median of one clock, "wall" or "cpu", in seconds per step."""
    return statistics.median(getattr(one, clock) for one in samples)


def least_of(samples: Sequence[Sample], clock: str) -> float:
    """Returns the smallest value of one clock, the least disturbed value on a busy machine."""
    return min(getattr(one, clock) for one in samples)


def ratio_of(above: Sequence[Sample], below: Sequence[Sample], clock: str) -> float:
    """Returns the median of the ratios of each round; samples of a round share disturbances."""
    pairs = zip(above, below, strict=True)
    return statistics.median(getattr(a, clock) / getattr(b, clock) for a, b in pairs)


def in_a_process(module: str, *words: str) -> Any:
    """Runs `python -m module words` on CPU devices, without a cache of compiled programs.

    Returns:
      The last line that it prints, as JSON.
    """
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    environment["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    result = subprocess.run(
        [sys.executable, "-m", module, *words],
        cwd=ROOT,
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return json.loads(result.stdout.splitlines()[-1])
