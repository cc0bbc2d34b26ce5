"""The step: compiled once, its state of one form for ever, and what it leaves alone."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zerojax
from tests.support import small_models
from tests.support.small_models import regression_loss
from tests.support.trajectories import plan_for, regression_batch
from zerojax.config.mesh import OffloadConfig
from zerojax.optim import sgd
from zerojax.step.build import build_evaluation, build_step
from zerojax.step.initialization import init_state
from zerojax.step.reshard import to_portable_state


class Model(nnx.Module):
    """Everything a state can hold: parameters, frozen ones, integers, one never read, extras."""

    def __init__(self, rngs):
        self.first = nnx.Linear(12, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.last = nnx.Linear(16, 5, rngs=rngs)
        self.order = nnx.Param(jnp.arange(16)[::-1])
        self.unread = nnx.Param(jnp.ones((8,)))

    def __call__(self, x):
        hidden = jnp.take(self.norm(self.first(x)), self.order[...], axis=1)
        return self.last(self.dropout(nnx.relu(hidden)))


class Counted:
    """A loss that counts how often it is traced."""

    def __init__(self):
        self.traces = 0

    def __call__(self, model, batch):
        self.traces += 1
        return regression_loss(model, batch)


def make(zero, model=Model, **options):
    return plan_for(
        model,
        zero=zero,
        **{
            "loss": regression_loss,
            "batch": regression_batch,
            "freeze": ("first/bias",),
            "persistence_threshold": 50,
            "optimizer": optax.adamw(1e-2, weight_decay=0.0),
            **options,
        },
    )


def batch_of(plan, index=0, **changes):
    return jax.device_put({**regression_batch(index), **changes}, plan.batch_sharding)


def forms(tree):
    return jax.tree.map(lambda leaf: (jax.typeof(leaf), leaf.sharding), tree)


@pytest.mark.thorough
@pytest.mark.parametrize("zero", [0, 3])
def test_the_step_is_traced_once_and_keeps_the_states_form(zero):
    loss = Counted()
    plan = make(zero, loss=loss)
    state, step = init_state(plan), build_step(plan)
    planned = jax.tree.map(lambda leaf: leaf.sharding, plan.abstract_state)
    before = forms(state)
    state, _ = step(state, batch_of(plan))
    traces = loss.traces
    for index in range(1, 4):
        state, metrics = step(state, batch_of(plan, index))
    assert loss.traces == traces
    assert forms(state) == before
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == planned
    assert int(state["step"]) == 4
    # A state that was made again, as after a checkpoint, does not trace either.
    step(init_state(plan, seed=1), batch_of(plan))
    assert loss.traces == traces
    assert {name: (x.dtype.name, x.shape) for name, x in metrics.items()} == {
        "loss": ("float32", ()),
        "weight": ("float32", ()),
        "grad_norm": ("float32", ()),
        "bad_leaf": ("int32", ()),
        "largest_leaf": ("int32", ()),
        "largest_share": ("float32", ()),
        "skipped": ("int32", ()),
        "num_skipped": ("int32", ()),
    }
    assert all(x.sharding.is_fully_replicated for x in metrics.values())
    assert float(metrics["weight"]) == 32 * 5


ONCE = r"was passed to an earlier step.*state, metrics = step\(state, batch\)"
KINDS = {
    "pipeline": {"mesh": {"stage": 2, "data": 4}},
    "sharded": {"zero": 3},
    "plain": {"zero": 0},
    "host": {"offload": OffloadConfig(opt_state="host", min_elements=16)},
    "nvme": {"offload": OffloadConfig(opt_state="nvme", min_elements=16)},
}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.slow if kind in ("sharded", "host") else [])
        for kind in KINDS
    ],
)
def test_a_state_that_was_given_away_is_refused(kind, tmp_path):
    """XLA's CPU devices would read freed memory and end the process."""
    options = {"optimizer": zerojax.adamw(1e-3), "freeze": (), **KINDS[kind]}
    if kind == "nvme":
        options["offload"] = dataclasses.replace(options["offload"], folder=str(tmp_path))
    plan = make(options.pop("zero", 1), model=small_models.Layers, **options)
    state, step, evaluate = init_state(plan), build_step(plan), build_evaluation(plan)
    batch = batch_of(plan)
    new, _ = step(state, batch)
    with pytest.raises(ValueError, match=ONCE):
        step(state, batch)
    with pytest.raises(ValueError, match=ONCE):
        evaluate(state, batch)
    for part in ("params", "opt_state", "rng"):
        with pytest.raises(ValueError, match=rf"^state\['{part}'\] {ONCE}"):
            step({**new, part: state[part]}, batch)
    assert (plan.offload is not None) == (kind in ("host", "nvme"))
    new, metrics = step(new, batch)
    assert np.isfinite(float(metrics["loss"]))
    assert np.isfinite(float(evaluate(new, batch)["loss"]))
    if kind == "nvme":
        new["disk"].store.close()


