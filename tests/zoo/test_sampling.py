"""Sampling against a plain NumPy computation of the definitions of Hugging Face's transformers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.refusals import Refusal
from zerojax.zoo.sampling import Sampling, draw_tokens, limited, penalized

VOCAB, ROWS = 37, 64


def arrays(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Logits [rows, vocab], float32, and which ids each row has."""
    generator = np.random.default_rng(seed)
    logits = 3 * generator.standard_normal((ROWS, VOCAB)).astype(np.float32)
    return logits, generator.random((ROWS, VOCAB)) < 0.2


def penalized_by_numpy(logits: np.ndarray, seen: np.ndarray, penalty: float) -> np.ndarray:
    """RepetitionPenaltyLogitsProcessor."""
    changed = np.where(logits < 0, logits * penalty, logits / penalty)
    return np.where(seen, changed, logits)


def kept_by_numpy(
    logits: np.ndarray, temperature: float, top_k: int | None, top_p: float | None
) -> np.ndarray:
    """Ids that TemperatureLogitsWarper, TopKLogitsWarper and TopPLogitsWarper leave, bool."""
    scores = logits.astype(np.float64) / temperature
    if top_k is not None:
        scores[scores < np.sort(scores)[:, -top_k][:, None]] = -np.inf
    if top_p is not None:
        order = np.argsort(scores)  # ascending
        ascending = np.take_along_axis(scores, order, axis=1)
        parts = np.exp(ascending - ascending[:, -1:])
        sums = np.cumsum(parts / parts.sum(1, keepdims=True), axis=1)
        removed = sums <= 1 - top_p
        removed[:, -1] = False
        scores[np.take_along_axis(removed, np.argsort(order), axis=1)] = -np.inf
    return scores > -np.inf


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("penalty", [1.0, 1.3, 0.7])
def test_the_repetition_penalty_is_that_of_transformers(seed, penalty):
    logits, seen = arrays(seed)
    controls = Sampling(repetition_penalty=penalty).controls(VOCAB)
    expected = penalized_by_numpy(logits, seen, penalty)
    found = penalized(jnp.asarray(logits), jnp.asarray(seen), controls)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("top_k", [None, 1, 5, VOCAB])
@pytest.mark.parametrize("top_p", [None, 0.05, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("temperature", [0.5, 1.7])
def test_ids_are_kept_as_by_transformers(temperature, top_k, top_p):
    logits, _ = arrays(11)
    controls = Sampling(temperature=temperature, top_k=top_k, top_p=top_p).controls(VOCAB)
    found = np.asarray(LIMITED(logits, controls))
    expected = kept_by_numpy(logits, temperature, top_k, top_p)
    np.testing.assert_array_equal(found > -np.inf, expected)
    np.testing.assert_allclose(found[expected], (logits / temperature)[expected], rtol=1e-6)


LIMITED = jax.jit(limited)
DRAW = jax.jit(draw_tokens)


def test_draws_come_from_what_is_kept_and_from_the_row_and_position_alone():
    logits, seen = (jnp.asarray(x) for x in arrays(5))
    controls = Sampling(temperature=1.5, top_k=9, top_p=0.8, num_ids=30, seed=2).controls(VOCAB)
    rows, positions = jnp.arange(ROWS), jnp.arange(ROWS) % 7
    drawn = np.asarray(DRAW(logits, seen, rows, positions, controls))
    inside = np.where(np.arange(VOCAB) < 30, logits, -np.inf)
    assert kept_by_numpy(inside, 1.5, 9, 0.8)[np.arange(ROWS), drawn].all()
    assert (drawn != np.argmax(inside, axis=1)).sum() > ROWS / 8
    order = np.random.default_rng(0).permutation(ROWS)
    again = DRAW(logits[order], seen[order], rows[order], positions[order], controls)
    np.testing.assert_array_equal(again, drawn[order])
    for other in ((rows + 1, positions), (rows, positions + 1)):
        assert (np.asarray(DRAW(logits, seen, *other, controls)) != drawn).sum() > ROWS / 8


def test_greedy_draws_take_the_likeliest_after_the_penalty():
    logits, seen = arrays(7)
    controls = Sampling(temperature=0.0, repetition_penalty=4.0, top_k=3).controls(VOCAB)
    zeros = jnp.zeros(ROWS, jnp.int32)
    drawn = DRAW(jnp.asarray(logits), jnp.asarray(seen), zeros, zeros, controls)
    np.testing.assert_array_equal(drawn, penalized_by_numpy(logits, seen, 4.0).argmax(1))
    assert (np.asarray(drawn) != logits.argmax(1)).any()


def test_options_out_of_range_are_refused():
    def make(options):
        Sampling(**options).check(13)

    rows = (
        ({"top_p": 0.0}, "top_p=0.0", "1 None", [{"top_p": 1.0}, {"top_p": None}]),
        ({"top_p": 1.1}, "top_p=1.1", "1 None", [{"top_p": 1.0}]),
        ({"top_k": 14}, "top_k=14 13", "None", [{"top_k": 13}, {"top_k": None}]),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0", "1.0", [{}]),
        ({"end_tokens": (3, 13)}, "end_tokens=13 13", "12", [{"end_tokens": (3, 12)}]),
        ({"pad_token": -1}, "pad_token=-1 13", "12", [{"pad_token": 12}]),
        ({"temperature": 1e300}, "temperature", "3.4e+38", [{"temperature": 3e38}]),
        ({"top_p": 1e-60}, "top_p", "1.2e-38", [{"top_p": 1e-37}]),
        ({"top_k": 10**12}, "top_k", "13", [{"top_k": 13}]),
        ({"seed": 10**30}, "seed 64", str(2**63 - 1), [{"seed": 2**63 - 1}]),
        ({"top_k": 2.5}, "top_k=2.5", "whole", [{"top_k": 2}], TypeError),
        ({"top_k": True}, "top_k=True", "whole", [{"top_k": 1}], TypeError),
        ({"temperature": "hot"}, "temperature='hot'", "number", [{}], TypeError),
        ({"end_tokens": (1.5,)}, "end_tokens=1.5", "integer", [{"end_tokens": (1,)}], TypeError),
        ({"end_tokens": 2}, "end_tokens=2", "[2]", [{"end_tokens": [2]}], TypeError),
        ({"seed": 1.0}, "seed=1.0", "seed=0", [{"seed": 0}], TypeError),
    )
    for row in rows:
        Refusal(*row).check(make)
