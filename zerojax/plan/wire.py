"""Computes the bytes that a plan's step sends, by formula: for each parameter, and in total.

Sources: ZeRO, Rajbhandari et al. 2019 (arXiv:1910.02054), section 7: 2, 2, 2 and 3 units per step
at stages 0 to 3, a unit being the bytes of all parameters as sent; ring collectives send (N-1)/N of
their payload per device.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax.numpy as jnp

from zerojax.optim.wire_codes import bytes_sent
from zerojax.plan.counts import coded_bytes, layers_of, padded_elements, whole_elements
from zerojax.plan.decisions import Decisions
from zerojax.plan.device_mesh import DATA_AXES, EXPERT, REPLICA
from zerojax.plan.leaf_placement import Access, LeafPlacement
from zerojax.plan.pipeline_costs import ticks_of

WIRE_UNIT_BYTES = 2
"""Bytes per parameter of the unit in which wire bytes are stated: bfloat16."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeafTransfer:
    """The collectives of one kind and phase that a step runs for one parameter.

    Attributes:
      phase: "before", "forward", "backward" or "after".
      kind: "all-gather", "reduce-scatter", "all-reduce" or, of rows and codes, "all-to-all".
      over: mesh axes.
      dtype: dtype of the sent values, by name.
      times: per step; 1 is everything that a device reads of the parameter, so that a loop over
        layers counts once.
      num_bytes: bytes that one device sends in a step.
      within: "node" for transfers inside a node, "nodes" for those only between nodes; "": among
        all devices of the axes.
    """

    phase: str
    kind: str
    over: tuple[str, ...]
    dtype: str
    times: float
    num_bytes: float
    within: str = ""


def wire_unit(plan: Decisions) -> float:
    """Returns the bytes that one all-gather of bfloat16 weights sends: 2 x parameters x (N-1)/N.

    Per device. N is the number of shards; parameters are those that a device reads: divided by
    tensor parallelism, and with a pipeline those of one stage.
    """
    placement = plan.placement
    return WIRE_UNIT_BYTES * math.fsum(
        _ring(placement.num_shards(leaf)) * whole_elements(placement, leaf)
        for leaf in placement.leaves.values()
    )


def wire_bytes(plan: Decisions) -> int:
    """Returns the bytes that one device sends per step for weights and gradients.

    It is the sum of `leaf_transfers`. A parameter that the model reads several times (tied weights)
    is counted once. Messages between pipeline stages are not included
    (`pipeline_costs.message_bytes`).
    """
    leaves = plan.placement.leaves.values()
    return round(math.fsum(t.num_bytes for leaf in leaves for t in leaf_transfers(plan, leaf)))


def bytes_by_level(plan: Decisions) -> tuple[int, int]:
    """Splits `wire_bytes` into bytes within nodes and only between nodes (`wire.secondary`)."""
    leaves = plan.placement.leaves.values()
    sent = [transfer for leaf in leaves for transfer in leaf_transfers(plan, leaf)]
    inside, between = (
        round(math.fsum(one.num_bytes for one in sent if one.within == level))
        for level in ("node", "nodes")
    )
    return inside, between


