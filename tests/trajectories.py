"""Short trainings whose losses are compared.

The same model and batches, another way of computing.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import optax

from tests.small_models import VOCAB
from zerojax.arrays import init_state
from zerojax.config import MeshConfig
from zerojax.mesh import make_mesh
from zerojax.plan import Plan, make_plan
from zerojax.step import build_step

TOLERANCE = 4e-6
"""|difference of losses| of float32 runs of 20 steps: the noise of summing one device's batch in
reversed row order is 3.8e-6, and a correct run sums in yet other orders."""

STEPS = 20


def text_batch(index: int, rows: int = 16, seq: int = 16) -> dict[str, np.ndarray]:
    """Batches repeat after four, so that a model can learn them."""
    tokens = np.random.default_rng(index % 4).integers(0, VOCAB - 3, (rows, seq + 1), np.int32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def regression_batch(index: int, rows: int = 16) -> dict[str, np.ndarray]:
    random = np.random.default_rng(index % 4)
    x = random.normal(size=(rows, 12)).astype(np.float32)
    return {"x": x, "y": np.sin(x[:, :5] * 2) + x[:, 5:10]}


def optimizer() -> optax.GradientTransformation:
    """Clipped AdamW.

    eps is large, since Adam would blow the rounding noise of gradients that are truly zero
    (attention key biases) up to full updates.
    """
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, eps=1e-5))


@dataclasses.dataclass
class Trajectory:
    plan: Plan
    losses: np.ndarray
    norms: np.ndarray
    state: Any


def train_for(
    model: Any,
    *,
    devices: int = 8,
    mesh: dict[str, Any] | None = None,
    steps: int = STEPS,
    batch: Any = text_batch,
    seed: int = 0,
    **options: Any,
) -> Trajectory:
    """Losses of `steps` steps on `devices` devices."""
    made = make_mesh(MeshConfig(**(mesh or {})), devices=jax.devices()[:devices])
    options = {"precision": "fp32", "optimizer": optimizer(), "zero": 0, **options}
    plan = make_plan(model, made, example_batch=batch(0), **options)
    state = init_state(plan, seed)
    return advance(plan, state, range(steps), batch=batch)


def advance(plan: Plan, state: Any, indices: Any, *, batch: Any = text_batch) -> Trajectory:
    step = build_step(plan)
    losses, norms = [], []
    for index in indices:
        state, metrics = step(state, jax.device_put(batch(index), plan.batch_sharding))
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
    return Trajectory(plan, np.array(losses), np.array(norms), state)
