"""Plain optax and NNX as Flax's guides have it, one process: `nnx.jit` and `nnx.Optimizer`."""

from __future__ import annotations

import optax
from flax import nnx

from benchmarks.compare.subject import BETAS, CLIP_NORM, EPS, LEARNING_RATE, WEIGHT_DECAY


def prepare(make_model, batch):
    model = make_model()
    tx = optax.chain(
        optax.clip_by_global_norm(CLIP_NORM),
        optax.adamw(LEARNING_RATE, *BETAS, EPS, weight_decay=WEIGHT_DECAY),
    )
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    def loss_of(model, batch):
        total, weight = model.loss(batch)
        return total / weight

    @nnx.jit
    def update(model, optimizer, batch):
        loss, grads = nnx.value_and_grad(loss_of)(model, batch)
        optimizer.update(model, grads)
        return loss

    def step(batch):
        return float(update(model, optimizer, batch))

    return step
