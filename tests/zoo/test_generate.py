"""Generation from the key/value cache against whole forward passes."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from zerojax.zoo import GPT2, Decoder, GPT2Config, Llama, LlamaConfig, generate

SIZES: dict[str, Any] = {
    "vocab_size": 13,
    "max_seq_len": 48,
    "num_layers": 2,
    "num_heads": 4,
    "embed_dim": 16,
}
GPT2_TINY = GPT2Config(**SIZES)
LLAMA_TINY = LlamaConfig(**SIZES, num_kv_heads=2, mlp_dim=24)


def build(config: GPT2Config | LlamaConfig) -> Decoder:
    """A model with weights so large that its likeliest token wins by more than rounding."""
    kind = GPT2 if isinstance(config, GPT2Config) else Llama
    graphdef, state = nnx.split(nnx.eval_shape(lambda: kind(config, rngs=nnx.Rngs(0))))
    generator = np.random.default_rng(0)

    def draw(shape: tuple[int, ...]) -> jax.Array:
        return jnp.asarray(0.2 * generator.standard_normal(shape), jnp.float32)

    params, rest = nnx.split_state(state, nnx.Param, ...)
    drawn = [
        (path, param.replace(draw(param.shape) + (path[-1] == "scale")))
        for path, param in nnx.to_flat_state(params)
    ]
    # Random state, where there is dropout: never drawn from here.
    keys = jax.tree.map(lambda value: jnp.zeros(value.shape, value.dtype), rest)
    return nnx.merge(graphdef, nnx.from_flat_state(drawn), keys)


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def model(request: pytest.FixtureRequest) -> Decoder:
    return build(GPT2_TINY if request.param == "gpt2" else LLAMA_TINY)


@pytest.fixture(scope="module")
def tokens() -> jax.Array:
    return jax.random.randint(jax.random.key(5), (3, 20), 0, SIZES["vocab_size"], jnp.int32)


@pytest.mark.thorough
def test_logits_from_the_cache_equal_those_of_the_whole_forward_pass(model, tokens):
    graphdef, state = nnx.split(model)

    @jax.jit
    def extend(tokens, cache, position):
        part = nnx.merge(graphdef, state)
        hidden, cache = part.extend(tokens, cache, position)
        return part.head(hidden), cache

    cache = model.init_cache(3, 32)
    # 7 tokens of prompt and 4 of padding, which the following tokens overwrite one by one.
    padded = jnp.pad(tokens[:, :7], [(0, 0), (0, 4)], constant_values=9)
    logits, cache = extend(padded, cache, 0)
    pieces = [logits[:, :7]]
    for position in range(7, 20):
        logits, cache = extend(tokens[:, position : position + 1], cache, position)
        pieces.append(logits)
    whole = jax.jit(lambda tokens: model(tokens))(tokens)
    assert float(whole.std()) > 0.1
    # The same float32 sums, over 32 masked positions instead of 20; logits are O(1).
    np.testing.assert_allclose(jnp.concatenate(pieces, axis=1), whole, rtol=0, atol=1e-5)


@pytest.mark.sampled(1)
def test_greedy_generation_equals_repeated_whole_forward_passes(model, tokens):
    forward = jax.jit(lambda tokens: model(tokens))
    expected = jnp.zeros((3, 16), jnp.int32).at[:, :6].set(tokens[:, :6])
    for length in range(6, 16):
        likeliest = jnp.argmax(forward(expected)[:, length - 1], axis=-1)
        expected = expected.at[:, length].set(likeliest.astype(jnp.int32))
    made = generate(model, tokens[:, :6], 10, temperature=0.0)
    assert made.dtype == jnp.int32
    np.testing.assert_array_equal(made, expected)
    assert len(np.unique(made[:, 6:])) > 2


@pytest.mark.thorough
def test_generation_may_fill_the_model_to_its_last_position(model, tokens):
    made = generate(model, tokens, 28, temperature=0.0)
    assert made.shape == (3, SIZES["max_seq_len"])
    logits = jax.jit(lambda tokens: model(tokens))(made[:, :-1])
    np.testing.assert_array_equal(made[:, -1], jnp.argmax(logits[:, -1], axis=-1))


@pytest.mark.thorough
def test_samples_have_the_probabilities_of_the_softmax(tokens):
    model = build(LLAMA_TINY)
    prompts = jnp.tile(tokens[:1, :5], (4096, 1))
    logits = jax.jit(lambda tokens: model(tokens))(tokens[:1, :5])[0, -1]
    for temperature, top_k in ((0.7, None), (1.5, 4)):
        drawn = generate(model, prompts, 1, temperature=temperature, top_k=top_k, seed=3)[:, -1]
        kept = np.asarray(logits / temperature)
        if top_k is not None:
            kept = np.where(kept < np.sort(kept)[-top_k], -np.inf, kept)
        expected = np.exp(kept - kept.max()) / np.exp(kept - kept.max()).sum()
        counted = np.bincount(drawn, minlength=13) / 4096
        # 5 standard deviations of a count of 4096 draws: 5 * 0.5 / 64.
        np.testing.assert_allclose(counted, expected, rtol=0, atol=0.04)
        assert not counted[expected == 0].any()
        assert expected.max() < 0.9


@pytest.mark.thorough
def test_ids_that_a_tokenizer_lacks_are_not_drawn(tokens):
    """Tables are often padded: Qwen's have more rows than its tokenizer has ids."""
    model = build(LLAMA_TINY)
    logits = np.asarray(model(tokens)[:, -1])
    few = int(logits.argmax(axis=-1).min()) or 1  # so that the likeliest id of one text is out
    kept = generate(model, tokens % few, 20, num_ids=few, seed=1)
    assert kept.max() < few
    likeliest = generate(model, tokens, 1, temperature=0.0, num_ids=few)[:, -1]
    np.testing.assert_array_equal(likeliest, logits[:, :few].argmax(axis=-1))


