"""A small language model, its batches, and its training on one device on rows cut before."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

ROWS, TOKENS, VOCAB = 8, 24, 14


class Causal(nnx.Module):
    """A small language model whose tokens see the mean of the tokens so far."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Param(0.3 * jax.random.normal(rngs.params(), (VOCAB, 16)))
        self.places = nnx.Param(0.3 * jax.random.normal(rngs.params(), (TOKENS, 16)))
        self.head = nnx.Param(0.3 * jax.random.normal(rngs.params(), (16, VOCAB)))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        seen = self.embed[...][tokens] + self.places[...][: tokens.shape[1]][None]
        counts = jnp.arange(1, tokens.shape[1] + 1, dtype=jnp.float32)
        return jnp.tanh(jnp.cumsum(seen, 1) / counts[None, :, None]) @ self.head[...]


def batch_of(step: int) -> dict[str, np.ndarray]:
    text = np.random.default_rng(step).integers(0, VOCAB, (ROWS, TOKENS + 1), np.int32)
    return {"tokens": text[:, :-1], "targets": text[:, 1:]}


def plain_training(
    steps: int, lengths: Callable[[int], int]
) -> tuple[list[float], dict[str, np.ndarray]]:
    """One device, rows cut before: (loss of each step, parameters)."""
    graph, params = nnx.split(Causal(nnx.Rngs(0)))
    tx = optax.adamw(1e-2)
    state = tx.init(params)

    def loss_of(params, tokens, targets):
        logits = nnx.merge(graph, params)(tokens)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    losses = []
    for step in range(steps):
        short = {name: x[:, : lengths(step + 1)] for name, x in batch_of(step).items()}
        loss, grads = jax.value_and_grad(loss_of)(params, **short)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
    return losses, {name: np.asarray(x[...]) for name, x in nnx.to_pure_dict(params).items()}
