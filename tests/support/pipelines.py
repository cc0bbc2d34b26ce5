"""Plans with a pipeline put together by hand, for tests of what is counted and shown.

Knows tables and shapes; nothing is cut out of a model here.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from tests.support.small_models import reference_model
from zerojax import make_plan
from zerojax.placement.device_mesh import make_abstract_mesh
from zerojax.placement.leaf_placement import Access
from zerojax.placement.state_layout import PipelineLayout
from zerojax.plan.make import Plan
from zerojax.schedules import lower, make_schedule


@functools.cache
def _plan_without(layers: int, microbatches: int, data: int, zero: int) -> Plan:
    rows = jax.ShapeDtypeStruct((data * microbatches, 16), jnp.int32)
    return make_plan(
        reference_model("gpt2", num_layers=layers),
        make_abstract_mesh({"data": data}, data),
        example_batch={"tokens": rows, "targets": rows},
        zero=zero,
        num_microbatches=microbatches,
        persistence_threshold=0,
    )


def layout_of(
    schedule: Any = "1f1b",
    *,
    stages: int = 4,
    microbatches: int = 8,
    layers: tuple[int, ...] | None = None,
    stash: str = "residuals",
    stacked: frozenset[str] = frozenset(),
    embed_flops: float = 0.0,
    layer_flops: float = 1000.0,
    head_flops: float = 0.0,
    stash_bytes: int = 4096,
    activation: tuple[int, ...] = (2, 16, 8),
    dtype: Any = jnp.bfloat16,
) -> PipelineLayout:
    """A layout with round numbers; every virtual stage has one layer unless `layers` says."""
    table = lower(make_schedule(schedule, stages=stages, microbatches=microbatches), stash=stash)
    return PipelineLayout(
        table=table,
        layers=layers or (1,) * table.schedule.num_virtual_stages,
        stacked=stacked,
        activations=(jax.ShapeDtypeStruct(activation, dtype),),
        embed_flops=embed_flops,
        layer_flops=layer_flops,
        head_flops=head_flops,
        stash_bytes=stash_bytes,
    )


def plan_of(layout: PipelineLayout | None = None, *, data: int = 2, zero: int = 1) -> Plan:
    """A tiny GPT-2 whose blocks are put on the stages of a layout.

    Its abstract state is the one without a pipeline.
    """
    layout = layout or layout_of(layers=(2, 2, 2, 2))
    plan = _plan_without(layout.num_layers, layout.schedule.num_microbatches, data, zero)
    stacked = frozenset(name for name in plan.placement.leaves if name.startswith("blocks/"))
    whole: dict[str, Any] = {"zero_axes": ("data", "stage")}
    if zero:
        whole["access"] = Access.GATHER_ONCE
    leaves = {
        name: dataclasses.replace(
            leaf, **({"layer_rows": layout.rows} if name in stacked else whole)
        )
        for name, leaf in plan.placement.leaves.items()
    }
    sizes = {**plan.placement.axis_sizes, "stage": layout.schedule.num_stages}
    return dataclasses.replace(
        plan,
        placement=dataclasses.replace(plan.placement, leaves=leaves, axis_sizes=sizes),
        pipeline=dataclasses.replace(layout, stacked=stacked),
    )
