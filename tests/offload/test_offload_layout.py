"""What is decided before a state is cut: which parameters, in how many slices, in which tiers."""

import jax
import numpy as np
import optax
import pytest

import zerojax
from tests.support.recipe import RECIPE
from tests.support.small_models import reference_model
from tests.support.trajectories import text_batch
from zerojax.config import OffloadConfig
from zerojax.offload.offload_tiers import plan_offload, slice_elements
from zerojax.optim.precision import Precision

SMALL = {"min_elements": 64, "slice_elements": 256}


def plan_of(offload, *, optimizer=None, mesh=None, zero=1, precision="fp32", **options):
    mesh = mesh or {"data": 2}
    devices = jax.devices()[: int(np.prod(list(mesh.values())))]
    return zerojax.make_plan(
        reference_model("gpt2"),
        zerojax.make_mesh(mesh, devices=devices),
        example_batch=text_batch(0),
        optimizer=optimizer or zerojax.adamw(1e-3, **RECIPE),
        zero=zero,
        precision=precision,
        offload=OffloadConfig(**offload),
        **options,
    )


def test_nothing_is_planned_where_nothing_leaves_the_device():
    plan = plan_of({})
    assert plan.offload is None
    assert plan.abstract_state is plan.abstract_stored
    assert "masters" not in plan.abstract_state


@pytest.mark.parametrize(
    ("layer", "layers", "limit", "expected"),
    [
        (1000, 24, 1000, 1000),  # one layer
        (1000, 24, 999, 500),  # the fewest parts that divide a layer
        (1000, 24, 300, 250),
        (1000, 24, 9000, 8000),  # several layers, a number that divides all of them
        (1000, 24, 10**9, 24000),
        (1009, 24, 100, 1009),  # nothing divides it: above the limit, whole
        (1, 1, 1, 1),
    ],
)
def test_slices_are_as_large_as_the_limit_allows(layer, layers, limit, expected):
    assert slice_elements(layer, layers, limit, whole_layers=False) == expected


def test_several_layers_share_no_slice_where_they_are_updated_one_by_one():
    assert slice_elements(1000, 24, 9000, whole_layers=True) == 1000
    assert slice_elements(1000, 24, 300, whole_layers=True) == 250


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mesh", [{"data": 2}, {"data": 2, "model": 2}, {"data": 1}])
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_slices_make_up_every_shard(mesh, zero):
    plan = plan_of({"opt_state": "host", **SMALL}, mesh=mesh, zero=zero)
    assert len(plan.offload.leaves) > 5
    for name, leaf in plan.offload.leaves.items():
        stored = plan.abstract_stored["params"][name]
        assert leaf.shard_shape == stored.sharding.shard_shape(stored.shape)
        assert leaf.num_slices * leaf.slice_elements == np.prod(leaf.shard_shape)
        assert leaf.num_shards * np.prod(leaf.shard_shape) == np.prod(stored.shape)


def test_shares_hold_for_all_parameters_together():
    shares = {"device": 0.25, "host": 0.45, "nvme": 0.3}
    layout = plan_of({"opt_state": shares, **SMALL, "folder": "unused"}).offload
    total = sum(leaf.num_slices * leaf.slice_elements for leaf in layout.leaves.values())
    for tier, share in shares.items():
        held = sum(leaf.counts[tier] * leaf.slice_elements for leaf in layout.leaves.values())
        assert held / total == pytest.approx(share, abs=256 / total)
    for leaf in layout.leaves.values():
        ends = [leaf.first(tier) + leaf.counts[tier] for tier in ("device", "host", "nvme")]
        assert ends[-1] == leaf.num_slices
        assert [leaf.first("host"), leaf.first("nvme")] == ends[:2]


def test_small_parameters_stay_on_the_device_and_are_named():
    plan = plan_of({"opt_state": "host", "min_elements": 200, "slice_elements": 256})
    kept = dict(plan.offload.kept)
    assert set(kept) | set(plan.offload.leaves) == set(plan.abstract_stored["params"])
    assert "blocks/attention_norm/scale" in kept
    assert kept["blocks/attention_norm/scale"].startswith("shard of 32 elements < ")
    for name in kept:
        assert name not in plan.abstract_state["masters"]
        assert plan.abstract_state["params"][name] == plan.abstract_stored["params"][name]


