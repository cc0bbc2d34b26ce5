"""Separation of floating-point activations, which have gradients, from others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp


def is_floating(x: Any) -> bool:
    """Whether an array, or a `ShapeDtypeStruct`, has a gradient."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def floating(activations: Sequence[Any]) -> list[Any]:
    """Those with a gradient."""
    return [x for x in activations if is_floating(x)]


def others(activations: Sequence[Any]) -> list[Any]:
    """Those without."""
    return [x for x in activations if not is_floating(x)]


def join(floating: Sequence[Any], others: Sequence[Any], like: Sequence[Any]) -> list[Any]:
    """The inverse of the two, in the order of `like`."""
    first, second = iter(floating), iter(others)
    return [next(first) if is_floating(x) else next(second) for x in like]
