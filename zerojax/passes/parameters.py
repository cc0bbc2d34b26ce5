"""Gathers parameters, once per step or at each read, and reduces their gradients."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from zerojax.operators.marks import mark_read
from zerojax.passes.microbatch import Arrays, PassConfig
from zerojax.passes.rewrite import Rewriting
from zerojax.passes.table_reads import StandIn
from zerojax.placement.device_mesh import (
    EXPERT,
    MANUAL_AXES,
    PASS_AXES,
    REPLICA,
    communicates_through_gloo,
)
from zerojax.placement.leaf_placement import Access, LeafPlacement
from zerojax.placement.state_layout import WeightTiles
from zerojax.tracing.tiled_products import TiledProduct, WeightProduct
from zerojax.tracing.tiled_programs import Tilings
from zerojax.transport import collectives
from zerojax.transport.owned_tables import OwnedTable
from zerojax.transport.sums import TreeOrder, barrier_kind


def _of_access(
    config: PassConfig, names: Iterable[str], question: Callable[[Access], bool]
) -> list[str]:
    return [name for name in names if question(config.placement.leaves[name].access)]


def leaf_collectives(
    config: PassConfig, names: Iterable[str], *, in_model: bool = False
) -> dict[str, collectives.LeafCollectives]:
    """Returns {name: collectives of this parameter}.

    Args:
      config: configuration of the pass.
      names: names of sharded parameters.
      in_model: True for collectives that run where the model reads the parameter: they decode
        codes. False for collectives outside of the model: they return codes. For a parameter of
        which each node holds a copy (`wire.secondary`), True gives the collectives inside a node,
        and False those between nodes.
    """
    fixed = config.fixed_pieces is not None
    leaves = config.placement.leaves
    one_level = collectives.inside_nodes if in_model else collectives.between_nodes
    table = {
        name: collectives.leaf_collectives(
            leaves[name],
            config.placement.num_shards(leaves[name]),
            compute_dtype=config.precision.compute_dtype
            if leaves[name].codes is None or in_model
            else jnp.uint8,
            reduce_dtype=jnp.float32 if leaves[name].gradient_in_full else wire_dtype(config),
            wire_codes=leaves[name].wire_codes,
            gradient_codes=leaves[name].gradient_codes,
            by_permutes=communicates_through_gloo(config.mesh) and not fixed,
            tree=config.tree,
            barrier=barrier_kind(config.mesh) if fixed and in_model else None,
            eight_bits=leaves[name].eight_bits,
            in_codes=in_model,
        )
        for name in names
    }
    members = {name: leaves[name].node_shards for name in table}
    return {
        name: leaf if (own := members[name]) is None else one_level(leaf, own)
        for name, leaf in table.items()
    }


def wire_dtype(config: PassConfig) -> Any:
    """Returns the dtype in which gradients are sent.

    It is `reduce_dtype`, or float32 if sums of several rounded gradients are sent in a fixed order.
    """
    if config.tree is TreeOrder.LOWEST_FIRST and config.num_microbatches > 1:
        return jnp.float32
    return config.precision.reduce_dtype


def gradient_dtype(config: PassConfig, leaf: LeafPlacement) -> Any:
    """Returns the dtype of a gradient that is reduce-scattered inside the backward pass.

    It is the dtype of the parameter's shard in the pass. If the model reads the shard itself, the
    dtype is at least as wide as the compute dtype, even if gradients are sent in a narrower dtype.
    """
    reduce = config.precision.reduce_dtype
    if leaf.gradient_in_full or config.fixed_pieces is not None:
        reduce = jnp.float32
    if leaf.access.reads_shard:
        return jnp.promote_types(config.precision.compute_dtype, reduce)
    return reduce


def prepare_parameters(
    config: PassConfig, params: Arrays, frozen: Arrays, copies: Arrays | None = None
) -> tuple[Arrays, Arrays]:
    """Gathers the parameters that are gathered once per step, and casts the others.

    Parameters of which each node holds a copy (`wire.secondary`) are gathered between nodes.

    Args:
      config: configuration of the pass.
      params, frozen: stored trained and frozen parameters.
      copies: {name: unsharded value in the compute dtype} of parameters that every device already
        has (`wire.weights`); None if there are none.

    Returns:
      ({name: differentiated value}, {name: unsharded value that is not differentiated}).
    """
    compute = config.precision.compute_dtype
    stored = {**params, **frozen}
    stored |= _gather_between_nodes(config, stored)
    once = _of_access(config, stored, lambda access: access.gathers_once)
    once = [name for name in once if name not in (copies or {})]
    sharded = {name: cast(stored[name], compute) for name in once}
    wholes = collectives.gather_buckets(
        sharded, leaf_collectives(config, once), config.allgather_bucket_size
    )
    wholes |= copies or {}
    inputs, constants = {}, {}
    for name, value in stored.items():
        access = config.placement.leaves[name].access
        if access.is_whole:
            inputs[name] = cast(value, compute)
        elif access.scatters_late:
            inputs[name] = wholes[name]
        else:
            leaf = config.placement.leaves[name]
            inputs[name] = cast(value, compute if name in frozen else gradient_dtype(config, leaf))
            if access.gathers_once:
                constants[name] = wholes[name]
    for name in frozen:
        value = inputs.pop(name)
        constants.setdefault(name, value)
    return inputs, constants


def _of_nodes(config: PassConfig, names: Iterable[str]) -> list[str]:
    return [name for name in names if config.placement.leaves[name].node_shards is not None]


def _gather_between_nodes(config: PassConfig, stored: Arrays) -> Arrays:
    """Returns {name: this device's part of its node's copy, in the compute dtype or codes}."""
    names = _of_nodes(config, stored)
    shards = {name: cast(stored[name], config.precision.compute_dtype) for name in names}
    return collectives.gather_buckets(
        shards, leaf_collectives(config, names), config.allgather_bucket_size
    )


def cast(value: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Casts a floating-point array to `dtype`; returns any other array unchanged."""
    return value.astype(dtype) if jnp.issubdtype(value.dtype, jnp.floating) else value


