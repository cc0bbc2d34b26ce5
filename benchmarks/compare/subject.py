"""The training task of all programs: sizes, optimizer, files with initial weights and batches.

Plain numbers and NumPy; imports neither JAX nor torch, so that all programs can use it.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from benchmarks.gpu.workloads import Workload

LEARNING_RATE = 3e-4
BETAS = (0.9, 0.999)
EPS = 1e-8
WEIGHT_DECAY = 0.01
"""Weight decay on all parameters, as by default in torch and optax."""
CLIP_NORM = 1.0
NUM_BATCHES = 4
"""Small number of batches, so that the loss falls within the compared steps."""

Batch = dict[str, np.ndarray]

# The sizes of benchmarks/small_gpt.py, readable by both frameworks; a test compares the two.
FULL = Workload(
    kind="gpt2",
    vocab_size=512,
    seq_len=256,
    num_layers=4,
    num_heads=4,
    num_kv_heads=4,
    embed_dim=256,
    mlp_dim=1024,
    batch_size=8,
    steps=4,
    rounds=6,
    untied=True,
)
SMOKE = dataclasses.replace(
    FULL, seq_len=16, num_layers=2, num_heads=2, num_kv_heads=2, embed_dim=32
)
WEIGHTS = "weights.npz"
BATCHES = "batches.npz"


def choose_workload(smoke: bool) -> Workload:
    """Returns the measured size or, for a smoke run, a tiny size."""
    return SMOKE if smoke else FULL


def read_weights(folder: Path) -> dict[str, np.ndarray]:
    """Returns {name: float32 array} of zerojax's model, with stacked layers."""
    with np.load(folder / WEIGHTS) as file:
        return dict(file)


def read_batches(folder: Path) -> list[Batch]:
    """Returns the global batches, each {"tokens", "targets": int32 [rows, seq_len]}."""
    with np.load(folder / BATCHES) as file:
        tokens, targets = file["tokens"], file["targets"]
    pairs = zip(tokens, targets, strict=True)
    return [{"tokens": one, "targets": other} for one, other in pairs]


def rows_of(batch: Batch, index: int, count: int) -> Batch:
    """Returns the rows of a global batch for process `index` of `count`."""
    size = len(batch["tokens"]) // count
    return {name: array[index * size : (index + 1) * size] for name, array in batch.items()}
