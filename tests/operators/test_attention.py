"""Every implementation of attention computes one function, which is written out here in float64.

Tolerances: values and gradients are sums of up to 70 products of float32; measured 3e-6 at most.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zerojax
from tests.support.trajectories import TOLERANCE, plan_for, train_for
from zerojax.operators import chunked_attention
from zerojax.operators.attending import calls_of_attention
from zerojax.operators.attention_choice import LONGEST_STORED
from zerojax.operators.attention_tiles import tiles_of
from zerojax.operators.chunked_attention import Visibility
from zerojax.step.build import build_step
from zerojax.tracing.batch_rows import follow_rows
from zerojax.tracing.row_dependence import Fixed, Rows, Total
from zerojax.tracing.stacking import REMAT_NAMES, REMAT_POLICIES

BLOCK, TOKENS = 16, 70
CLOSE = {"rtol": 0, "atol": 4e-6}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(chunked_attention, "BLOCK", BLOCK)


def drawn(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def inputs(heads=4, kv_heads=4, queries=TOKENS, keys=TOKENS, features=8):
    """Query, key, value and what the gradient is taken with."""
    return (
        drawn(2, queries, heads, features, seed=1),
        drawn(2, keys, kv_heads, features, seed=2),
        drawn(2, keys, kv_heads, features, seed=3),
        drawn(2, queries, heads, features, seed=4),
    )


def texts(lengths):
    """Segments of rows that are packed with texts of these lengths."""
    return jnp.asarray(np.stack([np.repeat(np.arange(len(row)), row) for row in lengths]))


PACKED = texts([(30, 1, 39), (16, 32, 22)])
PADDED = jnp.where(PACKED == 2, -1, PACKED)
BACKWARDS = jnp.broadcast_to(jnp.arange(TOKENS)[::-1], (2, TOKENS))


def written_out(
    query, key, value, table=None, *, causal=False, segments=None, positions=None, window=None
):
    """Attention in float64, one head of one row after the other, by a table if there is one."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    as_pair = lambda x: x if isinstance(x, tuple) else (x, x)  # noqa: E731
    out = np.zeros(query.shape)
    for row, head in np.ndindex(query.shape[0], query.shape[2]):
        at = [np.arange(x.shape[1]) for x in (query, key)]
        if positions is not None:
            at = [np.asarray(x)[row] for x in as_pair(positions)]
        distance = at[0][:, None] - at[1][None]
        seen = np.ones(distance.shape, bool)
        if table is not None:
            blocks = (np.arange(size) // table.block for size in seen.shape)
            seen &= table.seen[head % len(table.seen)][np.ix_(*blocks)]
        if causal:
            seen &= distance >= 0
        if window is not None:
            seen &= abs(distance) < window
        if segments is not None:
            of_query, of_key = (np.asarray(x)[row] for x in as_pair(segments))
            seen &= (of_query[:, None] == of_key[None]) & (of_key >= 0)[None]
        own = head * key.shape[2] // query.shape[2]
        scores = query[row, :, head] @ key[row, :, own].T / np.sqrt(query.shape[3])
        weights = np.exp(scores - scores.max()) * seen
        total = weights.sum(1, keepdims=True)
        out[row, :, head] = weights / np.where(total, total, 1) @ value[row, :, own]
    return out


CASES = {
    "all": {},
    "causal": {"causal": True},
    "window": {"window": 9},
    "causal, window": {"causal": True, "window": 17},
    "packed": {"segments": PACKED},
    "causal, packed": {"causal": True, "segments": PACKED},
    "causal, packed, window": {"causal": True, "segments": PACKED, "window": 5},
    "padded": {"segments": (jnp.zeros_like(PADDED), jnp.minimum(PADDED, 0))},
    "texts and padding": {"causal": True, "segments": PADDED},
    "positions": {"causal": True, "positions": BACKWARDS},
    "positions, window": {"window": 3, "positions": BACKWARDS},
}


def all_of(implementation, arrays, **options):
    """(out, gradients of query, key and value)."""
    attend = functools.partial(zerojax.attention, implementation=implementation, **options)

    @jax.jit
    def both(operands, slope):
        out, pull = jax.vjp(attend, *operands)
        return out, *pull(slope.astype(out.dtype))

    *operands, slope = arrays
    return both(operands, slope)


@pytest.mark.thorough
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("implementation", ["xla", "chunked"])
def test_values_are_those_written_out(implementation, case, kv_heads):
    arrays = inputs(kv_heads=kv_heads)
    attend = functools.partial(zerojax.attention, implementation=implementation, **CASES[case])
    found = jax.jit(attend)(*arrays[:3])
    np.testing.assert_allclose(found, written_out(*arrays[:3], **CASES[case]), **CLOSE)


@pytest.mark.thorough
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_stored_scores(case, kv_heads):
    """Inputs in float64, statistics in float32: in float32 stored scores are themselves 4.3e-6 from
    their own result in float64, where a gradient sums 4 heads and 70 queries (on one processor)."""
    with jax.enable_x64(True):
        arrays = [jnp.asarray(np.asarray(x), jnp.float64) for x in inputs(kv_heads=kv_heads)]
        stored = all_of("xla", arrays, **CASES[case])
        for found, expected in zip(all_of("chunked", arrays, **CASES[case]), stored, strict=True):
            assert found.dtype == jnp.float64
            np.testing.assert_allclose(found, expected, **CLOSE)


@pytest.mark.thorough
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (16, 16), (17, 16), (5, 70), (70, 5)])
def test_any_numbers_of_queries_and_keys(queries, keys):
    arrays = inputs(queries=queries, keys=keys)
    stored = all_of("xla", arrays)
    for found, expected in zip(all_of("chunked", arrays), stored, strict=True):
        np.testing.assert_allclose(found, expected, **CLOSE)


