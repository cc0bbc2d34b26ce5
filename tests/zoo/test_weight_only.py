"""Weights and caches of int8 codes: the logits of the rounded weights, keys and values."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import zerojax
from tests.support.refusals import refused
from tests.support.small_models import VOCAB, reference_model
from zerojax.config import MoEConfig
from zerojax.operators.rounded_weights import (
    coded_dot,
    codes_and_scales,
    encoded,
    encoded_rows,
    float8_and_scales,
    rounded,
)
from zerojax.operators.stored_attention import masked_attention
from zerojax.zoo.generation import generate
from zerojax.zoo.layers import Projection
from zerojax.zoo.weight_only import is_faster_apart, with_codes, with_layers_apart

TOKENS = np.random.default_rng(0).integers(0, VOCAB, (3, 9))
SUMS = 2e-6
"""Float32 products are rounded before they are multiplied by the scale, not after it."""
LORA = zerojax.LoraConfig(rank=2, targets=("attention/query", "mlp/up"))


def cast(model: nnx.Module, dtype: str) -> nnx.Module:
    graphdef, state = nnx.split(model)
    wide = lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x  # noqa: E731
    return nnx.merge(graphdef, jax.tree.map(wide, state))


def logits_of(model, dtype=None):
    """In two parts, so that the second reads the cache of the first."""
    cache = model.init_cache(len(TOKENS), 16, dtype)
    extend = jax.jit(lambda *args: model.extend(*args))
    first, cache = extend(TOKENS[:, :5], cache, jnp.int32(0))
    second, _ = extend(TOKENS[:, 5:], cache, jnp.int32(5))
    return np.asarray(model.head(jnp.concatenate([first, second], axis=1)), np.float32)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_logits_are_those_of_the_rounded_weights(name):
    model = reference_model(name)(nnx.Rngs(0))
    found = logits_of(with_codes(model, "int8"))
    rounding = reference_model(name, matmul_dtype="fake_int8")(nnx.Rngs(0))
    np.testing.assert_allclose(found, rounding(TOKENS), atol=SUMS)
    assert abs(found - logits_of(model)).max() > 100 * SUMS
    trained_for_it = with_codes(rounding, "int8")
    np.testing.assert_array_equal(logits_of(trained_for_it), found)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["llama", "with experts"])
def test_layers_apart_give_the_same_logits(name):
    """In the parameters' dtype bit for bit, and in another one as the cast model."""
    moe = MoEConfig(num_experts=4, experts_per_token=2) if name == "with experts" else None
    adapters = zerojax.LoraConfig(rank=2, targets=("attention/query",))
    model = zerojax.add_lora(reference_model("llama", moe=moe), adapters)(nnx.Rngs(0))
    apart = with_layers_apart(model)
    assert apart.blocks[0].attention_norm.scale.shape == model.blocks.attention_norm.scale.shape[1:]
    np.testing.assert_array_equal(logits_of(apart), logits_of(model))
    halves = with_layers_apart(cast(model, "bfloat16"))
    narrow = with_layers_apart(model, dtype=jnp.bfloat16)
    leaves = (jax.tree.leaves(nnx.state(each.blocks)) for each in (narrow, halves))
    for one, other in zip(*leaves, strict=True):
        assert one.dtype == jnp.bfloat16
        np.testing.assert_array_equal(one, other)
    assert not is_faster_apart(model, "cpu")
    assert is_faster_apart(model, "gpu") == (moe is None)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_so_they_are_in_sixteen_bits(dtype):
    """To the rounding of the activations: a few units in the last place of the largest logit."""
    model = cast(reference_model("llama")(nnx.Rngs(0)), dtype)
    found = logits_of(with_codes(model, "int8"))
    rounding = cast(reference_model("llama", matmul_dtype="fake_int8")(nnx.Rngs(0)), dtype)
    expected = np.asarray(rounding(TOKENS), np.float32)
    unit = float(jnp.finfo(dtype).eps) * abs(expected).max()
    np.testing.assert_allclose(found, expected, atol=4 * unit)