@pytest.mark.thorough
def test_the_seed_decides_the_samples(model, tokens):
    first, again, other = (generate(model, tokens, 10, seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    assert (first[0, 20:] != first[1, 20:]).any()
    greedy = generate(model, tokens, 10, temperature=0.0)
    np.testing.assert_array_equal(generate(model, tokens, 10, top_k=1, seed=4), greedy)


@pytest.mark.thorough
def test_prompts_of_similar_length_share_one_compilation(tokens, monkeypatch):
    model = build(dataclasses.replace(GPT2_TINY, num_layers=1))
    traces = []
    original = GPT2.look_up

    def counting(self, tokens, position):
        traces.append(tokens.shape)
        return original(self, tokens, position)

    monkeypatch.setattr(GPT2, "look_up", counting)
    for length, temperature, seed in ((3, 1.0, 0), (19, 0.5, 1), (20, 1.5, 2)):
        generate(model, tokens[:, :length], 4, temperature=temperature, seed=seed)
    assert traces == [(3, 32), (3, 1)]


@pytest.mark.thorough
def test_dropout_is_off_and_the_model_is_unchanged(tokens):
    noisy = build(dataclasses.replace(GPT2_TINY, dropout=0.5))
    plain = build(GPT2_TINY)
    nnx.update(plain, nnx.state(noisy, nnx.Param))
    before = nnx.to_pure_dict(nnx.state(noisy, nnx.RngCount))
    made = generate(noisy, tokens, 5, temperature=0.0)
    np.testing.assert_array_equal(made, generate(plain, tokens, 5, temperature=0.0))
    assert nnx.to_pure_dict(nnx.state(noisy, nnx.RngCount)) == before
    assert noisy.embed_dropout.deterministic is False


@pytest.mark.thorough
def test_the_cache_has_the_dtype_of_the_activations():
    model = build(LLAMA_TINY)
    assert model.init_cache(2, 8).keys.dtype == jnp.float32
    assert model.init_cache(2, 8).values.shape == (2, 2, 8, 2, 4)
    half = jax.tree.map(lambda value: value.astype(jnp.bfloat16), nnx.state(model, nnx.Param))
    nnx.update(model, half)
    assert model.init_cache(2, 8).keys.dtype == jnp.bfloat16
    assert generate(model, jnp.ones((1, 3), jnp.int32), 2).shape == (1, 5)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_tokens": 29}, "are 49 tokens, .* max_seq_len=48; use num_tokens=28"),
        ({"num_tokens": 0}, "num_tokens=0 is below 1"),
        ({"temperature": -1.0}, "temperature=-1.0 must be a finite number >= 0"),
        ({"temperature": float("nan")}, "temperature=nan must be a finite number >= 0"),
        ({"top_k": 0}, "top_k=0 must be between 1 and the vocabulary's 13"),
        ({"top_k": 14}, "top_k=14 must be between 1 and the vocabulary's 13"),
        ({"num_ids": 14}, "num_ids=14 must be between 1 and the vocabulary's 13"),
        ({"tokens": np.zeros((2, 0), np.int32)}, "the prompt is empty"),
        ({"tokens": np.zeros(3, np.int32)}, r"shape \(3,\), but must be \[batch, seq\]"),
        ({"tokens": np.full((1, 2), 13)}, "token 13, .* 13 rows"),
        ({"tokens": np.full((1, 2), -1)}, "token -1, .* 13 rows"),
    ],
)
def test_requests_that_cannot_be_met_are_refused(change, message, tokens):
    model = build(GPT2_TINY)
    request = {"tokens": tokens, "num_tokens": 2, "temperature": 1.0, "top_k": None} | change
    prompts, num_tokens = request.pop("tokens"), request.pop("num_tokens")
    with pytest.raises(ValueError, match=message):
        generate(model, prompts, num_tokens, **request)


def test_text_that_was_not_encoded_is_refused(tokens):
    with pytest.raises(TypeError, match="tokens are float32, but must be integers"):
        generate(build(GPT2_TINY), tokens.astype(jnp.float32), 2)
