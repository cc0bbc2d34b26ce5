"""Computes the bytes that a plan's step sends by formula, for each parameter and in total.

Source: ZeRO, Rajbhandari et al. 2019 (arXiv:1910.02054), section 7. A step sends 2, 2, 2 and 3
units at stages 0 to 3; a unit is the bytes of all parameters as sent. In ring collectives a device
sends (N-1)/N of the payload.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax.numpy as jnp

from zerojax.config.late_dataclasses import dataclass
from zerojax.features.known import times_used
from zerojax.optim.wire_codes import bytes_sent
from zerojax.pipeline.pipeline_costs import ticks_of
from zerojax.placement.decisions import Decisions
from zerojax.placement.device_mesh import DATA_AXES, EXPERT, REPLICA
from zerojax.placement.leaf_placement import LeafPlacement
from zerojax.plan.counts import coded_bytes, layers_of, padded_elements, whole_elements

WIRE_UNIT_BYTES = 2
"""Bytes per parameter of the unit in which sent bytes are stated: bfloat16."""


@dataclass(frozen=True, kw_only=True)
class LeafTransfer:
    """Collectives of one kind and phase that a step runs for one parameter.

    Attributes:
      phase: "before", "forward", "backward" or "after".
      kind: "all-gather", "reduce-scatter", "all-reduce" or, for rows and codes, "all-to-all".
      over: mesh axes of the collective.
      dtype: name of the dtype of the sent values.
      times: number of times per step that everything is sent that a device reads of the parameter;
        a whole loop over layers counts once.
      num_bytes: number of bytes that one device sends in a step.
      within: "node": inside nodes only; "nodes": between nodes only; "": among all devices of the
        axes.
    """

    phase: str
    kind: str
    over: tuple[str, ...]
    dtype: str
    times: float
    num_bytes: float
    within: str = ""


def wire_unit(plan: Decisions) -> float:
    """Returns the bytes that one device sends in one all-gather of bfloat16 weights: 2 x parameters
    x (N-1)/N.

    N is the number of shards. The parameters are those that a device reads: divided by tensor
    parallelism and, with a pipeline, of one stage.
    """
    placement = plan.placement
    return WIRE_UNIT_BYTES * math.fsum(
        _ring(placement.num_shards(leaf)) * whole_elements(placement, leaf)
        for leaf in placement.leaves.values()
    )


def wire_bytes(plan: Decisions) -> int:
    """Returns the bytes that one device sends per step for weights and gradients.

    It is the sum of `leaf_transfers` over all parameters. A parameter that the model reads several
    times (tied weights) counts once. Messages between pipeline stages are not included
    (`pipeline_costs.message_bytes`).
    """
    leaves = plan.placement.leaves.values()
    return round(math.fsum(t.num_bytes for leaf in leaves for t in leaf_transfers(plan, leaf)))


def bytes_by_level(plan: Decisions) -> tuple[int, int]:
    """Splits the bytes of weights and gradients into (bytes within nodes, bytes only between
    nodes), for `wire.secondary`."""
    leaves = plan.placement.leaves.values()
    sent = [transfer for leaf in leaves for transfer in leaf_transfers(plan, leaf)]
    inside, between = (
        round(math.fsum(one.num_bytes for one in sent if one.within == level))
        for level in ("node", "nodes")
    )
    return inside, between


def leaf_transfers(plan: Decisions, leaf: LeafPlacement) -> list[LeafTransfer]:
    """Returns the collectives that a step runs for one parameter, in their order.

    They follow from how the parameter is read (`zerojax.placement.leaf_placement.Access`):
      whole: one all-reduce of its gradient, which sends twice (N-1)/N of it.
      gather once: one all-gather and one reduce-scatter.
      gather once, scatter early: one all-gather, and one reduce-scatter per microbatch.
      gather on use: per microbatch two all-gathers (forward, backward) and one reduce-scatter; the
        all-gathers send 8 bits if the placement says so (`wire.weights`), and codes include their
        scales.
      look up: per microbatch two all-to-alls, of the rows and of their gradients; the ids of rows
        (4 bytes each) are not counted.

    These settings change the collectives:
      wire.weights, difference codes: the all-gather of the two kinds "gather once" sends codes of
        the difference.
      wire.secondary: the collectives run inside a node; in addition an all-gather and a
        reduce-scatter of a node's part run between nodes once per step.
      wire.gradients: a reduce-scatter becomes all-to-alls of codes.
      freeze_dtype: frozen parameters in codes are gathered as codes.
      offload.params, at any ZeRO stage: per microbatch each layer is gathered twice, the last layer
        once, and its gradient is reduced once. Tiles of the last layer are gathered twice, too.
      offload.tile_bytes: all tiles are gathered once more if the backward pass recomputes their
        product.
      pipeline: a device has the layers of one stage, over `data`. Transfers per microbatch run in
        every tick that has the slot, including masked ticks: m+p-1 times instead of m for 1f1b.
        Parameters that all stages read are sent over `data` and `stage` together, once per step.
    """
    placement, shards = plan.placement, plan.placement.num_shards(leaf)
    replicas = placement.axis_sizes[REPLICA]
    compute = jnp.dtype(plan.precision.compute_dtype)
    reduce = jnp.dtype(jnp.float32 if leaf.gradient_in_full else plan.precision.reduce_dtype)
    whole = whole_elements(placement, leaf)
    made: list[LeafTransfer] = []

    def add(
        phase: str,
        kind: str,
        over: tuple[str, ...],
        dtype: jnp.dtype,
        times: float,
        size: float,
        within: str = "",
    ) -> None:
        if size and times:
            made.append(
                LeafTransfer(
                    phase=phase,
                    kind=kind,
                    over=tuple(axis for axis in over if placement.axis_sizes[axis] > 1) or over,
                    dtype=dtype.name,
                    times=times,
                    num_bytes=times * size * dtype.itemsize,
                    within=within,
                )
            )

    if leaf.access.is_whole:
        streamed = _is_streamed(plan, leaf)
        if not leaf.frozen:
            over = tuple(dict.fromkeys((*DATA_AXES, *leaf.zero_axes)))
            if leaf.expert_dim is not None:
                over = tuple(axis for axis in over if axis != EXPERT)
            size = 2 * _ring(shards * replicas) * whole
            times = plan.num_microbatches if streamed else 1
            add("backward" if streamed else "after", "all-reduce", over, reduce, times, size)
        return made
    if leaf.access.looks_up:
        assert leaf.row_reads is not None
        times, row = plan.num_microbatches, _ring(shards) * leaf.shape[-1]
        add("forward", "all-to-all", leaf.zero_axes, compute, times, leaf.row_reads.rows * row)
        add("backward", "all-to-all", leaf.zero_axes, compute, times, leaf.row_reads.again * row)
        if not leaf.frozen:
            add("backward", "all-to-all", leaf.zero_axes, reduce, times, leaf.row_reads.rows * row)
            add("after", "all-reduce", (REPLICA,), reduce, 1, _over_replicas(plan, leaf))
        return made
    _add_shards(plan, leaf, add, reduce)
    if not leaf.frozen:
        add("after", "all-reduce", (REPLICA,), reduce, 1, _over_replicas(plan, leaf))
    return made


def _add_shards(
    plan: Decisions, leaf: LeafPlacement, add: Callable[..., None], reduce: jnp.dtype
) -> None:
    """Adds the collectives among the shards of a gathered parameter.

    Args:
      plan: the plan.
      leaf: placement of the parameter.
      add: function (phase, kind, axes, dtype, times, elements sent, `LeafTransfer.within`).
      reduce: dtype in which the gradient is sent.
    """
    placement, shards = plan.placement, plan.placement.num_shards(leaf)
    compute, codes = jnp.dtype(plan.precision.compute_dtype), leaf.gradient_codes
    coded = jnp.dtype(jnp.uint8)
    whole = padded_elements(placement, leaf)
    sent = whole if leaf.codes is None else coded_bytes(placement, leaf)
    fetched = compute if leaf.codes is None else coded
    gathered = coded if leaf.eight_bits else fetched
    streamed = _is_streamed(plan, leaf)
    forward, backward, scatters = _times_used(plan, leaf)
    once = not leaf.access.gathers_on_use and not streamed
    late = leaf.access.scatters_late and not streamed
    axes, members = leaf.zero_axes, leaf.node_shards or shards
    within = "" if leaf.node_shards is None else "node"
    between = shards // members if within else 1
    parts = 1 if once or within else leaf.num_slices
    in_codes, row = leaf.wire_codes or leaf.delta_codes, -(-sent // (parts * shards))
    fetch, gather = _ring(between) * sent / members, _ring(members) * sent
    if in_codes is not None and within:
        fetched, fetch = coded, (between - 1) * in_codes.num_bytes(row)
    elif in_codes is not None:
        gathered, gather = coded, parts * (shards - 1) * in_codes.num_bytes(row)
    add("before", "all-gather", axes, fetched, 1, fetch, "nodes")
    phase = "before" if once else "forward"
    add(phase, "all-gather", axes, gathered, forward, gather, within)
    add("backward", "all-gather", axes, gathered, backward, gather, within)
    if leaf.frozen:
        return
    phase = "after" if late else "backward"
    if codes is None or within:
        add(phase, "reduce-scatter", axes, reduce, scatters, _ring(members) * whole, within)
    else:
        parts = 1 if late else leaf.num_slices
        rows = parts * bytes_sent(codes, -(-whole // parts), shards)
        add(phase, "all-to-all", axes, coded, scatters, rows)
    if codes is None:
        add("after", "reduce-scatter", axes, reduce, 1, _ring(between) * whole / members, "nodes")
    elif within:
        rows = bytes_sent(codes, -(-whole // members), between)
        add("after", "all-to-all", axes, coded, 1, rows, "nodes")


def _over_replicas(plan: Decisions, leaf: LeafPlacement) -> float:
    """Returns the elements that a device sends to sum a shard of the gradient over `replica`."""
    replicas = plan.placement.axis_sizes[REPLICA]
    elements = padded_elements(plan.placement, leaf) / plan.placement.num_shards(leaf)
    return 2 * _ring(replicas) * elements


def _is_streamed(plan: Decisions, leaf: LeafPlacement) -> bool:
    return plan.offload is not None and leaf.name in plan.offload.by_layer


def _times_used(plan: Decisions, leaf: LeafPlacement) -> tuple[float, float, float]:
    """Returns the numbers of gathers in the forward pass, gathers in the backward pass, and
    scatters per step.

    With features that leave out layers they are the expected numbers after many steps.
    """
    forward, backward, scatters = _times_with_all_layers(plan, leaf)
    used = times_used(plan, leaf.name)
    return (
        forward * (used if leaf.access.gathers_on_use else 1),
        backward * used,
        scatters * (used if leaf.access.scatters_early else 1),
    )


def _times_with_all_layers(plan: Decisions, leaf: LeafPlacement) -> tuple[float, float, float]:
    tiles = plan.tiles.cut.get(leaf.name)
    if tiles is not None:
        microbatches = plan.num_microbatches
        return microbatches, microbatches * (1 + tiles.again), microbatches
    if _is_streamed(plan, leaf):
        microbatches = plan.num_microbatches
        return microbatches, microbatches * (1 - 1 / layers_of(plan, leaf)), microbatches
    early = leaf.access.scatters_early
    lazily = leaf.access.gathers_on_use
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
        # With the stash `input` backward slots start with a recomputed forward pass.
        again = 2 if layout.table.stash == "input" else 1
        forward = ticks_of(layout, "forward") / chunks
        backward = again * (ticks_of(layout, "backward") + ticks_of(layout, "weight")) / chunks
    return forward, backward, scatters


def _ring(size: int) -> float:
    return (size - 1) / size