def values_to_read(config: PassConfig, inputs: Arrays, constants: Arrays, frozen: Arrays) -> Arrays:
    """Returns the value that the model gets for each parameter.

    It is an unsharded value, a shard, or (unsharded value, shard) for a gradient that is
    reduce-scattered inside the backward pass.
    """
    values = {name: constants[name] for name in frozen}
    for name, value in inputs.items():
        values[name] = (constants[name], value) if name in constants else value
    return {name: values[name] for name in config.placement.leaves if name in values}


def build_reads(config: PassConfig, frozen: Arrays) -> dict[str, Any]:
    """Returns {parameter: function that the model applies when it reads it}.

    The functions gather, decode or look up a value, or reduce-scatter its gradient. Parameters that
    need none of these are left out.
    """
    leaves = config.placement.leaves
    on_use = _of_access(config, leaves, lambda access: access.gathers_on_use)
    early = _of_access(config, leaves, lambda access: access.gathers_once and access.scatters_early)
    table = leaf_collectives(config, on_use + early, in_model=True)
    compute = jnp.dtype(config.precision.compute_dtype).name
    decoded = {
        name: collectives.DecodeOnUse(name, leaf.codes, leaf.axes, compute)
        for name, leaf in leaves.items()
        if leaf.codes is not None and name not in on_use
    }
    reads: dict[str, Any] = {name: collectives.GatherOnUse(name, table[name]) for name in on_use}
    tapped = [name for name in early if name not in frozen]
    reads |= {name: collectives.ScatterEarly(name, table[name]) for name in tapped}
    looked_up = {name: StandIn(name, table) for name, table in owned_tables(config).items()}
    return reads | decoded | looked_up


def owned_tables(config: PassConfig) -> dict[str, OwnedTable]:
    """Returns {name: table} of the tables that are sharded by columns, whose rows are looked up."""
    leaves = config.placement.leaves
    tables = {}
    for name in _of_access(config, leaves, lambda access: access.looks_up):
        leaf = leaves[name]
        tables[name] = OwnedTable(
            rows=leaf.shape[0],
            width=leaf.shape[1],
            over=leaf.zero_axes,
            compute_dtype=jnp.dtype(config.precision.compute_dtype).name,
            reduce_dtype=jnp.dtype(wire_dtype(config)).name,
        )
    return tables


def tile_collectives(
    leaf: collectives.LeafCollectives, tiles: WeightTiles
) -> collectives.LeafCollectives:
    """Returns the collectives of one tile of a parameter."""
    if tiles.groups == 1:  # each shard has a part of every tile
        return leaf
    size = leaf.size // tiles.count
    return dataclasses.replace(leaf, size=size, padded_size=size)


def build_tilings(config: PassConfig, frozen: Arrays) -> Tilings:
    """Returns {parameter: its product in tiles, from the product in the traced loss}."""
    names = _of_access(config, config.tiles, lambda access: access.gathers_on_use)
    table = leaf_collectives(config, names, in_model=True)

    def tiling(name: str) -> Callable[[WeightProduct], TiledProduct]:
        tiles = config.tiles[name]
        leaf = tile_collectives(table[name], tiles)
        return lambda product: TiledProduct(
            product=product,
            gather=lambda shard: mark_read(leaf.gather(shard), name),
            scatter=None if name in frozen else leaf.scatter,
            dim=tiles.dim,
            count=tiles.count,
            groups=tiles.groups,
        )

    return {name: tiling(name) for name in names}


