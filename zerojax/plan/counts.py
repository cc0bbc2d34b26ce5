"""Counts of a plan: bytes by role and tier, floating-point operations, tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from zerojax.config.mesh import DEVICE, HOST, HOST_KIND, NVME
from zerojax.models import jaxpr, trees
from zerojax.models.flops import TRAINING_FACTOR, count_program_flops
from zerojax.plan.decisions import Decisions
from zerojax.plan.device_mesh import CONTEXT, DATA, MODEL, REPLICA, STAGE
from zerojax.plan.leaf_placement import Access, LeafPlacement
from zerojax.plan.pipeline_costs import total_buffer_bytes
from zerojax.plan.placement import Placement, straight_pieces, unrolled

MASTERS, OPTIMIZER, STORED = "master weights", "optimizer state", "weights"
GATHERED, GRADIENTS, ACTIVATIONS = "gathered weights", "gradients", "activations"
PIPELINE_BUFFERS = "pipeline buffers"

Tiers = dict[str, int]
"""{tier: bytes per device}, of the tiers that hold any."""


def shard_bytes(tree: Any) -> int:
    """Bytes of device memory per device, of a tree of `ShapeDtypeStruct`s with shardings."""
    return sum(_shard(leaf) for leaf in jax.tree.leaves(tree) if not _on_host(leaf))


def _shard(leaf: Any) -> int:
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def _on_host(leaf: Any) -> bool:
    return leaf.sharding.memory_kind == HOST_KIND


def state_tiers(plan: Decisions) -> dict[str, Tiers]:
    """{role: {tier: bytes}} of what the state holds between steps; exact.

    A role whose parameters are sliced (`zerojax.plan.state_layout`) has bytes in several tiers;
    what lies in files is what is missing in memory of the state in one piece.

    Returns:
      masters: what the optimizer updates; optimizer state; weights: copies in the compute dtype of
      sliced parameters, which forward and backward read; frozen; extras.
    """
    state, layout = plan.abstract_state, plan.offload
    rest = {"frozen": state["frozen"], "extras": state["extras"]}
    in_device = {role: {DEVICE: shard_bytes(tree)} for role, tree in rest.items()}
    if layout is None:
        return {
            MASTERS: {DEVICE: shard_bytes(state["params"])},
            OPTIMIZER: {DEVICE: shard_bytes(state["opt_state"])},
            **in_device,
        }
    copied = layout.leaves if plan.precision.has_masters else {}
    weights: Tiers = {}
    updated: Tiers = {}
    for name, leaf in state["params"].items():
        tier = HOST if name in layout.streamed else DEVICE
        _add(weights if name in copied else updated, tier, _shard(leaf))
    masters = _memory_tiers(state["masters"])
    stored = plan.abstract_stored
    whole = sum(_shard(stored["params"][name]) for name in copied)
    _add(masters, NVME, whole - sum(masters.values()))
    for tier, size in updated.items():
        _add(masters, tier, size)
    moments = _memory_tiers(state["opt_state"])
    all_moments = sum(map(_shard, jax.tree.leaves(stored["opt_state"])))
    _add(moments, NVME, all_moments - sum(moments.values()))
    return {MASTERS: masters, OPTIMIZER: moments, STORED: weights, **in_device}


def _memory_tiers(tree: Any) -> Tiers:
    """Of a tree with {tier: array} in place of what is sliced.

    Told by names: a sharding over absent devices has lost its kind of memory.
    """
    found: Tiers = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        tier = getattr(path[-1], "key", None) if path else None
        _add(found, HOST if tier == HOST else DEVICE, _shard(leaf))
    return found


def _add(tiers: Tiers, tier: str, size: int) -> None:
    if size:
        tiers[tier] = tiers.get(tier, 0) + size


def state_bytes(plan: Decisions, tier: str = DEVICE) -> int:
    """Bytes per device that the whole state holds in a tier between steps, counters included."""
    total = sum(tiers.get(tier, 0) for tiers in state_tiers(plan).values())
    if tier == DEVICE:
        state = plan.abstract_state
        total += shard_bytes([state["step"], state["skipped"], state["rng"], state["loss_scale"]])
    return total


def role_tiers(plan: Decisions) -> dict[str, Tiers]:
    """{role: {tier: bytes per device}}. State roles are exact; the others are by formula.

    Returns:
      What `state_tiers` returns, and
      gathered weights: copies in the compute dtype that forward and backward read.
      gradients: as the backward pass leaves them, and the accumulator where microbatches need one.
      activations: only what waits on the host; what is on the device no formula knows.
      pipeline buffers: where there is a pipeline, what waits between the passes of its stages.
    """
    weights, gradients = _formula_tiers(plan)
    found = {**state_tiers(plan), GATHERED: weights, GRADIENTS: gradients}
    if plan.pipeline is not None:
        found[PIPELINE_BUFFERS] = {DEVICE: total_buffer_bytes(plan.pipeline)}
    if plan.offload is not None and plan.offload.activations:
        # A loop over microbatches may have two buffers for them: compiled for 8 H200 it has two at
        # stage 3 and one at stage 1.
        buffers = 2 if plan.num_microbatches > 1 else 1
        found[ACTIVATIONS] = {HOST: buffers * (kept_activation_bytes(plan) or 0)}
    return found


def role_bytes(plan: Decisions) -> dict[str, int]:
    """Bytes of device memory by role, without activations; see `role_tiers`."""
    roles = {role: tiers.get(DEVICE, 0) for role, tiers in role_tiers(plan).items()}
    return {role: size for role, size in roles.items() if role != ACTIVATIONS}


def kept_activation_bytes(plan: Decisions) -> int | None:
    """What all layers are given of one microbatch, bytes on one device; None without a layer loop.

    The loop is the one that reads most bytes layer by layer. Where the weights of layers come one
    by one, the last layer's input stays on the device.
    """
    loops = list(_loops(plan.traced.forward.jaxpr))
    if not loops:
        return None
    loop = max(loops, key=_stacked_bytes)
    constants, carried = jaxpr.split_scan(loop)
    given = [v.aval for v in loop.invars[constants : constants + carried]]
    size = sum(
        math.prod(x.shape) * x.dtype.itemsize
        for x in given
        if x.shape and jnp.issubdtype(x.dtype, jnp.floating)
    )
    split = plan.mesh.shape[MODEL] if plan.settings.sequence_sharding else 1
    streamed = plan.offload is not None and bool(plan.offload.streamed)
    split *= plan.mesh.shape[CONTEXT] * plan.mesh.shape[STAGE]
    return size * (loop.params["length"] - streamed) // split


def _loops(program: Any) -> Iterator[Any]:
    for equation in program.eqns:
        if equation.primitive.name == "scan":
            yield equation
        else:
            for inner in jaxpr.inner_programs(equation.params):
                yield from _loops(inner)


def _stacked_bytes(loop: Any) -> int:
    stacks = loop.invars[sum(jaxpr.split_scan(loop)) :]
    return sum(math.prod(v.aval.shape) * v.aval.dtype.itemsize for v in stacks)


def whole_elements(placement: Placement, leaf: LeafPlacement) -> int:
    """Elements of a gathered parameter on one device: its own rows of a pipelined stack, padding
    included, and what tensor parallelism leaves."""
    split = math.prod(placement.axis_sizes[axis] for axis in leaf.axes if axis is not None)
    shape = leaf.shape
    if leaf.layer_rows is not None:
        shape = (len(leaf.layer_rows) // placement.axis_sizes[STAGE], *shape[1:])
    return trees.num_elements(shape) // split


def layers_of(plan: Decisions, leaf: LeafPlacement) -> int:
    """Layers of a stack that one device has; 1 for what is not a stack."""
    if plan.pipeline is not None and leaf.layer_rows is not None:
        return plan.pipeline.schedule.num_chunks * plan.pipeline.chunk_rows
    return leaf.num_slices


def _formula_tiers(plan: Decisions) -> tuple[Tiers, Tiers]:
    """(weights that forward and backward hold, gradients they leave), bytes per device.

    A pipeline always adds up; what one microbatch adds is that of one chunk. Of layers whose
    weights wait on the host (`offload.streamed`) a device has two, gathered, and the gradients of
    one; all gradients are on the host, or with an update in the backward pass nowhere. Of what is
    gathered where it is read, all that one straight piece of the loss reads lives together: a layer
    of a loop, or all layers that a Python loop calls (`zerojax.plan.placement.straight_pieces`).
    Gradients of such layers wait for one another at stage 2, whole: with one microbatch weights are
    freed meanwhile, and half of these gradients are beside them. Compiled for 8 H100 (JAX 0.12, 12
    matrices of 1 MiB in float32): 19.1 MiB of temporaries, 19.5 here; in bfloat16 9.6 and 9.8, and
    with 4 microbatches 14.3 and 13.5.
    """
    placement: Placement = plan.placement
    layout = plan.offload
    copied = layout.leaves if layout and plan.precision.has_masters else {}
    streamed = layout.streamed if layout else frozenset()
    compute = jnp.dtype(plan.precision.compute_dtype).itemsize
    accumulate = jnp.dtype(plan.precision.accumulate_dtype).itemsize
    reduce = jnp.dtype(plan.precision.reduce_dtype).itemsize
    weights = gradients = far_gradients = 0
    on_use: dict[str, int] = {}
    pieces = straight_pieces(plan.traced.forward.jaxpr)
    waiting = unrolled(placement, pieces, Access.GATHER_ONCE_SCATTER_EARLY)
    for leaf in placement.leaves.values():
        whole = whole_elements(placement, leaf)
        shard = placement.shard_elements(leaf)
        layers = layers_of(plan, leaf)
        several = plan.num_microbatches > 1 or plan.pipeline is not None
        summed = accumulate if several else 0
        if leaf.name in streamed:
            weights += 2 * whole // layers * compute
            gradients += whole // layers * compute
            assert layout is not None
            if not layout.update_in_backward:
                far_gradients += shard * (summed or reduce)
            continue
        if leaf.access is Access.GATHER_ON_USE:
            on_use[leaf.name] = whole // layers * compute
            weights += 0 if leaf.name in copied else shard * reduce
        elif not (leaf.name in copied and leaf.access is Access.WHOLE):
            weights += whole * compute
        if not leaf.frozen:
            scattered = leaf.access in (Access.GATHER_ON_USE, Access.GATHER_ONCE_SCATTER_EARLY)
            chunks = 1
            if plan.pipeline is not None and leaf.layer_rows is not None:
                chunks = plan.pipeline.schedule.num_chunks
            if scattered:  # a microbatch's own are added to the sum as they come
                gradients += shard * (summed or reduce)
                if leaf.name in waiting:
                    gradients += whole * compute // (1 if several else 2)
            else:
                gradients += whole * summed + whole // chunks * compute
    living = [sum(on_use.get(name, 0) for name in piece.names) for piece in pieces]
    held: Tiers = {DEVICE: weights + max((*living, *on_use.values()), default=0)}
    left: Tiers = {DEVICE: gradients}
    _add(left, HOST, far_gradients)
    return held, left


def model_flops(plan: Decisions) -> float:
    """Floating-point operations of one step over all devices, without what remat repeats.

    Three times the forward pass (`models.flops.TRAINING_FACTOR`) of every microbatch of every
    shard.
    """
    forward = count_program_flops(plan.traced.forward)
    shards = plan.placement.axis_sizes[DATA] * plan.placement.axis_sizes[REPLICA]
    return TRAINING_FACTOR * forward * plan.num_microbatches * shards


def tokens_per_step(plan: Decisions) -> int | None:
    """Tokens of a global batch; None where batches hold no "tokens"."""
    batch = plan.abstract_batch
    tokens = batch.get("tokens") if isinstance(batch, Mapping) else None
    return None if tokens is None else math.prod(tokens.shape)
