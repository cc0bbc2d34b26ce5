"""Builds optimizers of DeepSpeed for which zerojax has no fused kernel, as optax transformations.

XLA compiles their update rules.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Container
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zerojax.config.tree_types import Tree
from zerojax.optim import Schedule, map_layers

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
    """Builds DeepSpeed's LAMB, whose trust ratio is bounded by `min_coeff` and `max_coeff`.

    The formulas are those of `csrc/lamb/fused_lamb_cuda_kernel.cu`: the ratio of the norms of the
    parameter and of its update before bias correction is bounded, and the correction is part of the
    learning rate. In contrast, `zerojax.lamb` follows the paper (arXiv:1904.00962) and optax: no
    bounds, and bias correction before the ratio.

    There is one ratio per array. For stacked arrays, whose names the step passes to `update` as
    `layers`, there is one ratio per layer.
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
    """Builds AdamW, optionally without bias correction (`bias_correction: false`, as in BERT).

    The formulas are those of `csrc/adam/multi_tensor_adam.cu`. With a decay that is added to the
    gradient before, the result is DeepSpeed's Adam with `adam_w_mode: false`.
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
    """Builds an optax transformation with Adam's two moments.

    Args:
      b1: decay of the first moment, or a schedule of it.
      b2: decay of the second moment.
      prepare: function from the number of previous updates to a function (first moment, second
        moment, parameter) -> update.
      per_layer: True: that function is applied to each layer of a stacked array separately.
    """

    def init(params: Tree) -> optax.ScaleByAdamState:
        zeros = functools.partial(jax.tree.map, jnp.zeros_like)
        return optax.ScaleByAdamState(jnp.zeros([], jnp.int32), zeros(params), zeros(params))

    def update(
        updates: Tree, state: Tree, params: Tree = None, *, layers: Container[str] = (), **_: Any
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
    """Returns Adam's bias corrections 1 - beta ** (count + 1) for both betas; `count` is the number
    of updates before this one.

    A constant b2 near 1 is handled without cancellation: 1 - 0.999 in float32 has an error of 1e-5.
    """
    updates = count + 1
    second = -jnp.expm1(updates * math.log(b2)) if b2 > 0 else 1.0
    return 1 - _beta(b1, count) ** updates, second


def _beta(b1: float | Schedule, count: jax.Array) -> Any:
    return b1(count) if callable(b1) else b1
