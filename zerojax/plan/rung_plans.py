"""Plans the training step of each compiled row length of a curriculum, or of each batch size of a
ramp, before any of them is compiled.

The training state must be the same at every size, so a model whose parameters depend on the row
length is an error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from zerojax.config import BatchRampConfig, ConfigError, CurriculumConfig, OptimizerConfig
from zerojax.features.batch_ramp.batch_rungs import BatchLadder, batch_ladder_of, resized_structs
from zerojax.features.curriculum.rungs import WEIGHTS, Ladder, ladder_of
from zerojax.plan.inputs import PlanInputs, plan_options
from zerojax.plan.make import Plan, plan_of
from zerojax.plan.sizes_of_steps import sizes_of_steps
from zerojax.tracing.trees import flatten_names

_LENGTH_KEY, _BATCH_KEY = ("curriculum", "type"), ("batch_ramp", "start")


def with_rungs(plan: Plan) -> Plan:
    """Returns the plan with the plans of all compiled sizes of its curriculum or batch ramp; the
    same plan without either.

    Args:
      plan: plan for full rows and the full batch; its measured choices are used for all sizes.

    Raises:
      ConfigError: the curriculum or ramp does not fit the run, or a size cannot be planned.
    """
    features = plan.inputs.features
    curriculum, ramp = features.get(CurriculumConfig), features.get(BatchRampConfig)
    if curriculum.type is None and ramp.is_off:
        return plan
    ladder: Ladder | BatchLadder
    if ramp.is_off:
        has_own_loss = plan.inputs.loss is not None
        ladder = ladder_of(plan, curriculum, has_own_loss=has_own_loss)
        plans = {length: _plan_length(plan, ladder, length) for length in ladder.config.rungs}
    else:
        ladder = batch_ladder_of(plan, ramp)
        plans = {rows: _plan_batch(plan, ladder, rows) for rows in ladder.ramp.rungs[:-1]}
        # The plan of the whole run cannot know its rows from the number of updates: a skipped batch
        # advances the ramp, but is no update.
        scales = (
            isinstance(plan.inputs.optimizer, OptimizerConfig) and plan.inputs.optimizer.scaling
        )
        plans[ladder.whole] = _plan_batch(plan, ladder, ladder.whole) if scales else plan
    ladder = dataclasses.replace(ladder, plans=plans)
    return dataclasses.replace(plan, ladder=ladder, reasons=(*plan.reasons, *ladder.describe()))


def _plan_length(plan: Plan, ladder: Ladder, length: int) -> Plan:
    """Plans the step for rows of `length` tokens, with the measured choices of `plan`."""
    inputs = dataclasses.replace(
        plan.inputs,
        example_batch=shortened_structs(plan.abstract_batch, ladder, length),
        features=plan.inputs.features.replaced(CurriculumConfig()),
        num_microbatches=plan.num_microbatches,
        step_sizes=sizes_of_steps(plan.inputs),
    )
    remedy = "use a model and settings that support shorter rows, or other lengths (min_length, "
    rung = _planned(plan, inputs, ladder, length, f"{remedy}length_step)", _LENGTH_KEY)
    _check_state(plan, rung, length, ladder.seq_len)
    return _with_kernels(plan, rung)


def _plan_batch(plan: Plan, ladder: BatchLadder, rows: int) -> Plan:
    """Plans the step for a batch of `rows` rows, with the measured choices of `plan`."""
    number = None  # follows from virtual_shards
    if plan.settings.deterministic is None:
        number = plan.num_microbatches * rows // ladder.whole
    inputs = dataclasses.replace(
        plan.inputs,
        example_batch=resized_structs(plan.abstract_batch, rows),
        features=plan.inputs.features.replaced(BatchRampConfig()),
        num_microbatches=number,
        step_sizes=dataclasses.replace(sizes_of_steps(plan.inputs), own_rows=rows),
    )
    remedy = "use other batch sizes (start, increment), or settings that support this one"
    rung = _planned(plan, inputs, ladder, rows, remedy, _BATCH_KEY)
    return _with_kernels(plan, rung)


def _with_kernels(plan: Plan, rung: Plan) -> Plan:
    kernels = dict(rung.program.kernels)
    kernels |= {what: plan.program.kernels[what] for what in ("update", "statistics")}
    return dataclasses.replace(rung, program=dataclasses.replace(rung.program, kernels=kernels))


def _planned(
    plan: Plan,
    inputs: PlanInputs,
    ladder: Ladder | BatchLadder,
    size: int,
    remedy: str,
    key: tuple[str, ...],
) -> Plan:
    settings = plan.settings
    try:
        return plan_of(inputs, plan.mesh, zero=settings.zero, **plan_options(settings))
    except Exception as error:
        raise ConfigError(
            f"{ladder.describe_rung(size)} (one of the compiled sizes) cannot be planned, although "
            f"{ladder.describe_rung(ladder.whole)} can ({type(error).__name__}: {error}); {remedy}",
            key,
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
                _LENGTH_KEY,
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
