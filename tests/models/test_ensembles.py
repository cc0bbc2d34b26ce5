"""Parameters that `vmap` maps, alone and around or inside a scan over layers, equal one device.

Each model is trained at every stage. The stored values have dimensions that the model does not see
where it reads them, and none of these may be split.
"""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import zerojax
from tests.support.small_models import regression_loss
from tests.support.trajectories import TOLERANCE, plan_for, regression_batch, train_for
from zerojax.placement.leaf_placement import Access

OPTIONS = {"loss": regression_loss, "batch": regression_batch, "persistence_threshold": 8}
STEPS = 6


def stack(make, numbers, rngs, axis=0):
    """A module whose parameters have one dimension at `axis` for each number."""
    if not numbers:
        return make(rngs)
    inner = lambda rngs: stack(make, numbers[1:], rngs)  # noqa: E731
    axes = nnx.StateAxes({...: axis})
    return nnx.vmap(inner, in_axes=0, out_axes=axes)(rngs.split(numbers[0]))


class Ensemble(nnx.Module):
    """Five linear maps, of which the mean is taken; 5, 5 and 12 do not divide by 8."""

    def __init__(self, rngs, members=5, width=5, axis=0):
        self.axis = axis
        self.into = nnx.Linear(12, width, rngs=rngs)
        self.members = stack(lambda r: nnx.Linear(width, 5, rngs=r), (members,), rngs, axis)

    def __call__(self, x):
        axes = nnx.StateAxes({...: self.axis}), None
        call = nnx.vmap(lambda member, x: member(x), in_axes=axes)
        return jnp.mean(call(self.members, self.into(x)), axis=0)


class LayersOfEnsembles(nnx.Module):
    """A scan over three layers, each the mean of four members."""

    def __init__(self, rngs):
        self.layers = stack(lambda r: nnx.Linear(12, 12, rngs=r), (3, 4), rngs)
        self.out = nnx.Linear(12, 5, rngs=rngs)

    def __call__(self, x):
        member = nnx.vmap(lambda member, x: jnp.tanh(member(x)), in_axes=(0, None))

        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def layers(layer, x):
            return x + jnp.mean(member(layer, x), axis=0)

        return self.out(layers(self.layers, x))


class EnsembleOfLayers(nnx.Module):
    """The mean of four members, each a scan over three layers."""

    def __init__(self, rngs):
        self.members = stack(lambda r: nnx.Linear(12, 12, rngs=r), (4, 3), rngs)
        self.out = nnx.Linear(12, 5, rngs=rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def layers(layer, x):
            return x + jnp.tanh(layer(x))

        members = nnx.vmap(layers, in_axes=(0, None))
        return self.out(jnp.mean(members(self.members, x), axis=0))


class LinenEnsemble(linen.Module):
    """`linen.vmap`, with the members in any dimension of their parameters."""

    axis: int = 0

    @linen.compact
    def __call__(self, x):
        members = linen.vmap(
            linen.Dense,
            in_axes=None,
            out_axes=0,
            axis_size=6,
            variable_axes={"params": self.axis},
            split_rngs={"params": True},
        )
        return jnp.mean(members(5, name="members")(jnp.tanh(linen.Dense(9)(x))), axis=0)


class LinenLayer(linen.Module):
    """The mean of four members, as a step of `linen.scan`."""

    @linen.compact
    def __call__(self, x, _):
        members = linen.vmap(
            linen.Dense,
            in_axes=None,
            out_axes=0,
            axis_size=4,
            variable_axes={"params": 0},
            split_rngs={"params": True},
        )
        return x + jnp.mean(jnp.tanh(members(12, name="members")(x)), axis=0), None


class LinenLayers(linen.Module):
    """`linen.scan` over three layers, each an ensemble."""

    @linen.compact
    def __call__(self, x):
        layers = linen.scan(
            LinenLayer, variable_axes={"params": 0}, split_rngs={"params": True}, length=3
        )
        return linen.Dense(5)(layers(name="layers")(x, None)[0])


MODELS = {
    "members in front": Ensemble,
    "members behind": functools.partial(Ensemble, axis=1),
    "as many members as columns": functools.partial(Ensemble, members=5, width=13),
    "8 members of 8 rows": functools.partial(Ensemble, members=8, width=8),
    "layers of ensembles": LayersOfEnsembles,
    "ensemble of layers": EnsembleOfLayers,
    "linen": LinenEnsemble(),
    "linen, members behind": LinenEnsemble(axis=1),
    "linen, layers of ensembles": LinenLayers(),
}
QUICK = {
    ("members in front", 3, 2),
    ("members behind", 2, 1),
    ("8 members of 8 rows", 3, 1),
    ("layers of ensembles", 3, 1),
    ("ensemble of layers", 3, 1),
    ("linen", 2, 1),
    ("linen, layers of ensembles", 3, 1),
}
CASES = [
    pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow)
    for case in [(name, zero, count) for name in MODELS for zero in range(4) for count in (1, 2)]
]


