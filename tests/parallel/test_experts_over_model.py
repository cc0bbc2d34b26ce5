"""Tensor parallelism inside of experts: decoders, optimizers, where things lie and how they move.

That the numbers are those of one device is in test_expert_axis.py.
"""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import zerojax
from tests.parallel.test_expert_axis import OVER_MODEL, STEPS, assert_same_run, split
from tests.support.trajectories import TOLERANCE, advance, plan_for, train_for
from tests.zoo.test_moe import llama
from zerojax.step.reshard import reshard_state, to_portable_state


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("remat", "sequence_sharding"), [("none", False), ("full", False), ("none", True)]
)
def test_a_decoder_by_its_own_rules(remat, sequence_sharding):
    one = train_for(llama(), devices=1, steps=STEPS)
    options = {"zero": 3, "persistence_threshold": 1, "sequence_sharding": sequence_sharding}
    many = train_for(llama(remat=remat), mesh=OVER_MODEL[0], steps=STEPS, **options)
    assert_same_run(many, one)


@pytest.mark.thorough
@pytest.mark.parametrize("make", [zerojax.lamb, zerojax.adam8bit])
@pytest.mark.parametrize(
    ("zero", "mesh"),
    [
        (3, OVER_MODEL[0]),
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
def test_each_dimension_lies_over_one_axis():
    """Experts over `expert`, their width over `model`, the rest over `data`: 1 / 8 each."""
    plan = plan_for(split(), mesh=OVER_MODEL[0], zero=3, persistence_threshold=1)
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
    run = train_for(split(), mesh=OVER_MODEL[0], steps=3, **options)
    expected = jax.tree.map(np.asarray, to_portable_state(run.plan, run.state))
    plan, state = run.plan, run.state
    for mesh in OVER_MODEL[2], {"data": 2, "expert": 4}, {"data": 4, "model": 2}, OVER_MODEL[1]:
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
        plan_for(split(), mesh=OVER_MODEL[0], rules=rules)
