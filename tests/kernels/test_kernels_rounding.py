"""Stochastic rounding has no bias at all: what every one of the 2^16 draws does is counted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_kernels.rounding import bits_at, round_to_bfloat16, seed_of

DRAWS = jnp.arange(2**16, dtype=jnp.uint32)


def as_float(bits):
    return lax.bitcast_convert_type(jnp.uint32(bits), jnp.float32)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("fraction", [0, 1, 0x7FFF, 0x8000, 0xFFFF])
@pytest.mark.parametrize("start", [0x3F800000, 0xC2FE0000, 0x00010000], ids=["1", "-127", "tiny"])
def test_as_many_draws_round_away_from_zero_as_the_fraction_says(start, fraction):
    """So the mean over all draws is the value itself: no bias, not even by 2^-16 of a step."""
    value = jnp.full(DRAWS.shape, start + fraction, jnp.uint32)
    rounded = round_to_bfloat16(lax.bitcast_convert_type(value, jnp.float32), DRAWS)
    raw = np.asarray(lax.bitcast_convert_type(rounded, jnp.uint32))
    assert set(raw.tolist()) <= {start, start + 0x10000}
    assert (raw != start).sum() == fraction


def test_infinities_and_every_nan_stay_what_they_are():
    """Of a NaN the kept bits alone may say infinity, and with all bits set a carry says -0."""
    for bits in (0x7F800001, 0x7FFFFFFF, 0xFF80FFFF, 0xFFFFFFFF, 0x7FC00000):
        assert np.isnan(round_to_bfloat16(as_float(bits)[None], DRAWS[-1:])).all(), hex(bits)
    for infinity in (jnp.inf, -jnp.inf):
        kept = round_to_bfloat16(jnp.full(DRAWS.shape, infinity), DRAWS)
        assert (np.asarray(kept) == infinity).all()


@pytest.mark.parametrize("stream", range(3))
def test_all_sixteen_bits_are_drawn_and_each_is_set_half_of_the_time(stream):
    seed = seed_of(jax.random.key(0))
    drawn = np.asarray(bits_at(jnp.arange(2**16, dtype=jnp.uint32), (seed[0], seed[1]))(stream))
    assert drawn.max() < 2**16
    set_ones = [np.mean((drawn >> bit) & 1) for bit in range(16)]
    np.testing.assert_allclose(set_ones, 0.5, atol=5 * 0.5 / 2**8)  # 5 standard deviations


def test_streams_are_independent():
    """Parameter and moments of one element are rounded by streams of their own."""
    seed = seed_of(jax.random.key(0))
    bits = bits_at(jnp.arange(2**14, dtype=jnp.uint32), (seed[0], seed[1]))
    drawn = np.stack([np.asarray(bits(stream)) for stream in range(4)]).astype(np.float64)
    correlations = np.corrcoef(drawn)[np.triu_indices(4, 1)]
    assert np.abs(correlations).max() < 5 / 2**7  # 5 standard deviations of 2^14 pairs
