"""Gathers of parameters, before the pass or at each read, and reductions of their gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zerojax.parallel import collectives
from zerojax.parallel.sums import TreeOrder, barrier_kind
from zerojax.parallel.zero.microbatch import Arrays, PassConfig
from zerojax.parallel.zero.rewrite import Rewriting
from zerojax.plan.device_mesh import (
    PASS_AXES,
    PIPELINE_AXES,
    REPLICA,
    STAGE,
    communicates_through_gloo,
)
from zerojax.plan.leaf_placement import Access, LeafPlacement


def _of_access(config: PassConfig, names: Any, *accesses: Access) -> list[str]:
    return [name for name in names if config.placement.leaves[name].access in accesses]


def leaf_collectives(
    config: PassConfig, names: Any, *, in_model: bool = False
) -> dict[str, collectives.LeafCollectives]:
    """{name: the collectives of that parameter}.

    Args:
      config: of the pass; names: of sharded parameters.
      in_model: whether they stand beside what the model computes.
    """
    fixed = config.virtual_shards is not None
    return {
        name: collectives.leaf_collectives(
            config.placement.leaves[name],
            config.placement.num_shards(config.placement.leaves[name]),
            compute_dtype=config.precision.compute_dtype,
            reduce_dtype=wire_dtype(config),
            by_permutes=communicates_through_gloo(config.mesh) and not fixed,
            tree=config.tree,
            barrier=barrier_kind(config.mesh) if fixed and in_model else None,
        )
        for name in names
    }


def wire_dtype(config: PassConfig) -> Any:
    """Dtype in which gradients travel: what was rounded to `reduce_dtype`, or in the fixed tree
    also a float32 sum of several such."""
    if config.tree is TreeOrder.LOWEST_FIRST and config.num_microbatches > 1:
        return jnp.float32
    return config.precision.reduce_dtype


def gradient_dtype(config: PassConfig) -> Any:
    """Dtype of a gradient that was scattered where it was made."""
    return config.precision.reduce_dtype if config.virtual_shards is None else jnp.float32


def prepare_parameters(config: PassConfig, params: Arrays, frozen: Arrays) -> tuple[Arrays, Arrays]:
    """Once per step: gathers what is gathered once, casts the rest.

    Returns:
      ({name: what is differentiated}, {name: whole value that is only read}).
    """
    compute, reduce = config.precision.compute_dtype, gradient_dtype(config)
    stored = {**params, **frozen}
    once = _of_access(config, stored, Access.GATHER_ONCE, Access.GATHER_ONCE_SCATTER_EARLY)
    sharded = {name: cast(stored[name], compute) for name in once}
    wholes = collectives.gather_buckets(
        sharded, leaf_collectives(config, once), config.allgather_bucket_size
    )
    inputs, constants = {}, {}
    for name, value in stored.items():
        access = config.placement.leaves[name].access
        if access is Access.WHOLE:
            inputs[name] = cast(value, compute)
        elif access is Access.GATHER_ONCE:
            inputs[name] = wholes[name]
        else:
            inputs[name] = cast(value, reduce)
            if access is Access.GATHER_ONCE_SCATTER_EARLY:
                constants[name] = wholes[name]
    for name in frozen:
        value = inputs.pop(name)
        constants.setdefault(name, value)
    return inputs, constants


def cast(value: jax.Array, dtype: Any) -> jax.Array:
    """A floating-point array in `dtype`; any other as it is."""
    return value.astype(dtype) if jnp.issubdtype(value.dtype, jnp.floating) else value


def values_to_read(config: PassConfig, inputs: Arrays, constants: Arrays, frozen: Arrays) -> Arrays:
    """What is bound into the model: a value, a shard, or (whole, shard) for the early scatter."""
    values = {name: constants[name] for name in frozen}
    for name, value in inputs.items():
        values[name] = (constants[name], value) if name in constants else value
    return {name: values[name] for name in config.placement.leaves if name in values}


def build_reads(config: PassConfig, frozen: Arrays) -> dict[str, Any]:
    """What reading does, for the parameters where it does something."""
    leaves = config.placement.leaves
    on_use = _of_access(config, leaves, Access.GATHER_ON_USE)
    early = _of_access(config, leaves, Access.GATHER_ONCE_SCATTER_EARLY)
    table = leaf_collectives(config, on_use + early, in_model=True)
    reads: dict[str, Any] = {name: collectives.GatherOnUse(name, table[name]) for name in on_use}
    tapped = [name for name in early if name not in frozen]
    return reads | {name: collectives.ScatterEarly(name, table[name]) for name in tapped}


def build_rewriting(config: PassConfig, frozen: Arrays) -> Rewriting:
    """Reads of one layer in one collective; at stage 3 gathers are done again.

    Frozen parameters have buckets of their own, since nothing of theirs is scattered.
    """
    placed = config.placement.leaves
    names = _of_access(config, placed, Access.GATHER_ON_USE, Access.GATHER_ONCE_SCATTER_EARLY)
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
        read = collectives.gather_on_use if lazy else collectives.scatter_early
        return read(leaves, *operands)

    return Rewriting(
        shapes={name: placed[name].shape for name in names},
        buckets=buckets,
        read_together=read_together,
        regather=config.regather,
        everywhere=not config.model.reads_lazily,
    )


def _slice_size(leaf: LeafPlacement) -> int:
    """Elements of the part of a parameter that one read gives."""
    return math.prod(leaf.shape) // max(leaf.num_slices, 1)


def reduce_gradients(config: PassConfig, grads: Arrays) -> Arrays:
    """Gradients summed over the axes of a pass, as stored, sharded where the placement says;
    float32, but of parameters that are updated in slices in the dtype in which they were summed.

    Under a pipeline those of parameters that every stage reads are summed over `stage`, too: each
    stage has its own part of them, most have none.
    """
    leaves = config.placement.leaves
    bucket_size, dtype = config.reduce_bucket_size, config.precision.reduce_dtype
    axes = {name: leaf.axes for name, leaf in leaves.items()}
    wholes = {n: grads[n].astype(dtype) for n in _of_access(config, grads, Access.WHOLE)}
    everywhere = [n for n in wholes if config.pipeline and leaves[n].layer_rows is None]
    reduced: Arrays = {}
    for over in (PASS_AXES, PIPELINE_AXES):
        chosen = {n: x for n, x in wholes.items() if (n in everywhere) == (STAGE in over)}
        reduced |= collectives.sum_buckets(chosen, axes, bucket_size, over)
    once = {n: grads[n] for n in _of_access(config, grads, Access.GATHER_ONCE)}
    shards = collectives.scatter_buckets(once, leaf_collectives(config, once), bucket_size)
    shards |= {n: grads[n] for n in grads if n not in shards and n not in reduced}
    if config.placement.axis_sizes[REPLICA] > 1:
        shards = {name: shard.astype(dtype) for name, shard in shards.items()}
        shards = collectives.sum_buckets(shards, axes, bucket_size, (REPLICA,))
    reduced |= shards
    # What is updated slice by slice is cast there: a loop would be given all of it in float32.
    sliced = config.offload.leaves if config.offload is not None else {}
    return {
        name: reduced[name] if name in sliced else reduced[name].astype(jnp.float32)
        for name in grads
    }
