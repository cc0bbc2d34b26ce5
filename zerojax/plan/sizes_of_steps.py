"""Finds the rows and tokens of a run's steps from its batch and its features, for schedules of the
learning rate that count tokens and for rates that depend on the batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax

from zerojax.config.tree_types import Batch
from zerojax.features.known import sizes_of_features
from zerojax.optim.step_sizes import StepSizes
from zerojax.plan.inputs import PlanInputs

TOKENS = "tokens"


def sizes_of_steps(inputs: PlanInputs) -> StepSizes:
    """Returns the number of rows and tokens of every step of a run.

    The tokens of a step are all tokens of its rows, as in the log's `tokens_seen`: also those of
    weight 0 in the data, but not those that a feature cuts.

    Args:
      inputs: inputs of the plan; those of a compiled size have the sizes of the whole run.

    Raises:
      ConfigError: a feature does not fit the batch.
    """
    if inputs.step_sizes is not None:
        return inputs.step_sizes
    batch = inputs.example_batch
    rows = jax.tree.leaves(batch)[0].shape[0]
    seq_len, why = _seq_len(batch)
    found = sizes_of_features(inputs.features, rows, seq_len)
    if found is not None:
        return dataclasses.replace(found, why_unknown=why)
    tokens = None if seq_len is None else rows * seq_len
    return StepSizes.constant(rows, tokens, why)


def _seq_len(batch: Batch) -> tuple[int | None, str]:
    """Returns (number of tokens of a row, or None; why it is not known)."""
    tokens = batch.get(TOKENS) if isinstance(batch, Mapping) else None
    shape = getattr(tokens, "shape", ())
    if len(shape) == 2:
        return shape[1], ""
    names = sorted(map(str, batch)) if isinstance(batch, Mapping) else type(batch).__name__
    return None, f"the batch has no array {TOKENS!r} [rows, tokens]; it has {names}"
