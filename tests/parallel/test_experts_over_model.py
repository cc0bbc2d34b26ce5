"""Tensor parallelism inside of experts that lie on several devices: the numbers of one device."""

from __future__ import annotations

import functools
from typing import ClassVar

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import zerojax
from tests.parallel.test_expert_axis import OF_A_LEAF, STEPS, Mixture, assert_same_run, run_of
from tests.support.trajectories import TOLERANCE, advance, plan_for, text_batch, train_for
from tests.zoo.test_moe import llama, of_microbatches
from zerojax.parallel import zero as passes
from zerojax.parallel.initialization import init_state
from zerojax.parallel.reshard import reshard_state, to_portable_state
from zerojax.parallel.step import pass_config

MESHES = (
    {"data": 2, "expert": 2, "model": 2},
    {"data": 1, "expert": 4, "model": 2},
    {"data": 1, "expert": 2, "model": 4},
)


class Split(Mixture):
    """A user's own model that says how each expert is split."""

    tensor_parallel_rules: ClassVar = (
        (r"experts/(gate|up)$", (None, None, "model")),
        (r"experts/down$", (None, "model", None)),
        (r"head/kernel$", (None, "model")),
    )


def split(**changes):
    return lambda rngs: Split(rngs, **changes)


@functools.cache
def on_one_device(**changes):
    return run_of(split(**changes), devices=1)


@pytest.mark.thorough
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_losses_and_norms_are_those_of_one_device(mesh, stage):
    one = on_one_device()
    many = run_of(split(), mesh=mesh, zero=stage, persistence_threshold=1)
    assert one.losses[0] - one.losses[4] > 0.02  # of the same batch
    assert_same_run(many, one)


@functools.cache
def gradients(devices, stage, mesh):
    """{name: the summed gradient at the state of seed 0, in true shape}."""
    options = {"mesh": dict(mesh), "zero": stage, "persistence_threshold": 1}
    plan = plan_for(split(), devices=devices, **options)
    state = init_state(plan, 0)
    given = state["params"], state["frozen"], state["extras"], jax.random.key_data(state["rng"])
    batch = jax.device_put(text_batch(0), plan.batch_sharding)
    grads = jax.jit(passes.build_gradients(pass_config(plan)))(*given, batch, None)[1]
    leaves = plan.placement.leaves
    return {
        name: np.asarray(grad)[tuple(map(slice, leaves[name].shape))]
        for name, grad in grads.items()
    }


@pytest.mark.thorough
@pytest.mark.parametrize(("stage", "mesh"), [(3, MESHES[0]), (0, MESHES[1]), (2, MESHES[2])])
def test_gradients_are_those_of_one_device(stage, mesh):
    one, many = gradients(1, 0, ()), gradients(8, stage, tuple(mesh.items()))
    assert one.keys() == many.keys()
    for name, grad in one.items():
        largest = np.abs(grad).max()
        assert largest > 0
        bound = OF_A_LEAF["float32"] * largest
        np.testing.assert_allclose(many[name], grad, rtol=0, atol=bound, err_msg=name)


@pytest.mark.thorough
@pytest.mark.parametrize("mesh", MESHES[:2], ids=str)
def test_all_tokens_to_one_expert(mesh):
    """Further rounds are loops with collectives of both axes inside."""
    many = run_of(split(pull_to=3), mesh=mesh, zero=3, persistence_threshold=1)
    assert_same_run(many, on_one_device(pull_to=3))


@pytest.mark.thorough
@pytest.mark.parametrize("stage", [2, 3])
def test_accumulated_gradients(stage):
    options = {"mesh": MESHES[0], "zero": stage, "persistence_threshold": 1}
    many = train_for(split(), num_microbatches=4, steps=STEPS, **options)
    batch = of_microbatches(4, 4)
    one = train_for(split(), devices=1, num_microbatches=4, batch=batch, steps=STEPS)
    assert_same_run(many, one)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("remat", "sequence_sharding"), [("none", False), ("full", False), ("none", True)]
)
def test_a_decoder_by_its_own_rules(remat, sequence_sharding):
    one = train_for(llama(), devices=1, steps=STEPS)
    options = {"zero": 3, "persistence_threshold": 1, "sequence_sharding": sequence_sharding}
    many = train_for(llama(remat=remat), mesh=MESHES[0], steps=STEPS, **options)
    assert_same_run(many, one)


