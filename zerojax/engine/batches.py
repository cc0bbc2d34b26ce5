"""What a loop hands over, as arrays with the rows of one step.

Knows trees of arrays; never a mesh or a plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np


def as_batch(batch: Any, data_iter: Iterator[Any] | None, num_microbatches: int) -> Any:
    """The rows of this process for one step, as arrays of numpy or JAX, whoever made them.

    Args:
      batch: all of them, or None.
      data_iter: in its place: an iterator of which `num_microbatches` are taken and joined.

    Raises:
      TypeError: both, or neither. StopIteration: of `data_iter`.
    """
    if (batch is None) == (data_iter is None):
        raise TypeError("pass a batch or data_iter=, one of them")
    if data_iter is None:
        return jax.tree.map(as_array, batch)
    parts = [jax.tree.map(as_array, next(data_iter)) for _ in range(num_microbatches)]
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)


def as_array(leaf: Any) -> Any:
    """Arrays of numpy and JAX, and structs, as they are; others, as torch's tensors, as numpy's."""
    return leaf if hasattr(leaf, "shape") and hasattr(leaf, "sharding") else np.asarray(leaf)
