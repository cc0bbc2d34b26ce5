"""Trees that are to be the same, or the same up to rounding, compared by chex.

`strict=True` of chex's own comparison of values takes bfloat16 for float32.
"""

from typing import Any

import chex
import jax
import numpy as np


def assert_same(found: Any, expected: Any) -> None:
    """Structures, shapes, dtypes and every value."""
    chex.assert_trees_all_equal_shapes_and_dtypes(found, expected)
    chex.assert_trees_all_equal(found, expected)


def assert_near(found: Any, expected: Any, *, tolerance: float) -> None:
    """Structures, shapes and dtypes; integers are equal, others near.

    Args:
      tolerance: of the largest element of each expected array.
    """
    chex.assert_trees_all_equal_shapes_and_dtypes(found, expected)

    def is_near(one: Any, other: Any) -> bool:
        return _distance(one, other) <= _limit(other, tolerance)

    def told(one: Any, other: Any) -> str:
        return f"differ by {_distance(one, other)}, and may by {_limit(other, tolerance)}"

    chex.assert_trees_all_equal_comparator(is_near, told, found, expected)


def _distance(one: Any, other: Any) -> float:
    a, b = (np.asarray(x).astype(np.float64) for x in (one, other))
    return float(np.abs(a - b).max(initial=0)) if np.isfinite(a).all() else float("inf")


def _limit(array: Any, tolerance: float) -> float:
    if jax.numpy.issubdtype(array.dtype, jax.numpy.integer):
        return 0.0
    return tolerance * float(np.abs(np.asarray(array).astype(np.float64)).max(initial=0))
