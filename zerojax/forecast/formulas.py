"""What formulas say of a plan's step: bytes on the wire, floating-point operations, tokens.

Knows the placement table; never a compiled program. Sources: ZeRO, Rajbhandari et al. 2019
(arXiv:1910.02054), section 7: 2, 2, 2 and 3 units per step at stages 0 to 3, a unit being the
bytes of all parameters as sent; ring collectives send (N-1)/N of their payload per device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax.numpy as jnp

from zerojax import profile, trees
from zerojax.mesh import DATA, REPLICA
from zerojax.placement import Access, LeafPlacement
from zerojax.planned import Planned

WIRE_UNIT_BYTES = 2
"""Bytes per parameter of the unit in which wire bytes are stated: bfloat16."""


def wire_unit(plan: Planned) -> float:
    """2 bytes x parameters x (N-1)/N, per device: what one all-gather of bfloat16 weights sends.

    N is the size of `data`; parameters are divided by tensor parallelism.
    """
    size = plan.placement.axis_sizes[DATA]
    whole = sum(_whole(plan, leaf) for leaf in plan.placement.leaves.values())
    return WIRE_UNIT_BYTES * whole * (size - 1) / size


def wire_bytes(plan: Planned) -> int:
    """Bytes that one device sends per step over the data axes for weights and gradients.

    What a parameter costs follows from how it is read (`zerojax.placement.Access`):
      whole: one all-reduce of its gradient, twice (N-1)/N of it.
      gather once: one all-gather and one reduce-scatter.
      gather once, scatter early: one all-gather, one reduce-scatter per microbatch.
      gather on use: per microbatch two all-gathers (forward, backward) and one reduce-scatter.
    A parameter that the model reads several times (tied weights) is counted once.
    """
    return round(sum(_leaf_wire(plan, leaf) for leaf in plan.placement.leaves.values()))


def _leaf_wire(plan: Planned, leaf: LeafPlacement) -> float:
    sizes = plan.placement.axis_sizes
    data, replicas = sizes[DATA], sizes[REPLICA]
    compute = jnp.dtype(plan.precision.compute_dtype).itemsize
    reduce = jnp.dtype(plan.precision.reduce_dtype).itemsize
    whole, trained = _whole(plan, leaf), not leaf.frozen
    if leaf.access is Access.WHOLE:
        return 2 * _ring(data * replicas) * whole * reduce * trained
    lazily = leaf.access is Access.GATHER_ON_USE
    early = leaf.access is Access.GATHER_ONCE_SCATTER_EARLY
    gathers = plan.num_microbatches * (1 + plan.regather) if lazily else 1
    scatters = plan.num_microbatches if lazily or early else 1
    sent = _ring(data) * whole * (gathers * compute + trained * scatters * reduce)
    return sent + trained * 2 * _ring(replicas) * whole / data * reduce


def _ring(size: int) -> float:
    return (size - 1) / size


def _whole(plan: Planned, leaf: LeafPlacement) -> int:
    """Elements of a gathered parameter on one device."""
    sizes = plan.placement.axis_sizes
    split = math.prod(sizes[axis] for axis in leaf.axes if axis is not None)
    return trees.num_elements(leaf.shape) // split


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
