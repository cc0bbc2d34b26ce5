"""Counts a plan's bytes by role (such as optimizer state) and memory, its FLOPs and its tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from zerojax.config.mesh import DEVICE, HOST, HOST_KIND, NVME
from zerojax.config.tree_types import Tree
from zerojax.features.known import work_of_features
from zerojax.models.adapt import bound_attribute
from zerojax.optim import EmaState
from zerojax.optim.precision import Precision
from zerojax.optim.weight_codes import bytes_per_parameter
from zerojax.pipeline.pipeline_costs import total_buffer_bytes
from zerojax.placement.decisions import Decisions
from zerojax.placement.device_mesh import CONTEXT, MODEL, STAGE
from zerojax.placement.leaf_placement import FULL_ENOUGH, LeafPlacement
from zerojax.placement.state import feature_parts
from zerojax.placement.table import Placement, straight_pieces, unrolled
from zerojax.tracing import jaxpr, trees
from zerojax.tracing.flops import (
    TRAINING_FACTOR,
    count_program_flops,
    flops_without_gradient,
)
from zerojax.tracing.loops.largest import carried_arrays, largest_loop

MASTERS, OPTIMIZER, STORED = "master weights", "optimizer state", "weights"
AVERAGE = "average of weights"
GATHERED, GRADIENTS, ACTIVATIONS = "gathered weights", "gradients", "activations"
PIPELINE_BUFFERS, CONSTANTS = "pipeline buffers", "constants"
LAYER_UPDATE = "update of a layer"

Tiers = dict[str, int]
"""{memory ("device", "host" or "nvme"): bytes per device}, without memories that are not used."""


def shard_bytes(tree: Tree) -> int:
    """Returns the bytes that sharded `ShapeDtypeStruct`s take in the memory of each device."""
    return sum(_shard(leaf) for leaf in jax.tree.leaves(tree) if not _on_host(leaf))


def _shard(leaf: jax.ShapeDtypeStruct) -> int:
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def _on_host(leaf: jax.ShapeDtypeStruct) -> bool:
    return leaf.sharding.memory_kind == HOST_KIND


def state_tiers(plan: Decisions) -> dict[str, Tiers]:
    """Counts the exact bytes of the training state between steps, by role and memory.

    The state of offloaded parameters is cut into slices (`zerojax.placement.state_layout`), so a
    role may have bytes in several memories. The bytes in files are the bytes of the uncut state
    minus the bytes in memory.

    Returns:
      {role: {memory: bytes}}, with these roles:
      master weights: parameters that the optimizer updates.
      optimizer state, with the gradients that wait for a delayed update.
      average of weights: if the optimizer keeps an average.
      weights: copies in the compute dtype that forward and backward read, for offloaded parameters
        and for parameters that are sent as codes of their change.
      frozen weights and the model's other state.
    """
    state, layout = plan.abstract_state, plan.offload
    moments, average = _without_average(state["opt_state"])
    rest = {"frozen": state["frozen"], "extras": (state["extras"], feature_parts(state))}
    in_device = {role: {DEVICE: shard_bytes(tree)} for role, tree in rest.items()}
    if layout is None:
        return {
            MASTERS: {DEVICE: shard_bytes(state["params"])},
            OPTIMIZER: {DEVICE: shard_bytes((moments, state.get("one_bit")))},
            **({} if average is None else {AVERAGE: {DEVICE: shard_bytes(average)}}),
            **({STORED: {DEVICE: shard_bytes(state["copies"])}} if "copies" in state else {}),
            **in_device,
        }
    copied = layout.leaves if plan.precision.has_masters else {}
    weights: Tiers = {}
    updated: Tiers = {}
    for name, leaf in state["params"].items():
        tier = HOST if name in layout.streamed else DEVICE
        _add(weights if name in copied else updated, tier, _shard(leaf))
    for name in layout.paged:
        whole = plan.abstract_stored["params"][name]
        size = math.prod(whole.sharding.shard_shape(whole.shape))
        _add(weights, NVME, size * jnp.dtype(plan.precision.compute_dtype).itemsize)
    masters = _memory_tiers(state["masters"])
    stored = plan.abstract_stored
    whole = sum(_shard(stored["params"][name]) for name in copied)
    _add(masters, NVME, whole - sum(masters.values()))
    for tier, size in updated.items():
        _add(masters, tier, size)
    roles = {MASTERS: masters}
    parts = (moments, average), _without_average(stored["opt_state"])
    for role, held, all_of_it in zip((OPTIMIZER, AVERAGE), *parts, strict=True):
        if held is None:
            continue
        roles[role] = _memory_tiers(held)
        size = sum(map(_shard, jax.tree.leaves(all_of_it)))
        _add(roles[role], NVME, size - sum(roles[role].values()))
    _add(roles[OPTIMIZER], DEVICE, shard_bytes(state.get("delayed")))
    return {**roles, STORED: weights, **in_device}


def _without_average(opt_state: Tree) -> tuple[Any, Any]:
    """Splits an optimizer's state into (state without the average of the weights, the average or
    None)."""
    if not isinstance(opt_state, EmaState):
        return opt_state, None
    return (opt_state.inner, opt_state.count), opt_state.ema


def _memory_tiers(tree: Tree) -> Tiers:
    """Returns the bytes per memory of a tree that has {memory: array} in place of each sliced
    array.

    The keys name the memory, because shardings on a mesh of absent devices lose their memory kind.
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
    """Returns the bytes per device of the whole training state between steps in one memory
    (`tier`), including counters."""
    total = sum(tiers.get(tier, 0) for tiers in state_tiers(plan).values())
    if tier == DEVICE:
        state = plan.abstract_state
        total += shard_bytes([state["step"], state["skipped"], state["rng"], state["loss_scale"]])
    return total


