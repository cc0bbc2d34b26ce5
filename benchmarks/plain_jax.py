"""The same training by hand in plain JAX, as a careful user would write it without zerojax.

Uses Flax, optax and one jitted, donated step, and nothing of zerojax, so that both can be compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

Params = dict[str, jax.Array]


def init_params(factory: Callable[[nnx.Rngs], nnx.Module], seed: int = 0) -> Params:
    """Returns {name: float32 array}, initialized on the device by one program."""

    def build(key: jax.Array) -> Params:
        _, state = nnx.split(factory(nnx.Rngs(key)))
        return {name: variable.get_raw_value() for _, variable, name in _paths(state)}

    return jax.jit(build)(jax.random.key(seed))


def build_model(factory: Callable[[nnx.Rngs], nnx.Module], params: Params) -> nnx.Module:
    """Returns the module with these parameters."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: factory(nnx.Rngs(0))))
    flat = [(path, like.replace(params[name])) for path, like, name in _paths(state)]
    return nnx.merge(graphdef, nnx.from_flat_state(flat))


def build_loss(factory: Callable[[nnx.Rngs], nnx.Module]) -> Callable[[Params, Any], jax.Array]:
    """Returns `loss(params, batch)`, the mean over the batch of the model's own loss."""

    def loss(params: Params, batch: Any) -> jax.Array:
        total, weight = build_model(factory, params).loss(batch)
        return total / weight

    return loss


def build_step(
    factory: Callable[[nnx.Rngs], nnx.Module],
    tx: optax.GradientTransformation,
    *,
    compute_dtype: Any = jnp.float32,
) -> Callable[[Params, Any, Any], tuple[Params, Any, jax.Array]]:
    """Builds a jitted `step(params, opt_state, batch) -> (params, opt_state, loss)`, state donated.

    Master weights are float32; forward and backward pass use them in `compute_dtype`.
    """
    loss = build_loss(factory)

    def step(params: Params, opt_state: Any, batch: Any) -> tuple[Params, Any, jax.Array]:
        read = {name: x.astype(compute_dtype) for name, x in params.items()}
        value, grads = jax.value_and_grad(loss)(read, batch)
        grads = {name: grad.astype(jnp.float32) for name, grad in grads.items()}
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    return jax.jit(step, donate_argnums=(0, 1))


def build_nnx_step(model: nnx.Module, tx: optax.GradientTransformation) -> Callable[[Any], Any]:
    """Builds `step(batch) -> loss` in Flax's own way: `nnx.jit` of the module and its optimizer."""
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    def loss_of(model: Any, batch: Any) -> jax.Array:
        total, weight = model.loss(batch)
        return total / weight

    @nnx.jit
    def step(model: Any, optimizer: nnx.Optimizer, batch: Any) -> jax.Array:
        value, grads = nnx.value_and_grad(loss_of)(model, batch)
        optimizer.update(model, grads)
        return value

    return lambda batch: step(model, optimizer, batch)


def _paths(state: nnx.State) -> list[tuple[Any, Any, str]]:
    return [(path, leaf, "/".join(map(str, path))) for path, leaf in nnx.to_flat_state(state)]
