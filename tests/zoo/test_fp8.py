"""8-bit products: their rounding, their scales and their gradients, against NumPy and Flax.

On a CPU the products are those of the same 8-bit values, added up in float32: an emulation that
leaves out only how the tensor cores add.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import linen

from zerojax.zoo import fp8

NUMPY = {fp8.FORWARD: ml_dtypes.float8_e4m3fn, fp8.BACKWARD: ml_dtypes.float8_e5m2}
LIMITS = {fp8.FORWARD: 448.0, fp8.BACKWARD: 57344.0}


def random(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


# --- the plain way, in NumPy ------------------------------------------------------------------


def plain_scale(largest, limit):
    """The smallest power of two with which `largest` is representable."""
    return 1.0 if largest == 0 else 2.0 ** np.ceil(np.log2(largest / limit))


def plain_rounding(x, scale, dtype):
    """What 8 bits keep of an array, back in float64."""
    kept = np.clip(x / scale, -LIMITS[dtype], LIMITS[dtype]).astype(NUMPY[dtype])
    return kept.astype(np.float64) * scale


def plain_product(x, kernel, gradient, history):
    """(result, gradient of x, gradient of the kernel) for matrices, rounded by a history."""
    dtypes = fp8.FORWARD, fp8.FORWARD, fp8.BACKWARD
    rounded = [
        plain_rounding(array, plain_scale(max(past), LIMITS[dtype]), dtype)
        for array, past, dtype in zip((x, kernel, gradient), history, dtypes, strict=True)
    ]
    x, kernel, gradient = rounded
    return x @ kernel, gradient @ kernel.T, x.T @ gradient


# --- rounding and scales ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "mantissa_bits", "smallest_normal"),
    [(fp8.FORWARD, 3, 2.0**-6), (fp8.BACKWARD, 2, 2.0**-14)],
    ids=["e4m3", "e5m2"],
)
@pytest.mark.parametrize("scale", [2.0**-13, 1.0, 2.0**9])
def test_rounding_errs_by_half_a_step_at_most(dtype, mantissa_bits, smallest_normal, scale):
    """Relative to the value where it is normal, to the smallest normal below."""
    magnitudes = np.geomspace(smallest_normal * 2**-5, LIMITS[dtype], 4001)
    x = np.concatenate([magnitudes, -magnitudes, [0.0]]).astype(np.float32) * scale
    kept = np.asarray(fp8.quantise(jnp.asarray(x), jnp.float32(scale), dtype), np.float64) * scale
    limit = np.maximum(np.abs(x), smallest_normal * scale) * 2.0 ** -(mantissa_bits + 1)
    assert np.all(np.abs(kept - x) <= limit)
    # Rounding to nearest: the very values that ml_dtypes finds.
    np.testing.assert_array_equal(kept, plain_rounding(x, scale, dtype))


@pytest.mark.parametrize("dtype", [fp8.FORWARD, fp8.BACKWARD], ids=["e4m3", "e5m2"])
def test_too_large_is_the_largest_and_not_finite_stays_so(dtype):
    x = jnp.array([1e9, -1e9, jnp.inf, -jnp.inf, jnp.nan])
    kept = np.asarray(fp8.quantise(x, jnp.float32(1), dtype), np.float32)
    assert kept[:2].tolist() == [LIMITS[dtype], -LIMITS[dtype]]
    assert not np.isfinite(kept[2:]).any()


def test_a_scale_is_the_smallest_power_of_two_that_fits():
    largest = np.array([1e-9, 0.02, 0.4374, 0.4375, 0.4376, 1, 447, 448, 449, 1e6], np.float32)
    for value in largest:
        history = jnp.zeros((3, 5)).at[:, 3].set(value).at[:, 1].set(value / 3)
        found = fp8.scales_from(history)
        wanted = [plain_scale(value, LIMITS[d]) for d in (fp8.FORWARD, fp8.FORWARD, fp8.BACKWARD)]
        assert [float(scale) for scale in found] == wanted, value
        # Flax's scale is not rounded to a power of two.
        flax = linen.fp8_ops.compute_scale(value, 1.0, LIMITS[fp8.FORWARD])
        assert flax <= found[0] * (1 + 1e-6) < 2.001 * flax


def test_an_empty_history_scales_by_one_and_tiny_values_by_what_float32_can_multiply():
    assert [float(scale) for scale in fp8.scales_from(jnp.zeros((3, 4)))] == [1, 1, 1]
    scales = fp8.scales_from(jnp.full((3, 4), 1e-30))
    assert float(scales[fp8.INPUT] * scales[fp8.OUTPUT_GRADIENT]) == 2.0**-120


def test_a_magnitude_counts_for_sixteen_steps():
    history = jnp.zeros_like(fp8.init_history(jnp.ones(2))[...])
    scales = []
    for step in range(17):
        newest = jnp.full(3, 448.0 * 4 if step == 0 else 448.0)
        history = fp8.remember(history, newest)
        scales.append(float(fp8.scales_from(history)[fp8.INPUT]))
    assert scales == [4.0] * 16 + [1.0]


# --- one product ------------------------------------------------------------------------------


@pytest.mark.thorough
def test_several_steps_scale_by_the_steps_before():
    """Longer than the history, with magnitudes that rise and fall by 2**6."""
    length, steps = 4, 11
    history, plain_history = jnp.zeros((3, length)), np.zeros((3, length))
    for step in range(steps):
        grow = 2.0 ** (6 * np.sin(step))
        x, kernel = random(step, 24, 16) * grow, random(step + 50, 16, 8) * 0.1
        gradient = random(step + 90, 24, 8) * 1e-3 / grow
        result, pull = jax.vjp(
            lambda x, k, h: fp8.fp8_dot(x, k, h, 1), jnp.asarray(x), jnp.asarray(kernel), history
        )
        *gradients, history = pull(jnp.asarray(gradient))
        plain = plain_product(x, kernel, gradient, plain_history)
        for found, wanted in zip((result, *gradients), plain, strict=True):
            # The products are of the same 8-bit values; float32 sums of up to 24 terms.
            np.testing.assert_allclose(found, wanted, atol=3e-6 * np.abs(wanted).max())
        newest = [np.abs(array).max() for array in (x, kernel, gradient)]
        plain_history = np.concatenate([np.array(newest)[:, None], plain_history[:, :-1]], axis=1)
        np.testing.assert_allclose(history, plain_history, rtol=1e-7)


@pytest.mark.thorough
def test_head_dimensions_and_batch_dimensions_contract_as_in_flax():
    """[2, 5, heads, dim] x [heads, dim, embed], with scales that Flax chooses alike."""
    x, kernel, gradient = random(1, 2, 5, 4, 8), random(2, 4, 8, 16), random(3, 2, 5, 16)
    limits = np.array([448, 448, 57344], np.float32)
    history = jnp.zeros((3, 6)).at[:, 2].set(limits * np.array([2.0**-6, 2.0**-7, 2.0**-14]))
    dims = (((2, 3), (0, 1)), ((), ()))

    def flax_dot(x, kernel):
        scales = {f"{name}_scale": jnp.ones((1,)) for name in ("lhs", "rhs", "grad")}
        past = {f"{n}_amax_history": history[k] for k, n in enumerate(("lhs", "rhs", "grad"))}
        return linen.fp8_ops.fp8_scaled_dot_general(
            x, kernel, dims, preferred_element_type=jnp.float32, **scales, **past
        )

    found, pull = jax.vjp(lambda x, k: fp8.fp8_dot(x, k, history, 2), *map(jnp.array, (x, kernel)))
    wanted, flax_pull = jax.vjp(flax_dot, *map(jnp.array, (x, kernel)))
    pairs = zip((found, *pull(gradient)), (wanted, *flax_pull(gradient)), strict=True)
    for ours, theirs in pairs:
        assert ours.shape == theirs.shape
        # Powers of two as scales: only the order of float32 sums is free.
        np.testing.assert_allclose(ours, theirs, atol=3e-6 * np.abs(theirs).max())


@pytest.mark.thorough
def test_several_products_take_the_scale_that_no_history_finds_too_small():
    """Two kernels, one of which remembers an input eight times as large."""
    x, kernels = jnp.asarray(random(1, 6, 8)), [jnp.asarray(random(seed, 8, 4)) for seed in (2, 3)]
    small = jnp.ones((3, 4))
    large = small.at[fp8.INPUT].set(8.0)
    results, pull = jax.vjp(
        lambda h: fp8.fp8_dots(x, tuple(kernels), h, (None, None), 1), (small, large)
    )
    for result, kernel in zip(results, kernels, strict=True):
        alone = fp8.fp8_dot(x, kernel, small.at[fp8.INPUT].set(8.0), 1)
        np.testing.assert_array_equal(result, alone)
    (after,) = pull(results)
    for history, kernel, result in zip(after, kernels, results, strict=True):
        newest = [float(jnp.abs(array).max()) for array in (x, kernel, result)]
        np.testing.assert_array_equal(history[:, 0], np.float32(newest))


@pytest.mark.thorough
def test_a_product_beyond_float16_is_scaled_before_it_is_float16():
    """448 * 448 * 64 is 200 times the largest float16; the scaled result is 64."""
    x, kernel = jnp.ones((2, 64), jnp.float16), jnp.ones((64, 3), jnp.float16)
    history = jnp.ones((3, 2))
    result = fp8.fp8_dot(x, kernel, history, 1)
    assert result.dtype == jnp.float16
    np.testing.assert_array_equal(result, np.full((2, 3), 64.0))


@pytest.mark.thorough
def test_an_infinite_gradient_is_not_hidden_by_saturation():
    """A float16 run finds its overflows this way."""
    x, kernel = jnp.ones((2, 4), jnp.float16), jnp.ones((4, 3), jnp.float16)
    _, pull = jax.vjp(lambda x, k: fp8.fp8_dot(x, k, jnp.ones((3, 2)), 1), x, kernel)
    for gradient in pull(jnp.full((2, 3), 1.0, jnp.float16).at[0, 0].set(jnp.inf)):
        assert not np.isfinite(np.asarray(gradient, np.float32)).all()
