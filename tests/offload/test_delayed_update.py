"""An update with the gradients of the step before: weights follow the recurrence of ZeRO-Offload.

The reference is a loop in NumPy: each step takes the gradients of its weights, and then updates the
weights with the gradients of the step before. Sums in another order differ by `TOLERANCE`.
"""

import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import zerojax
from tests.support.late_updates import ROWS, LateRow, late_plan
from tests.support.pipeline_runs import function_model
from tests.support.small_models import reference_model, regression_loss
from tests.support.trajectories import (
    TOLERANCE,
    advance,
    plan_for,
    regression_batch,
    text_batch,
    train_for,
)
from zerojax.config import LogConfig
from zerojax.optim.loss_scale import LossScale
from zerojax.optim.precision import as_precision
from zerojax.step.host_budget import host_remedies
from zerojax.step.initialization import init_state
from zerojax.step.reshard import from_portable_state, reshard_state, to_portable_state

DELAYED = {"opt_state": "host", "delayed_update": True, "min_elements": 30, "slice_elements": 60}
RATE, B1, B2, EPS, DECAY, CLIP = 1e-2, 0.9, 0.95, 1e-5, 0.1, 0.05
STEPS = 8


def make_optimizer(**changes: Any) -> Any:
    given = {"b1": B1, "b2": B2, "eps": EPS, "weight_decay": DECAY, "clip_norm": CLIP, **changes}
    return zerojax.adamw(RATE, mask=None, **given)


def flat(tree: Any) -> dict[str, Any]:
    """{path with slashes: leaf}."""
    leaves = jax.tree.leaves_with_path(tree)
    return {"/".join(str(key.key) for key in path): leaf for path, leaf in leaves}


def follow(weights: dict[str, Any], batches: Iterable[Any]) -> tuple[list[float], dict[str, Any]]:
    """Losses and last weights of AdamW in NumPy with a delay of one step.

    A step whose gradient is not finite leaves nothing for the next one.
    """
    (_, apply), _ = function_model()

    def loss_of(weights: Any, batch: Any) -> Any:
        return jnp.mean(jnp.square(apply(weights, batch["x"]) - batch["y"]))

    structure = jax.tree.structure(weights)
    now = [np.asarray(x, np.float64) for x in jax.tree.leaves(weights)]
    first, second = [np.zeros_like(x) for x in now], [np.zeros_like(x) for x in now]
    losses, waiting, count = [], None, 0
    for batch in batches:
        given = [jnp.asarray(x, jnp.float32) for x in now]
        loss, found = jax.value_and_grad(loss_of)(jax.tree.unflatten(structure, given), batch)
        losses.append(float(loss))
        if waiting is not None:
            count += 1
            for i, grad in enumerate(waiting):
                first[i] = B1 * first[i] + (1 - B1) * grad
                second[i] = B2 * second[i] + (1 - B2) * grad**2
                mean, root = first[i] / (1 - B1**count), np.sqrt(second[i] / (1 - B2**count))
                now[i] = now[i] - RATE * (mean / (root + EPS) + DECAY * now[i])
        waiting = [np.asarray(x, np.float64) for x in jax.tree.leaves(found)]
        norm = np.sqrt(sum(np.sum(x**2) for x in waiting))
        waiting = [x * min(1, CLIP / norm) for x in waiting] if np.isfinite(norm) else None
    return losses, flat(jax.tree.unflatten(structure, now))


def delayed_plan(row: LateRow) -> Any:
    return late_plan(row, DELAYED, optimizer=make_optimizer())


@pytest.mark.parametrize(
    "row", [pytest.param(row, id=str(row), marks=[pytest.mark.slow] * row.is_slow) for row in ROWS]
)
def test_weights_follow_the_recurrence(row):
    """A batch in between has an infinite loss, and leaves nothing for the step after it."""

    def batch(index: int) -> Any:
        found = regression_batch(index)
        return {**found, "x": found["x"] * (np.inf if index == 4 else 1)}

    plan = delayed_plan(row)
    layout = plan.offload
    assert layout.delayed
    assert any(layout.beside_a_layer(name) for name in layout.leaves)
    state = init_state(plan, 0)
    (init, _), _ = function_model()
    start = to_portable_state(plan, state)["params"]
    names = flat(jax.eval_shape(init, jax.random.key(0)))
    tree = jax.tree.unflatten(
        jax.tree.structure(jax.eval_shape(init, jax.random.key(0))),
        [np.asarray(start[name]) for name in names],
    )
    run = advance(plan, state, range(STEPS), batch=batch)
    losses, weights = follow(tree, map(batch, range(STEPS)))
    kept = [index for index in range(STEPS) if index != 4]
    np.testing.assert_allclose(run.losses[kept], np.array(losses)[kept], rtol=2e-6, atol=TOLERANCE)
    mine = to_portable_state(plan, run.state)["params"]
    for name, value in weights.items():
        np.testing.assert_allclose(mine[name], value, rtol=0, atol=2e-5, err_msg=name)
    assert int(run.state["skipped"]) == 1
    assert losses[0] - losses[-1] > 0.01


def train(steps: int, offload: Any, **changes: Any) -> tuple[zerojax.Trainer, list[float]]:
    """The trainer of a run after so many steps, and the losses of those that it took."""
    losses: list[float] = []
    options = {
        "optimizer": make_optimizer(),
        "precision": "bf16",
        "run_dir": None,
        "log": LogConfig(every=1),
        "callbacks": [lambda trainer, values: losses.append(values["loss"])],
        **changes,
    }
    batches = [text_batch(index) for index in range(4)]
    mesh = {"data": 4, "model": 2, "zero": 2, "offload": offload}
    with zerojax.train(reference_model("llama"), mesh, batches, steps=steps, **options) as trainer:
        return trainer, losses


