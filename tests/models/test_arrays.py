"""How a state is born in its shards, apart from the user's arrays, and moves between plans."""

import math

import chex
import jax
import numpy as np
import pytest
from flax import linen, nnx

from tests.support import equal_trees, small_models
from tests.support.small_models import reference_model
from tests.support.trajectories import advance, plan_for, regression_batch
from zerojax.placement.state import run_key_data
from zerojax.plan.counts import shard_bytes
from zerojax.step.initialization import build_initialiser, init_state
from zerojax.step.reshard import from_portable_state, reshard_state, to_portable_state

USER = {
    "loss": small_models.regression_loss,
    "batch": regression_batch,
    "persistence_threshold": 20,
}


def user_model(rngs):
    return small_models.WithStatistics(rngs, rate=0.5)


def assert_same_state(left, right):
    equal_trees.assert_same(left, right)


def test_a_state_is_what_the_plan_says():
    plan = plan_for(user_model, zero=3, **USER)
    state = init_state(plan, seed=3)
    for leaf, planned in zip(
        jax.tree.leaves(state), jax.tree.leaves(plan.abstract_state), strict=True
    ):
        assert (leaf.shape, leaf.dtype) == (planned.shape, planned.dtype)
        assert leaf.sharding == planned.sharding
    assert int(state["step"]) == int(state["skipped"]) == 0
    assert not np.array_equal(state["rng"], run_key_data(3)), "weights are drawn from that key"


class OfLinen(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(2)(linen.Dense(8)(x))


@pytest.mark.thorough
def test_a_seed_gives_the_weights_of_the_models_own_init():
    batch = {"x": np.ones((8, 4), np.float32), "y": np.ones((8, 2), np.float32)}
    loss = lambda model, batch: ((model(batch["x"]) - batch["y"]) ** 2).mean()  # noqa: E731
    make = lambda rngs: nnx.Sequential(  # noqa: E731
        nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 2, rngs=rngs)
    )
    init = lambda key: {"w": jax.random.normal(key, (4, 2))}  # noqa: E731
    key = jax.random.key(3)
    for model, expected in (
        (make, jax.tree.leaves(nnx.to_pure_dict(nnx.state(make(nnx.Rngs(3)), nnx.Param)))),
        (OfLinen(), jax.tree.leaves(OfLinen().init(key, batch["x"]))),
        ((init, lambda params, x: x @ params["w"]), [init(key)["w"]]),
    ):
        plan = plan_for(
            model, batch=lambda index: batch, loss=loss, zero=3, persistence_threshold=0
        )
        params = jax.tree.leaves(to_portable_state(plan, init_state(plan, seed=3))["params"])
        by_shape = lambda arrays: {x.shape: np.asarray(x) for x in arrays}  # noqa: E731
        chex.assert_trees_all_equal(by_shape(params), by_shape(expected))


@pytest.mark.thorough
def test_values_do_not_depend_on_the_mesh_and_padding_is_zero():
    sharded = plan_for(user_model, zero=3, **USER)
    single = plan_for(user_model, devices=1, **USER)
    padded, whole = init_state(sharded, seed=1), init_state(single, seed=1)
    leaf = sharded.placement.leaves["out/bias"]
    assert (leaf.shape, leaf.stored_shape) == ((5,), (8,))
    np.testing.assert_array_equal(padded["params"]["out/bias"][5:], 0)
    assert_same_state(to_portable_state(sharded, padded), whole)
    assert_same_state(from_portable_state(sharded, to_portable_state(sharded, padded)), padded)


def test_another_seed_gives_other_parameters():
    plan = plan_for(user_model, devices=1, **USER)
    one, two = init_state(plan, seed=1), init_state(plan, seed=2)
    assert np.abs(one["params"]["out/kernel"] - two["params"]["out/kernel"]).max() > 0.1


@pytest.mark.thorough
@pytest.mark.parametrize("devices", [1, 8])
def test_users_own_arrays_survive(devices):
    """A donated buffer may be written to; the user's parameters and statistics must not be."""
    model = user_model(nnx.Rngs(0))
    leaves = jax.tree.leaves(nnx.state(model, (nnx.Param, nnx.BatchStat)))
    before = [np.array(leaf, copy=True) for leaf in leaves]
    plan = plan_for(model, devices=devices, zero=1, **USER)
    state = init_state(plan)
    np.testing.assert_array_equal(
        to_portable_state(plan, state)["params"]["hidden/kernel"], model.hidden.kernel[...]
    )
    run = advance(plan, state, range(3), batch=regression_batch)
    assert np.abs(run.state["extras"]["norm/mean"]).max() > 0
    for leaf, value in zip(leaves, before, strict=True):
        np.testing.assert_array_equal(leaf, value)


@pytest.mark.thorough
def test_an_instance_may_start_two_runs():
    model = user_model(nnx.Rngs(0))
    plan = plan_for(model, zero=3, **USER)
    first, second = (
        advance(plan, init_state(plan), range(2), batch=regression_batch) for _ in "ab"
    )
    np.testing.assert_array_equal(first.losses, second.losses)


@pytest.mark.thorough
def test_a_factory_is_never_built_whole():
    """One device's part of the program that makes the state is small beside the model."""
    factory = reference_model("gpt2", embed_dim=128, max_seq_len=64)
    plan = plan_for(factory, zero=3, persistence_threshold=0)
    lowered = build_initialiser(plan).lower(np.asarray(run_key_data(0)))
    memory = lowered.compile().memory_analysis()
    masters = sum(4 * math.prod(leaf.shape) for leaf in plan.placement.leaves.values())
    largest = max(4 * math.prod(leaf.shape) for leaf in plan.placement.leaves.values())
    assert memory.output_size_in_bytes < shard_bytes(plan.abstract_state) * 1.02
    assert memory.output_size_in_bytes < masters * 3 / 7
    assert memory.temp_size_in_bytes < largest


def test_a_state_moves_to_another_stage_and_mesh_and_back():
    here = plan_for(user_model, zero=3, **USER)
    there = plan_for(user_model, zero=1, mesh={"data": 2, "replica": 2}, devices=4, **USER)
    state = init_state(here, seed=1)
    moved = reshard_state(here, there, state)
    for leaf, planned in zip(
        jax.tree.leaves(moved), jax.tree.leaves(there.abstract_state), strict=True
    ):
        assert leaf.shape == planned.shape
        assert leaf.sharding == planned.sharding
    assert_same_state(reshard_state(there, here, moved), state)