@pytest.mark.thorough
@pytest.mark.parametrize("implementation", ["xla", "chunked"])
def test_a_packed_text_is_computed_as_if_it_were_alone(implementation):
    query, key, value, slope = inputs()
    packed = all_of(implementation, (query, key, value, slope), causal=True, segments=PACKED)
    part = slice(31, 70)  # the third text of the first row
    alone = all_of(
        implementation, tuple(x[:1, part] for x in (query, key, value, slope)), causal=True
    )
    for whole, expected in zip(packed, alone, strict=True):
        np.testing.assert_allclose(whole[:1, part], expected, **CLOSE)
    crossed = all_of(implementation, (query, key, value, slope), causal=True)
    assert np.max(np.abs(crossed[0][:1, part] - alone[0])) > 0.1, "texts that see each other"


@pytest.mark.thorough
@pytest.mark.parametrize("implementation", ["xla", "chunked"])
def test_a_row_of_padding_gives_zeros(implementation):
    arrays = inputs()
    nothing = jnp.full((2, TOKENS), -1)
    for array in all_of(implementation, arrays, causal=True, segments=nothing):
        np.testing.assert_array_equal(array, 0)


@pytest.mark.thorough
@pytest.mark.parametrize("implementation", ["xla", "chunked"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_lower_precisions(implementation, dtype):
    """Operands and results are rounded: 2^-8 and 2^-11 of values up to 4."""
    arrays = inputs(kv_heads=2)
    exact = all_of("xla", arrays, causal=True)
    rounded = tuple(x.astype(dtype) for x in arrays)
    limit = 0.06 if dtype == "bfloat16" else 0.01
    for found, expected in zip(all_of(implementation, rounded, causal=True), exact, strict=True):
        assert found.dtype == dtype
        np.testing.assert_allclose(found.astype(jnp.float32), expected, rtol=0, atol=limit)


@pytest.mark.parametrize(
    ("queries", "keys", "causal"), [(1, 40, False), (1, 1, True), (5, 1, False)]
)
def test_one_query_or_key_in_float16(queries, keys, causal):
    """The plain products that stand in for those of `jax.nn`: here in float32, as on any CPU.
    Operands and results are rounded: 2^-11 of values up to 4."""
    arrays = inputs(kv_heads=2, queries=queries, keys=keys)
    expected = written_out(*arrays[:3], causal=causal)
    half = [x.astype(jnp.float16) for x in arrays[:3]]
    found = zerojax.attention(*half, causal=causal, implementation="xla")
    assert found.dtype == jnp.float16
    np.testing.assert_allclose(found.astype(jnp.float32), expected, rtol=0, atol=0.01)


@pytest.mark.thorough
def test_scale():
    arrays = inputs()
    for implementation in ("xla", "chunked"):
        found = zerojax.attention(*arrays[:3], scale=0.1, implementation=implementation)
        expected = written_out(arrays[0] * 0.1 * np.sqrt(8), *arrays[1:3])
        np.testing.assert_allclose(found, expected, **CLOSE)


# --- memory ---------------------------------------------------------------------------------------


def compiled(implementation, remat="none", tokens=1024):
    """The program of a value and its gradients."""
    attend = functools.partial(zerojax.attention, causal=True, implementation=implementation)
    if remat != "none":
        attend = jax.checkpoint(attend, policy=REMAT_POLICIES[remat])

    def loss(query, key, value):
        return jnp.sum(attend(query, key, value) ** 2)

    shape = jax.ShapeDtypeStruct((1, tokens, 2, 8), jnp.float32)
    return jax.jit(jax.grad(loss, (0, 1, 2))).lower(shape, shape, shape).compile()


def largest_array(program):
    found = re.findall(r"\b(?:f32|bf16|s32|pred)\[([\d,]+)\]", program.as_text())
    return max(int(np.prod([int(n) for n in dims.split(",")])) for dims in found)


@pytest.mark.thorough
@pytest.mark.parametrize("remat", REMAT_NAMES)
def test_no_array_holds_the_scores(remat):
    """Nothing is larger than the inputs; also where a checkpoint keeps matrix products."""
    tokens = 1024
    stored, cut = compiled("xla", remat, tokens), compiled("chunked", remat, tokens)
    assert largest_array(stored) >= 2 * tokens * tokens
    assert largest_array(cut) <= tokens * 2 * 8
    bytes_of = [x.memory_analysis().temp_size_in_bytes for x in (cut, stored)]
    assert 16 * bytes_of[0] < bytes_of[1]


@pytest.mark.thorough
@pytest.mark.parametrize(("remat", "loops"), [("none", 2), ("full", 3), ("attention", 2)])
def test_scores_are_computed_again_once_where_the_result_is_kept(remat, loops):
    """Forward, backward, and under a checkpoint that keeps nothing forward once more.

    The checkpoint is around a layer that makes query, key and value, as in a model.
    """
    weight = drawn(3, 16, 16) / 4

    def layer(x):
        query, key, value = (x[:, :, None] @ w for w in weight)
        return zerojax.attention(query, key, value, causal=True, implementation="chunked")[:, :, 0]

    if remat != "none":
        layer = jax.checkpoint(layer, policy=REMAT_POLICIES[remat])
    x = drawn(1, 64, 16)
    program = jax.jit(jax.grad(lambda x: jnp.sum(layer(x) ** 2))).lower(x).compile()
    assert len(re.findall(r" while\(", program.as_text())) == loops


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ({}, 25),
        ({"causal": True}, 15),  # of 5 x 5 blocks the triangle
        ({"causal": True, "window": 1}, 5),
        ({"causal": True, "window": 2}, 9),
        ({"causal": True, "window": 17}, 9),
        ({"causal": True, "window": 18}, 12),
        ({"window": 2}, 13),
    ],
    ids=str,
)
def test_blocks_in_which_nothing_is_seen_are_left_out(case, expected):
    extent = chunked_attention.extent_of(
        TOKENS,
        TOKENS,
        visibility=Visibility(**{"causal": False, "window": None, **case}),
        table=None,
        has_positions=False,
        groups=1,
    )
    assert len(tiles_of(extent).places) == expected


