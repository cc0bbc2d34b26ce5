"""Reads the batches that a user's loop passes to an engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from zerojax.config.tree_types import Batch
from zerojax.models.given_arrays import as_arrays, check_arrays, own_arrays
from zerojax.plan.refusals import check_rows


def as_batch(batch: Batch, data_iter: Iterator[Any] | None, num_microbatches: int) -> Any:
    """Returns this process's rows of one step's batch, as NumPy or JAX arrays.

    Args:
      batch: all rows of this process, or None.
      data_iter: alternative to `batch`: an iterator, from which `num_microbatches` micro-batches
        are taken and joined.
      num_microbatches: number of micro-batches of a step.

    Raises:
      TypeError: both or neither were passed, or `batch` is a loader or iterator.
      StopIteration: `data_iter` has no further micro-batch.
    """
    if (batch is None) == (data_iter is None):
        raise TypeError("both or neither of batch and data_iter= were passed; pass one of them")
    if data_iter is None:
        _check_is_batch(batch)
        return as_arrays_of_batch(batch)
    if not isinstance(data_iter, Iterator):
        raise TypeError(
            f"data_iter is a {type(data_iter).__name__}, which is not an iterator; before the "
            "loop, write it = iter(loader), and pass data_iter=it"
        )
    parts = [own_arrays(as_arrays_of_batch(next(data_iter))) for _ in range(num_microbatches)]
    for part in parts:
        check_rows(part)
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)


def _check_is_batch(batch: Batch) -> None:
    """Raises TypeError if `batch` is a loader, a dataset or a generator."""
    is_tree = isinstance(batch, Mapping | Sequence) or hasattr(batch, "shape")
    gives = isinstance(batch, Iterator) or hasattr(batch, "__getitem__")
    if not is_tree and (gives or isinstance(batch, Iterable)):
        raise TypeError(
            f"the batch is a {type(batch).__name__}, not a batch; before the loop, write "
            "it = iter(loader), and pass data_iter=it"
        )


def as_arrays_of_batch(batch: Batch) -> Any:
    """Converts a batch to NumPy or JAX arrays; `ShapeDtypeStruct`s are unchanged.

    Raises:
      TypeError: the batch contains text, or rows as Python lists.
    """
    batch = as_arrays(batch)
    check_arrays(batch)
    return jax.tree.map(lambda leaf: leaf if hasattr(leaf, "shape") else np.asarray(leaf), batch)


def rows_of(batch: Batch) -> int | None:
    """Returns the number of rows of a batch; None if it has only scalars."""
    return next((leaf.shape[0] for leaf in jax.tree.leaves(batch) if leaf.shape), None)