def bits(trainer: Any) -> dict[str, bytes]:
    """{path: bytes} of the portable state."""
    leaves = jax.tree.leaves_with_path(to_portable_state(trainer.plan, trainer.state))
    return {jax.tree_util.keystr(path): np.asarray(x).tobytes() for path, x in leaves}


@functools.cache
def uninterrupted() -> tuple[dict[str, bytes], list[float]]:
    trainer, losses = train(4, DELAYED)
    return bits(trainer), losses


@pytest.mark.thorough
def test_a_checkpoint_holds_the_gradients_that_wait(tmp_path):
    _, losses = train(2, DELAYED, checkpoint=tmp_path / "run")
    trainer, more = train(4, DELAYED, checkpoint=tmp_path / "run")
    assert (bits(trainer), losses + more) == uninterrupted()


@pytest.mark.slow
def test_a_delay_begins_and_ends_at_a_checkpoint(tmp_path):
    """Where it begins nothing waits, so that the first update is missing; where it ends the
    gradients that wait are dropped."""
    train(1, {}, checkpoint=tmp_path / "run")
    trainer, losses = train(3, DELAYED, checkpoint=tmp_path / "run")
    before = bits(trainer)
    with pytest.warns(UserWarning, match="one update is left out"):
        trainer, more = train(4, {}, checkpoint=tmp_path / "run")
    assert len(losses + more) == 3
    assert not any("delayed" in name for name in bits(trainer))
    assert any("delayed" in name for name in before)


def test_another_mesh_continues_with_the_gradients_that_wait(tmp_path):
    rows = LateRow(zero=1), LateRow(zero=3, devices=2)
    plans = [delayed_plan(row) for row in rows]
    run = advance(plans[0], init_state(plans[0], 0), range(3), batch=regression_batch)
    portable = to_portable_state(plans[0], run.state)
    held = jax.tree.map(np.asarray, portable)
    placed = jax.tree.map(
        lambda x, y: jax.device_put(x, y.sharding), held, plans[1].abstract_portable
    )
    moved = advance(
        plans[1], from_portable_state(plans[1], placed), range(3, 6), batch=regression_batch
    )
    stayed = advance(plans[0], run.state, range(3, 6), batch=regression_batch)
    np.testing.assert_allclose(moved.losses, stayed.losses, rtol=0, atol=TOLERANCE)


def test_resharding_says_that_an_update_is_left_out():
    plan, new = (
        delayed_plan(LateRow(zero=1)),
        plan_for(
            function_model()[0],
            loss=regression_loss,
            batch=regression_batch,
            devices=2,
            zero=3,
            optimizer=make_optimizer(),
        ),
    )
    state = init_state(plan, 0)
    assert "delayed" not in reshard_state(plan, new, state)  # nothing waits
    run = advance(plan, state, range(2), batch=regression_batch)
    with pytest.warns(UserWarning, match="one update is left out"):
        assert "delayed" not in reshard_state(plan, new, run.state)


@pytest.mark.slow
def test_an_overflow_of_float16_is_not_applied_later():
    model = reference_model("llama")
    options = {"optimizer": make_optimizer(), "offload": DELAYED, "zero": 1, "devices": 2}
    precision = as_precision("fp16", loss_scale=LossScale(initial=2.0**30, hysteresis=1))
    plan = plan_for(model, precision=precision, **options)
    run = advance(plan, init_state(plan, 0), range(30))
    assert 10 < int(run.state["skipped"]) < 25
    assert np.all(np.isfinite(run.losses))
    assert run.losses[-1] < run.losses[0]


@jax.custom_vjp
def clipped(x):
    return x


clipped.defvjp(lambda x: (x, None), lambda _, grad: (jnp.clip(grad, -1e-3, 1e-3),))


class Clipped(nnx.Module):
    """Layers whose gradients are clipped by a derivative of the model's own."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(12, 16, rngs=rngs)
        self.blocks = nnx.vmap(lambda rngs: nnx.Linear(16, 16, rngs=rngs))(rngs.split(3))
        self.last = nnx.Linear(16, 5, rngs=rngs)

    def loss(self, batch: dict) -> Any:
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def apply(block: nnx.Linear, x: jax.Array) -> jax.Array:
            return clipped(x + jnp.tanh(block(x)))

        found = self.last(apply(self.blocks, self.first(batch["x"])))
        return jnp.mean(jnp.square(found - batch["y"]))


@pytest.mark.thorough
def test_a_derivative_of_the_models_own_gets_the_gradient_of_the_mean():
    options = {"batch": regression_batch, "optimizer": make_optimizer(), "steps": 6}
    options |= {"offload": DELAYED, "persistence_threshold": 10}
    one, several = (train_for(Clipped, devices=n, zero=1, **options) for n in (1, 4))
    np.testing.assert_allclose(several.losses, one.losses, rtol=0, atol=TOLERANCE)
    assert one.losses[0] - one.losses[-1] > 0.1


def test_too_little_host_memory_is_not_answered_with_files():
    remedies = list(host_remedies(delayed_plan(LateRow(zero=1)), needed=2**20, there=2**10))
    assert remedies
    assert not [remedy for remedy in remedies if "opt_state" in remedy]
