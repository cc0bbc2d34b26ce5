"""Codes of frozen weights: the table, nearest levels, NumPy's and XLA's bits, shapes."""

from statistics import NormalDist

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zerojax.optim import weight_codes
from zerojax.optim.weight_codes import (
    BLOCK,
    KINDS,
    NF4_LEVELS,
    WeightCodes,
    bytes_per_parameter,
    codes_for,
)


def values(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(scale=0.02, size=shape).astype(np.float32)


def test_the_table_is_that_of_the_definition():
    """QLoRA, section 3 and appendix E: quantiles of both halves of N(0, 1), evenly spaced in
    probability from bitsandbytes' offset to 1/2, divided by the largest."""
    offset = (1 - 1 / (2 * 15) + 1 - 1 / (2 * 16)) / 2
    assert offset == pytest.approx(0.9677083, abs=1e-7)
    quantile = NormalDist().inv_cdf
    above = [quantile(p) for p in np.linspace(offset, 0.5, 9)[:-1]]
    below = [-quantile(p) for p in np.linspace(offset, 0.5, 8)[:-1]]
    wanted = np.sort([*above, 0, *below]) / max(above)
    assert len(NF4_LEVELS) == 16
    # bitsandbytes' constants, which these are, come from SciPy's quantiles in float32.
    np.testing.assert_allclose(NF4_LEVELS, wanted, atol=2e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_decoded_is_the_nearest_value_that_a_code_can_mean(kind):
    x = values(40, 2 * BLOCK)
    codes = WeightCodes(kind, -1)
    decoded = codes.decode_on_host(codes.encode(x))
    blocks = x.reshape(-1, BLOCK)
    largest = np.abs(blocks).max(1, keepdims=True)
    exact = largest if kind == "nf4" else largest * np.float32(1 / 127)
    scale = exact.astype(jnp.bfloat16).astype(np.float32)
    units = NF4_LEVELS if kind == "nf4" else np.arange(-127, 128, dtype=np.float32)
    could = (units * scale)[:, None, :]
    far = np.abs(blocks[:, :, None] - could)
    assert scale.shape == (80, 1)
    found = np.abs(blocks - decoded.reshape(-1, BLOCK))
    # A value in the middle of two levels may take either, as products are rounded.
    np.testing.assert_allclose(found, far.min(2), rtol=1e-4, atol=1e-9)
    is_one = (decoded.reshape(-1, BLOCK)[:, :, None] == could).any(2)
    assert is_one.all()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dim", [-1, -2, -3])
@pytest.mark.parametrize("kind", KINDS)
def test_numpy_and_xla_code_and_decode_to_the_same_bits(kind, dim):
    shape = [3, 3, 3]
    shape[dim] = 2 * BLOCK
    x, codes = values(*shape), WeightCodes(kind, dim)
    x[0, 0, 0], x[:, 1] = 3.0, 0.0
    on_host = codes.encode(x)
    assert isinstance(on_host, np.ndarray)
    np.testing.assert_array_equal(on_host, jax.jit(codes.encode)(x))
    assert on_host.dtype == np.uint8
    assert on_host.shape == codes.coded_shape(shape)
    assert codes.true_shape(on_host.shape) == tuple(shape)
    assert on_host.nbytes == x.size * bytes_per_parameter(kind)
    decoded = codes.decode_on_host(on_host)
    assert np.all(decoded[:, 1] == 0)
    for dtype in (jnp.float32, jnp.bfloat16):
        traced = jax.jit(lambda y, dtype=dtype: codes.decode(y, dtype))(on_host)
        assert traced.dtype == dtype
        np.testing.assert_array_equal(np.asarray(traced), decoded.astype(dtype))


def test_the_host_codes_parts_of_an_array_as_all_of_it():
    x, codes = values(40, 3 * BLOCK, 30), WeightCodes("nf4", -2)
    assert x.size > 3 * weight_codes._IN_CACHE
    np.testing.assert_array_equal(codes.encode(x), jax.jit(codes.encode)(x))


def test_blocks_lie_along_one_dimension_and_know_nothing_of_their_neighbours():
    x = values(2, 3 * BLOCK, 5)
    codes = WeightCodes("nf4", -2)
    whole = codes.encode(x)
    parts = [codes.encode(x[:, i : i + BLOCK]) for i in range(0, x.shape[1], BLOCK)]
    np.testing.assert_array_equal(whole, np.concatenate(parts, axis=1))
    assert whole.shape == (2, 3 * 34, 5)


def test_what_is_not_finite_stays_so():
    x = values(3, BLOCK)
    x[0, 5], x[1, 7] = np.nan, np.inf
    for kind in KINDS:
        codes = WeightCodes(kind, -1)
        with np.errstate(invalid="ignore"):
            decoded = codes.decode_on_host(codes.encode(x))
        assert np.isnan(decoded[0]).all()
        assert not np.isfinite(decoded[1, 7])
        assert np.isfinite(decoded[2]).all()


@pytest.mark.parametrize(
    ("shape", "stack_dims", "dim"),
    [
        ((4096, 11008), 0, -2),
        ((32, 4096, 32, 128), 1, -1),
        ((32, 4096, 4096), 1, -1),
        ((64, 10, 128), 1, -1),
        ((64, 10, 30), 1, None),
        ((3, 3, 64, 96), 0, -2),
    ],
)
def test_blocks_lie_along_the_smallest_dimension_of_whole_blocks(shape, stack_dims, dim):
    found = codes_for("nf4", shape, stack_dims)
    assert (found and found.dim) == dim


def test_a_weight_takes_0_53_or_1_03_bytes():
    assert bytes_per_parameter("nf4") == 0.53125
    assert bytes_per_parameter("int8") == 1.03125
