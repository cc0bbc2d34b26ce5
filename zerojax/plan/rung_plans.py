"""Plans the training step of each compiled row length of a curriculum, before any of them is
compiled.

The training state must be the same at every length, so a model whose parameters depend on the row
length is an error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from zerojax.config import ConfigError, CurriculumConfig
from zerojax.plan.inputs import PlanInputs, plan_options
from zerojax.plan.make import Plan, plan_of
from zerojax.plan.rungs import WEIGHTS, Ladder, ladder_of
from zerojax.tracing.trees import flatten_names


def with_rungs(plan: Plan) -> Plan:
    """Returns the plan with the plans of all compiled lengths of its curriculum; the same plan
    without a curriculum.

    Args:
      plan: plan for full rows; its measured choices are used for all lengths.

    Raises:
      ConfigError: the curriculum does not fit the run, or a length cannot be planned.
    """
    curriculum = plan.inputs.curriculum
    if curriculum.type is None:
        return plan
    has_own_loss = plan.inputs.loss is not None
    ladder = ladder_of(plan, curriculum, has_own_loss=has_own_loss)
    plans = {length: _plan_rung(plan, ladder, length) for length in ladder.config.rungs}
    ladder = dataclasses.replace(ladder, plans=plans)
    return dataclasses.replace(plan, ladder=ladder, reasons=(*plan.reasons, *ladder.describe()))


def _plan_rung(plan: Plan, ladder: Ladder, length: int) -> Plan:
    """Plans the step for rows of `length` tokens, with the measured choices of `plan`."""
    inputs = dataclasses.replace(
        plan.inputs,
        example_batch=shortened_structs(plan.abstract_batch, ladder, length),
        curriculum=CurriculumConfig(),
        num_microbatches=plan.num_microbatches,
    )
    rung = _planned(plan, inputs, length, ladder.seq_len)
    _check_state(plan, rung, length, ladder.seq_len)
    kernels = dict(rung.program.kernels)
    kernels |= {what: plan.program.kernels[what] for what in ("update", "statistics")}
    return dataclasses.replace(rung, program=dataclasses.replace(rung.program, kernels=kernels))


def _planned(plan: Plan, inputs: PlanInputs, length: int, seq_len: int) -> Plan:
    settings = plan.settings
    try:
        return plan_of(inputs, plan.mesh, zero=settings.zero, **plan_options(settings))
    except Exception as error:
        raise ConfigError(
            f"rows of {length} tokens (one of the curriculum's compiled lengths) cannot be "
            f"planned, although rows of {seq_len} can ({type(error).__name__}: {error}); use a "
            "model and settings that support shorter rows, or other lengths (min_length, "
            "length_step)",
            ("curriculum", "type"),
        ) from error


def _check_state(plan: Plan, rung: Plan, length: int, seq_len: int) -> None:
    """Raises if the training state for a shorter length differs in names, shapes, dtypes or
    shardings."""
    before, after = (flatten_names(one.abstract_state) for one in (plan, rung))
    for name in sorted({*before, *after}):
        at = [_leaf(leaves.get(name)) for leaves in (before, after)]
        if at[0] != at[1]:
            shapes = [None if x is None else list(x[0]) for x in at]
            raise ConfigError(
                f"the model's state depends on the length of rows: {name} is {shapes[0]} with "
                f"{seq_len} tokens and {shapes[1]} with {length}; make this size a setting of the "
                "model, or leave the curriculum out",
                ("curriculum", "type"),
            )


def _leaf(leaf: Any) -> tuple[Any, ...] | None:
    return None if leaf is None else (leaf.shape, leaf.dtype, leaf.sharding)


def shortened_structs(batch: Mapping[str, Any], ladder: Ladder, length: int) -> dict[str, Any]:
    """Returns the shapes of a global batch whose rows have `length` tokens.

    Args:
      batch: structs [rows, tokens, ...] of the global batch with full rows.
      ladder: compiled lengths of the curriculum.
      length: number of tokens per row.
    """

    def short(name: str, leaf: Any) -> jax.ShapeDtypeStruct:
        shape = leaf.shape
        if name in ladder.keys:
            shape = (shape[0], length, *shape[2:])
        return jax.ShapeDtypeStruct(shape, leaf.dtype)

    structs = {name: short(name, leaf) for name, leaf in batch.items()}
    if ladder.adds_weights:
        rows = batch[ladder.keys[0]].shape[0]
        structs[WEIGHTS] = jax.ShapeDtypeStruct((rows, length), jnp.float32)
    return structs
