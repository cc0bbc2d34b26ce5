"""The same training on several devices by hand: shardings of the state, and JAX does the rest.

Uses Flax, optax and `NamedSharding`, and nothing of zerojax, so that zerojax can be compared with
it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import plain_jax


def lower_step(
    factory: Callable[[nnx.Rngs], nnx.Module],
    tx: optax.GradientTransformation,
    batch: Any,
    *,
    zero: int = 3,
    devices: Sequence[Any] | None = None,
) -> jax.stages.Lowered:
    """Traces and lowers the step of a model over all devices.

    What the ZeRO stage shards is sharded along its largest dimension that the number of devices
    divides, batches along their rows; the compiler adds gathers and reductions.

    Args:
      factory: builds the model, which has `loss(batch) -> (sum, weight)`.
      tx: optimizer.
      batch: example of the global batch.
      zero: what is sharded: moments from 1, gradients from 2, parameters at 3.
      devices: devices of the mesh; None: all of this process.
    """
    count = jax.device_count() if devices is None else len(devices)
    automatic = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((count,), ("data",), axis_types=automatic, devices=devices)
    params = jax.eval_shape(lambda: plain_jax.init_params(factory))
    state = params, jax.eval_shape(tx.init, params)
    split = jax.tree.map(lambda x: NamedSharding(mesh, _spec(x.shape, mesh.size)), state)
    whole = jax.tree.map(lambda _: NamedSharding(mesh, P()), state)
    shardings = (split if zero == 3 else whole)[0], (split if zero >= 1 else whole)[1]
    rows = NamedSharding(mesh, P("data"))
    loss = plain_jax.build_loss(factory)

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, batch)
        if zero >= 2:
            grads = jax.lax.with_sharding_constraint(grads, split[0])
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    jitted = jax.jit(
        step,
        donate_argnums=(0, 1),
        in_shardings=(*shardings, rows),
        out_shardings=(*shardings, NamedSharding(mesh, P())),
    )
    return jitted.lower(*state, batch)


def _spec(shape: tuple[int, ...], devices: int) -> P:
    """Shards the largest dimension that the devices divide; shards nothing if there is none."""
    divided = [dim for dim, size in enumerate(shape) if size % devices == 0]
    if devices == 1 or not divided:
        return P()
    largest = max(divided, key=lambda dim: shape[dim])
    return P(*("data" if dim == largest else None for dim in range(len(shape))))