@pytest.mark.thorough
@pytest.mark.parametrize("zero", [0, 3])
def test_what_a_step_changes_and_what_it_does_not(zero):
    plan = make(zero)
    state = init_state(plan)
    before = jax.device_get(to_portable_state(plan, state))
    after = jax.device_get(to_portable_state(plan, build_step(plan)(state, batch_of(plan))[0]))
    assert before["params"].keys() == {
        "first/kernel",
        "last/bias",
        "last/kernel",
        "norm/bias",
        "norm/scale",
        "unread",
    }
    changed = {n for n, x in before["params"].items() if (after["params"][n] != x).any()}
    assert changed == before["params"].keys() - {"unread"}
    np.testing.assert_array_equal(after["frozen"]["order"], np.arange(16)[::-1])
    assert before["frozen"].keys() == {"first/bias", "order"}
    np.testing.assert_array_equal(after["frozen"]["first/bias"], before["frozen"]["first/bias"])
    np.testing.assert_array_equal(after["rng"], before["rng"])
    assert (after["extras"]["norm/mean"] != before["extras"]["norm/mean"]).any()
    assert after["extras"]["dropout/rngs/count"] == before["extras"]["dropout/rngs/count"] + 1
    np.testing.assert_array_equal(
        after["extras"]["dropout/rngs/key"], before["extras"]["dropout/rngs/key"]
    )


@pytest.mark.thorough
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_step_that_is_not_finite_changes_nothing_but_the_counters(value):
    plan = make(1)
    step = build_step(plan)
    state, _ = step(init_state(plan), batch_of(plan))
    before = jax.device_get(state)
    poisoned = regression_batch(1)["x"]
    poisoned[3, 2] = value
    state, metrics = step(state, batch_of(plan, 1, x=poisoned))
    after = jax.device_get(state)
    assert int(metrics["skipped"]) == 1
    assert not np.isfinite(metrics["loss"])
    assert (after["step"], after["skipped"]) == (2, 1)
    for part in ("params", "frozen", "opt_state", "extras", "rng"):
        chex.assert_trees_all_equal(after[part], before[part], strict=True)
    state, metrics = step(state, batch_of(plan, 2))
    assert (int(metrics["skipped"]), int(state["skipped"]), int(state["step"])) == (0, 1, 3)
    assert int(state["opt_state"][0].count) == 2


@pytest.mark.thorough
def test_gradients_that_overflow_are_skipped_where_the_loss_is_finite():
    def loss(model, batch):
        return (
            jnp.sum(jnp.sqrt(jnp.abs(model.unread[...] - 1.0))) + regression_loss(model, batch)[0]
        )

    plan = make(0, loss=loss)
    state, metrics = build_step(plan)(init_state(plan), batch_of(plan))
    assert np.isfinite(metrics["loss"])
    assert int(state["skipped"]) == 1


def test_a_loss_that_is_not_finite_is_skipped_where_the_gradients_are():
    batch = {"x": np.ones((8, 8), np.float32)}
    plan = plan_for(
        (lambda key, batch: {"w": jnp.ones(8)}, lambda params, x: (x @ params["w"]).mean()),
        batch=lambda index: batch,
        loss=lambda model, batch: model(batch["x"]) + jnp.inf,
        optimizer=optax.sgd(1.0),
    )
    placed = jax.device_put(batch, plan.batch_sharding)
    state, metrics = build_step(plan)(init_state(plan), placed)
    assert np.isfinite(metrics["grad_norm"])
    assert int(metrics["skipped"]) == 1
    np.testing.assert_array_equal(state["params"]["w"], np.ones(8))


@pytest.mark.thorough
def test_the_gradient_norm_is_that_of_the_mean_loss_before_clipping():
    plan = make(3, optimizer=sgd(1.0, clip_norm=1e-3))  # the update in place
    state = init_state(plan)
    before = jax.device_get(state["params"])
    state, metrics = build_step(plan)(state, batch_of(plan))
    moved = np.sqrt(sum(((state["params"][n] - x) ** 2).sum() for n, x in before.items()))
    np.testing.assert_allclose(moved, 1e-3, rtol=1e-3)
    assert float(metrics["grad_norm"]) > 0.1
    free = make(3, optimizer=optax.sgd(1.0))
    state, other = build_step(free)(init_state(free), batch_of(free))
    moved = np.sqrt(sum(((state["params"][n] - x) ** 2).sum() for n, x in before.items()))
    np.testing.assert_allclose(metrics["grad_norm"], moved, rtol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm"], other["grad_norm"], rtol=1e-6)


@pytest.mark.thorough
def test_an_evaluation_changes_nothing_and_is_traced_once():
    loss = Counted()
    plan = make(3)
    state, evaluate = init_state(plan), build_evaluation(plan, loss)
    before = jax.device_get(state)
    first = evaluate(state, batch_of(plan))
    traces = loss.traces
    assert evaluate(state, batch_of(plan))["loss"] == first["loss"]
    assert loss.traces == traces
    assert float(first["weight"]) == 32 * 5
    chex.assert_trees_all_equal(jax.device_get(state), before, strict=True)


def test_dtypes_on_the_wire_and_in_the_accumulator():
    """bfloat16 reductions and a float32 accumulator, read from the traced program."""
    plan = make(1, precision="bf16", num_microbatches=4)
    text = str(build_step(plan).trace(plan.abstract_state, plan.abstract_batch).jaxpr)
    scatters = [line for line in text.splitlines() if "= reduce_scatter[" in line]
    assert scatters
    assert all(":bf16[" in line for line in scatters)
    assert " cond[" not in text, "a step is skipped by selecting, not by branching"
    wide = make(1, precision="bf16", reduce_dtype="fp32", num_microbatches=4)
    text = str(build_step(wide).trace(wide.abstract_state, wide.abstract_batch).jaxpr)
    scatters = [line for line in text.splitlines() if "= reduce_scatter[" in line]
    assert all(":f32[" in line for line in scatters)
