"""Shortens the rows of a host batch to the length of a step in a curriculum."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from zerojax.models.given_arrays import as_arrays
from zerojax.plan.rungs import WEIGHTS, Ladder


def shorten(batch: Any, ladder: Ladder, step: int) -> dict[str, Any]:
    """Returns the batch of a step: the first tokens of each row, at a compiled length.

    The tokens between the step's length and the compiled one keep their values and have the weight
    0, so a loss that looks at earlier tokens only is that of rows of the step's length.

    Args:
      batch: {name: array [rows, tokens, ...]} with whole rows; a process passes its own rows.
      ladder: of the plan.
      step: from 1.

    Returns:
      {name: array}, where the arrays of `ladder.keys` are [rows, compiled length, ...]; with
      `ladder.adds_weights` also "weights", float32 [rows, compiled length].

    Raises:
      ValueError: the batch lacks an array, or its rows do not have the length of the plan's.
    """
    arrays = as_arrays(batch)
    length = ladder.config.length(step)
    rung = ladder.config.rung(length)
    short = dict(_checked(arrays, ladder))
    for name in ladder.keys:
        short[name] = short[name][:, :rung]
    if ladder.adds_weights and WEIGHTS not in short:
        short[WEIGHTS] = np.ones(short[ladder.keys[0]].shape[:2], np.float32)
    if length < rung:
        short[WEIGHTS] = without_end(short[WEIGHTS], length)
    if WEIGHTS in ladder.keys and not np.any(short[WEIGHTS]) and np.any(arrays[WEIGHTS]):
        warnings.warn(
            f"step {step}: the first {length} tokens of all rows have the weight 0, as prompts may "
            "have, so the update of this step is skipped; raise min_length of the curriculum",
            stacklevel=2,
        )
    return short


def without_end(weights: Any, length: int) -> Any:
    """Returns weights [rows, tokens] with 0 from position `length` on, of the same dtype."""
    counted = np.arange(weights.shape[1])[None] < length
    return weights * counted.astype(weights.dtype)


def _checked(arrays: Any, ladder: Ladder) -> Mapping[str, Any]:
    """Returns the arrays of a batch; raises ValueError where rows are not whole."""
    for name in ladder.keys:
        shape = getattr(arrays.get(name), "shape", None) if isinstance(arrays, Mapping) else None
        if shape is None:
            raise ValueError(
                f"the batch has no array {name!r} to shorten for the curriculum; give every batch "
                "the array names of the first batch"
            )
        if len(shape) < 2 or shape[1] != ladder.seq_len:
            raise ValueError(
                f"batch[{name!r}] has shape {tuple(shape)}, and the curriculum shortens rows of "
                f"{ladder.seq_len} tokens; use rows of this length in every batch"
            )
    return arrays