def role_tiers(plan: Decisions) -> dict[str, Tiers]:
    """Counts bytes per device by role and memory during a step: the state exactly, other roles by
    formula.

    The sum is less than the peak, because activations on the device are left out.

    Returns:
      {role: {memory: bytes}}, with the roles of `state_tiers` and
      gathered weights: copies in the compute dtype that forward and backward read.
      gradients: gradients of the backward pass, and their sum over microbatches if there are
        several.
      activations: offloaded activations only; there is no formula for activations on the device.
      pipeline buffers: values that pipeline stages store between forward and backward.
      constants: arrays that the loss closes over, if they are large enough to list.
      update of a layer: `layer_update_bytes`.
    """
    weights, gradients = _formula_tiers(plan)
    found = {**state_tiers(plan), GATHERED: weights, GRADIENTS: gradients}
    if plan.pipeline is not None:
        found[PIPELINE_BUFFERS] = {DEVICE: total_buffer_bytes(plan.pipeline)}
    if (constants := large_constants(plan.traced.forward)) > 0:
        found[CONSTANTS] = {DEVICE: constants}
    if updated := layer_update_bytes(plan):
        found[LAYER_UPDATE] = {DEVICE: updated}
    if plan.offload is not None and plan.offload.activations != DEVICE:
        # A loop over microbatches may have two gradient buffers: compiled for 8 H200 it has two at
        # stage 3 and one at stage 1.
        buffers = 2 if plan.num_microbatches > 1 and not plan.offload.paged else 1
        found[ACTIVATIONS] = {
            plan.offload.activations: buffers * (kept_activation_bytes(plan) or 0)
        }
    return found


def layer_update_bytes(plan: Decisions) -> int:
    """Returns the bytes of device memory for the update of a layer of files in the backward pass;
    0 without one.

    They are the layer's optimizer state before and after the update, its new weights, and its
    gradients, which wait while the layer below is differentiated.
    """
    layout = plan.offload
    if layout is None or not (layout.update_in_backward and layout.paged):
        return 0
    precision, leaves = plan.precision, [layout.leaves[name] for name in layout.paged]
    state = jnp.dtype(precision.param_dtype).itemsize * precision.has_masters
    state += jnp.dtype(precision.moments_dtype).itemsize * len(layout.moments)
    sizes = 2 * state + jnp.dtype(precision.compute_dtype).itemsize + _scattered_itemsize(plan)
    return sizes * sum(math.prod(leaf.shard_shape[1:]) for leaf in leaves)


def large_constants(forward: ClosedJaxpr) -> int:
    """Returns the bytes of the arrays that a loss closes over, which are replicated on every
    device.

    Returns 0 if they are below 1 MiB (masks, tables of positions).
    """
    size = jaxpr.constant_bytes(forward)
    return size if size >= 2**20 else 0