def test_layers_that_no_device_has_whole_stay_on_it_and_are_named():
    """A rule may split a stack by layers, and what is frozen has no slices to go with it."""
    stack, frozen = "blocks/mlp/up/kernel", "blocks/mlp/down/kernel"
    plan = plan_of(
        {"opt_state": "host", "params": "host", **SMALL},
        mesh={"data": 2, "model": 2},
        rules=((stack, ("model", None, None)),),
        freeze=(frozen,),
    )
    assert plan.abstract_stored["params"][stack].sharding.spec[0] == "model"
    kept = dict(plan.offload.kept)
    assert kept[stack].startswith("its layers are split over model")
    assert kept[frozen].startswith("frozen")
    assert len(plan.offload.streamed) > 3
    assert not plan.offload.streamed & {stack, frozen}
    assert plan.abstract_state["params"][stack].sharding.memory_kind != "pinned_host"
    assert stack in plan.offload.leaves, "its optimizer state leaves the device all the same"


def test_what_is_read_is_of_the_compute_dtype_and_masters_lie_on_the_host():
    plan = plan_of({"opt_state": "host", **SMALL}, precision="bf16")
    name, leaf = next(iter(plan.offload.leaves.items()))
    state = plan.abstract_state
    assert state["params"][name].dtype == jax.numpy.bfloat16
    assert state["params"][name].sharding == plan.abstract_stored["params"][name].sharding
    master = state["masters"][name]["host"]
    assert (master.dtype, master.sharding.memory_kind) == (np.float32, "pinned_host")
    assert master.shape == (leaf.num_shards * leaf.num_slices, leaf.slice_elements)
    portable = plan.abstract_portable["params"][name]
    assert (portable.dtype, portable.sharding.memory_kind) == (np.float32, "pinned_host")
    assert plan.fingerprint == plan_of({}, precision="bf16").fingerprint


def test_weights_without_masters_are_their_own():
    plan = plan_of({"opt_state": "host", **SMALL}, precision=Precision(param_dtype="bfloat16"))
    assert plan.offload.arrays == ("mu", "nu")
    assert plan.abstract_state["masters"] == {}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("optimizer", "named"),
    [
        (lambda: zerojax.lamb(1e-3), "lamb"),
        (lambda: zerojax.adam8bit(1e-3), "adam8bit"),
        (lambda: zerojax.muon(1e-3), "muon"),
        (lambda: optax.adamw(1e-3), "a plain optax transformation"),
        (lambda: optax.chain(zerojax.adamw(1e-3)), "a plain optax transformation"),
    ],
)
def test_an_optimizer_that_may_need_whole_parameters_is_refused(optimizer, named):
    with pytest.raises(ValueError, match=f"{named}, may need all of a parameter.*zerojax.adamw"):
        plan_of({"opt_state": "host"}, optimizer=optimizer())


@pytest.mark.thorough
def test_arrays_of_a_slice_are_in_the_order_of_the_rule():
    arrays = lambda tx: plan_of({"opt_state": "host", **SMALL}, optimizer=tx).offload.arrays  # noqa: E731
    assert arrays(zerojax.adamw(1e-3)) == ("master", "mu", "nu")
    assert arrays(zerojax.lion(1e-3)) == ("master", "mu")
    assert arrays(zerojax.sgd(0.1, momentum=0.9)) == ("master", "trace")
    assert arrays(zerojax.sgd(0.1)) == ("master",)


def test_only_activations_leave_without_slices():
    plan = plan_of({})
    layout = plan_offload(
        OffloadConfig(activations="host"), plan.placement, plan.precision, plan.tx, plan.mesh
    )
    assert layout is not None
    assert (dict(layout.leaves), layout.activations) == ({}, "host")


def test_a_plan_says_how_much_leaves_and_when_nothing_does():
    plan = plan_of({"opt_state": "host", **SMALL})
    sentence = next(line for line in plan.reasons if line.startswith("offload.opt_state host"))
    assert f": {len(plan.offload.leaves)} parameters, in slices of at most 256 elements" in sentence
    nothing = plan_of({"opt_state": {"device": 0.5, "host": 0.5}, "min_elements": 10**6})
    assert any(
        line.startswith("offload.opt_state 50% device and 50% host has no effect")
        for line in nothing.reasons
    )
