"""Reference models whose tokens see a sliding window: in training, split, packed and generating."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import zerojax
from tests.support.small_models import reference_model
from tests.support.trajectories import TOLERANCE, plan_for, text_batch, train_for
from tests.zoo.test_context_training import packed_batch
from zerojax.config import ModelConfig
from zerojax.operators import chunked_attention
from zerojax.zoo.hugging_face import UnsupportedError
from zerojax.zoo.hugging_face.writing import describe_model

WINDOW, LAYERS, LENGTH = 3, 2, 16


@functools.cache
def model(name, attention="chunked", window=WINDOW):
    make = reference_model(name, num_layers=LAYERS, attention=attention, attention_window=window)
    return make(nnx.Rngs(0))


def tokens(seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, 32, (2, LENGTH)))


@jax.jit
def _hidden_of(graphdef, state, tokens):
    return nnx.merge(graphdef, state).hidden(tokens)


def hidden(of, tokens):
    return np.asarray(_hidden_of(*nnx.split(of), tokens))


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_token_acts_as_far_as_the_windows_of_all_layers_reach(name):
    """Each layer hands on what is less than a window away: 2 layers of 3 tokens reach 4 back."""
    place = 5
    changed = tokens().at[:, place].add(1)
    for attention in ("chunked", "xla"):
        found = hidden(model(name, attention), changed) != hidden(model(name, attention), tokens())
        acts = np.flatnonzero(found.any((0, 2))).tolist()
        assert acts == list(range(place, place + LAYERS * (WINDOW - 1) + 1))
    everywhere = hidden(model(name, "xla", None), changed) != hidden(
        model(name, "xla", None), tokens()
    )
    assert everywhere.any((0, 2)).sum() == LENGTH - place


@pytest.mark.thorough
def test_a_window_of_the_whole_row_is_none():
    wide = hidden(model("llama", window=LENGTH), tokens())
    np.testing.assert_allclose(wide, hidden(model("llama", window=None), tokens()), atol=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_tokens_after_a_cache_see_the_same_window(name):
    whole = hidden(model(name), tokens())
    extend = nnx.jit(type(model(name)).extend)
    first, cache = extend(model(name), tokens()[:, :5], model(name).init_cache(2, 17), jnp.int32(0))
    found = [first]
    for place in range(5, LENGTH):
        new = tokens()[:, place : place + 1]
        more, cache = extend(model(name), new, cache, jnp.int32(place))
        found.append(more)
    np.testing.assert_allclose(jnp.concatenate(found, axis=1), whole, rtol=0, atol=1e-6)


def test_the_plan_counts_the_tiles_that_hold_what_is_seen(monkeypatch):
    """Tiles of 2 x 2: the first two queries see 1 tile of keys, the next two 2, all others 3."""
    monkeypatch.setattr(chunked_attention, "BLOCK", 2)
    plan = plan_for(reference_model("llama", attention="chunked", attention_window=4))
    (said,) = [reason for reason in plan.reasons if reason.startswith("attention chunked")]
    assert said.endswith(f"computes {(1 + 2 + 6 * 3) / 64:.1%} of these scores")


BATCHES = {"rows": text_batch, "packed": packed_batch}
SPLITS = {
    "zero3": {"zero": 3},
    "ulysses": {"zero": 3, "mesh": {"data": 4, "context": 2}, "context_parallel": "ulysses"},
    "ring": {"zero": 1, "mesh": {"data": 2, "context": 4}, "context_parallel": "ring"},
    "allgather": {"zero": 3, "mesh": {"context": 8}, "context_parallel": "allgather"},
    "pipeline": {"zero": 1, "mesh": {"stage": 2}, "num_microbatches": 2},
    "tensor parallel": {"zero": 2, "mesh": {"data": 4, "model": 2}},
}


@pytest.mark.thorough
@pytest.mark.parametrize("case", BATCHES)
@pytest.mark.parametrize("split", SPLITS)
def test_it_trains_as_one_device(split, case, monkeypatch):
    monkeypatch.setattr(chunked_attention, "BLOCK", 2)
    make = reference_model("llama", attention="chunked", attention_window=WINDOW)
    expected = train_for(make, devices=1, batch=BATCHES[case])
    found = train_for(make, batch=BATCHES[case], persistence_threshold=0, **SPLITS[split])
    np.testing.assert_allclose(found.losses, expected.losses, rtol=0, atol=TOLERANCE)
    assert expected.losses[0] - expected.losses[-1] > 0.02


def test_sizes_are_checked():
    with pytest.raises(ValueError, match="attention_window.*0"):
        ModelConfig(attention_window=0)
    with pytest.raises(ValueError, match=r"attention_window=0 must be a whole number of at least"):
        zerojax.zoo.LlamaConfig(vocab_size=32, attention_window=0)


def test_it_is_written_as_the_model_that_has_one():
    described = describe_model(plan_for(reference_model("llama", attention_window=4)).model)
    written = described.config_json()
    assert (written["model_type"], written["sliding_window"]) == ("mistral", 4)
    with pytest.raises(UnsupportedError, match="attention_window=4 .*no sliding window"):
        describe_model(plan_for(reference_model("gpt2", attention_window=4)).model)
