"""Shortens the rows of a host batch to the length that a curriculum sets for a step."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from zerojax.config import CurriculumConfig
from zerojax.config.tree_types import Batch
from zerojax.models.given_arrays import as_arrays

WEIGHTS = "weights"
"""Name of the batch array of the tokens' weights."""


def shorten(
    batch: Batch,
    config: CurriculumConfig,
    step: int,
    *,
    keys: Sequence[str],
    seq_len: int,
    adds_weights: bool,
) -> dict[str, Any]:
    """Returns the batch of a step: the first tokens of each row, cut to a compiled length.

    A step is compiled only for some lengths, so a row is cut to the next compiled length. Tokens
    beyond the step's own length keep their values but have weight 0. If no token depends on later
    ones, the loss equals the loss of rows with the step's length.

    Args:
      batch: {name: array [rows, tokens, ...]} with uncut rows; each process passes its own rows.
      config: the curriculum.
      step: number of the step, from 1.
      keys: names of the arrays to shorten.
      seq_len: number of tokens of an uncut row.
      adds_weights: whether to add weights to a batch that has none.

    Returns:
      {name: array}; the arrays of `keys` are [rows, compiled length, ...]; with `adds_weights` also
      "weights", float32 [rows, compiled length].

    Raises:
      ValueError: the batch lacks an array, or its rows do not have the length of the plan's batch.
    """
    arrays = as_arrays(batch)
    length = config.length(step)
    rung = config.rung(length)
    short = dict(_checked(arrays, keys, seq_len))
    for name in keys:
        short[name] = short[name][:, :rung]
    if adds_weights and WEIGHTS not in short:
        short[WEIGHTS] = np.ones(short[keys[0]].shape[:2], np.float32)
    if length < rung:
        short[WEIGHTS] = without_end(short[WEIGHTS], length)
    if WEIGHTS in keys and not np.any(short[WEIGHTS]) and np.any(arrays[WEIGHTS]):
        warnings.warn(
            f"step {step}: the first {length} tokens of all rows have the weight 0, as prompts may "
            "have, so the update of this step is skipped; raise min_length of the curriculum",
            stacklevel=2,
        )
    return short


def without_end(weights: Any, length: int) -> Any:
    """Sets weights [rows, tokens] to 0 from position `length` on, keeping the dtype."""
    counted = np.arange(weights.shape[1])[None] < length
    return weights * counted.astype(weights.dtype)


def _checked(
    arrays: Mapping[str, np.ndarray], keys: Sequence[str], seq_len: int
) -> Mapping[str, Any]:
    """Returns the arrays of a batch; raises a ValueError if one of `keys` is missing or its rows do
    not have `seq_len` tokens."""
    for name in keys:
        shape = getattr(arrays.get(name), "shape", None) if isinstance(arrays, Mapping) else None
        if shape is None:
            raise ValueError(
                f"the batch has no array {name!r} to shorten for the curriculum; give every batch "
                "the array names of the first batch"
            )
        if len(shape) < 2 or shape[1] != seq_len:
            raise ValueError(
                f"batch[{name!r}] has shape {tuple(shape)}, and the curriculum shortens rows of "
                f"{seq_len} tokens; use rows of this length in every batch"
            )
    return arrays
