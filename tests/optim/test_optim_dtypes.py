"""Optimizers in place: moments and parameters in bfloat16, the kernel, and split leaves."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from pallas_kernels.choice import Choice
from tests.support.marks import needs_kernels
from tests.support.optim_steps import (
    SCHEDULE,
    check_close,
    check_same,
    context,
    gradient,
    make_params,
    run_apply,
    run_update,
)
from tests.support.recipe import CLIPPED, DECAYED, RECIPE
from zerojax.optim import adamw, lamb, lion, sgd

BF16, F32 = jnp.bfloat16, jnp.float32
OPTIMIZERS = {
    "adamw": adamw(SCHEDULE, **RECIPE),
    "lion": lion(SCHEDULE, **{**DECAYED, "weight_decay": 0.3}),
    "lamb": lamb(SCHEDULE, weight_decay=0.01, **CLIPPED),
    "sgd": sgd(SCHEDULE, momentum=0.9, **DECAYED),
    "sgd without momentum": sgd(SCHEDULE, **DECAYED),
}
optimizers = pytest.mark.parametrize("tx", OPTIMIZERS.values(), ids=OPTIMIZERS)


def floats(tree):
    return [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]


@pytest.mark.sampled(1)
@optimizers
@pytest.mark.parametrize("moments_dtype", [F32, BF16])
@pytest.mark.parametrize("param_dtype", [F32, BF16])
def test_moments_have_the_dtype_that_is_asked_for(tx, moments_dtype, param_dtype):
    changed = tx.with_dtypes(moments_dtype, False)
    params, grads = make_params(param_dtype), gradient(0)
    state = changed.init(params)
    assert {x.dtype for x in floats(state)} <= {jnp.dtype(moments_dtype)}
    assert jax.tree.structure(state) == jax.tree.structure(tx.init(params))
    like = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)  # noqa: E731
    applied = jax.eval_shape(lambda: changed.apply(grads, state, params, context()))
    assert like(applied) == like((params, state))
    assert like(jax.eval_shape(changed.update, grads, state, params)[1]) == like(state)
    assert (changed.kernel, changed.clip_norm) == (tx.kernel, tx.clip_norm)


@pytest.mark.thorough
@optimizers
def test_only_what_is_stored_is_rounded(tx):
    """As optax in float32 whose moments are rounded after each step.

    bfloat16 has 8 bits: a moment that float32 rounds otherwise in its last place is now and then
    rounded to the neighbour, 2^-8 away, and moves its parameter by that part of one step's update.
    The second pass of LAMB reads the moments as they are stored, which moves all that much.
    """
    tx = tx.with_dtypes(BF16, False)
    params = make_params()
    plain = tx.with_dtypes(F32, False)
    theirs, state = params, plain.init(params)
    to = lambda dtype: lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x  # noqa: E731
    for number in range(5):
        updates, state = plain.update(gradient(number), state, theirs)
        theirs = optax.apply_updates(theirs, updates)
        state = jax.tree.map(lambda x: to(F32)(to(BF16)(x)), state)
    expected = theirs, jax.tree.map(to(BF16), state)
    updated, applied = run_update(tx, params), run_apply(tx, params, scale_of=clipping)
    check_close(updated[0], expected[0], 3e-5)
    check_close(applied[0], expected[0], 5e-4 if tx.kernel == "lamb" else 3e-5)
    check_close(updated[1], expected[1], 2**-7)
    check_close(applied[1], expected[1], 2**-7)
    if floats(state) and tx.kernel != "lion":  # a sign does not feel it
        exact, _ = run_update(plain, params)
        assert max(float(jnp.abs(exact[n] - theirs[n]).max()) for n in exact) > 1e-4


def clipping(grads):
    return jnp.minimum(1.0, 1.0 / optax.tree.norm(grads))


@pytest.mark.thorough
@optimizers
def test_stochastic_rounding_is_right_on_average_and_follows_the_key(tx):
    """200 keys. The mean of each element is within 5 of its standard deviations, which are at most
    half of the distance between bfloat16 neighbours (2^-7 of the value) over the root of 200. The
    parameters of LAMB have a test of their own: they feel the rounding of this step's moments.
    """
    rounded = tx.with_dtypes(BF16, True)
    params = make_params(BF16)
    _, state = run_update(rounded, params, range(2))  # moments that are not 0
    grads = gradient(2)  # it is kept for other tests, so not made while tracing

    @jax.jit
    @jax.vmap
    def draw(key):
        return rounded.apply(grads, state, params, context(scale=0.1, key=key))

    drawn = draw(jnp.arange(200))
    wide = lambda tree: jax.tree.map(lambda x: x.astype(F32) if x.dtype == BF16 else x, tree)  # noqa: E731
    exact = tx.apply(grads, wide(state), wide(params), context(scale=0.1))
    moved, first = 0, 1 if tx.kernel == "lamb" else 0
    for some, one in zip(floats(drawn[first:]), floats(exact[first:]), strict=True):
        assert some.dtype == BF16
        values, one = np.asarray(some, np.float64), np.asarray(one, np.float64)
        spacing = 2.0 ** (np.floor(np.log2(np.abs(one).clip(1e-30))) - 7)
        assert np.all(np.abs(values - one) <= 1.01 * spacing)  # a neighbour, never further
        deviation = np.abs(values.mean(0) - one)
        assert np.all(deviation <= 5 * 0.5 * spacing / np.sqrt(200))
        moved += np.count_nonzero(values.std(0))
    assert moved > 100
    check_same(draw(jnp.arange(3)), jax.tree.map(lambda x: x[:3], drawn))


@pytest.mark.thorough
def test_the_two_passes_of_lamb_round_independently():
    """The first moment and the parameter are rounded up as often together as two coins agree."""
    tx = lamb(1e-2, clip_norm=None, mask=None).with_dtypes(BF16, True)
    params, grads = {"x": jnp.full((4000,), 1.0, BF16)}, {"x": jnp.full((4000,), 1.0)}
    step = context(axes={"x": ()})
    params, state = tx.apply(grads, tx.init(params), params, step)
    up = [np.asarray(x == x.max()) for x in (params["x"], state[0].mu["x"])]
    rates = [np.mean(x) for x in up]
    # 0.99 and 0.1 between their bfloat16 neighbours; 5 standard deviations and the moments' part.
    np.testing.assert_allclose(rates, [0.44, 0.8], atol=0.05)
    together = np.mean(up[0] & up[1])
    # Four standard deviations of a mean of 4000 coins.
    assert abs(together - rates[0] * rates[1]) < 4 * 0.5 / np.sqrt(4000)


@pytest.mark.sampled(2)
@needs_kernels
@optimizers
def test_the_kernel_does_the_same(tx):
    """In interpret mode; 300 elements end in a tail, which the kernel leaves to the reference."""
    keys = jax.random.split(jax.random.key(7), 2)
    params = {"bias": jax.random.normal(keys[0], (5,)), "w": jax.random.normal(keys[1], (3, 100))}
    grads = jax.tree.map(jnp.sin, params)
    kernel = Choice("interpret", "a test")
    axes = dict.fromkeys(params, ())

    def steps(choice):
        after = params, tx.init(params)
        for _ in range(2):
            after = tx.apply(grads, after[1], after[0], context(choice=choice, axes=axes))
        return after

    check_close(steps(kernel), steps(Choice("xla", "a test")))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("piece", [None, 3])
def test_seeds_drawn_together_are_those_of_each_leaf(piece):
    """On every device of a mesh of two axes, for leaves split over one, both and none."""
    axes = {"x": ("data",), "y": (), "z": ("data", "model"), "w": ("data",)}
    names = ("w", "z", "x", "y")

    def local():
        now = dataclasses.replace(context(key=5, axes=axes), piece=piece)
        return jnp.stack([now.seed(name) for name in names])[None], now.seeds(names)[None]

    mesh = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4])
    each, together = jax.jit(
        jax.shard_map(
            local, mesh=mesh, in_specs=(), out_specs=P(("data", "model")), check_vma=False
        )
    )()
    np.testing.assert_array_equal(each, together)
    assert len(np.unique(each.reshape(-1, 2), axis=0)) == 4 + 2 + 2 + 1


AXES = {
    "block/bias": (),
    "block/kernel": ("data", "model"),
    "embed": ("data",),
    "norm/scale": ("data",),
}
SPECS = {
    "block/bias": P(),
    "block/kernel": P(None, "data", "model"),
    "embed": P("data"),
    "norm/scale": P("data"),
}
WHOLE = {"block/bias": (2, 7), "block/kernel": (2, 8, 6), "embed": (12, 3), "norm/scale": (4,)}


def split_arrays(seed, scale):
    keys = jax.random.split(jax.random.key(seed), len(WHOLE))
    return {
        name: scale * jax.random.normal(key, WHOLE[name])
        for name, key in zip(WHOLE, keys, strict=True)
    }


def split_apply(tx, state):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    specs = optax.tree_utils.tree_map_params(
        tx.init, lambda _, spec: spec, state, SPECS, transform_non_params=lambda _: P()
    )
    local = lambda grads, state, params: tx.apply(  # noqa: E731
        grads, state, params, context(axes=AXES, shapes=WHOLE)
    )
    return jax.shard_map(
        local, mesh=mesh, in_specs=(SPECS, specs, SPECS), out_specs=(SPECS, specs), check_vma=False
    )


def only_large(params):
    """A mask that asks for the size of the whole parameter."""
    return {name: x.size > 20 for name, x in params.items()}


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["adamw", "lamb"])
def test_shards_are_updated_as_the_whole_is(name):
    params, tx = split_arrays(0, 1.0), OPTIMIZERS[name]
    state = tx.init(params)
    sharded = split_apply(tx, state)
    whole = lambda grads, state, params: tx.apply(grads, state, params, context())  # noqa: E731
    ours = theirs = params, state
    for number in range(2):
        grads = split_arrays(number + 1, 0.1)
        ours = jax.jit(sharded)(grads, ours[1], ours[0])
        theirs = jax.jit(whole)(grads, theirs[1], theirs[0])
    check_close(ours, theirs)


def test_a_mask_sees_whole_parameters():
    tx = sgd(1.0, weight_decay=0.5, mask=only_large, clip_norm=None)
    params = split_arrays(0, 1.0)
    zeros = jax.tree.map(jnp.zeros_like, params)
    after, _ = jax.jit(split_apply(tx, tx.init(params)))(zeros, tx.init(params), params)
    for name in params:
        factor = 0.5 if params[name].size > 20 else 1.0
        np.testing.assert_allclose(after[name], factor * params[name], rtol=1e-6)


def test_leaves_that_are_split_alike_share_one_sum():
    params = split_arrays(0, 1.0)
    tx = OPTIMIZERS["lamb"]
    step = jax.jit(split_apply(tx, tx.init(params)))
    program = step.lower(params, tx.init(params), params).compile().as_text()
    assert program.count(" all-reduce(") == len({*AXES.values()} - {()})


@pytest.mark.thorough
def test_shards_round_differently_and_copies_of_a_shard_alike():
    tx = sgd(1.0, clip_norm=None).with_dtypes(F32, True)
    params = {name: jnp.ones(shape, BF16) for name, shape in WHOLE.items()}
    grads = {name: jnp.full(shape, 2.0**-9) for name, shape in WHOLE.items()}
    after, _ = jax.jit(split_apply(tx, tx.init(params)))(grads, tx.init(params), params)
    for name in ("block/bias", "embed"):
        copies = {}
        for shard in after[name].addressable_shards:
            copies.setdefault(str(shard.index), []).append(np.asarray(shard.data).tobytes())
        assert all(len(set(same)) == 1 for same in copies.values())
    rows = np.asarray(after["embed"], np.float32).reshape(4, -1)
    assert len({row.tobytes() for row in rows}) > 1


@pytest.mark.thorough
def test_leaves_of_one_shape_and_content_are_rounded_by_bits_of_their_own():
    tx = sgd(1.0, clip_norm=None).with_dtypes(F32, True)
    params = {name: jnp.ones(512, BF16) for name in "ab"}
    grads = {name: jnp.full(512, 2.0**-9) for name in "ab"}
    after, _ = tx.apply(grads, tx.init(params), params, context(axes={"a": (), "b": ()}))
    assert np.any(np.asarray(after["a"]) != np.asarray(after["b"]))