def describe_constants(forward: ClosedJaxpr) -> list[str]:
    """Describes large arrays that a loss closes over, with a remedy; returns [] if there are
    none."""
    size = large_constants(forward)
    if not size:
        return []
    return [
        f"constants: the loss closes over constant arrays of {trees.format_bytes(size)}, which are "
        "replicated on every device at any ZeRO stage. To shard them with zero=3, make them "
        "parameters of the model and name "
        "them in freeze=; or pass them with the batch"
    ]


def role_bytes(plan: Decisions) -> dict[str, int]:
    """Returns {role: bytes of device memory} during a step, without activations."""
    roles = {role: tiers.get(DEVICE, 0) for role, tiers in role_tiers(plan).items()}
    return {role: size for role, size in roles.items() if role != ACTIVATIONS}


def kept_activation_bytes(plan: Decisions) -> int | None:
    """Returns the bytes of all layer inputs of one microbatch on one device; None without a loop
    over layers.

    The loop with the most bytes of stacked weights counts. If layer weights are streamed from the
    host, the last layer's input stays on the device and is not counted.
    """
    loop = largest_loop(plan.traced.forward.jaxpr)
    if loop is None:
        return None
    size = sum(math.prod(x.shape) * x.dtype.itemsize for x in carried_arrays(loop))
    split = plan.mesh.shape[MODEL] if plan.settings.sequence_sharding else 1
    streamed = plan.offload is not None and bool(plan.offload.by_layer)
    split *= plan.mesh.shape[CONTEXT] * plan.mesh.shape[STAGE]
    return size * (loop.params["length"] - streamed) // split


