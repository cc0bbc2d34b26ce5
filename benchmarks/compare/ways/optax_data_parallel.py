"""Plain optax and NNX over several processes: the state replicated, the batch sharded (ZeRO 0)."""

from __future__ import annotations

import functools
import os

import jax
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.compare.subject import BETAS, CLIP_NORM, EPS, LEARNING_RATE, WEIGHT_DECAY


def prepare(make_model, batch):
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    jax.distributed.initialize(address, int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"]))
    mesh = jax.make_mesh((jax.device_count(),), ("data",), (jax.sharding.AxisType.Auto,))
    replicated, sharded = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    graphdef, params = nnx.split(make_model())
    tx = optax.chain(
        optax.clip_by_global_norm(CLIP_NORM),
        optax.adamw(LEARNING_RATE, *BETAS, EPS, weight_decay=WEIGHT_DECAY),
    )
    params = jax.tree.map(
        lambda x: jax.make_array_from_process_local_data(replicated, jax.device_get(x)), params
    )
    opt_state = jax.jit(tx.init, out_shardings=replicated)(params)

    def loss_of(params, batch):
        total, weight = nnx.merge(graphdef, params).loss(batch)
        return total / weight

    @functools.partial(jax.jit, donate_argnums=(0, 1), out_shardings=replicated)
    def update(params, opt_state, batch):
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    def step(batch):
        nonlocal params, opt_state
        batch = jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharded, x), batch)
        params, opt_state, loss = update(params, opt_state, batch)
        return float(loss)

    return step
