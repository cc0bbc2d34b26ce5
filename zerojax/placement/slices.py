"""Converts between a stored parameter and its slices in device memory, host memory and files."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from zerojax.config.mesh import DEVICE, HOST, HOST_KIND, NVME
from zerojax.config.tree_types import Tree
from zerojax.placement.state_layout import SlicedLeaf

MEMORY_TIERS = (DEVICE, HOST)
"""The tiers whose slices are arrays."""

Tiers = dict[str, Any]
"""{tier: [slices of all shards, elements]} of those memory tiers that have slices."""


def to_device(x: jax.Array) -> jax.Array:
    """Copies an array to device memory, in a traced function."""
    return jax.device_put(x, jax.memory.Space.Device)


def to_host(x: jax.Array) -> jax.Array:
    """Copies an array to pinned host memory, in a traced function."""
    return jax.device_put(x, jax.memory.Space.Host)


def tier_sharding(leaf: SlicedLeaf, tier: str, mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Returns the sharding of slices, in which the slices of a shard are on the device that has the
    shard."""
    spec = P(leaf.axes) if leaf.axes else P()
    if tier == HOST:
        return NamedSharding(mesh, spec, memory_kind=HOST_KIND)
    return NamedSharding(mesh, spec)


def on_host(sharding: NamedSharding) -> NamedSharding:
    """Returns the same sharding with the memory kind of pinned host memory."""
    return NamedSharding(sharding.mesh, sharding.spec, memory_kind=HOST_KIND)


def abstract_tiers(leaf: SlicedLeaf, dtype: DTypeLike, mesh: Mesh | AbstractMesh) -> Tiers:
    """Returns {memory tier that holds slices of the array: `ShapeDtypeStruct` of these slices}."""
    return {
        tier: jax.ShapeDtypeStruct(
            (leaf.num_shards * leaf.counts[tier], leaf.slice_elements),
            dtype,
            sharding=tier_sharding(leaf, tier, mesh),
        )
        for tier in MEMORY_TIERS
        if leaf.counts[tier]
    }


def map_moments(
    leaves: Mapping[str, SlicedLeaf], function: Callable[..., Any], opt_state: Tree, *others: Tree
) -> Any:
    """Applies a function to each moment of an offloaded parameter in an optimizer's state; returns
    the new state.

    Args:
      leaves: {name: slices} of the offloaded parameters.
      function: function (slices of the parameter, number of the moment in the optimizer's order,
        the moment, the same moment of each of `others`) -> the replacement.
      opt_state: state of an optimizer of zerojax, whose dicts are its moments.
      others: states of the same structure.
    """
    number = itertools.count()

    def of_node(node: Tree, *same: Tree) -> Any:
        if not isinstance(node, dict):
            return node
        moment = next(number)
        return {
            name: function(leaves[name], moment, x, *(other[name] for other in same))
            if name in leaves
            else x
            for name, x in node.items()
        }

    return jax.tree.map(of_node, opt_state, *others, is_leaf=lambda node: isinstance(node, dict))


def without_moments(opt_state: Tree) -> Any:
    """Returns an optimizer's state with only its counters, from which an update of slices
    starts."""
    return jax.tree.map(
        lambda node: {} if isinstance(node, dict) else node,
        opt_state,
        is_leaf=lambda node: isinstance(node, dict),
    )


# --- traced, on one device's shard ----------------------------------------------------------------


def as_slices(leaf: SlicedLeaf, shard: jax.Array) -> jax.Array:
    """Reshapes a shard to [slices, elements], without a copy."""
    return shard.reshape(leaf.num_slices, leaf.slice_elements)


def cut(leaf: SlicedLeaf, shard: jax.Array) -> Tiers:
    """Splits a shard on the device into slices for device and host memory; slices in files are left
    out."""
    slices, result = as_slices(leaf, shard), {}
    for tier in MEMORY_TIERS:
        first, count = leaf.first(tier), leaf.counts[tier]
        if count:
            part = lax.slice_in_dim(slices, first, first + count)
            result[tier] = to_host(part) if tier == HOST else part
    return result


def take_slice(slices: jax.Array, number: jax.Array | int) -> jax.Array:
    """Returns slices[number]; from host memory as one copy, if `number` is linear in a loop
    counter."""
    # Without negative numbers the index stays linear, so that the copy is one of memory (DMA) and
    # not a kernel that reads host memory.
    return lax.dynamic_index_in_dim(slices, number, 0, keepdims=False, allow_negative_indices=False)