@pytest.mark.thorough
@pytest.mark.parametrize("make", [zerojax.lamb, zerojax.adam8bit])
@pytest.mark.parametrize(
    ("zero", "mesh"),
    [
        (3, MESHES[0]),
        pytest.param(1, {"data": 2, "expert": 4}, marks=pytest.mark.slow),
        pytest.param(0, {"data": 1, "expert": 8}, marks=pytest.mark.slow),
    ],
)
def test_updates_that_look_at_more_than_one_element(make, zero, mesh):
    """Norms of whole parameters (lamb), scales of blocks that lie on several devices (adam8bit)."""
    options = {"steps": STEPS, "optimizer": make(1e-2), "persistence_threshold": 1}
    many = train_for(split(), mesh=mesh, zero=zero, **options)
    one = train_for(split(), devices=1, **options)
    assert_same_run(many, one)
    mine, other = (to_portable_state(run.plan, run.state)["params"] for run in (many, one))
    for name, value in mine.items():
        # A step moves weights by up to 1e-2.
        np.testing.assert_allclose(value, other[name], rtol=0, atol=1e-4, err_msg=name)


@pytest.mark.thorough
def test_layers_of_a_list_that_are_rolled():
    model = split(layers=4)
    options = {"mesh": MESHES[0], "zero": 3, "persistence_threshold": 1}
    many = train_for(model, steps=STEPS, **options)
    assert many.plan.stacks
    assert_same_run(many, train_for(model, devices=1, steps=STEPS))


@pytest.mark.thorough
def test_each_dimension_lies_over_one_axis():
    """Experts over `expert`, their width over `model`, the rest over `data`: 1 / 8 each."""
    plan = plan_for(split(), mesh=MESHES[0], zero=3, persistence_threshold=1)
    leaves = plan.placement.leaves
    assert leaves["layers/0/experts/gate"].stored_spec == P("expert", "data", "model")
    assert leaves["layers/0/experts/down"].stored_spec == P("expert", "model", "data")
    assert leaves["head/kernel"].stored_spec == P(("data", "expert"), "model")
    for name in ("gate", "up", "down"):
        leaf = leaves[f"layers/0/experts/{name}"]
        assert plan.placement.shard_elements(leaf) * 8 == np.prod(leaf.shape)


@pytest.mark.thorough
def test_a_state_goes_to_other_degrees_of_both_bit_by_bit():
    options = {"zero": 3, "persistence_threshold": 1}
    run = train_for(split(), mesh=MESHES[0], steps=3, **options)
    expected = jax.tree.map(np.asarray, to_portable_state(run.plan, run.state))
    plan, state = run.plan, run.state
    for mesh in MESHES[2], {"data": 2, "expert": 4}, {"data": 4, "model": 2}, MESHES[1]:
        old, plan = plan, plan_for(split(), mesh=mesh, **options)
        state = reshard_state(old, plan, state)
        found = to_portable_state(plan, state)
        assert jax.tree.all(jax.tree.map(np.array_equal, found, expected))
    one = train_for(split(), devices=1, steps=STEPS)
    rest = advance(plan, state, range(3, STEPS))
    assert np.abs(rest.losses - one.losses[3:]).max() <= TOLERANCE


def test_a_rule_that_splits_the_experts_is_refused():
    """Two axes cannot split one dimension: one of them would be lost unseen."""
    rules = ((r"experts/up$", ("model", None, None)),)
    with pytest.raises(ValueError, match="up: its tensor-parallel rule splits dim 0 over model"):
        plan_for(split(), mesh=MESHES[0], rules=rules)
