"""Computes statistics of gradients before an update: sum of squares, count of non-finite values."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from pallas_kernels.elementwise import Blocks, Rule, Scalar, Values


class StatsScalars(NamedTuple):
    """Scalars of `GRADIENT_STATS`: only the factor of a gradient (1 / loss scale)."""

    gradient_scale: Scalar = 1.0


def gradient_stats(updated: Blocks, read: Blocks, s: StatsScalars) -> Values:
    """Sums squares of the scaled gradient, and counts non-finite elements before scaling; `read` is
    (grad,).

    The count is exact up to 2^24 per leaf and never 0 by rounding. Squares of finite bfloat16
    values can overflow, so an infinite sum of squares does not mean a non-finite gradient.
    """
    (grad,) = read
    scaled = grad * s.gradient_scale
    # Also False for NaN.
    is_finite = jnp.abs(grad) < jnp.full_like(grad, jnp.inf)
    bad = jnp.where(is_finite, jnp.zeros_like(grad), jnp.ones_like(grad))
    return Values(sums=(scaled * scaled, bad))


GRADIENT_STATS = Rule(
    name="gradient_stats",
    math=gradient_stats,
    scalars=StatsScalars,
    num_updated=0,
    num_read=1,
    num_sums=2,
)
