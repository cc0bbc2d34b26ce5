"""Losses against NumPy in float64; always (sum, weight) in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import equal_trees
from zerojax.models.losses import classification, mean_squared_error, next_token, weighted

RANDOM = np.random.default_rng(0)
LOGITS = RANDOM.normal(size=(2, 3, 7)) * 5
TARGETS = RANDOM.integers(0, 7, (2, 3))
WEIGHTS = np.array([[1.0, 0.0, 2.0], [0.5, 1.0, 0.0]])


def negative_log_likelihood(logits, targets):
    shifted = logits - logits.max(-1, keepdims=True)
    log_z = np.log(np.exp(shifted).sum(-1))
    return log_z - np.take_along_axis(shifted, targets[..., None], -1)[..., 0]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_next_token(weights):
    expected = negative_log_likelihood(LOGITS, TARGETS)
    counted = np.ones_like(expected) if weights is None else weights
    total, weight = next_token(jnp.asarray(LOGITS, jnp.float32), jnp.asarray(TARGETS), weights)
    assert total.dtype == weight.dtype == jnp.float32
    assert total.shape == weight.shape == ()
    np.testing.assert_allclose(total, (expected * counted).sum(), rtol=1e-6)
    np.testing.assert_allclose(weight, counted.sum(), rtol=0)


def test_bfloat16_logits_are_widened_before_the_softmax():
    logits = jnp.asarray(LOGITS, jnp.bfloat16)
    wide = next_token(logits.astype(jnp.float32), jnp.asarray(TARGETS))
    narrow = next_token(logits, jnp.asarray(TARGETS))
    assert narrow[0].dtype == jnp.float32
    np.testing.assert_array_equal(wide[0], narrow[0])


@pytest.mark.thorough
def test_a_position_of_weight_zero_has_no_gradient():
    def total(logits):
        return next_token(logits, jnp.asarray(TARGETS), jnp.asarray(WEIGHTS))[0]

    gradient = jax.grad(total)(jnp.asarray(LOGITS, jnp.float32))
    np.testing.assert_array_equal(gradient[0, 1], 0)
    assert np.abs(gradient[0, 0]).max() > 0


@pytest.mark.thorough
def test_classification_is_next_token_of_one_position():
    logits, labels = jnp.asarray(LOGITS[:, 0], jnp.float32), jnp.asarray(TARGETS[:, 0])
    one = classification(logits, labels, jnp.asarray([2.0, 1.0]))
    other = next_token(logits[:, None], labels[:, None], jnp.asarray([[2.0], [1.0]]))
    np.testing.assert_allclose(one, other, rtol=1e-6)


def test_mean_squared_error_in_float32():
    ones, halves = jnp.ones((4, 3), jnp.bfloat16), jnp.full((4, 3), 0.5, jnp.bfloat16)
    total, weight = mean_squared_error(ones, halves)
    assert (float(total), float(weight), total.dtype) == (3.0, 12.0, jnp.float32)
    total, weight = mean_squared_error(ones, halves, jnp.zeros((4, 3)).at[0].set(2.0))
    assert (float(total), float(weight)) == (1.5, 6.0)


def test_integer_weights_are_summed_in_float32():
    total, weight = weighted(jnp.arange(3.0), jnp.array([1, 0, 1]))
    assert (float(total), float(weight), weight.dtype) == (2.0, 2.0, jnp.float32)


@pytest.mark.parametrize("unknown", [-1, -100, 7, 1000])
def test_a_target_outside_the_vocabulary_is_ignored_at_weight_0_and_nan_otherwise(unknown):
    """-1 as an index would be the last token: plausible, and wrong."""
    targets = TARGETS.copy()
    targets[0, 1] = unknown
    run = jax.value_and_grad(lambda x, t, w: next_token(x, t, w)[0])
    logits = jnp.asarray(LOGITS, jnp.float32)
    ours, theirs = (run(logits, jnp.asarray(t), jnp.asarray(WEIGHTS)) for t in (targets, TARGETS))
    equal_trees.assert_same(ours, theirs)
    loss, gradient = run(logits, jnp.asarray(targets), None)
    assert jnp.isnan(loss)
    assert jnp.isnan(gradient[0, 1]).all()


@pytest.mark.thorough
def test_narrow_targets_reach_the_whole_vocabulary():
    logits = jnp.zeros((1, 2, 300)).at[0, :, 255].set(5.0)
    wide, narrow = (
        next_token(logits, jnp.array([[255, 0]], dtype))[0] for dtype in (jnp.int32, jnp.uint8)
    )
    assert wide == narrow