def build_rewriting(config: PassConfig, frozen: Arrays) -> Rewriting:
    """Builds the rules that combine the collectives of a layer's parameters into buckets.

    At stage 3 these collectives are all-gathers, at stage 2 reduce-scatters of gradients. If
    `config.regather` is set, the backward pass gathers again. Frozen parameters have separate
    buckets, because none of their gradients is scattered. Decoded values are never kept for the
    backward pass, at any stage.
    """
    placed = config.placement.leaves
    coded = {name for name, leaf in placed.items() if leaf.codes is not None}
    names = [
        name
        for name in _of_access(config, placed, lambda access: access.scatters_early)
        if name not in coded or placed[name].access.gathers_on_use
    ]
    table = leaf_collectives(config, names, in_model=True)
    lazy = config.placement.zero == 3
    limit = config.allgather_bucket_size if lazy else config.reduce_bucket_size

    def buckets(names: Sequence[str]) -> list[list[str]]:
        made = []
        for fixed in (False, True):
            chosen = [name for name in names if (name in frozen) == fixed]
            sizes = {name: _slice_size(placed[name]) for name in chosen}
            made += collectives.buckets_of(sizes, table, limit)
        return made

    def read_together(names: Sequence[str], given: Sequence[Any]) -> Sequence[Any]:
        leaves = tuple(table[name] for name in names)
        operands = [list(arrays) for arrays in zip(*given, strict=True)]
        if not lazy:
            return collectives.scatter_early(leaves, *operands)
        in_bits = leaves[0].eight_bits
        read = collectives.gather_eight_bits if in_bits else collectives.gather_on_use
        return read(leaves, *operands)

    return Rewriting(
        shapes={name: placed[name].device_shape(config.placement.axis_sizes) for name in names},
        buckets=buckets,
        read_together=read_together,
        regather=config.regather or bool(coded),
        everywhere=not config.model.reads_lazily,
        trained=frozenset(names) - frozen.keys(),
        shard_operand=0 if lazy else 1,
    )


def _slice_size(leaf: LeafPlacement) -> int:
    """Returns the number of elements that one read of a parameter returns (one layer of a
    stack).
    """
    return math.prod(leaf.shape) // max(leaf.num_slices, 1)


_AXES_OF_EXPERTS = tuple(axis for axis in PASS_AXES if axis != EXPERT)
_GRADIENT_DTYPE = jnp.float32
"""Dtype of the gradients that the optimizer gets."""


def _summed_over(config: PassConfig, leaf: LeafPlacement) -> tuple[str, ...]:
    """Returns the mesh axes over which the gradient of an unsharded parameter is summed."""
    if leaf.expert_dim is not None:
        return _AXES_OF_EXPERTS  # token rows of all devices along `expert` are included already
    return MANUAL_AXES if config.pipeline and leaf.layer_rows is None else PASS_AXES


def reduce_gradients(config: PassConfig, grads: Arrays) -> Arrays:
    """Sums gradients over devices; returns them with the sharding of their parameters.

    The result is float32, except for parameters that are updated in slices: their gradients keep
    the dtype in which they were summed. In a pipeline, gradients of parameters outside the layers
    are also summed over `stage`, because each stage computes only a part of the gradient.
    """
    leaves = config.placement.leaves
    bucket_size = config.reduce_bucket_size
    axes = {name: leaf.axes for name, leaf in leaves.items()}

    def summed(values: Arrays, over: tuple[str, ...]) -> Arrays:
        """Returns `values` summed over the mesh axes `over`, in float32 or `reduce_dtype`."""
        found: Arrays = {}
        for full in (False, True):
            chosen = {n: x for n, x in values.items() if leaves[n].gradient_in_full == full}
            dtype = jnp.float32 if full else config.precision.reduce_dtype
            chosen = {name: value.astype(dtype) for name, value in chosen.items()}
            found |= collectives.sum_buckets(chosen, axes, bucket_size, over)
        return found

    wholes = {n: grads[n] for n in _of_access(config, grads, lambda access: access.is_whole)}
    reduced: Arrays = {}
    for over in (PASS_AXES, MANUAL_AXES, _AXES_OF_EXPERTS):
        chosen = {n: x for n, x in wholes.items() if _summed_over(config, leaves[n]) == over}
        reduced |= summed(chosen, over)
    late = [
        *_of_access(config, grads, lambda access: access.scatters_late),
        *_of_nodes(config, grads),
    ]
    once = {n: grads[n] for n in late}
    shards = collectives.scatter_buckets(once, leaf_collectives(config, once), bucket_size)
    shards |= {n: grads[n] for n in grads if n not in shards and n not in reduced}
    if config.placement.axis_sizes[REPLICA] > 1:
        shards = summed(shards, (REPLICA,))
    reduced |= shards
    # Sliced updates cast each slice; a cast here would store the whole gradient in float32.
    sliced = config.offload.leaves if config.offload is not None else {}
    return {
        name: reduced[name] if name in sliced else reduced[name].astype(_GRADIENT_DTYPE)
        for name in grads
    }
