"""The attention kernels, interpreted on a CPU, against attention written out in float64.

Tolerance: operands and results are rounded to 16 bits (2^-8 of bfloat16, 2^-11 of float16), and so
are the weights before the second product: 2^-7 and 2^-10 of the largest value.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import Seen, attention_part, block_attention, part_gradients, why_not
from pallas_kernels.attention_tables import BLOCK, TILE, share_visited, tables_of
from pallas_kernels.choice import KernelUnavailable, missing

interpreted = pytest.mark.skipif(missing() is not None, reason=str(missing()))
ROUNDING = {jnp.bfloat16: 2**-7, jnp.float16: 2**-10}
TOKENS, HEAD_DIM = 128, 64


def drawn(seed, *shape, dtype=jnp.bfloat16):
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def operands(heads=2, kv_heads=1, tokens=TOKENS, keys=None, rows=1, dtype=jnp.bfloat16, width=64):
    keys = tokens if keys is None else keys
    shapes = [(tokens, heads), (keys, kv_heads), (keys, kv_heads), (tokens, heads)]
    return [
        drawn(seed, rows, length, number, width, dtype=dtype)
        for seed, (length, number) in enumerate(shapes)
    ]


def layout(name, heads, tokens=TOKENS):
    blocks = -(-tokens // BLOCK)
    random = np.random.default_rng(3)
    return {
        "diagonals": np.tril(np.triu(np.ones((1, blocks, blocks), bool), -2)),
        "random": random.random((1, blocks, blocks)) < 0.3,
        "heads": random.random((heads, blocks, blocks)) < 0.4,
        "columns": np.arange(blocks)[None, None] % 3 == np.zeros((1, blocks, 1), int),
    }[name]


def texts(rows, tokens):
    """Texts of any length; the last 20 tokens are padding, and so is all of a second row."""
    random = np.random.default_rng(1)
    found = np.sort(random.integers(0, 4, (rows, tokens)), axis=1)
    found[:, -20:] = -1
    found[1:] = -1
    return jnp.asarray(found, jnp.int32)


def mask_of(seen, heads, queries, keys, segments, positions):
    """Bool [rows, heads, queries, keys]."""
    at = (np.arange(queries)[None], np.arange(keys)[None]) if positions is None else positions
    query, key = (np.asarray(x)[:, None] for x in at)
    distance = query[..., :, None] - key[..., None, :]
    shown = np.ones(distance.shape, bool)
    if seen.causal:
        shown &= distance >= 0
    if seen.window is not None:
        shown &= distance < seen.window
        shown &= seen.causal | (distance > -seen.window)
    if segments is not None:
        query, key = (np.asarray(x)[:, None] for x in segments)
        shown = shown & (query[..., :, None] == key[..., None, :]) & (key >= 0)[..., None, :]
    if seen.layout is not None:
        whole = seen.layout.repeat(BLOCK, 1).repeat(BLOCK, 2)[None, :, :queries, :keys]
        shown = shown & whole
    return np.broadcast_to(shown, (len(shown), heads, queries, keys))


def written_out(arrays, shown):
    """(out, log-sum-exp, gradients of query, key and value), in float64."""
    query, key, value, slope = (np.asarray(x, np.float64) for x in arrays)
    group = query.shape[2] // key.shape[2]
    key, value = (x.repeat(group, 2) for x in (key, value))
    scale = query.shape[-1] ** -0.5
    scores = np.where(shown, np.einsum("bthd,bshd->bhts", query, key) * scale, -np.inf)
    top = np.maximum(scores.max(-1, keepdims=True), -1e30)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        log_sum = (top + np.log(total))[..., 0]
    weights = weights / np.where(total, total, 1)
    out = np.einsum("bhts,bshd->bthd", weights, value)
    inner = np.einsum("bthd,bshd->bhts", slope, value)
    turned = np.einsum("bthd,bthd->bht", slope, out)[..., None]
    of_scores = weights * (inner - turned) * scale
    fold = lambda x: x.reshape(*x.shape[:2], -1, group, x.shape[-1]).sum(3)  # noqa: E731
    return (
        out,
        np.moveaxis(log_sum, 1, 2),
        np.einsum("bhts,bshd->bthd", of_scores, key),
        fold(np.einsum("bhts,bthd->bshd", of_scores, query)),
        fold(np.einsum("bhts,bthd->bshd", weights, slope)),
    )


CASES = {
    "causal": ({"causal": True}, {}),
    "all, odd": ({}, {"tokens": 100}),
    "causal, odd": ({"causal": True}, {"tokens": 100}),
    "causal, window": ({"causal": True, "window": 40}, {"tokens": 192}),
    "window": ({"window": 70}, {"tokens": 192}),
    "packed": ({"causal": True, "segments": True}, {"rows": 2}),
    "packed, window, odd": ({"causal": True, "window": 30, "segments": True}, {"tokens": 150}),
    "positions": ({"causal": True, "positions": True}, {}),
    "diagonals": ({"layout": "diagonals"}, {"heads": 4, "kv_heads": 2}),
    "random, causal": ({"layout": "random", "causal": True}, {}),
    "heads, packed": ({"layout": "heads", "segments": True}, {"heads": 4, "kv_heads": 4}),
    "columns, odd": ({"layout": "columns", "causal": True}, {"tokens": 150}),
    "more keys": ({}, {"tokens": 64, "keys": 192}),
    "heads of 128": ({"causal": True}, {"width": 128, "kv_heads": 2}),
}


def case(name, **more):
    """(arrays, options of the kernels, the mask)."""
    asked, sizes = CASES[name]
    arrays = operands(**sizes, **more)
    rows, queries, heads, _ = arrays[0].shape
    keys = arrays[1].shape[1]
    asked = dict(asked)
    segments = positions = None
    if asked.pop("segments", False):
        segments = (texts(rows, queries),) * 2
    if asked.pop("positions", False):
        found = np.random.default_rng(2).permutation(queries)[None].repeat(rows, 0)
        positions = (jnp.asarray(found, jnp.int32),) * 2
    if "layout" in asked:
        asked["layout"] = layout(asked["layout"], heads, queries)
    seen = Seen(**asked)
    options = {"seen": seen, "segments": segments, "positions": positions, "interpret": True}
    return arrays, options, mask_of(seen, heads, queries, keys, segments, positions)


def assert_close(found, expected, dtype):
    found = np.asarray(found, np.float64)
    assert np.isfinite(found).all()
    size = np.abs(expected).max()
    np.testing.assert_allclose(found, expected, rtol=0, atol=ROUNDING[dtype] * max(size, 1e-3))


def quick(names, *chosen):
    marks = {True: [], False: [pytest.mark.thorough]}
    return [pytest.param(name, marks=marks[name in chosen]) for name in names]


@pytest.mark.thorough
@interpreted
@pytest.mark.parametrize("name", quick(CASES, "random, causal"))
def test_values_and_gradients_are_those_written_out(name):
    arrays, options, shown = case(name)
    *given, slope = arrays
    out, _, *gradients = written_out(arrays, shown)
    found, pull = jax.vjp(functools.partial(block_attention, **options), *given)
    assert found.dtype == jnp.bfloat16
    assert_close(found, out, jnp.bfloat16)
    for mine, expected in zip(pull(slope), gradients, strict=True):
        assert mine.dtype == jnp.bfloat16
        assert_close(mine, expected, jnp.bfloat16)
    hidden = ~shown.any(-1).swapaxes(1, 2)
    assert np.all(np.asarray(found)[hidden] == 0), "a query that sees nothing gives zeros"


@interpreted
@pytest.mark.thorough
def test_float16_rounds_less():
    arrays, options, shown = case("causal", dtype=jnp.float16)
    out, *_ = written_out(arrays, shown)
    assert_close(block_attention(*arrays[:3], **options), out, jnp.float16)


@interpreted
@pytest.mark.thorough
def test_parts_of_the_keys_are_merged_by_their_log_sums():
    """As the steps of a ring do: each half of the keys alone, gradients by the sum over all."""
    arrays, _, shown = case("causal")
    query, key, value, slope = arrays
    out, log_sum, *gradients = written_out(arrays, shown)
    halves = [slice(0, 64), slice(64, 128)]
    at = np.arange(TOKENS)[None]
    where = [(jnp.asarray(at), jnp.asarray(at[:, half])) for half in halves]
    options = {"seen": Seen(causal=True), "interpret": True}
    parts = [
        attention_part(query, key[:, half], value[:, half], positions=here, **options)
        for half, here in zip(halves, where, strict=True)
    ]
    whole = jnp.logaddexp(parts[0].log_sum, parts[1].log_sum)
    np.testing.assert_allclose(whole, log_sum, rtol=0, atol=2**-7)
    merged = sum(
        part.out.astype(jnp.float32) * jnp.exp(part.log_sum - whole)[..., None] for part in parts
    )
    assert_close(merged, out, jnp.bfloat16)
    assert np.all(np.asarray(parts[1].log_sum)[:, :64] == -np.inf), "they see none of these keys"
    turned = jnp.sum(slope.astype(jnp.float32) * out, axis=-1)
    more = {"log_sum": whole, "turned": turned, "slope": slope, **options}
    found = [
        part_gradients(query, key[:, half], value[:, half], positions=here, **more)
        for half, here in zip(halves, where, strict=True)
    ]
    assert_close(sum(x[0].astype(jnp.float32) for x in found), gradients[0], jnp.bfloat16)
    for side in (1, 2):
        joined = jnp.concatenate([x[side] for x in found], axis=1)
        assert joined.dtype == jnp.float32
        assert_close(joined, gradients[side], jnp.bfloat16)


@pytest.mark.thorough
@interpreted
def test_one_bit_of_a_table_that_is_flipped_is_seen():
    arrays, options, _ = case("diagonals")
    layout = options["seen"].layout.copy()
    layout[0, 5, 4] ^= True
    options = {**options, "seen": Seen(layout=layout)}
    shown = mask_of(Seen(layout=case("diagonals")[1]["seen"].layout), 4, TOKENS, TOKENS, None, None)
    out, *_ = written_out(arrays, shown)
    found = block_attention(*arrays[:3], **options)
    assert np.abs(np.asarray(found, np.float64) - out).max() > 0.1


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["diagonals", "random", "heads", "columns"])
def test_tables_hold_each_pair_of_blocks_once(name):
    seen = layout(name, heads=3, tokens=320)
    seen = np.broadcast_to(seen, (len(seen), 20, 20))
    found = tables_of(np.ascontiguousarray(seen))
    for table, wanted in ((found.of_queries, seen), (found.of_keys, seen.transpose(0, 2, 1))):
        shown = np.zeros(wanted.shape, int)
        for head, tile in np.ndindex(*table.counts.shape):
            for turn in range(table.counts[head, tile]):
                word, blocks = table.words[head, tile, turn], table.blocks[head, tile, turn]
                for bit in np.flatnonzero([word >> n & 1 for n in range(16)]):
                    query, key = divmod(int(bit), 4)
                    own, other = (query, key) if table is found.of_queries else (key, query)
                    shown[head, tile * 4 + own, blocks[other]] += 1
        np.testing.assert_array_equal(shown, wanted)


def test_layouts_of_small_blocks_stay_sparse():
    """A diagonal and one column of 64 x 64 blocks of 16: two turns a tile of four would do."""
    seen = np.eye(64, dtype=bool)[None]
    seen[:, :, 0] = True
    table = tables_of(seen)
    assert table.of_queries.counts.max() == 2
    assert share_visited(table.of_queries) < 0.13
    assert share_visited(tables_of(np.ones((1, 64, 64), bool)).of_queries) == 1


def struct(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


@interpreted
def test_what_the_kernels_cannot_is_refused_before_anything_is_traced():
    good = struct(1, 64, 4, 64)
    assert why_not(good, good, capability=9.0) is None
    assert "9.0 (Hopper), not 8.0" in why_not(good, good, capability=8.0)
    assert "not 10.0" in why_not(good, good, capability=10.0)
    assert "not float32" in why_not(struct(1, 64, 4, 64, dtype=jnp.float32), good)
    assert "64 or 128, not 80" in why_not(struct(1, 64, 4, 80), good)
    assert "3 key/value heads" in why_not(good, struct(1, 64, 3, 64))
    with pytest.raises(KernelUnavailable, match="attention by Mosaic GPU: .* not float32"):
        block_attention(*(jnp.ones((1, 64, 1, 64)),) * 3, seen=Seen())
    wrong = Seen(layout=np.ones((1, 3, 4), bool))
    arrays = (jnp.ones((1, 64, 1, 64), jnp.bfloat16),) * 3
    with pytest.raises(ValueError, match=r"give bool \[1 or 1, 4, 4\]"):
        block_attention(*arrays, seen=wrong)
    with pytest.raises(ValueError, match="padded to multiples of 4 blocks"):
        tables_of(np.ones((1, 3, 4), bool))
    assert TILE == 4 * BLOCK
