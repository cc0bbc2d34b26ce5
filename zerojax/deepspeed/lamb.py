"""DeepSpeed's LAMB, with bounds on the ratio of norms, as an optax transformation.

Knows formulas; never a file.

The formulas are those of `csrc/lamb/fused_lamb_cuda_kernel.cu`: the ratio is that of the norms of
the parameter and of its update before the bias is corrected, bounded, and the correction is part of
the rate. `zerojax.lamb` has the paper's (arXiv:1904.00962) as optax has it: no bounds, and the
correction before the ratio.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zerojax.optim import Schedule

Tree = Any


def bounded_lamb(
    learning_rate: Schedule,
    *,
    b1: float | Schedule,
    b2: float,
    eps: float,
    weight_decay: float,
    min_coeff: float,
    max_coeff: float,
    eps_inside_sqrt: bool,
    bias_correction: bool,
) -> optax.GradientTransformation:
    """LAMB whose ratio of norms lies between `min_coeff` and `max_coeff`.

    There is one ratio for each array; where layers are stacked in arrays [layers, ...] that is one
    for all of them, and not one for each as in DeepSpeed.
    """

    def init(params: Tree) -> optax.ScaleByAdamState:
        zeros = functools.partial(jax.tree.map, jnp.zeros_like)
        return optax.ScaleByAdamState(jnp.zeros([], jnp.int32), zeros(params), zeros(params))

    def update(
        updates: Tree, state: optax.ScaleByAdamState, params: Tree = None
    ) -> tuple[Tree, optax.ScaleByAdamState]:
        assert params is not None, "LAMB reads the parameters' norms"
        beta = b1(state.count) if callable(b1) else b1
        count = optax.safe_increment(state.count)
        average = lambda decay, old, new: decay * old + (1 - decay) * new  # noqa: E731
        mu = jax.tree.map(functools.partial(average, beta), state.mu, updates)
        nu = jax.tree.map(lambda old, g: average(b2, old, g * g), state.nu, updates)
        rate = learning_rate(state.count)
        if bias_correction:
            rate = rate * jnp.sqrt(1 - b2**count) / (1 - beta**count)

        def leaf(m: jax.Array, v: jax.Array, p: jax.Array) -> jax.Array:
            root = jnp.sqrt(v + eps) if eps_inside_sqrt else jnp.sqrt(v) + eps
            moved = m / root + weight_decay * p
            of_param, of_update = (jnp.sqrt(jnp.sum(x * x)) for x in (p, moved))
            bounded = jnp.clip(of_param / of_update, min_coeff, max_coeff)
            ratio = jnp.where((of_param > 0) & (of_update > 0), bounded, 1.0)
            return (-rate * ratio * moved).astype(p.dtype)

        return jax.tree.map(leaf, mu, nu, params), optax.ScaleByAdamState(count, mu, nu)

    return optax.GradientTransformation(init, update)
