"""Bytes that a plan's step sends, by formula.

Sources: ZeRO, Rajbhandari et al. 2019 (arXiv:1910.02054), section 7: 2, 2, 2 and 3 units per step
at stages 0 to 3, a unit being the bytes of all parameters as sent; ring collectives send (N-1)/N of
their payload per device.
"""

from __future__ import annotations

import math

import jax.numpy as jnp

from zerojax.plan.counts import layers_of, whole_elements
from zerojax.plan.leaf import Access, LeafPlacement
from zerojax.plan.mesh import REPLICA
from zerojax.plan.pipeline_costs import ticks_of
from zerojax.plan.plan import Plan

WIRE_UNIT_BYTES = 2
"""Bytes per parameter of the unit in which wire bytes are stated: bfloat16."""


def wire_unit(plan: Plan) -> float:
    """2 bytes x parameters x (N-1)/N, per device: what one all-gather of bfloat16 weights sends.

    N is the number of shards; parameters are those that a device reads: divided by tensor
    parallelism, and of a pipeline those of one stage.
    """
    placement = plan.placement
    return WIRE_UNIT_BYTES * math.fsum(
        _ring(placement.num_shards(leaf)) * whole_elements(placement, leaf)
        for leaf in placement.leaves.values()
    )


def wire_bytes(plan: Plan) -> int:
    """Bytes that one device sends per step for weights and gradients.

    What a parameter costs follows from how it is read (`zerojax.plan.leaf.Access`):
      whole: one all-reduce of its gradient, twice (N-1)/N of it.
      gather once: one all-gather and one reduce-scatter.
      gather once, scatter early: one all-gather, one reduce-scatter per microbatch.
      gather on use: per microbatch two all-gathers (forward, backward) and one reduce-scatter.
      streamed (`offload.params`), whatever the stage: per microbatch each layer is gathered twice,
        the last one once, and its gradient reduced once.
    A parameter that the model reads several times (tied weights) is counted once.

    Of a pipeline a device has the layers of one stage, over `data`; what is said per microbatch
    happens in every tick that has the slot, masked ones included: m+p-1 times in place of m for
    1f1b. What all stages read goes over `data` and `stage` together, once per step. Messages
    between stages are not in it (`plan.pipeline_costs.message_bytes`).
    """
    return round(sum(_leaf_wire(plan, leaf) for leaf in plan.placement.leaves.values()))


def _leaf_wire(plan: Plan, leaf: LeafPlacement) -> float:
    placement, shards = plan.placement, plan.placement.num_shards(leaf)
    replicas = placement.axis_sizes[REPLICA]
    compute = jnp.dtype(plan.precision.compute_dtype).itemsize
    reduce = jnp.dtype(plan.precision.reduce_dtype).itemsize
    whole, trained = whole_elements(placement, leaf), not leaf.frozen
    streamed = plan.offload is not None and leaf.name in plan.offload.streamed
    if leaf.access is Access.WHOLE:
        times = plan.num_microbatches if streamed else 1
        return 2 * _ring(shards * replicas) * whole * reduce * trained * times
    gathers, scatters = _times_used(plan, leaf)
    sent = _ring(shards) * whole * (gathers * compute + trained * scatters * reduce)
    return sent + trained * 2 * _ring(replicas) * whole / shards * reduce


def _times_used(plan: Plan, leaf: LeafPlacement) -> tuple[float, float]:
    """(gathers, scatters) of a parameter in one step; 1 is all that a device reads of it."""
    if plan.offload is not None and leaf.name in plan.offload.streamed:
        return plan.num_microbatches * (2 - 1 / layers_of(plan, leaf)), plan.num_microbatches
    early = leaf.access in (Access.GATHER_ON_USE, Access.GATHER_ONCE_SCATTER_EARLY)
    lazily = leaf.access is Access.GATHER_ON_USE
    if plan.pipeline is None:
        microbatches = plan.num_microbatches
        gathers = microbatches * (1 + plan.program.regather) if lazily else 1
        return gathers, microbatches if early else 1
    layout, chunks = plan.pipeline, plan.pipeline.schedule.num_chunks
    gathers = scatters = 1.0
    if early:
        last = "weight" if layout.schedule.splits_backward else "backward"
        scatters = ticks_of(layout, last) / chunks
    if lazily:
        # With the stash `input` the backward slots begin with a forward pass.
        again = 2 if layout.table.stash == "input" else 1
        backward = ticks_of(layout, "backward") + ticks_of(layout, "weight")
        gathers = (ticks_of(layout, "forward") + again * backward) / chunks
    return gathers, scatters


def _ring(size: int) -> float:
    return (size - 1) / size
