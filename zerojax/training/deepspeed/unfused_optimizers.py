"""Optimizers of DeepSpeed that zerojax does not fuse, as optax transformations.

XLA compiles them without zerojax's fused kernels.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Container
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zerojax.optim import Schedule, map_layers

Tree = Any
Leaf = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


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

    The formulas are those of `csrc/lamb/fused_lamb_cuda_kernel.cu`: the ratio is that of the norms
    of the parameter and of its update before the bias is corrected, bounded, and the correction is
    part of the rate. `zerojax.lamb` has the paper's (arXiv:1904.00962) as optax has it: no bounds,
    and the correction before the ratio.

    There is one ratio for each array, and in the step one for each layer of the arrays in which
    layers are stacked, whose names `update` is given as `layers`.
    """

    def leaf(rate: jax.Array, m: jax.Array, v: jax.Array, p: jax.Array) -> jax.Array:
        root = jnp.sqrt(v + eps) if eps_inside_sqrt else jnp.sqrt(v) + eps
        moved = m / root + weight_decay * p
        of_param, of_update = (jnp.sqrt(jnp.sum(x * x)) for x in (p, moved))
        bounded = jnp.clip(of_param / of_update, min_coeff, max_coeff)
        ratio = jnp.where((of_param > 0) & (of_update > 0), bounded, 1.0)
        return (-rate * ratio * moved).astype(p.dtype)

    def prepare(count: jax.Array) -> Leaf:
        rate = learning_rate(count)
        if bias_correction:
            first, second = _corrections(b1, b2, count)
            rate = rate * jnp.sqrt(second) / first
        return functools.partial(leaf, rate)

    return _with_moments(b1, b2, prepare, per_layer=True)


def plain_adamw(
    learning_rate: Schedule,
    *,
    b1: float | Schedule,
    b2: float,
    eps: float,
    weight_decay: float,
    bias_correction: bool,
) -> optax.GradientTransformation:
    """AdamW whose moments may stay as they are, from 0 on (`bias_correction: false`, as in BERT).

    The formulas are those of `csrc/adam/multi_tensor_adam.cu`. Behind decay that is added to the
    gradient it is DeepSpeed's Adam with `adam_w_mode: false`.
    """

    def prepare(count: jax.Array) -> Leaf:
        rate = learning_rate(count)
        first, second = _corrections(b1, b2, count) if bias_correction else (1.0, 1.0)

        def leaf(m: jax.Array, v: jax.Array, p: jax.Array) -> jax.Array:
            moved = (m / first) / (jnp.sqrt(v / second) + eps) + weight_decay * p
            return (-rate * moved).astype(p.dtype)

        return leaf

    return _with_moments(b1, b2, prepare)


def _with_moments(
    b1: float | Schedule,
    b2: float,
    prepare: Callable[[jax.Array], Leaf],
    *,
    per_layer: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """A transformation that keeps Adam's two moments.

    Args:
      prepare: number of updates before this one -> (moments, parameter) -> what is added to it.
      per_layer: whether that is done to each layer of a stack by itself.
    """

    def init(params: Tree) -> optax.ScaleByAdamState:
        zeros = functools.partial(jax.tree.map, jnp.zeros_like)
        return optax.ScaleByAdamState(jnp.zeros([], jnp.int32), zeros(params), zeros(params))

    def update(
        updates: Tree, state: Any, params: Tree = None, *, layers: Container[str] = (), **_: Any
    ) -> tuple[Tree, Any]:
        assert params is not None, "decay and norms read the parameters"
        beta = _beta(b1, state.count)
        mu = jax.tree.map(lambda old, g: beta * old + (1 - beta) * g, state.mu, updates)
        nu = jax.tree.map(lambda old, g: b2 * old + (1 - b2) * g * g, state.nu, updates)
        apart = layers if per_layer else ()
        moved = map_layers(prepare(state.count), apart, mu, nu, params)
        return moved, optax.ScaleByAdamState(optax.safe_increment(state.count), mu, nu)

    return optax.GradientTransformationExtraArgs(init, update)


def _corrections(b1: float | Schedule, b2: float, count: jax.Array) -> tuple[Any, Any]:
    """1 minus each beta to the number of updates, this one included.

    For a constant second beta near 1 without the cancellation: 1 - 0.999 in float32 is off by 1e-5.
    """
    updates = count + 1
    second = -jnp.expm1(updates * math.log(b2)) if b2 > 0 else 1.0
    return 1 - _beta(b1, count) ** updates, second


def _beta(b1: float | Schedule, count: jax.Array) -> Any:
    return b1(count) if callable(b1) else b1