@pytest.mark.thorough
def test_adapters_are_added_to_the_products_of_codes():
    """The kernels are rounded and the adapters are not."""
    model = zerojax.add_lora(reference_model("llama"), LORA)(nnx.Rngs(0))
    for projection in (model.blocks.attention.query, model.blocks.mlp.up):
        projection.lora.b[...] = jnp.full_like(projection.lora.b[...], 0.05)
    found = logits_of(with_codes(model, "int8"))
    for _, part in nnx.iter_modules(model.blocks):
        if isinstance(part, Projection):
            round_all = jax.vmap(functools.partial(rounded_kernel, part.num_inputs))
            part.kernel[...] = round_all(part.kernel[...])
    np.testing.assert_allclose(found, logits_of(model), atol=SUMS)
    plain = with_codes(reference_model("llama")(nnx.Rngs(0)), "int8")
    assert abs(found - logits_of(plain)).max() > 100 * SUMS


def rounded_kernel(num_inputs, kernel):
    flat = kernel.reshape(np.prod(kernel.shape[:num_inputs]), -1)
    return rounded(jnp, flat, "int8").reshape(kernel.shape)


def test_a_product_with_codes_is_that_with_the_rounded_kernel():
    """Also if the sum of codes exceeds the range of float16, and with weights that are not
    finite."""
    draw = np.random.default_rng(1).normal
    x, kernel = draw(size=(2, 1024)), draw(size=(1024, 3, 4))
    for dtype in (jnp.float32, jnp.float16):
        own = jnp.asarray(kernel, dtype)
        codes, scales = encoded(own, "int8", 1)
        found = coded_dot(jnp.asarray(abs(x), dtype), abs(codes), scales, 1)
        values = rounded(np, np.asarray(own).reshape(1024, 12), "int8").astype(np.float64)
        expected = np.asarray(abs(x).astype(dtype), float) @ abs(values)
        # Sums of 1024 terms in float32, and a result in float16.
        rtol = 4e-6 if dtype == jnp.float32 else 4 * float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(found.reshape(2, 12), expected, rtol=rtol)
    for bad in (np.nan, np.inf):
        codes, scales = encoded(jnp.asarray(kernel).at[5, 0, 0].set(bad), "int8", 1)
        found = coded_dot(jnp.asarray(x, jnp.float32), codes, scales, 1)
        assert not np.isfinite(found[:, 0, 0]).any()
        assert np.isfinite(found[:, 1:]).all()


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_8_bit_floats_are_the_nearest_to_the_weights(dtype):
    """To the rounding of a float32 product; compiled and in NumPy, as in an export, the same."""
    random = np.random.default_rng(3)
    kernel = random.normal(size=(300, 7)) * np.exp(random.normal(size=(300, 7)))
    kernel[:, 1], kernel[3, 2] = 0, 0
    kernel = np.asarray(jnp.asarray(kernel, dtype))
    codes, scales = float8_and_scales(np, kernel)
    compiled = jax.jit(lambda x: encoded(x, "fp8", 1))(kernel)
    np.testing.assert_array_equal(np.asarray(compiled[0], np.float32), codes.astype(np.float32))
    np.testing.assert_array_equal(np.asarray(compiled[1], np.float32), scales[0])
    every = np.arange(256, dtype=np.uint8).view(codes.dtype).astype(np.float64)
    every = every[np.isfinite(every)]
    wide = kernel.astype(np.float64)[..., None]
    best = abs(every * scales[..., None] - wide).min(-1)
    error = abs(codes.astype(np.float64) * scales - wide[..., 0])
    assert (error <= best * (1 + 1e-6) + 1e-7 * abs(wide[..., 0])).all()
    assert abs(codes.astype(np.float32)).max() == 448
    scale = encoded(jnp.asarray(kernel).at[5, 0].set(np.inf), "fp8", 1)[1]
    assert np.isnan(float(scale[0]))
    assert np.isfinite(np.asarray(scale[1:], np.float32)).all()


