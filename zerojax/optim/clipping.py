"""Clipping by the global gradient norm, for a step that knows the norm already."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformationExtraArgs:
    """`optax.clip_by_global_norm` that takes the norm from the step, which has it already.

    It comes first in a chain: the norm that the step hands on is that of the gradients. Elsewhere
    take optax's own.
    """

    def update(
        updates: Any, state: Any, params: Any = None, *, grad_norm: Any = None, **_: Any
    ) -> tuple[Any, Any]:
        norm = optax.tree.norm(updates) if grad_norm is None else grad_norm
        scale = lambda x: jnp.where(norm < max_norm, x, x / norm.astype(x.dtype) * max_norm)  # noqa: E731
        return jax.tree.map(scale, updates), state

    return optax.GradientTransformationExtraArgs(optax.identity().init, update)
