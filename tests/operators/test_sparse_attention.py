"""Attention by block layouts is that of the dense mask, and computes the listed tiles alone.

Tolerances: sums of up to 70 products of float32, as in `test_attention`. Gradients of keys and
values are sums over the heads that share them, and held to that of each head.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import zerojax
from tests.operators.test_attention import (
    BACKWARDS,
    CLOSE,
    PACKED,
    PADDED,
    TOKENS,
    all_of,
    inputs,
    largest_array,
    written_out,
)
from tests.support.hugging_face_folders import write_folder
from tests.support.trajectories import TOLERANCE, plan_for, train_for
from zerojax.config import (
    BigBirdLayout,
    BSLongformerLayout,
    FixedLayout,
    SlidingWindowLayout,
    VariableLayout,
)
from zerojax.operators import BlockTable, chunked_attention, layout_table
from zerojax.operators.attending import calls_of_attention
from zerojax.operators.attention_tiles import Extent, tiles_of
from zerojax.operators.marks import inner_programs
from zerojax.step.build import build_step
from zerojax.tracing.batch_rows import follow_rows
from zerojax.tracing.row_dependence import Fixed, Rows, Total
from zerojax.training.run_file import _model_of
from zerojax.zoo.hugging_face import describe_model

SIZE = 4
LAYOUTS = {
    "fixed": FixedLayout(block=SIZE),
    "fixed, patterns": FixedLayout(
        block=SIZE, different_layout_per_head=True, num_different_global_patterns=4
    ),
    "variable": VariableLayout(block=SIZE, local_window_blocks=(1, 3), num_random_blocks=2),
    "bigbird": BigBirdLayout(block=SIZE),
    "bigbird, heads": BigBirdLayout(block=SIZE, different_layout_per_head=True, seed=3),
    "bslongformer": BSLongformerLayout(block=SIZE, global_block_indices=(2, 9)),
    "sliding window": SlidingWindowLayout(block=SIZE),
    "large blocks": BigBirdLayout(block=32, num_sliding_window_blocks=1),
}
CASES = {
    "all": {},
    "causal": {"causal": True},
    "window": {"window": 9},
    "causal, packed": {"causal": True, "segments": PACKED},
    "texts and padding": {"causal": True, "segments": PADDED, "window": 20},
    "positions": {"causal": True, "positions": BACKWARDS},
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(chunked_attention, "BLOCK", 16)


@pytest.mark.thorough
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_those_of_the_mask(case, layout, kv_heads):
    arrays, layout = inputs(kv_heads=kv_heads), LAYOUTS[layout]
    masked = all_of("xla", arrays, layout=layout, **CASES[case])
    table = layout_table(layout, num_heads=4, num_tokens=TOKENS)
    np.testing.assert_allclose(
        masked[0], written_out(*arrays[:3], table, **CASES[case]), **CLOSE, err_msg="the reference"
    )
    tiled = all_of("chunked", arrays, layout=layout, **CASES[case])
    shared = 4 // kv_heads
    for found, expected, sums in zip(tiled, masked, (1, 1, shared, shared), strict=True):
        np.testing.assert_allclose(found / sums, expected / sums, **CLOSE)


@pytest.mark.thorough
@pytest.mark.parametrize("implementation", ["xla", "chunked"])
@pytest.mark.parametrize("layout", ["bigbird, heads", "bigbird"])
def test_one_bit_of_a_table_that_is_flipped_is_seen(implementation, layout):
    """The comparison above would fail: values and gradients differ by far more than it allows."""
    arrays = inputs(kv_heads=2)
    table = layout_table(LAYOUTS[layout], num_heads=4, num_tokens=TOKENS)
    right = all_of(implementation, arrays, layout=table)
    for shown in (True, False):
        head, row, column = np.argwhere(table.seen == shown)[len(table.seen) * 20]
        seen = table.seen.copy()
        seen[head, row, column] = not shown
        wrong = all_of(implementation, arrays, layout=dataclasses.replace(table, seen=seen))
        for a, b in zip(right, wrong, strict=True):
            assert np.max(np.abs(a - b)) > 1e-3


@pytest.mark.parametrize("implementation", ["xla", "chunked"])
def test_a_table_that_shows_nothing_gives_zeros(implementation):
    nothing = BlockTable(SIZE, np.zeros((1, 18, 18), bool))
    for array in all_of(implementation, inputs(), layout=nothing):
        np.testing.assert_array_equal(array, 0)


@pytest.mark.parametrize("implementation", ["xla", "chunked"])
def test_a_longer_table_is_cut_and_needs_no_equal_sides(implementation):
    query, key, value, _ = inputs(queries=30, keys=TOKENS)
    table = layout_table(FixedLayout(block=SIZE, num_local_blocks=3), num_heads=4, num_tokens=200)
    attend = functools.partial(zerojax.attention, layout=table, implementation=implementation)
    found = jax.jit(attend)(query, key, value)
    whole = jnp.pad(query, [(0, 0), (0, TOKENS - 30), (0, 0), (0, 0)])
    expected = written_out(whole, key, value, table.cut(TOKENS, TOKENS))[:, :30]
    np.testing.assert_allclose(found, expected, **CLOSE)


def test_lower_precision_rounds_alone():
    """bfloat16 rounds operands and results: 2^-8 of values up to 4."""
    arrays = inputs(kv_heads=2)
    exact = all_of("xla", arrays, layout=LAYOUTS["bigbird"])
    rounded = tuple(x.astype(jnp.bfloat16) for x in arrays)
    for found, expected in zip(
        all_of("chunked", rounded, layout=LAYOUTS["bigbird"]), exact, strict=True
    ):
        assert found.dtype == jnp.bfloat16
        np.testing.assert_allclose(found.astype(jnp.float32), expected, rtol=0, atol=0.06)


def test_a_summed_loss_is_seen_through_a_layout():
    def loss(weight, rows, layout):
        x = rows[:, :, None] @ weight
        x = x.reshape(2, TOKENS, 2, 4)
        out = zerojax.attention(x, x, x, layout=layout, implementation="chunked")
        return jnp.sum(out**2)

    for layout in (LAYOUTS["bigbird"], LAYOUTS["bigbird, heads"]):
        run = functools.partial(loss, layout=layout)
        program = jax.make_jaxpr(run)(jnp.ones((8, 8)), jnp.ones((2, TOKENS, 8)))
        assert follow_rows(program, [Fixed(0), Rows(0)], 2) == [Total()]


# --- work -----------------------------------------------------------------------------------------


def scores_computed(function, *shapes, features):
    """Scores that a program computes, from the products that it holds and the turns of its loops.

    A tile's products have `features` on one side of each score: 2 forward and 5 backward.
    """

    def products(jaxpr):
        total = 0
        for equation in jaxpr.eqns:
            turns = equation.params["length"] if equation.primitive.name == "scan" else 1
            for inner in inner_programs(equation.params):
                total += turns * products(inner)
            if equation.primitive.name == "dot_general":
                (left, _), _ = equation.params["dimension_numbers"]
                shape = equation.invars[0].aval.shape
                summed = np.prod([shape[d] for d in left])
                total += int(np.prod(equation.outvars[0].aval.shape) * summed)
        return total

    return products(jax.make_jaxpr(function)(*shapes).jaxpr) / features


def gradient(*, features=8, heads=4, tokens=1024, **options):
    attend = functools.partial(zerojax.attention, implementation="chunked", **options)
    shape = jax.ShapeDtypeStruct((1, tokens, heads, features), jnp.float32)

    def loss(query, key, value):
        return jnp.sum(attend(query, key, value) ** 2)

    return jax.grad(loss, (0, 1, 2)), (shape,) * 3


WORK = {  # of all scores; causal attention without a layout computes 0.5625
    "fixed": (FixedLayout(attention="unidirectional"), {"causal": True}, 0.21),
    "fixed, patterns": (
        FixedLayout(different_layout_per_head=True, num_different_global_patterns=4),
        {},
        0.32,
    ),
    "bigbird": (BigBirdLayout(), {}, 0.08),
    "bigbird, causal": (BigBirdLayout(attention="unidirectional"), {"causal": True}, 0.04),
    "bslongformer": (BSLongformerLayout(num_sliding_window_blocks=5), {}, 0.1),
    "sliding window": (SlidingWindowLayout(), {"causal": True}, 0.036),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", WORK)
def test_products_are_those_of_the_listed_tiles(case, monkeypatch):
    """4096 tokens in blocks of 16; without a layout all 4096 x 4096 scores are computed."""
    monkeypatch.setattr(chunked_attention, "BLOCK", 512)
    layout, options, most = WORK[case]
    program, shapes = gradient(layout=layout, tokens=4096, **options)
    computed = scores_computed(program, *shapes, features=8)
    table = layout_table(layout, num_heads=4, num_tokens=4096)
    tiles = tiles_of(extent(table, causal=options.get("causal", False), tokens=4096))
    assert computed == 7 * 4 * tiles.num_scores
    assert table.share < tiles.num_scores / 4096**2 <= most
    dense, shapes = gradient(tokens=4096)
    assert scores_computed(dense, *shapes, features=8) == 7 * 4 * 4096**2


def extent(table, *, causal, tokens=1024):
    return Extent(
        queries=tokens,
        keys=tokens,
        block=512,
        causal=causal,
        window=None,
        has_positions=False,
        table=table,
        groups=1,
    )


def test_a_compiled_program_has_as_many_turns_as_tiles_and_no_array_of_all_scores(monkeypatch):
    monkeypatch.setattr(chunked_attention, "BLOCK", 512)
    layout = SlidingWindowLayout()
    program, shapes = gradient(layout=layout, causal=True)
    compiled = jax.jit(program).lower(*shapes).compile()
    tiles = tiles_of(extent(layout_table(layout, num_heads=4, num_tokens=1024), causal=True))
    turns = re.findall(r'"known_trip_count":\{"n":"(\d+)"\}', compiled.as_text())
    assert turns.count(str(len(tiles.places))) >= 2, "one loop forward, one backward"
    assert largest_array(compiled) < 1024**2 / 4


@pytest.mark.sampled(6)
@pytest.mark.parametrize("layout", [*LAYOUTS, "nothing"])
@pytest.mark.parametrize("causal", [False, True])
def test_tiles_hold_each_pair_of_blocks_that_is_seen_once(layout, causal):
    """Entry by entry: a place beyond the blocks shows nothing, and no other entry is left out."""
    table = BlockTable(SIZE, np.zeros((4, 18, 18), bool))
    if layout in LAYOUTS:
        table = layout_table(LAYOUTS[layout], num_heads=4, num_tokens=TOKENS)
    heads, blocks = len(table.seen), table.seen.shape[1]
    given = dataclasses.replace(extent(table, causal=causal, tokens=TOKENS), block=16, groups=2)
    tiles = tiles_of(given)
    shown = np.zeros((heads, blocks + 16, blocks + 4096), int)
    parts = tiles.query_block // table.block
    for turn, (row, *columns) in enumerate(tiles.places):
        columns = np.reshape(columns, (tiles.heads, -1))
        assert all(len(set(one)) == len(one) for one in columns), (
            "a sum over blocks needs them apart"
        )
        for head in range(heads):
            own = head // 2 if heads > 1 else 0
            bits = np.ones((parts, columns.shape[1]), bool)
            if tiles.seen is not None:
                bits = tiles.seen[turn][own, head % 2 if heads > 1 else 0]
            first = row * parts
            np.add.at(shown[head], (slice(first, first + parts), columns[own]), bits)
    assert not shown[:, blocks:].any()
    assert not shown[:, :, blocks:].any()
    expected = table.seen & given.may_see(table.block)
    np.testing.assert_array_equal(shown[:, :blocks, :blocks], expected)


# --- what is said, and what is refused ------------------------------------------------------------


def said(tokens=1024, implementation="auto", **options):
    shape = jax.ShapeDtypeStruct((1, tokens, 4, 8), jnp.float32)
    run = functools.partial(zerojax.attention, implementation=implementation, **options)
    with calls_of_attention() as calls:
        jax.eval_shape(run, shape, shape, shape)
    (call,) = calls
    return call.describe()


def test_the_shares_are_said(monkeypatch):
    monkeypatch.setattr(chunked_attention, "BLOCK", 512)
    layout = SlidingWindowLayout()
    assert said(layout=layout, causal=True) == (
        "attention chunked (auto: the call has a layout): stores 128 x 144 of the 1024 x 1024 "
        "scores of each head at a time; computes 14.1% of these scores; layout "
        "sliding_window, blocks of 16, makes 3.1% of them visible"
    )
    assert said(layout=layout, implementation="xla") == (
        "attention xla (set by the call): stores all 1024 x 1024 scores of each head; computes "
        "100.0% of these scores; layout sliding_window, blocks of 16, makes 3.1% of them visible"
    )
    assert "; computes 75.0% of these scores" in said(
        window=200, causal=True, implementation="chunked"
    )


# --- models ---------------------------------------------------------------------------------------


def decoder(layout, attention="auto"):
    sizes = {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "embed_dim": 16, "max_seq_len": 32}
    config = zerojax.zoo.LlamaConfig(
        vocab_size=32, attention=attention, attention_layout=layout, **sizes
    )
    return lambda rngs: zerojax.zoo.Llama(config, rngs=rngs)


MODEL_LAYOUT = BigBirdLayout(
    block=2, attention="unidirectional", different_layout_per_head=True, seed=2
)


@pytest.mark.thorough
def test_a_model_generates_by_its_layout():
    """Tokens after a cache see the blocks that they see in the whole row."""
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 32, (2, 12)))
    model = decoder(MODEL_LAYOUT)(nnx.Rngs(0))
    whole = nnx.jit(zerojax.zoo.Llama.hidden)(model, tokens)
    extend = nnx.jit(zerojax.zoo.Llama.extend)
    first, cache = extend(model, tokens[:, :5], model.init_cache(2, 17), jnp.int32(0))
    found = [first]
    for place in range(5, 12):
        hidden, cache = extend(model, tokens[:, place : place + 1], cache, jnp.int32(place))
        found.append(hidden)
    np.testing.assert_allclose(jnp.concatenate(found, axis=1), whole, rtol=0, atol=1e-6)
    dense = nnx.jit(zerojax.zoo.Llama.hidden)(decoder(None)(nnx.Rngs(0)), tokens)
    assert np.max(np.abs(dense - whole)) > 1e-3


@pytest.mark.thorough
def test_a_short_row_has_a_part_of_the_layout_of_the_longest():
    layout = VariableLayout(block=2, num_random_blocks=2, local_window_blocks=(1,), seed=5)
    found = decoder(layout)(nnx.Rngs(0)).blocks.attention
    assert found.layout == layout
    table = layout_table(layout, num_heads=4, num_tokens=32).cut(9, 9)
    own = layout_table(layout, num_heads=4, num_tokens=9)
    assert np.any(table.seen != own.seen), "the random blocks of 9 tokens are others"
    tokens = jnp.arange(9)[None]
    with calls_of_attention() as calls:
        jax.eval_shape(decoder(layout)(nnx.Rngs(0)).hidden, tokens)
    assert {call.layout for call in calls} == {table}


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_other_reference_models_take_a_layout(kind):
    layout = FixedLayout(block=2, num_local_blocks=2)
    sizes = {"num_layers": 1, "num_heads": 2, "embed_dim": 8, "max_seq_len": 16, "vocab_size": 32}
    config, model = {
        "gpt2": (zerojax.zoo.GPT2Config, zerojax.zoo.GPT2),
        "bert": (zerojax.zoo.BertConfig, zerojax.zoo.Bert),
    }[kind]
    tokens = jnp.arange(12)[None]
    weights = nnx.state(model(config(**sizes), rngs=nnx.Rngs(0)))

    def logits(name, given):
        make = config(attention_layout=given, attention=name, **sizes)
        graph, _ = nnx.split(nnx.eval_shape(lambda: model(make, rngs=nnx.Rngs(0))))
        return jax.jit(lambda values: nnx.merge(graph, values)(tokens))(weights)

    asked = ("xla", layout), ("chunked", layout), ("auto", None)
    found = {name: logits(name, given) for name, given in asked}
    np.testing.assert_allclose(found["chunked"], found["xla"], **CLOSE)
    assert np.max(np.abs(found["auto"] - found["xla"])) > 1e-5
    with pytest.raises(ValueError, match="use at most 8"):
        config(attention_layout=BigBirdLayout(block=2, num_random_blocks=9), **sizes)


def test_a_run_file_has_a_layout():
    overrides = ["attention_layout.mode=bigbird", "model.attention_layout.block=32"]
    model = zerojax.config.load(zerojax.config.RunConfig, None, overrides).model
    assert model.attention_layout.layout == BigBirdLayout(block=32)
    sizes = zerojax.zoo.as_decoder_config(model, 256)
    assert sizes.attention_layout == BigBirdLayout(block=32)
    assert zerojax.config.ModelConfig().attention_layout.layout is None
    written = zerojax.config.to_dict(model)
    assert zerojax.config.from_dict(zerojax.config.ModelConfig, written) == model


def test_a_pretrained_model_takes_the_layout_of_its_run_file(tmp_path):
    folder = write_folder(tmp_path / "llama", "llama")
    layout = {"mode": "sliding_window", "block": 2}
    config = zerojax.config.ModelConfig(pretrained=str(folder), attention_layout=layout)
    model = _model_of(config, vocab_size=1)
    assert model.config.attention_layout == SlidingWindowLayout(block=2)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"mode": "longformer"}, "attention_layout.mode: .* did you mean 'bslongformer'"),
        ({"block": 32}, "attention_layout.block: 32 has no effect without a layout; set mode"),
        ({"mode": "bigbird", "num_local_blocks": 2}, "bigbird has no such key; it has block"),
        ({"mode": "fixed", "num_global_blocks": 3}, r"does not divide num_local_blocks \(4\)"),
    ],
    ids=str,
)
def test_a_section_that_cannot_be_is_refused(given, words):
    with pytest.raises(zerojax.config.ConfigError, match=words):
        zerojax.config.ModelConfig(attention_layout=given)


def test_the_plan_names_the_shares_of_a_model():
    plan = plan_for(decoder(MODEL_LAYOUT))
    (said,) = [reason for reason in plan.reasons if "layout" in reason]
    assert said.startswith("attention chunked (auto: the call has a layout): stores ")
    assert "; layout bigbird, blocks of 2, makes " in said


def test_a_layout_is_not_exported_as_a_model_that_sees_all():
    with pytest.raises(
        zerojax.errors.UnsupportedError, match="attention_layout=bigbird .*Hugging Face's"
    ):
        describe_model(zerojax.models.as_model(decoder(MODEL_LAYOUT)))


ROWS = {
    "3-tensor parallel": {"zero": 3, "mesh": {"data": 4, "model": 2}},
    "1": {"zero": 1},
    "2": {"zero": 2, "num_microbatches": 2},
    "0-stages": {"zero": 0, "mesh": {"data": 4, "stage": 2}, "num_microbatches": 2},
}


@pytest.mark.thorough
@pytest.mark.parametrize("options", ROWS.values(), ids=ROWS)
def test_a_model_with_a_layout_trains_as_one_device_with_the_mask(options, monkeypatch):
    monkeypatch.setattr(chunked_attention, "BLOCK", 8)
    expected = train_for(decoder(MODEL_LAYOUT, "xla"), devices=1)
    found = train_for(decoder(MODEL_LAYOUT), persistence_threshold=0, **options)
    np.testing.assert_allclose(found.losses, expected.losses, rtol=0, atol=TOLERANCE)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "layout", [MODEL_LAYOUT, SlidingWindowLayout(block=2)], ids=["heads", "one"]
)
def test_tensor_parallelism_sends_nothing_more_for_a_layout(layout):
    sent = {}
    for attention in ("xla", "chunked"):
        plan = plan_for(decoder(layout, attention), mesh={"data": 4, "model": 2}, zero=3)
        step = build_step(plan).lower(plan.abstract_state, plan.abstract_batch).compile()
        kinds = r" = (\S+) (all-\w+|reduce-scatter|collective-permute)\("
        sent[attention] = sorted(re.findall(kinds, step.as_text()))
    assert len(sent["xla"]) > 5
    assert sent["chunked"] == sent["xla"]