@pytest.mark.parametrize("size", [5e-4, 5e-3, 0.5])
def test_small_float16_weights_keep_their_codes(size):
    """Also with scales below the smallest normal float16; compiled and in NumPy the same."""
    kernel = np.float16(size * np.random.default_rng(5).uniform(-1, 1, (300, 7)))
    for kind in ("int8", "fp8"):
        options = () if kind == "fp8" else (kind,)
        encode = float8_and_scales if kind == "fp8" else codes_and_scales
        codes, scales = (x.astype(np.float32) for x in encode(np, kernel, *options))
        found = jax.jit(functools.partial(encoded, name=kind, num_inputs=1))(kernel)
        np.testing.assert_array_equal(found[0].astype(np.float32), codes.reshape(kernel.shape))
        np.testing.assert_array_equal(found[1], scales.reshape(7))
        # A code differs by 1/16 of itself at most, and a scale of 19 units by 1/38.
        assert abs(codes * scales - kernel).max() < 0.06 * abs(kernel).max()


@pytest.mark.thorough
def test_logits_with_8_bit_floats_are_those_of_the_decoded_weights():
    model = reference_model("llama")(nnx.Rngs(0))
    found = logits_of(with_codes(model, "fp8"))
    plain = logits_of(model)
    for _, part in nnx.iter_modules(model.blocks):
        if isinstance(part, Projection):
            decode = functools.partial(decoded_floats, part.num_inputs)
            part.kernel[...] = jax.vmap(decode)(part.kernel[...])
    np.testing.assert_allclose(found, logits_of(model), atol=SUMS)
    assert 100 * SUMS < abs(found - plain).max() < 0.1 * abs(plain).max()


def decoded_floats(num_inputs, kernel):
    codes, scales = encoded(kernel, "fp8", num_inputs)
    wide = codes.astype(jnp.float32)
    return wide * jnp.broadcast_to(scales, wide.shape)


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0, "sinks": np.ones(4, np.float32)}])
def test_attention_to_codes_is_that_to_the_decoded_keys_and_values(options):
    draw = np.random.default_rng(2).normal
    query = jnp.asarray(draw(size=(2, 3, 4, 8)), jnp.float32)
    key, value = (jnp.asarray(draw(size=(2, 6, 2, 8)), jnp.float32) for _ in range(2))
    seen = jnp.tril(jnp.ones((3, 6), bool), 3)[None, None]
    (keys, key_scales), (values, value_scales) = encoded_rows(key), encoded_rows(value)
    options = {**options, "seen": seen, "scale": 0.3}
    wide = keys.astype(jnp.float32), values.astype(jnp.float32)
    found = masked_attention(query, *wide, **options, code_scales=(key_scales, value_scales))
    decoded = wide[0] * key_scales[..., None], wide[1] * value_scales[..., None]
    np.testing.assert_allclose(found, masked_attention(query, *decoded, **options), atol=SUMS)
    largest = abs(key).max(-1, keepdims=True)
    assert (abs(decoded[0] - key) <= largest / 254 * 1.0001).all()


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_logits_change_little_with_a_cache_of_codes(name):
    """Keys and values change by at most 1/254 of the largest feature of a head; more than nothing,
    so that the codes are read."""
    model = reference_model(name)(nnx.Rngs(0))
    for each in (model, with_codes(model, "int8")):
        change = abs(logits_of(each, jnp.int8) - logits_of(each)).max()
        assert 1e-5 < change < 0.01 * abs(logits_of(each)).max()


@pytest.mark.thorough
def test_what_does_not_fit_is_refused():
    def model(**changes):
        return reference_model("llama", **changes)(nnx.Rngs(0))

    plain = model()
    refused(lambda: generate(plain, TOKENS, 2, quantize="int4"), "quantize='int4'", "int8")
    eight = model(matmul_dtype="fake_int8")
    refused(lambda: generate(eight, TOKENS, 2, quantize="fp8"), "fake_int8", "quantize")
    refused(lambda: generate(plain, TOKENS, 2, cache="fp8"), "cache='fp8'", "int8")
    experts = model(moe=MoEConfig(num_experts=4, experts_per_token=2))
    refused(lambda: generate(experts, TOKENS, 2, quantize="int8"), "4 experts", "quantize")
    four = model(matmul_dtype="fake_int4", mlp_dim=64)
    refused(lambda: generate(four, TOKENS, 2, quantize="int8"), "fake_int4", "quantize")
