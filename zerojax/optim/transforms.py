"""Helpers for optax transformations: clipping, stacked layers, random keys, extra arguments."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zerojax.config.tree_types import Tree
from zerojax.tracing import trees

EXTRA_ARGUMENTS = ("value", "grad", "grad_norm", "layers")
"""Keyword arguments that `extra_arguments` returns."""


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformationExtraArgs:
    """Builds `optax.clip_by_global_norm` that uses the gradient norm already computed by the step.

    It must be the first part of a chain, because the step passes the norm of the gradients.
    Elsewhere in a chain use optax's own function.
    """

    def update(
        updates: Tree,
        state: Tree,
        params: Tree = None,
        *,
        grad_norm: jax.Array | None = None,
        **_: Any,
    ) -> tuple[Any, Any]:
        norm = optax.tree.norm(updates) if grad_norm is None else grad_norm
        # The order of operations is optax's, so that the bits are equal.
        scale = lambda x: jnp.where(norm < max_norm, x, x / norm.astype(x.dtype) * max_norm)  # noqa: E731
        return jax.tree.map(scale, updates), state

    return optax.GradientTransformationExtraArgs(optax.identity().init, update)


def map_layers(
    function: Callable[..., Any], layers: Container[str], first: Tree, *others: Tree
) -> Tree:
    """Maps a function over trees like `jax.tree.map`; for arrays named in `layers`, over each row
    (layer) separately."""
    named = {name: name in layers for name in trees.flatten_names(first)}

    def leaf(is_stack: bool, *arrays: jax.Array) -> Any:
        return (jax.vmap(function) if is_stack else function)(*arrays)

    return jax.tree.map(leaf, trees.unflatten_like(first, named), first, *others)


def with_raw_keys(tx: optax.GradientTransformation, params: Tree) -> optax.GradientTransformation:
    """Returns a transformation that stores PRNG keys in its state as uint32 arrays, not typed keys.

    Args:
      tx: transformation, returned unchanged if its state has no typed key.
      params: structs of the parameters.
    """
    # The stored words of a key do not tell its implementation, so it is noted from the typed keys.
    impls: list[Any] = []

    def find(params: Tree) -> Tree:
        leaves = jax.tree.leaves(tx.init(params))
        impls.extend(jax.random.key_impl(x) if _is_key(x) else None for x in leaves)

    jax.eval_shape(find, params)
    if not any(impls):
        return tx
    inner = optax.with_extra_args_support(tx)

    def stored(state: Tree) -> Tree:
        return jax.tree.map(lambda x: jax.random.key_data(x) if _is_key(x) else x, state)

    def typed(state: Tree) -> Tree:
        leaves, structure = jax.tree.flatten(state)
        pairs = zip(leaves, impls, strict=True)
        return structure.unflatten(
            [x if impl is None else jax.random.wrap_key_data(x, impl=impl) for x, impl in pairs]
        )

    def update(updates: Tree, state: Tree, params: Tree = None, **extra: Any) -> tuple[Any, Tree]:
        updates, state = inner.update(updates, typed(state), params, **extra)
        return updates, stored(state)

    return optax.GradientTransformationExtraArgs(lambda params: stored(inner.init(params)), update)


def _is_key(x: object) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def extra_arguments(
    grads: Mapping[str, Any], grad_norm: jax.Array, loss: jax.Array, layers: frozenset[str]
) -> dict[str, Any]:
    """Returns the keyword arguments for `update` of a `GradientTransformationExtraArgs`.

    Args:
      grads: gradients of the mean loss, with the shapes of the parameters.
      grad_norm: float32 []; l2 norm of the gradients before clipping.
      loss: float32 []; mean loss of the global batch.
      layers: names of parameters whose dimension 0 counts layers.

    Returns:
      "value" and "grad", the names that optax uses (`optax.polyak_sgd`, `optax.contrib.momo`), and
      "grad_norm" and "layers" for zerojax's own optimizers.
    """
    return {"value": loss, "grad": grads, "grad_norm": grad_norm, "layers": layers}
