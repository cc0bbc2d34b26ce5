"""Losses as a pair (sum, weight), divided once over all devices and microbatches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from zerojax.config.late_dataclasses import dataclass
from zerojax.config.tree_types import Batch, Tree
from zerojax.tracing.protocol import ModelLike

NATS_PER_TOKEN = "nats per token"
"""Unit of a mean cross-entropy over tokens, whose exponential is the perplexity."""


@dataclass(frozen=True)
class LossWithUnit:
    """Loss function whose unit is known.

    Attributes:
      function: loss function `(model, batch) -> loss`.
      unit: unit of the mean loss, such as `NATS_PER_TOKEN`; None if unknown.
    """

    function: Callable[[Any, Any], Any]
    unit: str | None

    def __call__(self, model: ModelLike, batch: Batch) -> Any:
        return self.function(model, batch)


def loss_unit(loss: object) -> str | None:
    """Returns the unit that a loss function declares, or None."""
    return loss.unit if isinstance(loss, LossWithUnit) else None


BUILT_IN_METRICS = frozenset(
    [
        "at_floor",
        "bad_leaf",
        "compile_seconds",
        "event",
        "first_interval_seconds",
        "grad_norm",
        "kind",
        "largest_leaf",
        "layer_sums",
        "largest_share",
        "learning_rate",
        "loss",
        "loss_scale",
        "mfu",
        "num_skipped",
        "seconds",
        "skipped",
        "step",
        "step_seconds",
        "text",
        "tflops_per_device",
        "time",
        "tokens_seen",
        "tokens_per_second_per_device",
        "weight",
    ]
)
"""Names that zerojax uses in steps, reports and logs; metrics of a loss need other names."""

BUILT_IN_PREFIXES = ("memory_", "spent_")
"""Prefixes of further reserved names."""


class LossParts(NamedTuple):
    """Result of a loss, split into loss or sum, weight, and metrics.

    Attributes:
      loss: the sum, or the mean if there is no weight.
      weight: weight of the sum; None if the loss returned none.
      metrics: {name: a mean, or a pair (sum, weight)}; {} if the loss returned none.
    """

    loss: Any
    weight: Any
    metrics: Mapping[str, Any]


def split_result(result: Tree) -> LossParts:
    """Splits `loss`, `(sum, weight)`, `(loss, {...})` or `(sum, weight, {...})` into its parts."""
    parts = result if isinstance(result, tuple) else (result,)
    metrics: Mapping[str, Any] = {}
    if len(parts) > 1 and isinstance(parts[-1], Mapping):
        *parts, metrics = parts
    return LossParts(parts[0], parts[1] if len(parts) > 1 else None, metrics)


def as_sums(result: Tree) -> dict[str, Any]:
    """Converts a loss's result for one part of a batch to float32 sums that can be added over
    parts.

    A loss without a weight is a mean over its part of the batch; its weight is 1, because parts
    have equally many rows. A metric without its own weight is averaged with the weights of the
    loss; a part in which that weight is 0 does not count.

    Returns:
      {"loss": sum, "weight": sum}; with metrics also "metrics": {name: {"sum", "weight"}}.
    """
    parts = split_result(result)
    weight = _float32(1.0 if parts.weight is None else parts.weight)
    sums: dict[str, Any] = {"loss": _float32(parts.loss), "weight": weight}
    if parts.metrics:
        sums["metrics"] = {name: _metric(value, weight) for name, value in parts.metrics.items()}
    return sums


def no_sums(metrics: Sequence[str]) -> dict[str, Any]:
    """Returns sums of 0, the start for adding results of `as_sums` that have these metrics."""
    sums: dict[str, Any] = {"loss": jnp.float32(0), "weight": jnp.float32(0)}
    if metrics:
        zero = {"sum": jnp.float32(0), "weight": jnp.float32(0)}
        sums["metrics"] = {name: dict(zero) for name in metrics}
    return sums


def own_means(sums: Mapping[str, Any]) -> dict[str, Any]:
    """Computes {name: mean} of the loss's metrics from their sums over all parts; {} without
    metrics. A mean with weight 0 is not finite.
    """
    return {name: x["sum"] / x["weight"] for name, x in sums.get("metrics", {}).items()}


def _metric(
    value: ArrayLike | tuple[ArrayLike, ArrayLike], weight: jax.Array
) -> dict[str, jax.Array]:
    if isinstance(value, tuple):
        total, metric_weight = value
        return {"sum": _float32(total), "weight": _float32(metric_weight)}
    # A mean over zero elements is NaN, and 0 * NaN is NaN.
    return {"sum": jnp.where(weight == 0, 0, _float32(value) * weight), "weight": weight}


def _float32(value: ArrayLike) -> jax.Array:
    return jnp.asarray(value, jnp.float32)


def next_token(
    logits: jax.Array, targets: jax.Array, weights: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Computes the cross-entropy of the target tokens, in float32.

    Args:
      logits: [batch, seq, vocab], any float dtype; cast to float32 before the softmax.
      targets: integers [batch, seq], the token that follows each position. A target outside the
        vocabulary makes loss and gradient NaN, unless its weight is 0.
      weights: [batch, seq], weights of the positions; weight 0 ignores a position. None uses 1.

    Returns:
      (sum over positions of weight x negative log-likelihood in nats, sum of weights), float32.
    """
    logits, targets = logits.astype(jnp.float32), targets.astype(jnp.int32)
    weights = jnp.ones(targets.shape, jnp.float32) if weights is None else weights
    counted = weights.astype(jnp.float32)
    known = (targets >= 0) & (targets < logits.shape[-1])
    index = jnp.where(known, targets, 0)
    # That of token 0 for an unknown target, which `trusted` makes NaN below.
    picked = jnp.take_along_axis(logits, index[..., None], axis=-1)[..., 0]
    negative_log_likelihood = jax.nn.logsumexp(logits, axis=-1) - picked
    trusted = jnp.where(known | (counted == 0), counted, jnp.nan)
    return jnp.sum(negative_log_likelihood * trusted), jnp.sum(counted)