@functools.cache
def one_device(name):
    return train_for(MODELS[name], devices=1, steps=STEPS, **OPTIONS)


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "zero", "count"), CASES)
def test_mapped_parameters_equal_one_device(name, zero, count):
    expected = one_device(name)
    run = train_for(MODELS[name], zero=zero, num_microbatches=count, steps=STEPS, **OPTIONS)
    np.testing.assert_allclose(run.losses, expected.losses, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(run.norms, expected.norms, rtol=5e-6)


@pytest.mark.slow
@pytest.mark.parametrize("zero", [2, 3])
def test_with_tensor_parallelism(zero):
    options = {"mesh": {"model": 2}, "rules": (("members/kernel", (None, None, "model")),)}
    expected = train_for(EnsembleOfWide, devices=1, steps=STEPS, **OPTIONS)
    run = train_for(EnsembleOfWide, zero=zero, steps=STEPS, **OPTIONS, **options)
    np.testing.assert_allclose(run.losses, expected.losses, rtol=0, atol=TOLERANCE)


class EnsembleOfWide(nnx.Module):
    """Three members with a matrix that tensor parallelism can split."""

    def __init__(self, rngs):
        self.members = stack(lambda r: nnx.Linear(12, 16, rngs=r), (3,), rngs)
        self.out = nnx.Linear(16, 5, rngs=rngs)

    def __call__(self, x):
        call = nnx.vmap(lambda member, x: jnp.tanh(member(x)), in_axes=(0, None))
        return self.out(jnp.mean(call(self.members, x), axis=0))


def leaves_of(name):
    return plan_for(MODELS[name], zero=3, **OPTIONS).placement.leaves


def test_a_mapped_dimension_is_never_split():
    leaf = leaves_of("members in front")["members/kernel"]
    assert leaf.shape == (5, 5, 5)
    # Which of three equal dimensions is mapped cannot be told.
    assert leaf.access is Access.GATHER_ONCE
    assert "under `vmap`" in leaf.reasons[-1]
    leaf = leaves_of("as many members as columns")["members/kernel"]
    assert leaf.shape == (5, 13, 5)
    assert (leaf.stack_dims, leaf.mapped_dims, leaf.num_slices) == (1, 1, 1)
    assert (leaf.access, leaf.zero_dim) == (Access.GATHER_ON_USE, -2)


def test_a_scan_over_ensembles_reads_a_layer_of_all_members():
    leaf = leaves_of("layers of ensembles")["layers/kernel"]
    assert leaf.shape == (3, 4, 12, 12)
    assert (leaf.stack_dims, leaf.mapped_dims, leaf.num_slices) == (2, 1, 3)
    assert leaf.access is Access.GATHER_ON_USE


def test_members_behind_are_gathered_once():
    leaf = leaves_of("linen, members behind")["members/kernel"]
    assert leaf.shape == (9, 6, 5)
    assert leaf.access is Access.GATHER_ONCE
    assert leaf.stack_dims == 0


def test_virtual_shards_know_a_mapped_dimension_from_a_loop():
    """A value that a loop reads whole again and again is summed in one order: gathered once."""

    class Repeated(nnx.Module):
        def __init__(self, rngs):
            self.members = stack(lambda r: nnx.Linear(12, 12, rngs=r), (4,), rngs)
            self.out = nnx.Linear(12, 5, rngs=rngs)

        def __call__(self, x):
            member = nnx.vmap(lambda member, x: jnp.tanh(member(x)), in_axes=(0, None))

            @nnx.scan(in_axes=(None, nnx.Carry), out_axes=nnx.Carry, length=3)
            def again(members, x):
                return jnp.mean(member(members, x), axis=0)

            return self.out(again(self.members, x))

    options = {"deterministic": "mesh", "optimizer": zerojax.adamw(1e-3), **OPTIONS}
    leaf = plan_for(Repeated, zero=3, **options).placement.leaves["members/kernel"]
    assert leaf.access is Access.GATHER_ONCE
    assert "read more than once" in leaf.reasons[-1]
