"""The kernels, run in interpret mode, give what the plain reference gives; what is refused."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import choice, gradients, mosaic, muon, optimizers, rounding
from pallas_kernels.update import update, update_trees
from tests.support.kernel_rules import RULES
from tests.support.marks import needs_kernels

XLA = choice.Choice("xla", "the oracle")
BF16, F32, F16 = jnp.bfloat16, jnp.float32, jnp.float16

# Less than a tile; tiles of 128; a tile and a tail; whole tiles.
SHAPES = [(), (384,), (33, 25), (2, 512)]


def normal(number, shape, dtype=F32, scale=1.0):
    drawn = jax.random.normal(jax.random.fold_in(jax.random.key(0), number), shape) * scale
    return drawn.astype(dtype)


def scalars_of(rule, skip=False):
    step = {"gradient_scale": 0.5, "skip": skip}
    adam = optimizers.adam_scalars(1e-2, count=3, b2=0.95, weight_decay=0.1, **step)
    return {
        optimizers.AdamScalars: adam,
        optimizers.LambScalars: optimizers.lamb_scalars(adam, trust_ratio=1.5),
        optimizers.LionScalars: optimizers.lion_scalars(1e-2, **step),
        optimizers.SgdScalars: optimizers.SgdScalars(1e-2, 0.9, 0.1, 0.5, float(skip)),
        muon.MomentumScalars: muon.momentum_scalars(0.95, count=3, nesterov=True, **step),
        muon.DescentScalars: muon.DescentScalars(1e-2, 1.5, 0.1, float(skip)),
        muon.NesterovAdamScalars: muon.nesterov_adam_scalars(
            1e-2, count=3, nesterov=True, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1, **step
        ),
        gradients.StatsScalars: gradients.StatsScalars(0.5),
    }[rule.scalars]


def arrays_of(rule, shape, dtype=F32, grad_dtype=BF16):
    """Of one leaf. Second moments must not be negative; all are made so where it does no harm."""
    updated = tuple(normal(k, shape, dtype) for k in range(rule.num_updated))
    read = tuple(normal(10 + k, shape, grad_dtype) for k in range(rule.num_read))
    if rule.scalars in (optimizers.AdamScalars, optimizers.LambScalars, muon.NesterovAdamScalars):
        updated = (*updated[:-1], jnp.abs(updated[-1]))
        if rule is optimizers.LAMB_APPLY:
            read = (read[0].astype(F32), jnp.abs(read[1]).astype(F32))
    return updated, read


def both(rule, updated, read, *, skip=False, **more):
    """(kernel's, reference's) results as flat lists."""
    found = []
    for impl in ("interpret", XLA):
        result = update(rule, updated, read, scalars=scalars_of(rule, skip), impl=impl, **more)
        found.append(jax.tree.leaves(result))
    return found


def check_equal(kernel, reference, *, sums=0):
    """Arrays: one product and one sum may be contracted here and not there (2^-23 of the terms,
    which are below 4). Sums: another order of at most 1024 terms."""
    assert [(x.shape, x.dtype) for x in kernel] == [(x.shape, x.dtype) for x in reference]
    arrays = len(kernel) - sums
    for a, b in zip(kernel[:arrays], reference[:arrays], strict=True):
        step = {F32: 2**-22, BF16: 2**-8, F16: 2**-10}[a.dtype.type]
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol=step, atol=2**-21)
    for a, b in zip(kernel[arrays:], reference[arrays:], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


by_name = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)


@pytest.mark.parametrize("rule", [optimizers.ADAMW, optimizers.SGD], ids=lambda rule: rule.name)
def test_the_reference_writes_moments_where_they_lie_on_cpus(rule):
    """XLA copies each moment that the new parameter would be computed from before it is updated."""
    updated, read = arrays_of(rule, (64, 128), grad_dtype=F32)

    def step(updated, read, scalars):
        return update(rule, updated, read, scalars=scalars, impl=XLA).updated

    with jax.default_device(jax.devices("cpu")[0]):
        lowered = jax.jit(step, donate_argnums=0).lower(updated, read, scalars_of(rule))
    memory = lowered.compile().memory_analysis()
    assert memory.alias_size_in_bytes == sum(x.nbytes for x in updated)
    assert memory.temp_size_in_bytes < updated[0].nbytes / 8  # numbers alone


@pytest.mark.sampled(3)
@needs_kernels
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@by_name
def test_the_kernel_computes_what_the_reference_computes(rule, shape):
    updated, read = arrays_of(rule, shape)
    check_equal(
        *both(rule, updated, read, out_dtypes=(BF16,) * rule.num_outputs), sums=rule.num_sums
    )


@pytest.mark.sampled(2)
@needs_kernels
@pytest.mark.parametrize(
    ("dtype", "grad_dtype"), [(BF16, BF16), (F16, F16), (F32, F32), (BF16, F32)], ids=str
)
@pytest.mark.parametrize("rule", [optimizers.ADAMW, optimizers.LION], ids=lambda rule: rule.name)
def test_any_mixture_of_float_types(rule, dtype, grad_dtype):
    updated, read = arrays_of(rule, (513,), dtype, grad_dtype)
    updated = (updated[0].astype(F32), *updated[1:])
    check_equal(*both(rule, updated, read, out_dtypes=(dtype,)))


@pytest.mark.sampled(2)
@needs_kernels
@pytest.mark.parametrize("rule", RULES[:-1], ids=lambda rule: rule.name)
def test_a_skipped_step_changes_nothing_whatever_the_gradient_holds(rule):
    updated, read = arrays_of(rule, (513,))
    bad = read[-1].at[7].set(jnp.nan).at[512].set(jnp.inf)
    for found in both(rule, updated, (*read[:-1], bad), skip=True, out_dtypes=()):
        for before, after in zip(updated, found, strict=False):
            np.testing.assert_array_equal(np.asarray(before), np.asarray(after))


@pytest.mark.thorough
@needs_kernels
@pytest.mark.parametrize("bad", [jnp.inf, -jnp.inf, jnp.nan])
def test_statistics_count_every_non_finite_value(bad):
    grad = normal(0, (3, 5, 128), F16)
    squares = float(np.sum((np.asarray(grad, np.float64) / 2) ** 2))
    rule = gradients.GRADIENT_STATS
    for found in both(rule, (), (grad,)):
        assert float(found[1]) == 0
        assert float(found[0]) == pytest.approx(squares, rel=1e-6)
    spoilt = grad.reshape(-1).at[jnp.array([0, 700, 1919])].set(bad).reshape(grad.shape)
    for found in both(rule, (), (spoilt,)):
        assert float(found[1]) == 3


@pytest.mark.thorough
@needs_kernels
def test_stochastic_rounding_is_the_same_in_the_kernel_and_in_the_tail():
    updated, read = arrays_of(optimizers.ADAMW, (1300,), BF16)
    seed = rounding.seed_of(jax.random.key(3))
    kernel, reference = both(optimizers.ADAMW, updated, read, seed=seed)
    for a, b in zip(kernel, reference, strict=True):
        assert a.dtype == BF16
        # Another contraction of a product and a sum may decide one element in thousands otherwise.
        assert np.mean(np.asarray(a) != np.asarray(b)) <= 2 / 1300
    nearest, _ = both(optimizers.ADAMW, updated, read)
    assert np.mean(np.asarray(nearest[0]) != np.asarray(kernel[0])) > 0.2


def test_stochastic_rounding_is_right_on_average_and_exact_where_it_can_be():
    x = jnp.array([1.0, 1.001, -3.3e-5, 0.0, 7e30, jnp.inf, -jnp.inf, jnp.nan], F32)
    draws = 4096
    index = jnp.arange(draws, dtype=jnp.uint32)[:, None] + jnp.zeros((1, x.size), jnp.uint32)
    bits = rounding.bits_at(index, tuple(rounding.seed_of(jax.random.key(1))))(1)
    rounded = np.asarray(rounding.round_to_bfloat16(jnp.broadcast_to(x, bits.shape), bits))
    np.testing.assert_array_equal(rounded, np.asarray(rounded).astype(BF16).astype(np.float32))
    exact = [0, 3, 5, 6, 7]
    np.testing.assert_array_equal(rounded[:, exact], np.tile(np.asarray(x)[exact], (draws, 1)))
    spacing = np.abs(np.asarray(x)[[1, 2, 4]]) * 2**-7
    error = np.abs(rounded[:, [1, 2, 4]].astype(np.float64).mean(0) - np.asarray(x)[[1, 2, 4]])
    assert (error < 4 * spacing / 2 / np.sqrt(draws)).all()  # four deviations of the mean


def test_a_moment_in_bfloat16_moves_only_with_stochastic_rounding():
    """b2=0.999 changes nu by a thousandth a step: less than half a unit of bfloat16."""
    ones = jnp.ones((256,), BF16)
    still = (jnp.zeros((256,)),)

    @jax.jit
    def nu_after_300_steps(key):
        def step(count, state):
            seed = None if key is None else rounding.seed_of(jax.random.fold_in(key, count))
            scalars = optimizers.adam_scalars(0.0, count=count + 1)
            more = {"scalars": scalars, "seed": seed, "impl": XLA}
            return update(optimizers.ADAMW, state, still, **more).updated

        return jax.lax.fori_loop(0, 300, step, (ones, ones * 0, ones))[2].astype(F32)

    assert float(nu_after_300_steps(None).min()) > 0.99
    drifted = float(nu_after_300_steps(jax.random.key(0)).mean())
    assert drifted == pytest.approx(0.999**300, rel=0.02)


def test_different_leaves_steps_and_streams_draw_different_bits():
    index = jnp.arange(4096, dtype=jnp.uint32)
    first = rounding.bits_at(index, tuple(rounding.seed_of(jax.random.key(0))))
    other = rounding.bits_at(index, tuple(rounding.seed_of(jax.random.key(1))))
    drawn = [np.asarray(bits, np.float64) for bits in (first(0), first(1), first(2), other(0))]
    for bits in drawn:
        assert bits.min() >= 0
        assert bits.max() < 2**16
        assert bits.mean() == pytest.approx(2**15, rel=0.03)
    assert np.abs(np.corrcoef(drawn) - np.eye(4)).max() < 0.06


@pytest.mark.parametrize("size", [1, 127, 128, 384, 512, 513, 1280, 10**6 + 3, 2**33])
def test_tiles_cover_a_leaf_once(size):
    tiles = mosaic.tiles_of(size, loops=True)
    assert tiles.size == size
    assert tiles.rows % tiles.loop == 0
    assert tiles.tail < 512
    assert (tiles.tail == 0) == (size % 128 == 0)


def test_offsets_above_32_bits_are_refused():
    with pytest.raises(ValueError, match=r"4294967297 elements .* 2147483647.*; pad it"):
        mosaic.tiles_of(2**32 + 1)
    with pytest.raises(ValueError, match="block=100 is not a positive multiple of 128"):
        mosaic.tiles_of(2**20, block=100)


def test_trees_come_back_in_the_order_of_donation():
    params = {"a": jnp.zeros((2,)), "b": [jnp.ones((3,)), jnp.full((2,), 2.0)]}
    trace = jax.tree.map(lambda x: x * 0, params)
    grads = jax.tree.map(jnp.ones_like, params)
    decays = {"a": 0.0, "b": [0.5, 0.0]}

    def leaf(updated, read, decay):
        scalars = optimizers.SgdScalars(1.0, 0.9, decay)
        return update(optimizers.SGD, updated, read, scalars=scalars, out_dtypes=(BF16,))

    result = update_trees(leaf, (params, trace), (grads,), decays)
    expected = {"a": jnp.full((2,), -1.0), "b": [jnp.full((3,), -0.5), jnp.full((2,), 1.0)]}
    chex.assert_trees_all_equal(result.updated[0], expected, strict=True)
    assert float(result.updated[1]["b"][0][0]) == 1.5
    assert jax.tree.map(lambda x: x.dtype, result.outputs[0])["a"] == BF16
    assert result.sums == ()


def test_leaves_that_do_not_fit_the_rule_are_refused():
    x, rule = jnp.zeros((4,)), optimizers.LION
    scalars = optimizers.lion_scalars(1e-3)
    with pytest.raises(ValueError, match="lion updates 2 arrays and reads 1; got 3 and 1"):
        update(rule, (x, x, x), (x,), scalars=scalars)
    with pytest.raises(ValueError, match=r"differ in shape: \[\(3,\), \(4,\)\]"):
        update(rule, (x, x), (x[:3],), scalars=scalars)
    with pytest.raises(TypeError, match="int32 is not one of float32, bfloat16, float16"):
        update(rule, (x, x), (x.astype(jnp.int32),), scalars=scalars)
    half, seed = x.astype(F16), jnp.zeros((2,), jnp.uint32)
    with pytest.raises(TypeError, match="cannot be rounded stochastically"):
        update(rule, (half, half), (x,), scalars=scalars, seed=seed)
    with pytest.raises(ValueError, match="lion has 1 outputs, but out_dtypes has 2"):
        update(rule, (x, x), (x,), scalars=scalars, out_dtypes=(BF16, BF16))
