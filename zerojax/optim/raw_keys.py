"""optax transformations with random keys stored as numbers, as checkpoints need them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

Tree = Any


def with_raw_keys(tx: optax.GradientTransformation, params: Tree) -> optax.GradientTransformation:
    """The transformation with uint32 arrays in place of typed PRNG keys in its state.

    Args:
      tx: as it is returned where its state has no typed key.
      params: structs.
    """
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

    def update(updates: Any, state: Tree, params: Any = None, **extra: Any) -> tuple[Any, Tree]:
        updates, state = inner.update(updates, typed(state), params, **extra)
        return updates, stored(state)

    return optax.GradientTransformationExtraArgs(lambda params: stored(inner.init(params)), update)


def _is_key(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
