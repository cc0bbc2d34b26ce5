"""Codes of gradients: half a step from every value, in blocks of any number, NaN never lost."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from zerojax.optim.wire_codes import BLOCKS, WireCodes, bytes_sent
from zerojax.placement.device_mesh import make_mesh
from zerojax.transport.sums import sum_in_codes

LARGEST = {8: 127, 4: 7}


def written_out(codes, values):
    """What codes keep of [rows, elements], one block after the other, in float64; and the steps."""
    kept, steps = np.zeros_like(values), np.zeros_like(values)
    block = BLOCKS[codes.bits]
    for row in range(values.shape[0]):
        for start in range(0, values.shape[1], block):
            part = values[row, start : start + block]
            wanted = np.float32(np.abs(part).max()) / np.float32(LARGEST[codes.bits])
            scale = float(np.asarray(jnp.asarray(wanted, jnp.bfloat16), np.float64))
            if scale < wanted * (1 - 2**-20):  # the next bfloat16
                bits = np.asarray(scale, np.float32).view(np.uint32) + np.uint32(1 << 16)
                scale = float(bits.view(np.float32))
            steps[row, start : start + block] = scale
            if scale:
                kept[row, start : start + block] = np.round(part / scale) * scale
    return kept, steps


def values_of(shape, seed=0):
    """Normal values of magnitudes from 1e-6 to 1e6, with zeros among them."""
    random = np.random.default_rng(seed)
    values = random.normal(size=shape) * 10.0 ** random.integers(-6, 7, size=shape)
    values[..., ::7] = 0
    return np.float32(values)


@pytest.mark.thorough
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("elements", [1, 5, 63, 64, 65, 256, 1000])
def test_no_value_is_off_by_more_than_half_a_step(bits, elements):
    codes = WireCodes(bits)
    values = values_of((3, elements), elements)
    sent = codes.encode(jnp.asarray(values))
    assert sent.dtype == jnp.uint8
    assert sent.shape == (3, codes.num_bytes(elements))
    found = np.asarray(codes.decode(sent, elements), np.float64)
    kept, steps = written_out(codes, values.astype(np.float64))
    assert (np.abs(found - values) <= steps / 2 * (1 + 1e-6)).all()
    # A quotient that is half of an odd number may be rounded either way; none is here.
    np.testing.assert_allclose(found, kept, rtol=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("bits", [8, 4])
def test_what_is_a_multiple_of_the_step_is_kept_exactly(bits):
    largest = LARGEST[bits]
    values = np.tile(np.arange(-largest, largest + 1, dtype=np.float32), 40)[None] * 0.25
    codes = WireCodes(bits)
    found = codes.decode(codes.encode(jnp.asarray(values)), values.shape[1])
    np.testing.assert_array_equal(found, values)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so_in_its_block_alone(bits, value):
    codes, block = WireCodes(bits), BLOCKS[bits]
    values = values_of((2, 3 * block))
    values[1, block + 3] = value
    there_and_back = jax.jit(lambda x: codes.decode(codes.encode(x), 3 * block))
    found = np.asarray(there_and_back(values))
    is_finite = np.isfinite(found)
    assert not is_finite[1, block : 2 * block].any()
    assert is_finite[0].all()
    assert is_finite[1, :block].all()
    assert is_finite[1, 2 * block :].all()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("devices", "in_node"), [(8, 1), (8, 8), (8, 2), (8, 4), (6, 3), (3, 1)])
def test_a_sum_is_that_of_the_same_codes_written_out(bits, devices, in_node):
    """Each device's parts coded, added up in a node, coded again, added up between nodes."""
    codes = WireCodes(bits, in_node)
    elements = 331
    # [sender, receiver, elements], of one magnitude: where one sender's is all of a sum, its last
    # digit in float32 decides about the scale.
    given = np.random.default_rng(devices).normal(size=(devices, devices, elements))
    given = given.astype(np.float32)
    mesh = make_mesh({"data": devices}, jax.devices()[:devices])
    summed = jax.shard_map(
        lambda rows: sum_in_codes(rows[0], codes, ("data",))[None],
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P("data"),
    )
    found = np.asarray(jax.jit(summed)(given))
    flat = lambda parts: written_out(codes, parts.reshape(-1, elements))[0].reshape(parts.shape)  # noqa: E731
    kept = flat(given.astype(np.float64))
    if in_node in (1, devices):
        wanted = kept.sum(0)
    else:
        in_nodes = kept.reshape(-1, in_node, devices, elements).sum(1)
        wanted = flat(in_nodes).sum(0)
    # Sums in float32, and a code may be the neighbouring one where such a sum is halfway.
    scale = np.abs(wanted).max(-1, keepdims=True)
    near = np.abs(found - wanted) <= 1e-5 * scale
    assert near.mean() > 0.995
    assert (np.abs(found - wanted) <= scale / LARGEST[bits]).all()


def test_bytes_are_those_of_the_rows_that_are_sent():
    codes = WireCodes(8, 8)
    row = codes.num_bytes(2**20)
    assert bytes_sent(codes, 64 * 2**20, 64) == (7 * 8 + 7) * row
    assert bytes_sent(WireCodes(8), 64 * 2**20, 64) == 63 * row
    elements = 64 * 2**20
    for bits, limit, each, between in ((8, 0.51, 0.992, 0.110), (4, 0.27, 0.523, 0.058)):
        for in_node in (1, 8):
            sent = bytes_sent(WireCodes(bits, in_node), elements, 64)
            assert sent / (63 * 2**20 * 2) < limit
            assert sent / elements == pytest.approx(each, abs=5e-4)
        assert 7 * WireCodes(bits).num_bytes(2**20) / elements == pytest.approx(between, abs=5e-4)
    assert math.isclose(WireCodes(4).bits_each, 4.25)
