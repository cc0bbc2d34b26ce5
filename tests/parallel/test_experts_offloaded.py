"""Experts on several devices whose optimizer state, or layers' inputs, lie outside device memory.

As in `test_offload_equality`, no bit of a run may differ from that with everything on the device.
"""

import jax
import numpy as np
import pytest

from tests.offload.test_offload_equality import OPTIMIZERS, SHARES, WHOLE
from tests.offload.test_offload_params import assert_equal, both
from tests.parallel.test_expert_axis import mixture
from tests.support.offload_disk_runs import close
from tests.support.trajectories import TOLERANCE, advance, plan_for, train_for
from tests.zoo.test_moe import llama
from zerojax.step.reshard import reshard_state, to_portable_state

STEPS = 4
MESH = {"data": 2, "expert": 4}
SLICES = {"slice_elements": 50, "min_elements": 30}
"""Several slices of every part of experts that a device has."""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("zero", "mesh", "tiers"),
    [
        (3, MESH, WHOLE),
        pytest.param(1, {"data": 2, "expert": 2, "model": 2}, SHARES, marks=pytest.mark.slow),
        pytest.param(0, {"replica": 2, "data": 2, "expert": 2}, WHOLE, marks=pytest.mark.slow),
        pytest.param(2, {"data": 1, "expert": 8}, SHARES, marks=pytest.mark.slow),
    ],
)
def test_on_the_host_as_on_the_device(zero, mesh, tiers):
    options = {"mesh": mesh, "zero": zero, "persistence_threshold": 1, "steps": STEPS}
    options["optimizer"] = OPTIMIZERS["adamw"](clip_norm=1.0)
    run = train_for(mixture(), offload={"opt_state": tiers, **SLICES}, **options)
    here = train_for(mixture(), **options)
    gate = run.plan.offload.leaves["layers/0/experts/gate"]
    assert "expert" in gate.axes
    assert gate.num_slices > 2
    assert run.losses.tobytes() == here.losses.tobytes()
    assert run.norms.tobytes() == here.norms.tobytes()
    mine, other = to_portable_state(run.plan, run.state), to_portable_state(here.plan, here.state)
    assert jax.tree.all(jax.tree.map(np.array_equal, mine, other))
    assert len(set(here.losses)) == STEPS  # something changes


@pytest.mark.thorough
def test_in_files_as_on_the_device(tmp_path):
    options = {"mesh": MESH, "zero": 3, "persistence_threshold": 1, "steps": STEPS}
    options["optimizer"] = OPTIMIZERS["adamw"]()
    here = train_for(mixture(), **options)
    there = {"opt_state": {"host": 0.5, "nvme": 0.5}, "folder": str(tmp_path), **SLICES}
    run = train_for(mixture(), offload=there, **options)
    try:
        assert "layers/0/experts/gate" in {leaf.name for leaf in run.plan.offload.on_disk}
        assert run.losses.tobytes() == here.losses.tobytes()
        assert run.norms.tobytes() == here.norms.tobytes()
        assert len(set(here.losses)) == STEPS
    finally:
        close(run.state)


@pytest.mark.thorough
def test_layers_inputs_on_the_host():
    options = {"mesh": MESH, "zero": 3, "persistence_threshold": 1, "steps": STEPS}
    here = train_for(llama(remat="full"), **options)
    away = train_for(llama(remat="full"), offload={"activations": "host"}, **options)
    np.testing.assert_array_equal(away.losses, here.losses)
    np.testing.assert_array_equal(away.norms, here.norms)
    assert len(set(here.losses)) == STEPS


@pytest.mark.thorough
def test_a_state_in_slices_goes_to_another_degree_bit_by_bit():
    """From the host at one degree to the device at another, and on as if it had been there."""
    options = {"zero": 3, "persistence_threshold": 1, "optimizer": OPTIMIZERS["adamw"]()}
    offload = {"opt_state": "host", **SLICES}
    run = train_for(mixture(), mesh=MESH, offload=offload, steps=2, **options)
    expected = jax.tree.map(np.asarray, to_portable_state(run.plan, run.state))
    plan = plan_for(mixture(), mesh={"data": 4, "expert": 2}, **options)
    state = reshard_state(run.plan, plan, run.state)
    found = to_portable_state(plan, state)
    assert jax.tree.all(jax.tree.map(np.array_equal, found, expected))
    back = plan_for(mixture(), mesh={"data": 1, "expert": 8}, offload=offload, **options)
    state = reshard_state(plan, back, state)
    rest = advance(back, state, range(2, STEPS))
    alone = train_for(mixture(), devices=1, steps=STEPS, **options)
    assert np.abs(rest.losses - alone.losses[2:]).max() <= TOLERANCE


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("zero", "mesh", "more"),
    [
        (3, MESH, {}),
        (1, {"data": 2, "expert": 2, "model": 2}, {"update_in_backward": True}),
        pytest.param(0, {"replica": 2, "data": 2, "expert": 2}, {}, marks=pytest.mark.slow),
        pytest.param(2, {"data": 1, "expert": 8}, {"activations": "host"}, marks=pytest.mark.slow),
        pytest.param(0, MESH, {"update_in_backward": True}, marks=pytest.mark.slow),
        pytest.param(3, MESH, {"update_in_backward": True}, marks=pytest.mark.slow),
    ],
)
def test_weights_that_come_layer_by_layer(zero, mesh, more):
    """Equal up to rounding, as in `test_offload_params`."""
    run, expected = both(llama(), more, mesh=mesh, zero=zero, steps=8)
    (gate,) = (n for n in run.plan.offload.streamed if n.endswith("mlp/experts/gate"))
    assert "expert" in run.plan.offload.leaves[gate].axes
    assert_equal(run, expected)


@pytest.mark.slow
def test_weights_that_come_layer_by_layer_for_several_microbatches():
    run, expected = both(llama(), {}, mesh=MESH, zero=2, num_microbatches=4, steps=8)
    assert_equal(run, expected)
