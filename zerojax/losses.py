"""What is minimised: losses as a sum and a weight, so that they can be divided once, globally.

Knows arrays; never knows how many devices or microbatches a batch is cut into.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

NATS_PER_TOKEN = "nats per token"
"""Unit of a mean cross-entropy over tokens, whose exponential is the perplexity."""


@dataclasses.dataclass(frozen=True)
class LossWithUnit:
    """A loss function whose unit is known.

    Attributes:
      function: `(model, batch) -> loss`.
      unit: of the mean loss, such as `NATS_PER_TOKEN`; None: not known.
    """

    function: Callable[[Any, Any], Any]
    unit: str | None

    def __call__(self, model: Any, batch: Any) -> Any:
        return self.function(model, batch)


def loss_unit(loss: Any) -> str | None:
    """The unit that a loss function states; None where it states none."""
    return loss.unit if isinstance(loss, LossWithUnit) else None


def next_token(
    logits: jax.Array, targets: jax.Array, weights: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Cross-entropy of the target tokens, in float32.

    Args:
      logits: [batch, seq, vocab], any float dtype; upcast to float32 before the softmax.
      targets: [batch, seq] integers: the token that follows each position. One outside of the
        vocabulary gives NaN, in the gradient too, unless its weight is 0.
      weights: [batch, seq]; a position of weight 0 does not count. None: every position counts 1.

    Returns:
      (sum over positions of weight x negative log-likelihood in nats, sum of weights), float32.
    """
    logits, targets = logits.astype(jnp.float32), targets.astype(jnp.int32)
    weights = jnp.ones(targets.shape, jnp.float32) if weights is None else weights
    counted = weights.astype(jnp.float32)
    known = (targets >= 0) & (targets < logits.shape[-1])
    index = jnp.where(known, targets, 0)
    picked = jnp.take_along_axis(logits, index[..., None], axis=-1)[..., 0]
    negative_log_likelihood = jax.nn.logsumexp(logits, axis=-1) - picked
    trusted = jnp.where(known | (counted == 0), counted, jnp.nan)
    return jnp.sum(negative_log_likelihood * trusted), jnp.sum(counted)


def mean_squared_error(
    predictions: jax.Array, targets: jax.Array, weights: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Squared error per element, in float32.

    Args:
      predictions: any shape, any float dtype.
      targets: the same shape.
      weights: the same shape, or None for 1 everywhere.

    Returns:
      (sum of weight x (prediction - target)^2, sum of weights), float32.
    """
    difference = predictions.astype(jnp.float32) - targets.astype(jnp.float32)
    return weighted(difference * difference, weights)


def classification(
    logits: jax.Array, labels: jax.Array, weights: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Cross-entropy of class labels, in float32.

    Args:
      logits: [batch, classes]; labels: [batch] integers in [0, classes); weights: [batch] or None.

    Returns:
      (sum of weight x negative log-likelihood in nats, sum of weights), float32.
    """
    logits = logits.astype(jnp.float32)
    picked = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
    return weighted(jax.nn.logsumexp(logits, axis=-1) - picked, weights)


def weighted(values: jax.Array, weights: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """`(sum of values x weights, sum of weights)` in float32; None counts each value once."""
    values = values.astype(jnp.float32)
    if weights is None:
        return jnp.sum(values), jnp.float32(values.size)
    weights = weights.astype(jnp.float32)
    return jnp.sum(values * weights), jnp.sum(weights)
