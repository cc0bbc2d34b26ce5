"""What formulas say of a plan's step: bytes on the wire, floating-point operations, tokens.

Knows the placement table and a pipeline's; never a compiled program. Sources: ZeRO, Rajbhandari et
al. 2019 (arXiv:1910.02054), section 7: 2, 2, 2 and 3 units per step at stages 0 to 3, a unit being
the bytes of all parameters as sent; ring collectives send (N-1)/N of their payload per device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax.numpy as jnp

from zerojax import profile
from zerojax.mesh import DATA, REPLICA, STAGE
from zerojax.pipeline_costs import message_bytes, ticks_of
from zerojax.placement import Access, LeafPlacement
from zerojax.plan_table import whole_elements
from zerojax.planned import Planned

WIRE_UNIT_BYTES = 2
"""Bytes per parameter of the unit in which wire bytes are stated: bfloat16."""


def wire_unit(plan: Planned) -> float:
    """2 bytes x parameters x (N-1)/N, per device: what one all-gather of bfloat16 weights sends.

    N is the size of `data`; parameters are those that a device reads: divided by tensor
    parallelism, and of a pipeline those of one stage.
    """
    size = plan.placement.axis_sizes[DATA]
    whole = sum(whole_elements(plan.placement, leaf) for leaf in plan.placement.leaves.values())
    return WIRE_UNIT_BYTES * whole * _ring(size)


def wire_bytes(plan: Planned) -> int:
    """Bytes that one device sends per step over the data axes for weights and gradients.

    What a parameter costs follows from how it is read (`zerojax.placement.Access`):
      whole: one all-reduce of its gradient, twice (N-1)/N of it.
      gather once: one all-gather and one reduce-scatter.
      gather once, scatter early: one all-gather, one reduce-scatter per microbatch.
      gather on use: per microbatch two all-gathers (forward, backward) and one reduce-scatter.
    A parameter that the model reads several times (tied weights) is counted once. Of a pipeline a
    device has the layers of one stage, and what is said per microbatch happens in every tick that
    has the slot, masked ones included: m+p-1 in place of m for 1f1b.
    """
    return round(sum(_leaf_wire(plan, leaf) for leaf in plan.placement.leaves.values()))


def stage_bytes(plan: Planned) -> int:
    """Bytes that one device of a pipeline sends per step along `stage`, 0 without one.

    Activations and gradients to its neighbours, and the gradients of what every stage has
    (embedding and head), summed over the stages where they are already reduced over `data`. Where
    such a parameter is whole on every data shard, one all-reduce does both, and counts here.
    """
    if plan.pipeline is None:
        return 0
    shared = [leaf for leaf in plan.placement.leaves.values() if leaf.layer_rows is None]
    return message_bytes(plan.pipeline) + round(sum(_shared_wire(plan, leaf) for leaf in shared))


def _shared_wire(plan: Planned, leaf: LeafPlacement) -> float:
    if leaf.frozen:
        return 0.0
    sizes, reduce = plan.placement.axis_sizes, jnp.dtype(plan.precision.reduce_dtype).itemsize
    members = sizes[STAGE] * sizes[REPLICA]
    if leaf.access is Access.WHOLE:
        return 2 * _ring(members * sizes[DATA]) * whole_elements(plan.placement, leaf) * reduce
    return 2 * _ring(members) * plan.placement.shard_elements(leaf) * reduce


def _leaf_wire(plan: Planned, leaf: LeafPlacement) -> float:
    sizes = plan.placement.axis_sizes
    data, replicas = sizes[DATA], sizes[REPLICA]
    compute = jnp.dtype(plan.precision.compute_dtype).itemsize
    reduce = jnp.dtype(plan.precision.reduce_dtype).itemsize
    whole, trained = whole_elements(plan.placement, leaf), not leaf.frozen
    with_stages = plan.pipeline is not None and leaf.layer_rows is None
    if leaf.access is Access.WHOLE:
        summed = 0 if with_stages else 2 * _ring(data * replicas)
        return summed * whole * reduce * trained
    gathers, scatters = _times_used(plan, leaf)
    if leaf.access is not Access.GATHER_ON_USE:
        gathers = 1
    if leaf.access is Access.GATHER_ONCE:
        scatters = 1
    sent = _ring(data) * whole * (gathers * compute + trained * scatters * reduce)
    over_replicas = 0 if with_stages else 2 * _ring(replicas)
    return sent + trained * over_replicas * whole / data * reduce


def _times_used(plan: Planned, leaf: LeafPlacement) -> tuple[float, float]:
    """(gathers, scatters) of a parameter in one step if each use of it has its own, where 1 is all
    that a device reads of it."""
    layout = plan.pipeline
    if layout is None:
        return plan.num_microbatches * (1 + plan.regather), plan.num_microbatches
    split = layout.schedule.splits_backward
    last = "weight" if split else "backward"
    if leaf.layer_rows is None:
        # Read by the embedding or the head: the former again in a backward slot of its own.
        ticks = ticks_of(layout, "head")
        return ticks * (1 + plan.regather), ticks
    passes = ("forward", "backward", "weight") if split else ("forward", "backward")
    again = layout.table.stash == "input"
    gathers = sum(ticks_of(layout, slot) * (1 + again * (slot != "forward")) for slot in passes)
    chunks = layout.schedule.num_chunks
    return gathers / chunks, ticks_of(layout, last) / chunks


def _ring(size: int) -> float:
    return (size - 1) / size


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
