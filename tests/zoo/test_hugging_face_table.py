"""The table of architectures: every array has tensors, every tensor its place, slices included."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from tests.support.hugging_face_folders import CASES, FAMILIES, case_of
from zerojax.tracing import trees
from zerojax.zoo import BertConfig, GPT2Config, LlamaConfig
from zerojax.zoo.hugging_face import ARCHITECTURES, UnsupportedError, architecture_of
from zerojax.zoo.hugging_face.config_reading import _KIND_OF, _NUMBER, _WHOLE
from zerojax.zoo.hugging_face.layouts import RowsOfTensor, parse_layout
from zerojax.zoo.rope import RopeScaling, rotary_frequencies

SIZES = {"vocab_size": 20, "max_seq_len": 8, "num_layers": 3, "num_heads": 4, "embed_dim": 16}
CONFIGS = {
    "gpt2": GPT2Config(**SIZES),
    "gpt2 untied": GPT2Config(**SIZES, tie_embeddings=False, mlp_dim=24),
    "llama": LlamaConfig(**SIZES, num_kv_heads=2, mlp_dim=24),
    "llama tied, wide heads": LlamaConfig(
        **SIZES, num_kv_heads=2, mlp_dim=24, head_dim=6, tie_embeddings=True
    ),
    "bert": BertConfig(**SIZES, mlp_dim=24),
    "bert without a head": BertConfig(**SIZES, has_mlm_head=False, has_pooler=True),
    "bert of two heads": BertConfig(**SIZES, has_pooler=True, exact_gelu=False),
}

LAYOUTS = [
    ("vocab embed", 0, {"vocab": 5, "embed": 4}),
    ("mlp embed -> embed mlp", 0, {"mlp": 6, "embed": 4}),
    ("(heads dim) embed -> embed heads dim", 0, {"heads": 3, "dim": 4, "embed": 2}),
    ("embed (3 heads dim) -> embed heads dim", 1, {"heads": 2, "dim": 4, "embed": 2}),
    ("(heads 3 dim) -> heads dim", 2, {"heads": 4, "dim": 3}),
]


def shapes_of(config) -> dict[str, tuple[int, ...]]:
    row = next(x for x in ARCHITECTURES.values() if isinstance(config, x.config_class))
    state = jax.eval_shape(lambda: nnx.state(row.build(config, nnx.Rngs(0)), nnx.Param))
    flat = {trees.path_name(path): x for path, x in nnx.to_flat_state(state)}
    return {name: tuple(variable.get_raw_value().shape) for name, variable in flat.items()}


def rows_of(config):
    return next(x for x in ARCHITECTURES.values() if isinstance(config, x.config_class))


@pytest.mark.parametrize("name", CONFIGS)
def test_every_parameter_has_one_row(name):
    config = CONFIGS[name]
    leaves = rows_of(config).leaves(config)
    assert sorted(leaf.name for leaf in leaves) == sorted(shapes_of(config))


@pytest.mark.parametrize("name", CONFIGS)
def test_layouts_fit_the_shapes_and_fill_every_tensor(name):
    """As many elements in their tensors as in our arrays: nothing is left out or taken twice."""
    config, shapes = CONFIGS[name], shapes_of(CONFIGS[name])
    tensors: dict[str, int] = {}
    for leaf in rows_of(config).leaves(config):
        shape = shapes[leaf.name]
        for layer in range(shape[0] if leaf.is_stacked else 1):
            own = shape[1:] if leaf.is_stacked else shape
            tensors[leaf.tensor_of(layer)] = math.prod(leaf.layout.their_shape(own))
    assert sum(tensors.values()) == sum(math.prod(shape) for shape in shapes.values())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CONFIGS)
def test_settings_come_back(name):
    config = CONFIGS[name]
    row = rows_of(config)
    written = {"model_type": row.model_type, **row.write_config(config)}
    back = row.config_class(**architecture_of(written).read_config(written))
    assert row.write_config(back) == row.write_config(config)
    assert shapes_of(back) == shapes_of(config)


@pytest.mark.parametrize(("text", "part", "sizes"), LAYOUTS)
def test_every_slice_is_found_in_their_tensor(text, part, sizes):
    """All slices of a small array, read run by run, beside the whole array sliced."""
    layout = parse_layout(text, part)
    shape = tuple(sizes[name] for name in layout.ours)
    ours = np.arange(math.prod(shape)).reshape(shape)
    theirs = np.full(layout.their_shape(shape), -1)
    layout.to_theirs(ours, theirs)
    ranges = [list(itertools.combinations(range(size + 1), 2)) for size in shape]
    for index in itertools.product(*ranges):
        runs = layout.their_runs(shape, index)
        picked = theirs[np.ix_(*[np.r_[tuple(slice(*run) for run in dim)] for dim in runs])]
        wanted = ours[tuple(slice(*taken) for taken in index)]
        np.testing.assert_array_equal(layout.to_ours(picked, index), wanted)
        assert picked.size == wanted.size, "reads no more than it needs"


def test_slices_of_unequal_parts_are_found_too():
    """Three arrays of 4, 2 and 2 heads, one after the other in one tensor."""
    text, counts, first, total = "(heads dim) embed -> embed heads dim", (4, 2, 2), 0, 8 * 3
    theirs = np.full((total, 5), -1)
    layouts = []
    for heads in counts:
        rows = RowsOfTensor(first, total)
        layouts.append(dataclasses.replace(parse_layout(text), rows=rows))
        first += heads * 3
    arrays = [np.arange(5 * n * 3).reshape(5, n, 3) + 1000 * i for i, n in enumerate(counts)]
    for layout, ours in zip(layouts, arrays, strict=True):
        assert layout.their_shape(ours.shape) == theirs.shape
        layout.to_theirs(ours, theirs)
    assert (theirs >= 0).all(), "every row belongs to one of them"
    for layout, ours in zip(layouts, arrays, strict=True):
        for index in (((0, 5), (0, ours.shape[1]), (0, 3)), ((1, 3), (1, 2), (0, 3))):
            runs = layout.their_runs(ours.shape, index)
            picked = theirs[np.ix_(*[np.r_[tuple(slice(*run) for run in dim)] for dim in runs])]
            wanted = ours[tuple(slice(*taken) for taken in index)]
            np.testing.assert_array_equal(layout.to_ours(picked, index), wanted)


@pytest.mark.parametrize(
    ("text", "part", "words"),
    [
        ("a b -> a c", 0, "both sides need the same dimensions"),
        ("a a", 0, "each once"),
        ("(3 a) -> a", 3, "part=3 must be from 0 to 2"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(text, part, words):
    with pytest.raises(ValueError, match=words):
        parse_layout(text, part)


LLAMA = {
    "model_type": "llama",
    "vocab_size": 20,
    "max_position_embeddings": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "hidden_size": 8,
    "intermediate_size": 8,
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "mamba"}, "model_type='mamba' .* llama"),
        ({"attention_bias": True}, "attention_bias=True, but the projections .* no biases"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu', .*only 'silu' or 'swish'"),
        ({"rope_scaling": {"rope_type": "twisted"}}, "type 'twisted'"),
        ({"rope_scaling": {"type": "llama3", "factor": 2.0}}, "no 'low_freq_factor"),
        ({"hidden_size": None}, "no 'hidden_size'"),
    ],
)
def test_what_would_be_another_model_is_refused(change, words):
    config = {**LLAMA, **change}
    with pytest.raises(UnsupportedError, match=words):
        architecture_of(config).read_config(config)


def untyped(case: str) -> dict[str, Any]:
    """A configuration whose periods say which layers differ, since no list does."""
    config = case_of(case)["config"]
    return config | {key: None for key in ("layer_types", "no_rope_layers") if key in config}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("case", [*CASES, *FAMILIES])
def test_a_number_of_a_config_is_taken_or_refused_in_a_sentence(case):
    """Each as 0, -1 and null: no division by zero, and no comparison with None."""
    numbers = [key for key, (_, kind) in _KIND_OF.items() if kind in (_NUMBER, _WHOLE)]
    configs = [case_of(case)["config"], untyped(case)]
    for config, key, value in itertools.product(configs, numbers, (0, -1, None)):
        row = architecture_of(config)
        with contextlib.suppress(ValueError):
            row.config_class(**row.read_config({**config, key: value}))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("case", "change", "words"),
    [
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0 must be above 0"),
        ("gemma2", {"query_pre_attn_scalar": None}, "query_pre_attn_scalar is null"),
        ("granite", {"logits_scaling": 0.0}, "logits_scaling=0.0 must be above 0"),
        ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval=0 must"),
        ("gemma3", {"sliding_window_pattern": 0}, "sliding_window_pattern=0 must be"),
        ("cohere2", {"sliding_window_pattern": 0}, "sliding_window_pattern=0 must be"),
        ("qwen3", {"rms_norm_eps": None}, "rms_norm_eps is null.* remove the key for 1e-06"),
        ("qwen3", {"rope_parameters": None, "rope_theta": 0}, "json: rope_theta=0 must be above"),
        ("qwen3", {"rope_parameters": {"rope_theta": 0}}, "rope_theta=0 must be above 0"),
        ("gemma3", {"rope_parameters": None, "rope_local_base_freq": 0}, "local_base_freq=0 must"),
        ("qwen3", {"hidden_size": 0}, "hidden_size=0 must be at least 1"),
    ],
)
def test_a_number_that_cannot_be_is_refused_by_its_key(case, change, words):
    config = untyped(case) | change
    with pytest.raises(UnsupportedError, match=words):
        architecture_of(config).read_config(config)


def test_a_base_that_is_null_is_the_default():
    plain = FAMILIES["qwen3"]["config"] | {"rope_parameters": None}
    read = [
        architecture_of(plain).read_config({**plain, **change})["kinds"][0].rope.theta
        for change in ({}, {"rope_theta": None}, {"rope_parameters": {"rope_theta": None}})
    ]
    assert read == [10000.0] * 3


def test_settings_of_transformers_5_are_those_of_4():
    rope = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope |= {"original_max_position_embeddings": 4, "rope_type": "llama3"}
    old = {**LLAMA, "rope_theta": 5e5, "rope_scaling": rope}
    new = {**LLAMA, "rope_parameters": {**rope, "rope_theta": 5e5}}
    read = architecture_of(LLAMA).read_config
    assert read(old) == read(new)
    assert read(old)["rope_theta"] == 5e5
    assert read(old)["rope_scaling"].kind == "llama3"
    assert read(LLAMA)["rope_scaling"] is None


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"kind": "twisted", "factor": 2.0},
            "'twisted' is unknown; use linear, dynamic, llama3, yarn or lon",
        ),
        ({"kind": "yarn", "factor": 2.0}, "needs original_max_seq_len"),
        (
            {"kind": "yarn", "factor": 2.0, "original_max_seq_len": 8, "beta_fast": 1.0},
            "beta_slow=1.0 must be above 0 and below beta_fast=1.0",
        ),
        (
            {"kind": "longrope", "factor": 2.0, "original_max_seq_len": 8, "short_factor": (1.0,)},
            "short_factor has 1 numbers and long_factor 0",
        ),
        ({"kind": "linear", "factor": 0.5}, "factor=0.5 must be at least 1"),
        ({"kind": "llama3", "factor": 8.0}, "needs original_max_seq_len"),
        (
            {"kind": "linear", "factor": 2.0, "low_freq_factor": 4.0},
            "low_freq_factor=4.0 must be above 0 and below high_freq_factor=4.0",
        ),
    ],
)
def test_scalings_that_cannot_be_are_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        RopeScaling(**fields)


def test_wavelengths_are_stretched_as_each_kind_says():
    """By the formulas, element by element, in float64."""
    plain = np.asarray(rotary_frequencies(8, 100.0))
    np.testing.assert_allclose(plain, 100.0 ** (-np.arange(8) / 8), rtol=1e-6)
    linear = RopeScaling(kind="linear", factor=4.0)
    np.testing.assert_allclose(rotary_frequencies(8, 100.0, linear), plain / 4, rtol=1e-6)
    dynamic = RopeScaling(kind="dynamic", factor=2.0, original_max_seq_len=10)
    for length in (4, 10):  # up to the length of training nothing changes
        np.testing.assert_array_equal(rotary_frequencies(8, 100.0, dynamic, seq_len=length), plain)
    base = 100.0 * (2 * 30 / 10 - 1) ** (16 / 14)
    longer = rotary_frequencies(8, 100.0, dynamic, seq_len=30)
    np.testing.assert_allclose(longer, base ** (-np.arange(8) / 8), rtol=1e-6)
    llama3 = RopeScaling(kind="llama3", factor=8.0, original_max_seq_len=64)
    for found, frequency in zip(rotary_frequencies(8, 100.0, llama3), plain, strict=True):
        wavelength = 2 * np.pi / frequency
        ramp = (64 / wavelength - 1) / (4 - 1)
        wanted = (1 - ramp) * frequency / 8 + ramp * frequency
        wanted = frequency if wavelength < 64 / 4 else wanted
        wanted = frequency / 8 if wavelength > 64 / 1 else wanted
        np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_yarn_keeps_short_waves_and_stretches_long_ones():
    """arXiv:2309.00071, equations 17 to 23, in float64; cosine and sine grow by its equation 22."""
    half, theta, factor, length = 16, 10000.0, 4.0, 1024
    scaling = RopeScaling(kind="yarn", factor=factor, original_max_seq_len=length)
    plain = theta ** (-np.arange(half) / half)
    ends = [half * np.log(length / (turns * 2 * np.pi)) / np.log(theta) for turns in (32, 1)]
    low, high = max(np.floor(ends[0]), 0), np.ceil(ends[1])
    ramp = np.clip((np.arange(half) - low) / (high - low), 0, 1)
    wanted = ramp * plain / factor + (1 - ramp) * plain
    found = rotary_frequencies(half, theta, scaling)
    np.testing.assert_allclose(found, wanted, rtol=2e-6)
    np.testing.assert_allclose(found[0], 1.0)
    np.testing.assert_allclose(found[-1], plain[-1] / factor, rtol=2e-6)
    assert scaling.magnitude == pytest.approx(0.1 * np.log(4.0) + 1.0)
    untruncated = rotary_frequencies(half, theta, dataclasses.replace(scaling, truncate=False))
    assert np.abs(np.asarray(untruncated) / wanted - 1).max() > 1e-3


def test_longrope_has_one_factor_for_each_pair_and_length():
    scaling = RopeScaling(
        kind="longrope",
        factor=4.0,
        original_max_seq_len=16,
        short_factor=(1.0, 1.5),
        long_factor=(2.0, 6.0),
    )
    for length, factors in ((16, (1.0, 1.5)), (17, (2.0, 6.0))):
        found = rotary_frequencies(2, 100.0, scaling, seq_len=length)
        np.testing.assert_allclose(found, np.array([1.0, 0.1]) / factors, rtol=1e-6)
    assert scaling.magnitude == pytest.approx((1 + np.log(4) / np.log(16)) ** 0.5)
