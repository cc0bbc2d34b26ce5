"""Prompts of different lengths in a batch: each row is continued as if it were alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.support.hugging_face_folders import DECODERS, write_folder
from tests.support.refusals import refused
from tests.zoo.test_generate import GPT2_TINY, LLAMA_TINY, SIZES, build
from zerojax.config import MoEConfig
from zerojax.config.attention_layouts import FixedLayout
from zerojax.zoo import GPT2, Decoder, DecoderConfig, LayerKind, Rope, RopeScaling, generate
from zerojax.zoo import generation as generating
from zerojax.zoo.hugging_face import from_hugging_face
from zerojax.zoo.sampling import Sampling

PROMPTS, NEW = (9, 3, 14), 6
"""Tokens of each prompt, and new tokens of each."""
WINDOW = LayerKind(window=4, rope=Rope(theta=100.0))
NOPE = LayerKind(rope=None)
DYNAMIC = RopeScaling(kind="dynamic", factor=2.0, original_max_seq_len=12)
LONG = RopeScaling(
    kind="longrope",
    factor=2.0,
    original_max_seq_len=16,
    short_factor=(1.0, 1.5),
    long_factor=(2.0, 5.0),
)


def scaled(scaling: RopeScaling) -> dict[str, Any]:
    return {"kinds": (LayerKind(rope=Rope(scaling=scaling)),)}


CASES: dict[str, dict[str, Any]] = {
    "learned positions": {"learned_positions": True, "kinds": (NOPE,)},
    "windows, none": {"kinds": (WINDOW, NOPE), "pattern": (0, 1)},
    "soft caps": {"attention_softcap": 2.0, "logit_softcap": 3.0},
    "sinks": {"attention_sinks": True, "kinds": (WINDOW,)},
    "blocks": {"attention_layout": FixedLayout(block=4, num_local_blocks=2)},
    "dynamic": scaled(DYNAMIC),
    "longrope beside none": {"kinds": (*scaled(LONG)["kinds"], NOPE), "pattern": (0, 1)},
    "experts": {"moe": MoEConfig(num_experts=4, experts_per_token=2)},
}


def decoder(changes: dict[str, Any]) -> Decoder:
    config = DecoderConfig(**{**SIZES, "num_kv_heads": 2, "mlp_dim": 24, **changes})
    return build_any(lambda: Decoder(config, rngs=nnx.Rngs(0)))


def build_any(make: Any) -> Decoder:
    """A model with large random weights, so that the text decides the logits."""
    model = make()
    generator = np.random.default_rng(0)
    for path, param in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        values = 0.2 * generator.standard_normal(param.shape) + (path[-1] == "scale")
        param.set_value(jnp.asarray(values, jnp.float32))
    return model


def texts(vocab_size: int) -> list[np.ndarray]:
    generator = np.random.default_rng(1)
    return [generator.integers(0, vocab_size, prompt + NEW) for prompt in PROMPTS]


def extended(model: Decoder, rows: list[np.ndarray]) -> np.ndarray:
    """Logits [batch, new, vocab]: after the prompts in a batch, then token by token."""
    lengths = jnp.asarray(PROMPTS)
    whole = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for place, row in zip(whole, rows, strict=True):
        place[: len(row)] = row
    longest = max(PROMPTS)

    @nnx.jit
    def extend(model, tokens, cache, position):
        hidden, cache = model.extend(tokens, cache, position, text_length=lengths + NEW)
        return model.head(hidden), cache

    cache = model.init_cache(len(rows), 32)
    logits, cache = extend(model, jnp.asarray(whole[:, :longest]), cache, jnp.int32(0))
    every = np.arange(len(rows))
    found = [np.asarray(logits)[every, np.asarray(PROMPTS) - 1]]
    for count in range(NEW - 1):
        newest = whole[every, np.asarray(PROMPTS) + count][:, None]
        logits, cache = extend(model, jnp.asarray(newest), cache, lengths + count)
        found.append(np.asarray(logits)[:, 0])
    return np.stack(found, axis=1)


def assert_as_alone(model: Decoder) -> None:
    rows = texts(model.config.vocab_size)
    found = extended(model, rows)
    for prompt, row, logits in zip(PROMPTS, rows, found, strict=True):
        whole = np.asarray(nnx.jit(lambda m, t: m(t))(model, jnp.asarray(row[None])))[0]
        expected = whole[prompt - 1 : -1]
        size = max(1.0, np.abs(expected).max())
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5 * size)
        assert expected.std() > 0.05


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES)
def test_logits_of_each_row_are_those_of_the_row_alone(case):
    assert_as_alone(decoder(CASES[case]))


@pytest.mark.slow  # four passes of each model
@pytest.mark.parametrize("case", DECODERS)
def test_so_they_are_in_every_family(case, tmp_path):
    assert_as_alone(from_hugging_face(write_folder(tmp_path / case, case)).to_model())


@pytest.fixture(scope="module")
def gpt2() -> Decoder:
    return build(dataclasses.replace(GPT2_TINY, num_layers=1))


@pytest.fixture(scope="module")
def prompts() -> list[np.ndarray]:
    return [row[:-NEW] for row in texts(SIZES["vocab_size"])]


@pytest.mark.thorough
@pytest.mark.parametrize("config", [GPT2_TINY, LLAMA_TINY])
def test_rows_are_continued_as_if_alone(config, prompts):
    model = build(config)
    together = np.asarray(generate(model, prompts, 10, temperature=0.0, pad_token=7))
    assert together.shape == (3, 24)
    for row, prompt in zip(together, prompts, strict=True):
        alone = np.asarray(generate(model, [prompt], 10, temperature=0.0))[0]
        np.testing.assert_array_equal(row[: len(alone)], alone)
        assert (row[len(alone) :] == 7).all()


@pytest.mark.thorough
def test_a_row_depends_on_seed_number_and_position_alone(gpt2, prompts):
    options = {"temperature": 1.3, "top_p": 0.9, "repetition_penalty": 1.2, "seed": 4}
    drawn = np.asarray(generate(gpt2, prompts, 12, **options))
    order, numbers = [2, 0], [2, 0]
    others = [*(prompts[i] for i in order), np.ones(31, int), *prompts]
    found = generate(gpt2, others, 9, **options, row_numbers=[*numbers, 9, 5, 6, 7])
    found = np.asarray(found)
    for place, row in enumerate(order):
        size = len(prompts[row]) + 9
        np.testing.assert_array_equal(found[place, :size], drawn[row, :size])
    same = found[3, : len(prompts[0]) + 9] == drawn[0, : len(prompts[0]) + 9]
    assert not same.all()


@pytest.mark.thorough
def test_rows_end_at_any_end_token_and_the_loop_ends_with_the_last(gpt2, prompts, monkeypatch):
    free = np.asarray(generate(gpt2, prompts, 20, temperature=0.9, seed=3))
    new = [row[len(p) : len(p) + 20].tolist() for row, p in zip(free, prompts, strict=True)]
    ends = (new[0][4], new[1][2], new[2][6])
    stops = [min(row.index(end) for end in ends if end in row) + 1 for row in new]
    assert len(set(stops)) > 1
    steps, original = [], GPT2.look_up

    def counting(self, tokens, position):
        jax.debug.callback(lambda: steps.append(tokens.shape[1]))
        return original(self, tokens, position)

    monkeypatch.setattr(GPT2, "look_up", counting)
    generating._decode.clear_cache()
    options = {"end_tokens": ends, "pad_token": 12}
    found = generate(gpt2, prompts, 20, temperature=0.9, seed=3, **options)
    jax.effects_barrier()
    assert steps.count(1) == max(stops) - 1
    generating._decode.clear_cache()
    for row, prompt, text, stop in zip(np.asarray(found), prompts, new, stops, strict=True):
        added = row[len(prompt) :]
        np.testing.assert_array_equal(added[:stop], text[:stop])
        assert (added[stop:] == 12).all()


@pytest.mark.thorough
def test_rows_that_end_get_the_next_prompts(gpt2, prompts, monkeypatch):
    """Static batches of two would decode 19 positions for each of three pairs."""
    every = [prompts[i % 3] for i in (0, 1, 2, 1, 0, 2, 1)]
    limits = [2, 20, 3, 20, 2, 20, 1]
    steps, original = [], GPT2.look_up

    def counting(self, tokens, position):
        jax.debug.callback(lambda: steps.append(tokens.shape[1]))
        return original(self, tokens, position)

    monkeypatch.setattr(GPT2, "look_up", counting)
    programs = generating._prefill, generating._decode
    for program in programs:
        program.clear_cache()
    sampling = Sampling(temperature=0.9, seed=3, pad_token=12)
    found = generating.continue_rows(gpt2, every, limits, sampling, num_rows=2)
    jax.effects_barrier()
    assert steps.count(1) < 3 * 19 - 10
    assert [program._cache_size() for program in programs] == [1, 1]
    for program in programs:
        program.clear_cache()
    together = generating.continue_rows(gpt2, every, limits, sampling)
    np.testing.assert_array_equal(found.tokens, together.tokens)
    np.testing.assert_array_equal(found.lengths, limits)


@pytest.mark.thorough
def test_two_programs_serve_all_options_and_lengths_of_a_bucket(gpt2):
    programs = generating._prefill, generating._decode
    for program in programs:
        program.clear_cache()
    generator = np.random.default_rng(3)
    requests: list[tuple[tuple[int, int], int, dict[str, Any]]] = [
        ((3, 20), 4, {}),
        ((20, 2), 9, {"temperature": 0.0}),
        ((7, 7), 20, {"top_k": 3, "temperature": 0.5}),
        ((1, 5), 17, {"top_p": 0.5, "seed": 8, "num_ids": 12}),
        ((5, 6), 1, {"repetition_penalty": 1.5, "end_tokens": (1, 2, 3), "pad_token": 4}),
    ]
    for lengths, num_tokens, options in requests:
        rows = [generator.integers(0, 12, length) for length in lengths]
        made = generate(gpt2, rows, num_tokens, **options)
        assert made.shape == (2, max(lengths) + num_tokens)
    assert [program._cache_size() for program in programs] == [1, 1]


def test_bad_rows_are_refused(gpt2, prompts):
    empty = [prompts[0], np.zeros(0, int)]
    refused(lambda: generate(gpt2, empty, 2), "empty 1 2", "one token")
    refused(lambda: generate(gpt2, [], 2), "0 prompts", "one")
    refused(lambda: generate(gpt2, prompts, 40), "14 num_tokens=40 54 48", "num_tokens=34 8")
    refused(lambda: generate(gpt2, prompts, 2, row_numbers=[1]), "row_numbers 3", "3 integers")
