"""How two or more ways of doing the same are timed against each other.

Knows clocks, order and fresh processes; never what is timed.
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
    """One stretch of steps: seconds per step on the wall clock and of this process on all cores."""

    wall: float
    cpu: float


Side = Callable[[int], Sample]
"""Runs that many steps, waits for the last, and says what they took."""


def sample(run: Callable[[], object], steps: int = 1) -> Sample:
    """Times `run`, which has to do `steps` steps and wait for them."""
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return Sample((time.perf_counter() - wall) / steps, (time.process_time() - cpu) / steps)


def interleave(
    sides: Mapping[str, Side], *, warm_up: int, steps: int, rounds: int
) -> dict[str, list[Sample]]:
    """Samples of every side, taken in turns: A B, B A, A B, ... so that drift hits all alike.

    Args:
      sides: name -> side.
      warm_up: steps of each side before the first sample.
      steps: per sample.
      rounds: samples per side.
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
    """Median of one clock, "wall" or "cpu", in seconds."""
    return statistics.median(getattr(one, clock) for one in samples)


def least_of(samples: Sequence[Sample], clock: str) -> float:
    """The smallest value of one clock, which on a busy machine is the least disturbed one."""
    return min(getattr(one, clock) for one in samples)


def ratio_of(above: Sequence[Sample], below: Sequence[Sample], clock: str) -> float:
    """Median over the rounds of this round's ratio: neighbours in time share their disturbances."""
    pairs = zip(above, below, strict=True)
    return statistics.median(getattr(a, clock) / getattr(b, clock) for a, b in pairs)


def in_a_process(module: str, *words: str) -> Any:
    """Runs `python -m module words` on CPU devices without kept programs.

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
