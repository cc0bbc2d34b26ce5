"""The moving average in the pass of an update: every rule that updates parameters, and 8-bit AdamW.

The reference against NumPy, and the kernels, in interpret mode, against the reference.
"""

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import choice, muon, optimizers
from pallas_kernels.adam8bit import init_moments
from pallas_kernels.adam8bit_kernel import AVERAGING, update_adam8bit
from pallas_kernels.elementwise import averaging, averaging_scalars
from pallas_kernels.update import update
from tests.kernels.test_kernels_elementwise import arrays_of, check_equal, normal, scalars_of
from tests.support.marks import needs_kernels

XLA = choice.Choice("xla", "the oracle")
BF16, F32 = jnp.bfloat16, jnp.float32
RATE = 0.25
"""A power of two, by which no product is rounded: see `tests.support.ema_runs.DECAY`."""
PLAIN = [
    optimizers.ADAMW,
    optimizers.LION,
    optimizers.SGD,
    optimizers.SGD_PLAIN,
    optimizers.LAMB_APPLY,
    muon.MUON_DESCENT,
    muon.NESTEROV_ADAM,
]
by_name = pytest.mark.parametrize("plain", PLAIN, ids=lambda rule: rule.name)
# Less than a tile; a tile and a tail; whole tiles.
SHAPES = [(5,), (33, 25), (2, 512)]
SEED = jnp.array([3, 5], jnp.uint32)


def with_rate(scalars):
    return averaging_scalars(type(scalars))(*scalars, RATE)


def leaf_of(plain, shape, dtype=F32):
    updated, read = arrays_of(plain, shape, dtype)
    return (*updated, normal(20, shape)), read


def moved_in_numpy(average, param):
    average, param = (np.asarray(x.astype(F32)) for x in (average, param))
    return average + np.float32(RATE) * (param - average)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@by_name
def test_the_reference_moves_it_to_what_is_stored(plain, dtype):
    """Bit for bit, also of parameters that are rounded stochastically; the others stay as they
    are without it."""
    updated, read = leaf_of(plain, (33, 25), dtype)
    seed = SEED if dtype == BF16 else None
    scalars = scalars_of(plain)
    more = {"seed": seed, "impl": XLA}
    found = update(averaging(plain), updated, read, scalars=with_rate(scalars), **more).updated
    alone = update(plain, updated[:-1], read, scalars=scalars, **more).updated
    chex.assert_trees_all_equal(found[:-1], alone, strict=True)
    assert found[-1].dtype == F32
    np.testing.assert_array_equal(found[-1], moved_in_numpy(updated[-1], found[0]))


@pytest.mark.sampled(3)
@by_name
def test_a_skipped_step_does_not_move_it(plain):
    updated, read = leaf_of(plain, (33, 25))
    bad = (*read[:-1], jnp.full_like(read[-1], jnp.nan))
    scalars = with_rate(scalars_of(plain, skip=True))
    found = update(averaging(plain), updated, bad, scalars=scalars, impl=XLA).updated
    chex.assert_trees_all_equal(found, updated, strict=True)


@pytest.mark.sampled(2)
@needs_kernels
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@by_name
def test_the_kernel_moves_it_as_the_reference_does(plain, shape, dtype):
    updated, read = leaf_of(plain, shape, dtype)
    seed = SEED if dtype == BF16 else None
    scalars = with_rate(scalars_of(plain))
    pair = [
        update(averaging(plain), updated, read, scalars=scalars, seed=seed, impl=impl).updated
        for impl in ("interpret", XLA)
    ]
    check_equal(*pair)
    # Whatever a kernel's division makes of a parameter, its average follows what it has stored; one
    # product and one sum may be contracted.
    expected = moved_in_numpy(updated[-1], pair[0][0])
    np.testing.assert_allclose(pair[0][-1], expected, rtol=0, atol=2**-23)


def of_one_byte(shape, dtype, impl, *, skip=False):
    param, average, grad = normal(0, shape, dtype), normal(1, shape), normal(2, shape, BF16)
    plain = optimizers.adam_scalars(1e-2, count=3, weight_decay=0.1, skip=skip)
    more = {"seed": SEED, "impl": impl}
    given = param, init_moments(shape), grad
    scalars = AVERAGING(*plain, jnp.float32(RATE))
    found = update_adam8bit(*given, scalars=scalars, average=average, **more)
    return found, update_adam8bit(*given, scalars=plain, **more), average


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("impl", [XLA, pytest.param("interpret", marks=needs_kernels)])
@pytest.mark.parametrize("shape", [(5,), (1300,), (3, 512)], ids=str)
def test_beside_codes_it_follows_what_is_stored(shape, impl, dtype):
    found, alone, average = of_one_byte(shape, dtype, impl)
    chex.assert_trees_all_equal(found[:3], alone[:3])
    expected = moved_in_numpy(average, found.param)
    np.testing.assert_allclose(found.average, expected, rtol=0, atol=0 if impl is XLA else 2**-23)
    skipped, _, average = of_one_byte(shape, dtype, impl, skip=True)
    np.testing.assert_array_equal(skipped.average, average)


def test_what_does_not_fit_is_refused():
    x, moments = jnp.zeros((512,)), init_moments((512,))
    plain = optimizers.adam_scalars(1e-2, count=1)
    more = {"seed": SEED, "impl": XLA}
    with pytest.raises(ValueError, match=r"average is bfloat16\[512\], but must be float32"):
        update_adam8bit(x, moments, x, scalars=plain, average=x.astype(BF16), **more)
    with pytest.raises(TypeError, match="AdamScalars, but must be AdamScalarsAndAverage"):
        update_adam8bit(x, moments, x, scalars=plain, average=x, **more)