def next_token_of_call(model: Callable[[jax.Array], jax.Array], batch: Mapping[str, Any]) -> Any:
    """Computes the next-token loss of `model(tokens)`, for a language model without its own loss.

    Args:
      model: function from integers [batch, seq] to logits [batch, seq, vocab].
      batch: dict with "tokens", "targets" and optionally "weights".

    Raises:
      ValueError: rows hold several texts ("segments"), which `model(tokens)` cannot separate.
    """
    if "segments" in batch:
        raise ValueError(
            "each row holds several texts (batch['segments'], from chats or packed text), but this "
            "model takes only tokens, so that texts would attend to each other; give the model a "
            "method loss(batch), or pass loss=, that uses batch['segments']"
        )
    return next_token(model(batch["tokens"]), batch["targets"], batch.get("weights"))


def mean_squared_error(
    predictions: jax.Array, targets: jax.Array, weights: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Computes the sum of squared errors and of weights, in float32; their quotient is the mean
    squared error.

    Args:
      predictions: predicted values, any shape, any float dtype.
      targets: true values, the same shape.
      weights: weights of the elements, the same shape; None uses weight 1.

    Returns:
      (sum of weight x (prediction - target)^2, sum of weights), float32.
    """
    difference = predictions.astype(jnp.float32) - targets.astype(jnp.float32)
    return weighted(difference * difference, weights)


def classification(
    logits: jax.Array, labels: jax.Array, weights: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Computes the cross-entropy of class labels, in float32.

    Args:
      logits: [batch, classes], any float dtype.
      labels: integers [batch] in [0, classes).
      weights: [batch], weights of the rows; None uses weight 1.

    Returns:
      (sum of weight x negative log-likelihood in nats, sum of weights), float32.
    """
    logits = logits.astype(jnp.float32)
    picked = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
    return weighted(jax.nn.logsumexp(logits, axis=-1) - picked, weights)


def weighted(values: jax.Array, weights: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Computes (sum of values x weights, sum of weights) in float32; None uses weight 1."""
    values = values.astype(jnp.float32)
    if weights is None:
        return jnp.sum(values), jnp.float32(values.size)
    weights = weights.astype(jnp.float32)
    return jnp.sum(values * weights), jnp.sum(weights)