def leaf_transfers(plan: Decisions, leaf: LeafPlacement) -> list[LeafTransfer]:
    """Returns the collectives of one parameter in a step, in their order.

    They follow from how it is read (`zerojax.plan.leaf_placement.Access`):
      whole: one all-reduce of its gradient, twice (N-1)/N of it.
      gather once: one all-gather and one reduce-scatter.
      gather once, scatter early: one all-gather, one reduce-scatter per microbatch.
      either of these with `delta_codes`: the all-gather sends codes of the change.
      gather on use: per microbatch two all-gathers (forward, backward) and one reduce-scatter; the
        gathers in 8 bits where the placement says so (`wire.weights`); codes include their scales.
      look up: per microbatch two all-to-alls, of the rows and of their gradients; the ids besides
        (4 bytes for each row) are not counted.
      the same with `node_shards` (`wire.secondary`): these inside of a node, and once per step an
        all-gather and a reduce-scatter between nodes of a node's part.
    With `wire.gradients` codes a reduce-scatter is all-to-alls of the codes.
    Frozen parameters in codes are gathered as codes.
      streamed (`offload.params`), whatever the stage: per microbatch each layer is gathered twice,
        the last one once, and its gradient reduced once. In tiles the last one is gathered twice,
        too, and all of them once more where the backward pass computes the product again.
    With a pipeline a device has the layers of one stage, over `data`; transfers per microbatch
    occur in every tick that has the slot, masked ones included: m+p-1 times in place of m for
    1f1b. Parameters that all stages read are sent over `data` and `stage` together, once per step.
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

    if leaf.access is Access.WHOLE:
        streamed = _is_streamed(plan, leaf)
        if not leaf.frozen:
            over = tuple(dict.fromkeys((*DATA_AXES, *leaf.zero_axes)))
            if leaf.expert_dim is not None:
                over = tuple(axis for axis in over if axis != EXPERT)
            size = 2 * _ring(shards * replicas) * whole
            times = plan.num_microbatches if streamed else 1
            add("backward" if streamed else "after", "all-reduce", over, reduce, times, size)
        return made
    if leaf.access is Access.LOOK_UP:
        assert leaf.asked is not None
        times, row = plan.num_microbatches, _ring(shards) * leaf.shape[-1]
        add("forward", "all-to-all", leaf.zero_axes, compute, times, leaf.asked.rows * row)
        add("backward", "all-to-all", leaf.zero_axes, compute, times, leaf.asked.again * row)
        if not leaf.frozen:
            add("backward", "all-to-all", leaf.zero_axes, reduce, times, leaf.asked.rows * row)
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
      add: (phase, kind, axes, dtype, times, elements sent, `LeafTransfer.within`).
      reduce: dtype of its gradient when sent.
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
    once = leaf.access is not Access.GATHER_ON_USE and not streamed
    late = leaf.access is Access.GATHER_ONCE and not streamed
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
    """Returns the elements that a device sends to sum a gradient shard over `replica`."""
    replicas = plan.placement.axis_sizes[REPLICA]
    elements = padded_elements(plan.placement, leaf) / plan.placement.num_shards(leaf)
    return 2 * _ring(replicas) * elements


def _is_streamed(plan: Decisions, leaf: LeafPlacement) -> bool:
    return plan.offload is not None and leaf.name in plan.offload.by_layer


def _times_used(plan: Decisions, leaf: LeafPlacement) -> tuple[float, float, float]:
    """Returns per step the numbers of gathers for the forward pass, gathers in the backward pass,
    and scatters.

    With layer drop the expectation after many steps.
    """
    forward, backward, scatters = _times_with_all_layers(plan, leaf)
    if plan.layer_drop is None:
        return forward, backward, scatters
    used = plan.layer_drop.times_used(leaf.name)
    lazily = leaf.access is Access.GATHER_ON_USE
    early = lazily or leaf.access is Access.GATHER_ONCE_SCATTER_EARLY
    return (
        forward * (used if lazily else 1),
        backward * used,
        scatters * (used if early else 1),
    )


def _times_with_all_layers(plan: Decisions, leaf: LeafPlacement) -> tuple[float, float, float]:
    if _is_streamed(plan, leaf):
        microbatches = plan.num_microbatches
        tiles = plan.tiles.cut.get(leaf.name)
        if tiles is not None:
            return microbatches, microbatches * (1 + tiles.again), microbatches
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
        # With the stash `input` backward slots start with a recomputed forward pass.
        again = 2 if layout.table.stash == "input" else 1
        forward = ticks_of(layout, "forward") / chunks
        backward = again * (ticks_of(layout, "backward") + ticks_of(layout, "weight")) / chunks
    return forward, backward, scatters


def _ring(size: int) -> float:
    return (size - 1) / size
