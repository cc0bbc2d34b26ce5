"""Defines the layout of slices in a process's files: which bucket holds which rows.

A bucket holds one slice of one parameter: for each of its arrays ("master", then moments) the rows
[shards of this process, elements]. This module computes with shards and bytes; it never opens a
file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from zerojax.config.late_dataclasses import dataclass
from zerojax.config.mesh import DEVICE, NVME
from zerojax.optim import EMA
from zerojax.placement.decisions import Decisions
from zerojax.placement.slices import tier_sharding
from zerojax.placement.state_layout import MASTER, SlicedLeaf

ALIGNMENT = 64  # bytes: a CPU device uses memory with this alignment without a copy


@dataclass(frozen=True, eq=False)
class DiskLeaf:
    """Position of one parameter's slices in a process's files: the numbers and layout of its
    buckets.

    Attributes:
      leaf: division of the parameter into slices.
      first_bucket: number of the parameter's first bucket.
      dtypes: {array: dtype}, in the order of the arrays in a bucket.
      shards: numbers of the shards that this process holds; a bucket has one row for each.
      row_of: {device of this process: row of its shard}; copies of a shard share one row.
      own_rows: rows that this process writes into a checkpoint: shards that no process with a lower
        number holds.
    """

    leaf: SlicedLeaf
    first_bucket: int
    dtypes: Mapping[str, np.dtype]
    shards: tuple[int, ...]
    row_of: Mapping[jax.Device, int]
    own_rows: tuple[int, ...]

    @property
    def num_buckets(self) -> int:
        """Number of the parameter's optimizer-state slices in files, each of which is one
        bucket.
        """
        return self.leaf.counts[NVME]

    @property
    def bucket_bytes(self) -> int:
        """Bytes of one bucket (one slice of the parameter's optimizer state) in a file."""
        return sum(self._array_bytes(dtype) for dtype in self.dtypes.values())

    def views(self, bucket: np.ndarray) -> dict[str, np.ndarray]:
        """Returns {array: [rows, elements]} of one slice: views of the bytes of its bucket, not
        copies.
        """
        shape, start, result = (len(self.shards), self.leaf.slice_elements), 0, {}
        for name, dtype in self.dtypes.items():
            size = math.prod(shape) * dtype.itemsize
            result[name] = bucket[start : start + size].view(dtype).reshape(shape)
            start += self._array_bytes(dtype)
        return result

    def _array_bytes(self, dtype: np.dtype) -> int:
        size = len(self.shards) * self.leaf.slice_elements * dtype.itemsize
        return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, eq=False)
class DiskSlice:
    """One slice read from files, which the caller may use until the iteration continues.

    Attributes:
      place: position of the parameter's buckets.
      number: number of the slice in its shard, counted over all tiers.
      arrays: {array: values, [rows, elements]} in the store's own memory.
      write: function that starts to write `arrays`; do not change them afterwards.
    """

    place: DiskLeaf
    number: int
    arrays: Mapping[str, np.ndarray]
    write: Callable[[], None]


def disk_leaves(plan: Decisions) -> dict[str, DiskLeaf]:
    """Returns {parameter with slices in files: position of its buckets} of this process, in
    order.
    """
    assert plan.offload is not None
    return places_of(plan, plan.offload.on_disk)


def places_of(plan: Decisions, leaves: Sequence[SlicedLeaf]) -> dict[str, DiskLeaf]:
    """Returns {parameter: position of its buckets}, also for parameters without optimizer-state
    slices in files.
    """
    layout, mesh = plan.offload, plan.mesh
    assert layout is not None
    assert isinstance(mesh, Mesh)
    master = {MASTER: np.dtype(plan.precision.param_dtype)}
    known = {**master, EMA: np.dtype(np.float32)}
    moment = np.dtype(plan.precision.moments_dtype)
    dtypes = {name: known.get(name, moment) for name in layout.arrays}
    result, buckets = {}, 0
    for leaf in leaves:
        shard_of = _shards(leaf, mesh)
        here = jax.process_index()
        own = {device: shard for device, shard in shard_of.items() if device.process_index == here}
        shards = tuple(sorted(set(own.values())))
        rows = {device: shards.index(shard) for device, shard in own.items()}
        owners = owners_of(shard_of)
        own_rows = tuple(row for row, shard in enumerate(shards) if owners[shard] == here)
        result[leaf.name] = DiskLeaf(leaf, buckets, dtypes, shards, rows, own_rows)
        buckets += leaf.counts[NVME]
    return result


def owners_of(shard_of: Mapping[Any, int]) -> dict[int, int]:
    """Returns {shard number: lowest process that holds it}, from {device: shard number}."""
    owners: dict[int, int] = {}
    for device, shard in shard_of.items():
        owners[shard] = min(owners.get(shard, device.process_index), device.process_index)
    return owners


def _shards(leaf: SlicedLeaf, mesh: Mesh) -> dict[jax.Device, int]:
    """Returns {device: number of the shard that it holds}."""
    sharding = tier_sharding(leaf, DEVICE, mesh)
    # One row for each shard, so the start of a device's part is the number of its shard.
    indices = sharding.devices_indices_map((leaf.num_shards, 1))
    return {device: index[0].start or 0 for device, index in indices.items()}
