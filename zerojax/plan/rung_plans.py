"""Plans the training step of each compiled size of a run whose steps differ in rows or tokens,
before any of them is compiled.

The training state must be the same at every size.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from zerojax.config import ConfigError, OptimizerConfig
from zerojax.features.known import ladder_of
from zerojax.features.several_sizes import Ladder
from zerojax.plan.inputs import plan_options
from zerojax.plan.make import Plan, plan_of
from zerojax.plan.sizes_of_steps import sizes_of_steps
from zerojax.tracing.trees import flatten_names


def with_rungs(plan: Plan) -> Plan:
    """Returns the plan with the plans of all compiled sizes; the same plan if steps have one size.

    Args:
      plan: plan of a full step; its measured choices are used for all sizes.

    Raises:
      ConfigError: a feature that changes the size does not fit the run, or a size cannot be
        planned.
    """
    inputs = plan.inputs
    ladder = ladder_of(inputs.features, plan, own_loss=inputs.loss is not None)
    if ladder is None:
        return plan
    # A rate that scales with the rows: the plan of the run cannot know them from the number of
    # updates, because a skipped batch is no update, but a step of the feature.
    scales = isinstance(inputs.optimizer, OptimizerConfig) and inputs.optimizer.scaling
    plans = {
        size: plan if ladder.is_plan_of_run(size) and not scales else _plan_size(plan, ladder, size)
        for size in ladder.sizes
    }
    ladder = ladder.planned(plans)
    return dataclasses.replace(plan, ladder=ladder, reasons=(*plan.reasons, *ladder.describe()))


def _plan_size(plan: Plan, ladder: Ladder, size: int) -> Plan:
    """Plans the step of a compiled size, with the measured choices of `plan`."""
    settings, sizes = plan.settings, sizes_of_steps(plan.inputs)
    if ladder.rows_of_steps is not None:
        sizes = dataclasses.replace(sizes, own_rows=size)
    number = ladder.microbatches(plan.num_microbatches, size)
    inputs = dataclasses.replace(
        plan.inputs,
        example_batch=ladder.structs(plan.abstract_batch, size),
        features=plan.inputs.features.replaced(ladder.kind()),
        # That of fixed pieces follows from the mesh.
        num_microbatches=number if settings.fixed_pieces is None else None,
        step_sizes=sizes,
    )
    where = ladder.kind.keyword, ladder.kind.switch
    try:
        rung = plan_of(inputs, plan.mesh, zero=settings.zero, **plan_options(settings))
    except Exception as error:
        raise ConfigError(
            f"{ladder.describe_rung(size)} (one of the compiled sizes) cannot be planned, although "
            f"{ladder.describe_rung(ladder.whole)} can ({type(error).__name__}: {error}); "
            f"{ladder.remedy}",
            where,
        ) from error
    _check_state(plan, rung, ladder, size)
    kernels = dict(rung.program.kernels)
    kernels |= {what: plan.program.kernels[what] for what in ("update", "statistics")}
    return dataclasses.replace(rung, program=dataclasses.replace(rung.program, kernels=kernels))


def _check_state(plan: Plan, rung: Plan, ladder: Ladder, size: int) -> None:
    """Raises if the training state of a size differs in names, shapes, dtypes or shardings."""
    before, after = (flatten_names(one.abstract_state) for one in (plan, rung))
    for name in sorted({*before, *after}):
        at = [_leaf(leaves.get(name)) for leaves in (before, after)]
        if at[0] != at[1]:
            shapes = [None if x is None else list(x[0]) for x in at]
            raise ConfigError(
                f"the model's state depends on the size of steps: {name} is {shapes[0]} with "
                f"{ladder.describe_rung(ladder.whole)} and {shapes[1]} with "
                f"{ladder.describe_rung(size)}; make this size a setting of the model, or leave "
                f"{ladder.kind.keyword} out",
                (ladder.kind.keyword, ladder.kind.switch),
            )


def _leaf(leaf: jax.ShapeDtypeStruct | None) -> tuple[Any, ...] | None:
    return None if leaf is None else (leaf.shape, leaf.dtype, leaf.sharding)
