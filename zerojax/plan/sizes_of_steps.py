"""Finds the rows and tokens of a run's steps from its batch, its curriculum and its batch ramp, for
schedules of the learning rate that count tokens and for rates that depend on the batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from zerojax.config import BatchRamp, BatchRampConfig, CurriculumConfig
from zerojax.config.checks import MAX_SIZE
from zerojax.optim.step_sizes import StepSizes
from zerojax.plan.inputs import PlanInputs

TOKENS = "tokens"


def sizes_of_steps(inputs: PlanInputs) -> StepSizes:
    """Returns the number of rows and tokens of every step of a run.

    The tokens of a step are all tokens of its rows, as in the log's `tokens_seen`: also those of
    weight 0 in the data, but not those that a curriculum cuts.

    Args:
      inputs: inputs of the plan; those of a compiled size have the sizes of the whole run.

    Raises:
      ConfigError: the batch ramp does not fit the batch.
    """
    if inputs.step_sizes is not None:
        return inputs.step_sizes
    batch, features = inputs.example_batch, inputs.features
    curriculum, ramp = features.get(CurriculumConfig), features.get(BatchRampConfig)
    rows = jax.tree.leaves(batch)[0].shape[0]
    seq_len, why = _seq_len(batch)
    if not ramp.is_off:
        found = BatchRamp(config=ramp, final=rows)
        return StepSizes(
            after=tuple(step - 1 for step in found.first_steps),
            rows=found.rungs,
            tokens=None if seq_len is None else tuple(size * seq_len for size in found.rungs),
            why_unknown=why,
        )
    if curriculum.type is None or seq_len is None:
        tokens = None if seq_len is None else rows * seq_len
        return StepSizes.constant(rows, tokens, why)
    return _sizes_in_curriculum(curriculum, rows, seq_len)


def _seq_len(batch: Any) -> tuple[int | None, str]:
    """Returns (number of tokens of a row, or None; why it is not known)."""
    tokens = batch.get(TOKENS) if isinstance(batch, Mapping) else None
    shape = getattr(tokens, "shape", ())
    if len(shape) == 2:
        return shape[1], ""
    names = sorted(map(str, batch)) if isinstance(batch, Mapping) else type(batch).__name__
    return None, f"the batch has no array {TOKENS!r} [rows, tokens]; it has {names}"


def _sizes_in_curriculum(curriculum: CurriculumConfig, rows: int, seq_len: int) -> StepSizes:
    if curriculum.schedule_type != "fixed_discrete" and curriculum.max_length is None:
        curriculum = dataclasses.replace(curriculum, max_length=seq_len)
    after, lengths, step = [], [], 0
    while True:
        length = curriculum.length(step + 1)
        after.append(step)
        lengths.append(length)
        following = curriculum.first_step_above(length, step + 1)
        if following is None or following > MAX_SIZE:
            break
        step = following - 1
    return StepSizes(
        after=tuple(after),
        rows=(rows,) * len(after),
        tokens=tuple(rows * length for length in lengths),
    )
