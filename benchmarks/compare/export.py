"""Writes the initial weights and the batches of every program.

Runs before all other parts.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks import plain_jax, small_gpt
from benchmarks.compare.subject import BATCHES, NUM_BATCHES, WEIGHTS


def export(folder: Path, smoke: bool) -> None:
    """Writes both files: zerojax's own initial weights, and random tokens."""
    config = small_gpt.choose_config(smoke)
    params = plain_jax.init_params(small_gpt.make_factory(config))
    weights = {name: np.asarray(value) for name, value in params.items()}
    np.savez(folder / WEIGHTS, **weights)
    source = small_gpt.make_source(config)
    batches = [source.batch(index) for index in range(NUM_BATCHES)]
    stacked = {
        name: np.stack([batch[name] for batch in batches]).astype(np.int32)
        for name in ("tokens", "targets")
    }
    np.savez(folder / BATCHES, **stacked)