# --- choice and refusals --------------------------------------------------------------------------


def test_auto_depends_on_the_number_of_keys():
    def taken(keys, implementation="auto"):
        arrays = [jax.ShapeDtypeStruct((1, n, 2, 4), jnp.float32) for n in (8, keys, keys)]
        run = functools.partial(zerojax.attention, implementation=implementation)
        with calls_of_attention() as calls:
            jax.eval_shape(run, *arrays)
        (call,) = calls
        return call.describe()

    assert taken(LONGEST_STORED) == (
        "attention xla (auto: no more than 4096 keys): stores all 8 x 4096 scores of each head"
    )
    assert taken(LONGEST_STORED + 1).startswith("attention chunked (auto: more than 4096 keys)")
    assert taken(64, "chunked") == (
        "attention chunked (set by the call): stores 16 x 16 of the 8 x 64 scores of each head at "
        "a time"
    )


@pytest.mark.thorough
def test_the_plan_says_which_one_and_why():
    model = zerojax.zoo.build_model(
        zerojax.config.ModelConfig(num_layers=1, num_heads=2, embed_dim=8, attention="chunked"), 64
    )
    plan = plan_for(model)
    assert (
        sum(reason.startswith("attention chunked (set by the call)") for reason in plan.reasons)
        == 1
    )