def put_slice(slices: jax.Array, new: jax.Array, number: jax.Array | int) -> jax.Array:
    """Returns `slices` with `new` at position `number`; XLA may write in place."""
    return lax.dynamic_update_index_in_dim(slices, new, number, 0, allow_negative_indices=False)


def take_slices(slices: jax.Array, first: jax.Array | int, count: int) -> jax.Array:
    """Returns slices[first : first + count], as `take_slice` does."""
    starts, sizes = (first, *[0] * (slices.ndim - 1)), (count, *slices.shape[1:])
    return lax.dynamic_slice(slices, starts, sizes, allow_negative_indices=False)


def put_slices(slices: jax.Array, new: jax.Array, first: jax.Array | int) -> jax.Array:
    """Returns `slices` with the slices `new` from position `first` on; XLA may write in place."""
    starts = (first, *[0] * (slices.ndim - 1))
    return lax.dynamic_update_slice(slices, new, starts, allow_negative_indices=False)


# --- on the host, shard by shard ------------------------------------------------------------------


def shards_of(array: jax.Array) -> dict[jax.Device, np.ndarray]:
    """Returns {device: shard} of this process as NumPy arrays, which may share the array's
    memory."""
    return {shard.device: np.asarray(shard.data) for shard in array.addressable_shards}


def array_of_shards(
    shape: tuple[int, ...], sharding: NamedSharding, shards: Mapping[jax.Device, np.ndarray]
) -> jax.Array:
    """Builds a global array; each process gives `shards` of its own devices, {device: shard}."""
    kind = sharding.memory_kind

    def place(device: jax.Device, shard: np.ndarray) -> jax.Array:
        return jax.device_put(shard, jax.sharding.SingleDeviceSharding(device, memory_kind=kind))

    placed = [place(device, shards[device]) for device in sharding.addressable_devices]
    return jax.make_array_from_single_device_arrays(shape, sharding, placed)


def join_leaf(
    leaf: SlicedLeaf,
    tiers: Tiers,
    stored: jax.ShapeDtypeStruct,
    from_files: Mapping[jax.Device, np.ndarray] | None = None,
) -> jax.Array:
    """Joins slices into the stored parameter or moment, with one copy on the CPU.

    Args:
      leaf: slices of the parameter.
      tiers: slices in device and host memory.
      stored: shape, dtype and sharding of the result.
      from_files: {device: [slices, elements]} of the slices in files; None if there are none.
    """
    parts = [shards_of(tiers[tier]) for tier in MEMORY_TIERS if leaf.counts[tier]]
    if leaf.counts[NVME]:
        assert from_files is not None, leaf.name
        parts.append(dict(from_files))
    shards = {
        device: np.concatenate([part[device] for part in parts]).reshape(leaf.shard_shape)
        for device in parts[0]
    }
    return array_of_shards(stored.shape, stored.sharding, shards)


def cut_leaf(
    leaf: SlicedLeaf, array: jax.Array, mesh: Mesh
) -> tuple[Tiers, dict[jax.Device, np.ndarray]]:
    """Splits a stored parameter or moment into slices; the inverse of `join_leaf`.

    Returns:
      (slices in device and host memory, {device: [slices, elements]} of the slices for files).
    """
    shards = {device: as_numpy_slices(leaf, x) for device, x in shards_of(array).items()}
    abstract, result = abstract_tiers(leaf, array.dtype, mesh), {}
    for tier, target in abstract.items():
        first, count = leaf.first(tier), leaf.counts[tier]
        # Copied: on the CPU `device_put` may share memory, and the step writes over its arrays.
        parts = {d: np.array(x[first : first + count], copy=True) for d, x in shards.items()}
        result[tier] = array_of_shards(target.shape, target.sharding, parts)
    return result, {device: x[leaf.first(NVME) :] for device, x in shards.items()}


def as_numpy_slices(leaf: SlicedLeaf, shard: np.ndarray) -> np.ndarray:
    """Reshapes a shard to [slices, elements], without a copy if it is contiguous."""
    return np.ascontiguousarray(shard).reshape(leaf.num_slices, leaf.slice_elements)
