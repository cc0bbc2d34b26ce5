"""Batches of an engine's loop as arrays with the rows of one step."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from zerojax.models.trees import check_arrays


def as_batch(batch: Any, data_iter: Iterator[Any] | None, num_microbatches: int) -> Any:
    """The rows of this process for one step, as arrays of numpy or JAX, whoever made them.

    Args:
      batch: all of them, or None.
      data_iter: in its place: an iterator of which `num_microbatches` are taken and joined.

    Raises:
      TypeError: both, or neither, or what gives batches. StopIteration: of `data_iter`.
    """
    if (batch is None) == (data_iter is None):
        raise TypeError("pass a batch or data_iter=, one of them")
    if data_iter is None:
        _check_is_batch(batch)
        return as_arrays(batch)
    if not isinstance(data_iter, Iterator):
        raise TypeError(
            f"data_iter is a {type(data_iter).__name__}, which is no iterator; make one before the "
            "loop, it = iter(loader), and pass data_iter=it"
        )
    parts = [as_arrays(next(data_iter)) for _ in range(num_microbatches)]
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)


def _check_is_batch(batch: Any) -> None:
    """Refuses a loader, a dataset or a generator in the place of one batch."""
    is_tree = isinstance(batch, Mapping | Sequence) or hasattr(batch, "shape")
    gives = isinstance(batch, Iterator) or hasattr(batch, "__getitem__")
    if not is_tree and (gives or isinstance(batch, Iterable)):
        raise TypeError(
            f"the batch is a {type(batch).__name__}, which gives batches; make an iterator before "
            "the loop, it = iter(loader), and pass data_iter=it"
        )


def as_arrays(batch: Any) -> Any:
    """A batch with arrays of numpy or JAX in the place of others, such as torch's tensors.

    Raises:
      TypeError: it holds text, or rows as Python lists.
    """
    if isinstance(batch, UserDict):  # what tokenizers of Hugging Face return
        batch = dict(batch)
    check_arrays(batch)
    return jax.tree.map(as_array, batch)


def as_array(leaf: Any) -> Any:
    """Arrays of numpy and JAX, and structs, as they are; others, as torch's tensors, as numpy's."""
    return leaf if hasattr(leaf, "shape") and hasattr(leaf, "sharding") else np.asarray(leaf)
