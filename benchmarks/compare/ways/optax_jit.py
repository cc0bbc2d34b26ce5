"""Plain optax and NNX, one process: the state split once, one jitted and donated step."""

from __future__ import annotations

import functools

import jax
import optax
from flax import nnx

from benchmarks.compare.subject import BETAS, CLIP_NORM, EPS, LEARNING_RATE, WEIGHT_DECAY


def prepare(make_model, batch):
    graphdef, params = nnx.split(make_model())
    tx = optax.chain(
        optax.clip_by_global_norm(CLIP_NORM),
        optax.adamw(LEARNING_RATE, *BETAS, EPS, weight_decay=WEIGHT_DECAY),
    )
    opt_state = tx.init(params)

    def loss_of(params, batch):
        total, weight = nnx.merge(graphdef, params).loss(batch)
        return total / weight

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(params, opt_state, batch):
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    def step(batch):
        nonlocal params, opt_state
        params, opt_state, loss = update(params, opt_state, batch)
        return float(loss)

    return step
