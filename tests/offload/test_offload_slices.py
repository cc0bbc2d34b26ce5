"""Slices of a state: cut, joined, born, and updated one after the other, in memory tiers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zerojax
from tests.offload.test_offload_layout import SMALL, plan_of
from tests.support.equal_trees import assert_same
from tests.support.recipe import CLIPPED, DECAYED, RECIPE
from zerojax.hardware import compile_client
from zerojax.offload.sliced_update import build_offload_update
from zerojax.optim.precision import Precision
from zerojax.passes.update import ThisStep, build_update
from zerojax.step.reshard import from_portable_state, to_portable_state

HOST = {"opt_state": "host", **SMALL}
SHARES = {"opt_state": {"device": 0.4, "host": 0.6}, **SMALL}


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


MESHES = [
    {"data": 2, "model": 2},
    *map(slow, [{"data": 2}, {"replica": 2, "data": 2}, {"data": 1}]),
]
TIERS = pytest.mark.parametrize(
    "offload", [SHARES, slow(HOST)], ids=lambda x: "host" if x is HOST else "shares"
)


@pytest.mark.thorough
@TIERS
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_state_is_born_in_slices_with_the_values_it_would_have_in_one_piece(mesh, offload):
    plan, plain = plan_of(offload, mesh=mesh), plan_of({}, mesh=mesh)
    state = zerojax.init_state(plan, 3)
    assert jax.tree.map(lambda x: x.sharding, state) == plan.state_shardings
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(state["masters"])}
    assert kinds == ({"pinned_host"} if offload is HOST else {"device", "pinned_host"})
    assert_same(
        to_portable_state(plan, state), to_portable_state(plain, zerojax.init_state(plain, 3))
    )


@pytest.mark.thorough
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_what_was_joined_is_cut_again_to_the_same_state(mesh):
    plan = plan_of(SHARES, mesh=mesh, zero=3, precision="bf16")
    state = zerojax.init_state(plan, 1)
    state["opt_state"] = jax.tree.map(
        lambda x: jax.device_put(
            np.random.default_rng(x.size).normal(size=x.shape).astype(x.dtype), x.sharding
        ),
        state["opt_state"],
    )
    portable = to_portable_state(plan, state)
    again = from_portable_state(plan, portable)
    assert jax.tree.map(lambda x: x.sharding, again) == plan.state_shardings
    assert_same(again, state)


@pytest.mark.thorough
@pytest.mark.parametrize("donated", ["the slices it came from", "the slices it became"])
def test_slices_share_no_memory_with_their_joined_form(donated):
    """Steps write over their arrays. (Leaves that are not sliced are passed on as they are.)"""
    plan = plan_of(HOST)
    slices = zerojax.init_state(plan)
    portable = to_portable_state(plan, slices)
    sliced = {name: portable["params"][name] for name in plan.offload.leaves}
    before = {name: np.array(x, copy=True) for name, x in sliced.items()}
    if donated == "the slices it became":
        slices = from_portable_state(plan, portable)
    shardings = plan.state_shardings["masters"]
    change = jax.jit(
        lambda tree: jax.tree.map(lambda x: x * 0, tree), donate_argnums=0, out_shardings=shardings
    )
    jax.block_until_ready(change(slices["masters"]))
    assert_same(sliced, before)


OPTIMIZERS = {
    "adamw": functools.partial(zerojax.adamw, 1e-3, **RECIPE),
    "groups": functools.partial(
        zerojax.adamw, 1e-3, **RECIPE, groups={"blocks/mlp/.*": {"learning_rate_factor": 0.1}}
    ),
    "lion": functools.partial(zerojax.lion, 1e-3, **{**DECAYED, "clip_norm": None}),
    "sgd": functools.partial(zerojax.sgd, 0.1, momentum=0.9, nesterov=True, **DECAYED),
    "plain sgd": functools.partial(zerojax.sgd, 0.1, **CLIPPED),
}


class Updates:
    """The update of a plan alone, fed with random gradients."""

    def __init__(self, plan):
        self.plan, self.state = plan, zerojax.init_state(plan)
        sliced = plan.offload is not None
        build = build_offload_update(plan) if sliced else build_update(plan)

        def update(grads, state, scale, norm, skip):
            now = ThisStep(scale, norm, skip, jax.random.key(7), jnp.float32(0))
            if sliced:
                return {**state, **build(grads, state, now)}
            params, opt_state = build(grads, state, now)
            return {**state, "params": params, "opt_state": opt_state}

        self._update = jax.jit(update, donate_argnums=1, out_shardings=plan.state_shardings)

    def __call__(self, number, *, skip=False):
        grads = {}
        for name, x in self.plan.abstract_stored["params"].items():
            random = np.random.default_rng((number, len(name), x.size))
            value = random.normal(size=x.shape).astype(np.float32)
            grads[name] = jax.device_put(np.full_like(value, np.nan) if skip else value, x.sharding)
        scale, norm = jnp.float32(0.5), jnp.float32(np.nan if skip else 3.0)
        self.state = self._update(grads, self.state, scale, norm, jnp.asarray(skip))
        return to_portable_state(self.plan, self.state)


@pytest.mark.thorough
@TIERS
@pytest.mark.parametrize(
    "optimizer", [name if name == "groups" else slow(name) for name in OPTIMIZERS]
)
def test_slices_are_updated_to_the_bits_of_whole_shards(optimizer, offload):
    mesh = {"data": 2, "model": 2} if offload is SHARES else {"data": 2}
    sliced = Updates(plan_of(offload, optimizer=OPTIMIZERS[optimizer](), mesh=mesh))
    whole = Updates(plan_of({}, optimizer=OPTIMIZERS[optimizer](), mesh=mesh))
    first = None
    for number in range(3):
        found, expected = sliced(number), whole(number)
        assert_same(found, expected)
        first = first or found
    name = "blocks/mlp/up/kernel"
    assert np.any(np.asarray(found["params"][name]) != np.asarray(first["params"][name]))
    as_read = np.asarray(sliced.state["params"][name])
    np.testing.assert_array_equal(as_read, np.asarray(found["params"][name]))


@pytest.mark.thorough
@TIERS
def test_a_step_that_is_skipped_changes_no_slice(offload):
    updates = Updates(plan_of(offload))
    before = jax.tree.map(lambda x: np.array(x, copy=True), updates(0))
    assert_same(updates(1, skip=True), before)


@pytest.mark.slow
def test_low_precision_moments_are_rounded_in_slices_as_well():
    """Other random bits than for a whole shard, so within one rounding of it and not equal."""
    precision = Precision(moments_dtype="bfloat16")
    sliced, whole = (Updates(plan_of(x, precision=precision)) for x in (HOST, {}))
    found, expected = sliced(0), whole(0)
    assert {x.dtype for x in jax.tree.leaves(sliced.state["masters"])} == {np.dtype(np.float32)}
    moments = [
        (x, y)
        for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True)
        if x.dtype == jnp.bfloat16
    ]
    assert len(moments) > 10
    for x, y in moments:
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        np.testing.assert_allclose(x, y, rtol=2**-7)


@pytest.mark.slow
def test_weights_without_masters_are_updated_where_they_are():
    precision = Precision(param_dtype="bfloat16", moments_dtype="bfloat16")
    updates = Updates(plan_of(HOST, precision=precision))
    name = "blocks/mlp/up/kernel"
    before = np.asarray(to_portable_state(updates.plan, updates.state)["params"][name], np.float32)
    after = np.asarray(updates(0)["params"][name], np.float32)
    assert updates.state["masters"] == {}
    moved = np.abs(after - before)
    assert 0 < moved.max() < 0.01  # a learning rate of 1e-3 and one rounding of bfloat16


@pytest.mark.thorough
def test_lowered_for_cuda_every_slice_is_brought_and_put_back_once():
    """JAX alone, without a compiler for GPUs: a loop has one copy each way per array.

    Two slices are loaded before it, and two stored after it.
    """
    counts = {}
    for offload in (HOST, {}):
        plan = plan_of(offload, mesh={"data": 2})
        plan = plan.remake(plan.mesh.abstract_mesh)
        traced = zerojax.build_step(plan).trace(plan.abstract_state, plan.abstract_batch)
        text = compile_client.lower_for_gpus(traced).as_text()
        copies = [line for line in text.splitlines() if "annotate_device_placement" in line]
        to_host = sum('"pinned_host"' in line for line in copies)
        kinds = text.count('mhlo.memory_kind = "pinned_host"')
        counts[bool(offload)] = (len(copies) - to_host, to_host, kinds)
    assert counts[False] == (0, 0, 0)
    leaves = plan_of(HOST, mesh={"data": 2}).offload.leaves.values()
    arrays, copies = 3 * len(leaves), 3 * sum(min(leaf.num_slices, 3) for leaf in leaves)
    assert copies > arrays
    # Stores and results of the step; arguments and results in host memory.
    assert counts[True] == (copies, copies + arrays, 2 * arrays)