def whole_elements(placement: Placement, leaf: LeafPlacement) -> int:
    """Returns the number of elements of a parameter on one device after ZeRO's all-gather.

    Other mesh axes still split the parameter: the device has only the rows of its pipeline stage
    (including padding rows), its own experts, and its tensor-parallel part.
    """
    split = math.prod(placement.axis_sizes[axis] for axis in leaf.axes if axis is not None)
    shape = leaf.device_shape(placement.axis_sizes)
    if leaf.layer_rows is not None:
        shape = (len(leaf.layer_rows) // placement.axis_sizes[STAGE], *shape[1:])
    return trees.num_elements(shape) // split


def padded_elements(placement: Placement, leaf: LeafPlacement) -> int:
    """Returns the number of elements of a gathered parameter as it is sent: `whole_elements` and
    ZeRO's padding."""
    whole = whole_elements(placement, leaf)
    dim, padded = leaf.zero_dim, leaf.padded_size
    if dim is None or padded is None or (leaf.codes is not None and leaf.codes.dim == dim):
        return whole
    return whole // leaf.shape[dim] * padded


def coded_bytes(placement: Placement, leaf: LeafPlacement) -> int:
    """Returns the bytes on one device of a parameter that is gathered as quantized codes."""
    assert leaf.codes is not None
    return round(whole_elements(placement, leaf) * bytes_per_parameter(leaf.codes.kind))


def layers_of(plan: Decisions, leaf: LeafPlacement) -> int:
    """Returns the number of layers of a stacked parameter on one device; 1 for other parameters."""
    if plan.pipeline is not None and leaf.layer_rows is not None:
        return plan.pipeline.schedule.num_chunks * plan.pipeline.chunk_rows
    return leaf.num_slices


def _formula_tiers(plan: Decisions) -> tuple[Tiers, Tiers]:
    """Estimates the bytes per device of the weights used by forward and backward, and of their
    gradients.

    With a pipeline gradients are always accumulated, and one microbatch adds the gradients of one
    chunk. Of streamed layers (`offload.by_layer`) a device stores two gathered layers and the
    gradients of one; all gradients are stored where the weights are, on the host or in files, or
    not at all with an update of layers in the program of the backward pass. Parameters that are
    gathered on use are in memory together if one part of the loss without a loop reads them: one
    layer of a loop, or all layers that a Python loop calls
    (`zerojax.placement.table.straight_pieces`). Weights in tiles are gathered one after the other.

    Three kinds of parameters need no copy: frozen parameters stored in the compute dtype, shards
    that are gathered on use, and copies that are part of the state (`wire.weights`). Coded
    parameters are gathered as codes and decoded where they are read.

    At stage 2 unsharded gradients of such layers exist at the same time. With one microbatch the
    weights are freed meanwhile, and half of these gradients exist beside them, or the gradients of
    one layer if layers are gathered in separate buckets (`FULL_ENOUGH`). Compiled for 8 H100 (JAX
    0.12, 12 matrices of 1 MiB in float32): 19.1 MiB of temporaries, 19.5 by this formula; in
    bfloat16 9.6 and 9.8, and with 4 microbatches 14.3 and 13.5. Of 6 matrices of 16 MiB: 114.2 and
    124.1, and in bfloat16 59.1 and 62.1.

    Returns:
      ({memory: bytes of weights}, {memory: bytes of gradients}).
    """
    placement: Placement = plan.placement
    layout = plan.offload
    copied = layout.leaves if layout and plan.precision.has_masters else {}
    streamed = layout.by_layer if layout else frozenset()
    compute = jnp.dtype(plan.precision.compute_dtype).itemsize
    reduce = jnp.dtype(plan.precision.reduce_dtype).itemsize
    several = _adds_up(plan)
    weights = gradients = far_gradients = tiled = 0
    on_use: dict[str, int] = {}
    by_layer: dict[str | None, list[tuple[int, int]]] = {}
    pieces = straight_pieces(plan.traced.forward.jaxpr)
    waiting = unrolled(placement, pieces, gradients=True)
    for leaf in placement.leaves.values():
        whole = whole_elements(placement, leaf)
        shard, part = placement.shard_elements(leaf), placement.held_elements(leaf)
        layers = layers_of(plan, leaf)
        if leaf.codes is not None:
            coded = coded_bytes(placement, leaf)
            lazily = leaf.access.gathers_on_use
            on_use[leaf.name] = (whole * compute + (coded if lazily else 0)) // layers
            weights += coded if leaf.zero_dim is not None and not lazily else 0
            weights += coded // leaf.node_shards if leaf.node_shards else 0
            continue
        if leaf.name in streamed:
            assert layout is not None
            tiles = plan.tiles.cut.get(leaf.name)
            row = whole // layers if tiles is None else shard // layers
            weights += 2 * row * compute
            gradients += row * (compute if tiles is None else reduce)
            if tiles is not None:  # the current tile, the next tile, and the gradient of one
                weights += 2 * whole // layers // tiles.count * compute
                gradients += whole // layers // tiles.count * compute
            if leaf.name in layout.updated_in_pass:
                # gradients of the layer above, which waits for its update
                gradients += shard // layers * _scattered_itemsize(plan)
            else:
                far_gradients += shard * _scattered_itemsize(plan)
            continue
        as_stored = leaf.name in copied or _is_read_as_stored(plan, leaf)
        if leaf.access.reads_shard:
            as_stored = as_stored or not _is_cast(plan.precision)
            read = whole // layers * (1 if leaf.eight_bits else compute)
            tiles = plan.tiles.cut.get(leaf.name)
            if tiles is not None:  # one at work, the next one, and the gradient of one
                tiled, read = max(tiled, 3 * read // tiles.count), 0
            on_use[leaf.name] = read if leaf.row_reads is None else 0
            as_they_lie = as_stored and leaf.node_shards is None
            size = compute if leaf.frozen else max(compute, reduce)
            weights += 0 if as_they_lie else part * size
        elif leaf.delta_codes is None and not (as_stored and leaf.access.is_whole):
            weights += whole * compute
        gradients += gradient_bytes(plan, leaf)
        if leaf.frozen or leaf.name not in waiting:
            continue
        if several:
            gradients += whole * compute
        else:
            layer = by_layer.setdefault(trees.layer_of(leaf.name), [])
            layer.append((whole, whole * compute))
    gradients += _waiting_gradients(by_layer)
    living = [sum(on_use.get(name, 0) for name in piece.names) for piece in pieces]
    held: Tiers = {DEVICE: weights + max((*living, *on_use.values()), default=0) + tiled}
    left: Tiers = {DEVICE: gradients}
    _add(left, NVME if layout and layout.paged else HOST, far_gradients)
    return held, left


def gradient_bytes(plan: Decisions, leaf: LeafPlacement) -> int:
    """Returns the bytes on one device of a parameter's gradient after the backward pass, or of its
    sum over microbatches.

    Sharded gradients of a microbatch are added to the sum as they arrive. Gradients that are not
    sharded exist beside the sum; with a pipeline only the gradients of one chunk do. The part of
    the gradients that belongs to a node (`wire.secondary`), which is larger than a shard, also
    exists beside the sum in the compiled program and is counted so.
    """
    if leaf.frozen:
        return 0
    if not leaf.access.has_whole_gradient:
        held = plan.placement.held_elements(leaf)
        size = _scattered_itemsize(plan)
        if leaf.node_shards is not None and _adds_up(plan):
            # Gradients of one microbatch, in the dtype of the read weights, before they are added.
            dtypes = plan.precision.compute_dtype, plan.precision.reduce_dtype
            size += jnp.promote_types(*dtypes).itemsize
        return held * size
    whole, chunks = whole_elements(plan.placement, leaf), 1
    if plan.pipeline is not None and leaf.layer_rows is not None:
        chunks = plan.pipeline.schedule.num_chunks
    summed = jnp.dtype(plan.precision.accumulate_dtype).itemsize if _adds_up(plan) else 0
    compute = jnp.dtype(plan.precision.compute_dtype).itemsize
    return whole * summed + whole // chunks * compute


def _adds_up(plan: Decisions) -> bool:
    """Returns True if a step has several microbatches or the plan has pipeline stages."""
    return plan.num_microbatches > 1 or plan.pipeline is not None


def _scattered_itemsize(plan: Decisions) -> int:
    """Returns the number of bytes per element of a reduce-scattered gradient."""
    precision = plan.precision
    dtype = precision.accumulate_dtype if _adds_up(plan) else precision.reduce_dtype
    return jnp.dtype(dtype).itemsize


def _is_cast(precision: Precision) -> bool:
    """Returns whether a shard is cast to another dtype before it is gathered."""
    compute, reduce = jnp.dtype(precision.compute_dtype), jnp.dtype(precision.reduce_dtype)
    return precision.param_dtype != compute or reduce.itemsize > compute.itemsize


def _is_read_as_stored(plan: Decisions, leaf: LeafPlacement) -> bool:
    frozen = plan.abstract_stored["frozen"].get(leaf.name)
    return frozen is not None and frozen.dtype == jnp.dtype(plan.precision.compute_dtype)


def _waiting_gradients(by_layer: Mapping[str | None, Sequence[tuple[int, int]]]) -> int:
    """Returns the bytes of gradients that exist at the same time with one microbatch.

    Args:
      by_layer: {layer: (elements, bytes) of each of its arrays}.
    """
    largest = shared = 0
    for layer, arrays in by_layer.items():
        elements, size = (sum(numbers) for numbers in zip(*arrays, strict=True))
        if layer is not None and elements >= FULL_ENOUGH:
            largest = max(largest, size)
        else:
            shared += size
    return largest + shared // 2


def model_flops(plan: Decisions) -> float:
    """Counts the floating-point operations of one step over all devices, without recomputation.

    They are three times the forward pass (`tracing.flops.TRAINING_FACTOR`) of every microbatch of
    every data shard, without the products for gradients of frozen parameters. With features that
    leave out layers they are the expected number after many steps.
    """
    forward = plan.traced.forward
    flops = TRAINING_FACTOR * count_program_flops(forward)
    leaves = plan.placement.leaves
    if any(leaf.frozen for leaf in leaves.values()):
        is_trained = [not leaves[name].frozen for name in sorted(leaves)]
        others = len(forward.jaxpr.invars) - len(is_trained)
        flops -= flops_without_gradient(forward, [*is_trained, *[False] * others])
    return flops * work_of_features(plan) * plan.division.unit


def active_parameters(plan: Decisions) -> int | None:
    """Returns the number of parameters used per token; None if all are used, as far as the model
    declares.

    Models declare the number by `num_parameters` and `num_active_parameters` of their
    configuration.
    """
    config = bound_attribute(plan.users_model, "config")
    counts = (getattr(config, name, None) for name in ("num_parameters", "num_active_parameters"))
    total, active = counts
    if total is None or active is None or total == active:
        return None
    return plan.placement.num_parameters() - (total - active)


def tokens_per_step(plan: Decisions) -> int | None:
    """Returns the number of tokens in a global batch; None if batches have no "tokens"."""
    batch = plan.abstract_batch
    tokens = batch.get("tokens") if isinstance(batch, Mapping) else None
    return None if tokens is None else math.prod(tokens.shape)
