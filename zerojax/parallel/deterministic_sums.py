"""Reproducible sums: one binary tree over an index, the same on any number of devices.

Floating-point sums depend on their association, not on the order of two operands. A sum over `2^k`
numbered values is therefore fixed by saying which bit of the number is combined first. Devices hold
consecutive values, so the device's number is the high bits. What is summed on a device before
devices exchange anything combines the lowest bit first, what is exchanged value by value the
highest bit first; both are the same tree on every number of devices.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


class TreeOrder(enum.Enum):
    """Which bit of a value's number the sum combines first."""

    LOWEST_FIRST = "lowest bit first"
    HIGHEST_FIRST = "highest bit first"


def tree_sum(rows: jax.Array, order: TreeOrder) -> jax.Array:
    """The sum over dimension 0, of a size that is a power of two, in the fixed order."""
    while rows.shape[0] > 1:
        half = rows.shape[0] // 2
        if order is TreeOrder.LOWEST_FIRST:
            pairs = rows.reshape(half, 2, *rows.shape[1:])
            rows = pairs[:, 0] + pairs[:, 1]
        else:
            rows = rows[:half] + rows[half:]
    return rows[0]


def tree_total(
    value_of: Callable[[jax.Array, Any], tuple[Any, Any]],
    count: int,
    order: TreeOrder,
    *,
    like: Any,
    carried: Any,
) -> tuple[Any, Any]:
    """The sum of `count` values that are made one after the other, in the fixed order.

    Loops of two in each other: the program holds one `value_of`, and beside the value that is being
    made there are at most log2(count) partial sums.

    Args:
      value_of: (number int32 [], what is carried) -> (value, what is carried on).
      count: a power of two.
      order: which bit is combined first.
      like: shapes and dtypes of a value.
      carried: goes through all calls, in the order in which they are made.

    Returns:
      (the sum, what was carried through).
    """
    bits = count.bit_length() - 1

    def level(depth: int, number: jax.Array, carried: Any) -> tuple[Any, Any]:
        if depth == bits:
            return value_of(number, carried)
        bit = depth if order is TreeOrder.HIGHEST_FIRST else bits - 1 - depth

        def half(which: jax.Array, carry: Any) -> Any:
            earlier, carried = carry
            later, carried = level(depth + 1, number + (which << bit), carried)
            # Selected, not added to zero: 0 + -0 is not -0.
            total = jax.tree.map(lambda a, x: jnp.where(which == 0, x, a + x), earlier, later)
            return total, carried

        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
        return lax.fori_loop(0, 2, half, (zeros, carried))

    return level(0, jnp.int32(0), carried)