REFUSED = {
    "key and value": (lambda q, k, v: (q, k[:, 1:], v), {}, ValueError, "must be equal"),
    "features": (lambda q, k, v: (q, k[..., 1:], v[..., 1:]), {}, ValueError, "must be 2 and 8"),
    "integers": (lambda q, k, v: (q.astype(int),) * 3, {}, TypeError, "floating-point"),
    "window": (None, {"window": 0}, ValueError, "window=0 must be at least 1"),
    "a keyword": (None, {"is_causal": True}, TypeError, "did you mean 'causal'"),
    "segments": (None, {"segments": PACKED[:, 1:]}, ValueError, r"\[batch, tokens\]"),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused(case):
    change, options, error, words = REFUSED[case]
    operands = inputs()[:3]
    with pytest.raises(error, match=words):
        zerojax.attention(*(change(*operands) if change else operands), **options)


def test_a_second_derivative_is_refused():
    query, key, value, _ = inputs()
    loss = lambda x: jnp.sum(zerojax.attention(x, key, value, implementation="chunked") ** 2)  # noqa: E731
    slope = lambda x: jnp.sum(jax.grad(loss)(x) ** 2)  # noqa: E731
    with pytest.raises(NotImplementedError, match="use implementation='xla'"):
        jax.grad(slope)(query)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("implementation", ["xla", "chunked"])
@pytest.mark.parametrize("options", [{}, {"causal": True, "window": 6}])
def test_a_summed_loss_is_seen_through_attention(implementation, options):
    """The analysis of a loss follows the rows of the batch through the loop over blocks."""

    def loss(weight, rows):
        x = rows[:, :, None] @ weight
        return jnp.sum(zerojax.attention(x, x, x, implementation=implementation, **options) ** 2)

    program = jax.make_jaxpr(loss)(jnp.eye(4), jnp.ones((2, 13, 4)))
    assert follow_rows(program, [Fixed(0), Rows(0)], 2) == [Total()]


# --- training -------------------------------------------------------------------------------------


def grouped(attention, remat="dots"):
    sizes = {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "embed_dim": 16, "max_seq_len": 32}
    config = zerojax.zoo.LlamaConfig(vocab_size=32, attention=attention, remat=remat, **sizes)
    return lambda rngs: zerojax.zoo.Llama(config, rngs=rngs)


ROWS = [
    pytest.param(
        {"zero": 3, "mesh": {"data": 4, "model": 2}},
        id="3-tensor parallel",
        marks=pytest.mark.thorough,
    ),
    *(
        pytest.param(
            {"zero": zero, **more},
            id=f"{zero}-{name}",
            marks=pytest.mark.thorough if zero in quicker else pytest.mark.slow,
        )
        for zero in range(4)
        for name, more, quicker in (
            ("data", {}, (0,)),
            ("microbatches", {"num_microbatches": 2}, (2, 3)),
            ("stages", {"mesh": {"data": 4, "stage": 2}, "num_microbatches": 2}, (1, 3)),
        )
    ),
]


@pytest.mark.thorough
def test_tensor_parallelism_sends_nothing_more():
    """The loop works on the heads of each device: its collectives are those of stored scores."""
    sent = {}
    for attention in ("xla", "chunked"):
        plan = plan_for(grouped(attention), mesh={"data": 4, "model": 2}, zero=3)
        step = build_step(plan).lower(plan.abstract_state, plan.abstract_batch).compile()
        kinds = re.findall(
            r" = (\S+) (all-\w+|reduce-scatter|collective-permute)\(", step.as_text()
        )
        sent[attention] = sorted(kinds)
    assert len(sent["xla"]) > 5
    assert sent["chunked"] == sent["xla"]


@functools.cache
def one_device():
    return train_for(grouped("xla"), devices=1)


@pytest.mark.parametrize("options", ROWS)
def test_a_model_in_chunks_trains_as_one_device_with_stored_scores(options, monkeypatch):
    monkeypatch.setattr(chunked_attention, "BLOCK", 4)
    expected = one_device()
    found = train_for(grouped("chunked"), persistence_threshold=0, **options)
    np.testing.assert_allclose(found.losses, expected.losses, rtol=0, atol=TOLERANCE)


@pytest.mark.thorough
def test_a_checkpoint_that_keeps_attention_trains_alike(monkeypatch):
    monkeypatch.setattr(chunked_attention, "BLOCK", 4)
    expected = one_device()
    found = train_for(grouped("chunked", "attention"), zero=3, persistence_threshold=0)
    np.testing.assert_allclose(found.losses, expected.losses, rtol=0, atol=TOLERANCE)
