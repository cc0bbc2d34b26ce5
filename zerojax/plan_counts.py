"""What is counted of a plan: bytes per device by role, floating-point operations, tokens.

Knows a plan by its attributes; never a compiled program, a card, nor how anything is shown.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from zerojax import profile, trees
from zerojax.mesh import DATA, REPLICA, STAGE
from zerojax.pipeline_costs import total_buffer_bytes
from zerojax.placement import Access, LeafPlacement, Placement
from zerojax.planned import Planned


def shard_bytes(tree: Any) -> int:
    """Bytes per device of a tree of `ShapeDtypeStruct`s with shardings."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def role_bytes(plan: Planned) -> dict[str, int]:
    """Bytes per device by role. State roles are exact; the others are by formula.

    Returns:
      masters, optimizer state, frozen, extras: what the state holds between steps.
      gathered weights: copies in the compute dtype that forward and backward read.
      gradients: as the backward pass leaves them, and the accumulator where microbatches need one.
      pipeline buffers: where there is one, what waits between the passes of its stages.
    """
    state = plan.abstract_state
    weights, gradients = _formula_bytes(plan)
    buffers = {}
    if plan.pipeline is not None:
        buffers[PIPELINE_BUFFERS] = total_buffer_bytes(plan.pipeline)
    return {
        "master weights": shard_bytes(state["params"]),
        "optimizer state": shard_bytes(state["opt_state"]),
        "frozen": shard_bytes(state["frozen"]),
        "extras": shard_bytes(state["extras"]),
        "gathered weights": weights,
        "gradients": gradients,
        **buffers,
    }


PIPELINE_BUFFERS = "pipeline buffers"


def whole_elements(placement: Placement, leaf: LeafPlacement) -> int:
    """Elements of a gathered parameter on one device: its own rows of a pipelined stack, padding
    included, and what tensor parallelism leaves."""
    split = math.prod(placement.axis_sizes[axis] for axis in leaf.axes if axis is not None)
    shape = leaf.shape
    if leaf.layer_rows is not None:
        shape = (len(leaf.layer_rows) // placement.axis_sizes[STAGE], *shape[1:])
    return trees.num_elements(shape) // split


def _formula_bytes(plan: Planned) -> tuple[int, int]:
    """(weights that forward and backward hold, gradients they leave), bytes per device.

    A pipeline always adds up; what one microbatch adds is that of one chunk.
    """
    placement: Placement = plan.placement
    compute = jnp.dtype(plan.precision.compute_dtype).itemsize
    accumulate = jnp.dtype(plan.precision.accumulate_dtype).itemsize
    reduce = jnp.dtype(plan.precision.reduce_dtype).itemsize
    weights = gradients = 0
    on_use: dict[str, int] = {}
    for leaf in placement.leaves.values():
        whole = whole_elements(placement, leaf)
        shard = placement.shard_elements(leaf)
        layers = math.prod(leaf.shape[: leaf.stack_dims])
        chunks = 1
        if plan.pipeline is not None and leaf.layer_rows is not None:
            chunks = plan.pipeline.schedule.num_chunks
            layers = chunks * plan.pipeline.chunk_rows
        if leaf.access is Access.GATHER_ON_USE:
            group = leaf.name.split(trees.SEPARATOR)[0] if leaf.stack_dims else leaf.name
            on_use[group] = on_use.get(group, 0) + whole // layers * compute
            weights += shard * reduce
        else:
            weights += whole * compute
        if not leaf.frozen:
            scattered = leaf.access in (Access.GATHER_ON_USE, Access.GATHER_ONCE_SCATTER_EARLY)
            summed = accumulate if plan.num_microbatches > 1 or plan.pipeline else 0
            if scattered:  # a microbatch's own are added to the sum as they come
                gradients += shard * (summed or reduce)
            else:
                gradients += whole * summed + whole // chunks * compute
    return weights + max(on_use.values(), default=0), gradients


def model_flops(plan: Planned) -> float:
    """Floating-point operations of one step over all devices, without what remat repeats.

    Three times the forward pass (`profile.TRAINING_FACTOR`) of every microbatch of every shard.
    """
    forward = profile.count_program_flops(plan.forward)
    shards = plan.placement.axis_sizes[DATA] * plan.placement.axis_sizes[REPLICA]
    return profile.TRAINING_FACTOR * forward * plan.num_microbatches * shards


def tokens_per_step(plan: Planned) -> int | None:
    """Tokens of a global batch; None where batches hold no "tokens"."""
    batch = plan.abstract_batch
    tokens = batch.get("tokens") if isinstance(batch, Mapping) else None
    return None if tokens is None else math.prod(tokens.shape)
