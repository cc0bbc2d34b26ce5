"""Bytes that a plan's step sends, by formula: for each parameter, and in all.

Sources: ZeRO, Rajbhandari et al. 2019 (arXiv:1910.02054), section 7: 2, 2, 2 and 3 units per step
at stages 0 to 3, a unit being the bytes of all parameters as sent; ring collectives send (N-1)/N of
their payload per device.
"""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp

from zerojax.plan.counts import layers_of, whole_elements
from zerojax.plan.decisions import Decisions
from zerojax.plan.device_mesh import DATA_AXES, REPLICA
from zerojax.plan.leaf_placement import Access, LeafPlacement
from zerojax.plan.pipeline_costs import ticks_of

WIRE_UNIT_BYTES = 2
"""Bytes per parameter of the unit in which wire bytes are stated: bfloat16."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeafTransfer:
    """One kind of collective of a parameter in a step.

    Attributes:
      phase: "before", "forward", "backward" or "after".
      kind: "all-gather", "reduce-scatter" or "all-reduce".
      over: mesh axes.
      dtype: on the wire, by name.
      times: per step; 1 is all that a device reads of the parameter, so that a loop over layers
        counts once.
      num_bytes: that one device sends in a step.
    """

    phase: str
    kind: str
    over: tuple[str, ...]
    dtype: str
    times: float
    num_bytes: float


def wire_unit(plan: Decisions) -> float:
    """2 bytes x parameters x (N-1)/N, per device: what one all-gather of bfloat16 weights sends.

    N is the number of shards; parameters are those that a device reads: divided by tensor
    parallelism, and of a pipeline those of one stage.
    """
    placement = plan.placement
    return WIRE_UNIT_BYTES * math.fsum(
        _ring(placement.num_shards(leaf)) * whole_elements(placement, leaf)
        for leaf in placement.leaves.values()
    )


def wire_bytes(plan: Decisions) -> int:
    """Bytes that one device sends per step for weights and gradients: `leaf_transfers` of all.

    A parameter that the model reads several times (tied weights) is counted once. Messages between
    pipeline stages are not in it (`pipeline_costs.message_bytes`).
    """
    leaves = plan.placement.leaves.values()
    return round(math.fsum(t.num_bytes for leaf in leaves for t in leaf_transfers(plan, leaf)))


def leaf_transfers(plan: Decisions, leaf: LeafPlacement) -> list[LeafTransfer]:
    """The collectives of one parameter in a step, in their order.

    They follow from how it is read (`zerojax.plan.leaf_placement.Access`):
      whole: one all-reduce of its gradient, twice (N-1)/N of it.
      gather once: one all-gather and one reduce-scatter.
      gather once, scatter early: one all-gather, one reduce-scatter per microbatch.
      gather on use: per microbatch two all-gathers (forward, backward) and one reduce-scatter.
      streamed (`offload.params`), whatever the stage: per microbatch each layer is gathered twice,
        the last one once, and its gradient reduced once.
    Of a pipeline a device has the layers of one stage, over `data`; what is said per microbatch
    happens in every tick that has the slot, masked ones included: m+p-1 times in place of m for
    1f1b. What all stages read goes over `data` and `stage` together, once per step.
    """
    placement, shards = plan.placement, plan.placement.num_shards(leaf)
    replicas = placement.axis_sizes[REPLICA]
    compute, reduce = (
        jnp.dtype(dtype) for dtype in (plan.precision.compute_dtype, plan.precision.reduce_dtype)
    )
    whole = whole_elements(placement, leaf)
    made: list[LeafTransfer] = []

    def add(
        phase: str, kind: str, over: tuple[str, ...], dtype: jnp.dtype, times: float, size: float
    ) -> None:
        if size:
            made.append(
                LeafTransfer(
                    phase=phase,
                    kind=kind,
                    over=tuple(axis for axis in over if placement.axis_sizes[axis] > 1) or over,
                    dtype=dtype.name,
                    times=times,
                    num_bytes=times * size * dtype.itemsize,
                )
            )

    if leaf.access is Access.WHOLE:
        streamed = plan.offload is not None and leaf.name in plan.offload.streamed
        if not leaf.frozen:
            over = tuple(dict.fromkeys((*DATA_AXES, *leaf.zero_axes)))
            size = 2 * _ring(shards * replicas) * whole
            times = plan.num_microbatches if streamed else 1
            add("backward" if streamed else "after", "all-reduce", over, reduce, times, size)
        return made
    forward, backward, scatters = _times_used(plan, leaf)
    once = leaf.access is not Access.GATHER_ON_USE and not _is_streamed(plan, leaf)
    size = _ring(shards) * whole
    add("before" if once else "forward", "all-gather", leaf.zero_axes, compute, forward, size)
    if backward:
        add("backward", "all-gather", leaf.zero_axes, compute, backward, size)
    if not leaf.frozen:
        late = leaf.access is Access.GATHER_ONCE and not _is_streamed(plan, leaf)
        phase = "after" if late else "backward"
        add(phase, "reduce-scatter", leaf.zero_axes, reduce, scatters, size)
        add("after", "all-reduce", (REPLICA,), reduce, 1, 2 * _ring(replicas) * whole / shards)
    return made


def _is_streamed(plan: Decisions, leaf: LeafPlacement) -> bool:
    return plan.offload is not None and leaf.name in plan.offload.streamed


def _times_used(plan: Decisions, leaf: LeafPlacement) -> tuple[float, float, float]:
    """(gathers of the forward pass or before it, of the backward pass, scatters) in one step."""
    if _is_streamed(plan, leaf):
        microbatches = plan.num_microbatches
        return microbatches, microbatches * (1 - 1 / layers_of(plan, leaf)), microbatches
    early = leaf.access in (Access.GATHER_ON_USE, Access.GATHER_ONCE_SCATTER_EARLY)
    lazily = leaf.access is Access.GATHER_ON_USE
    if plan.pipeline is None:
        microbatches = plan.num_microbatches
        again = microbatches * plan.program.regather if lazily else 0
        return microbatches if lazily else 1, again, microbatches if early else 1
    layout, chunks = plan.pipeline, plan.pipeline.schedule.num_chunks
    forward, backward, scatters = 1.0, 0.0, 1.0
    if early:
        last = "weight" if layout.schedule.splits_backward else "backward"
        scatters = ticks_of(layout, last) / chunks
    if lazily:
        # With the stash `input` the backward slots begin with a forward pass.
        again = 2 if layout.table.stash == "input" else 1
        forward = ticks_of(layout, "forward") / chunks
        backward = again * (ticks_of(layout, "backward") + ticks_of(layout, "weight")) / chunks
    return forward, backward, scatters


def _ring(size: int) -> float:
    return (size - 1) / size
