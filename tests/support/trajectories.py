"""Short trainings whose losses are compared.

The same model and batches, another way of computing.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
import optax

from tests.support.small_models import VOCAB
from zerojax.config import MeshConfig
from zerojax.placement.device_mesh import make_mesh
from zerojax.plan.make import Plan, make_plan
from zerojax.step.build import build_step
from zerojax.step.initialization import init_state

TOLERANCE = 4e-6
"""|difference of losses| of float32 runs of 20 steps: the noise of summing one device's batch in
reversed row order is 3.8e-6, and a correct run sums in yet other orders. Two files of tests, whose
losses were seen to differ by ten units in their last place (4.8e-6), allow 1e-6 of the loss beside
it: `test_equality` and `test_hpz`."""

STEPS = 20
ROWS = 32
"""Rows of every batch: 8 devices on `data` times 4 microbatches need 32."""


def text_batch(index: int) -> dict[str, np.ndarray]:
    """Random tokens, [32, 16]; batches repeat after four, so that a model can learn them."""
    tokens = np.random.default_rng(index % 4).integers(0, VOCAB - 3, (ROWS, 17), np.int32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def failing_at(step: int, batches: Callable[[int], Any]) -> Callable[[int], Any]:
    """Returns batches that raise OSError where that of `step` + 1 would be read."""

    def read(index: int) -> Any:
        if index == step:
            raise OSError("the disk is gone")
        return batches(index)

    return read


def regression_batch(index: int) -> dict[str, np.ndarray]:
    """A smooth function of random points, [32, 12] -> [32, 5]; batches repeat after four."""
    random = np.random.default_rng(index % 4)
    x = random.normal(size=(ROWS, 12)).astype(np.float32)
    return {"x": x, "y": np.sin(x[:, :5] * 2) + x[:, 5:10]}


def optimizer() -> optax.GradientTransformation:
    """Clipped AdamW.

    eps is large, since Adam would blow the rounding noise of gradients that are truly zero
    (attention key biases) up to full updates.
    """
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, eps=1e-5))


@dataclasses.dataclass
class Trajectory:
    """What a run left: its plan, its loss and gradient norm per step, its last state.

    `first` are all metrics of its first step.
    """

    plan: Plan
    losses: np.ndarray
    norms: np.ndarray
    state: Any
    first: dict[str, Any] = dataclasses.field(default_factory=dict)


def plan_for(
    model: Any,
    *,
    devices: int = 8,
    mesh: dict[str, Any] | None = None,
    batch: Callable[[int], Any] = text_batch,
    **options: Any,
) -> Plan:
    """A float32 plan at stage 0 over `devices` devices, unless `options` say otherwise."""
    made = make_mesh(MeshConfig(**(mesh or {})), devices=jax.devices()[:devices])
    options = {"precision": "fp32", "optimizer": optimizer(), "zero": 0, **options}
    return make_plan(model, made, example_batch=batch(0), **options)


def train_for(
    model: Any,
    *,
    steps: int = STEPS,
    batch: Callable[[int], Any] = text_batch,
    seed: int = 0,
    **options: Any,
) -> Trajectory:
    """Losses of `steps` steps; `options` are those of `plan_for`."""
    plan = plan_for(model, batch=batch, **options)
    return advance(plan, init_state(plan, seed), range(steps), batch=batch)


def advance(
    plan: Plan, state: Any, indices: Iterable[int], *, batch: Callable[[int], Any] = text_batch
) -> Trajectory:
    """Takes the steps of these batches from `state`, which is donated."""
    step = build_step(plan)
    losses, norms, first = [], [], {}
    for index in indices:
        state, metrics = step(state, jax.device_put(batch(index), plan.batch_sharding))
        first = first or metrics
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
    return Trajectory(plan, np.array(losses), np.array(norms), state, first)
