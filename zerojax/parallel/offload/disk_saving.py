"""Saves and restores checkpoints of offloaded parameters slice by slice, from memory or files.

So no offloaded parameter has to fit unsharded into memory. Saving writes the slices of each shard
in the order in which the store yields them. Restoring reads those parts of a saved array that the
shards of the new mesh or storage tier need.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from zerojax.checkpoint.store.boxes import Box, Shape, parts_of_run
from zerojax.checkpoint.store.pieces import PieceWriter, ShardBlock
from zerojax.parallel.offload.disk import (
    DiskState,
    Source,
    arrays_of,
    filled_disk,
)
from zerojax.parallel.offload.disk_durable import rest_writer
from zerojax.parallel.offload.disk_places import DiskLeaf, places_of
from zerojax.parallel.offload.disk_step import build_weights
from zerojax.plan.make import Plan
from zerojax.plan.slices import Tiers, abstract_tiers, array_of_shards, map_moments, shards_of
from zerojax.plan.state import TrainState
from zerojax.plan.state_layout import MASTER, SlicedLeaf
from zerojax.tracing.trees import path_name

Read = Callable[[Box], np.ndarray]
"""Function that reads a box of a saved array; the box is (start indices, sizes)."""


class Saved(Protocol):
    """An array of a checkpoint that has not been read yet."""

    def open(self) -> Read:
        """Returns a function that reads parts of the array; deleting the function frees its
        resources.
        """


def saved_names(plan: Plan) -> dict[str, dict[str, str]]:
    """Returns {offloaded parameter: {array: name of that array in a portable state}}.

    Offloaded parameters are those with slices in host memory or in files; arrays are "master" and
    the moments.
    """
    assert plan.offload is not None
    names = jax.tree_util.tree_map_with_path(
        lambda path, _: path_name(path), plan.abstract_portable
    )
    return arrays_of(plan, names, plan.offload.off_device)


def write_pieces(
    plan: Plan, state: TrainState, folder: Path, *, with_fingerprints: bool = True
) -> None:
    """Writes this process's slices of offloaded parameters into a checkpoint.

    Offloaded parameters are those with slices in host memory or in files.

    If several processes hold a shard, the first of them writes it.

    Raises:
      StoreError, OSError: the store or the disk of `folder` reports an error.
    """
    assert plan.offload is not None
    leaves, names = plan.offload.off_device, saved_names(plan)
    held = {"params": state["masters"], "opt_state": state["opt_state"]}
    arrays = arrays_of(plan, held, leaves)
    with PieceWriter(folder, jax.process_index()) as writer:
        for piece in state["disk"].slices() if state["disk"] else ():
            for array, rows in piece.arrays.items():
                name = names[piece.place.leaf.name][array]
                for row in piece.place.own_rows:
                    block = _block(plan, piece.place, row, name, with_fingerprints)
                    writer.write(block, piece.number * piece.place.leaf.slice_elements, rows[row])
        for place in places_of(plan, leaves).values():
            for array, tiers in arrays[place.leaf.name].items():
                for row, number, values in _slices_in_memory(place, tiers):
                    name = names[place.leaf.name][array]
                    block = _block(plan, place, row, name, with_fingerprints)
                    writer.write(block, number * place.leaf.slice_elements, values)


def _slices_in_memory(place: DiskLeaf, tiers: Tiers) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yields (row, slice number, values) of a parameter's optimizer-state slices in memory that
    this process saves.
    """
    for tier, array in tiers.items():
        by_row = {place.row_of[device]: shard for device, shard in shards_of(array).items()}
        for row in place.own_rows:
            for index, values in enumerate(by_row[row]):
                yield row, place.leaf.first(tier) + index, values


def _block(plan: Plan, place: DiskLeaf, row: int, name: str, with_fingerprint: bool) -> ShardBlock:
    whole = plan.placement.leaves[place.leaf.name]
    return ShardBlock(
        name=name,
        start=_start(plan, place, row),
        shape=place.leaf.shard_shape,
        rows=whole.layer_rows,
        whole=whole.shape if with_fingerprint else None,
    )


def _start(plan: Plan, place: DiskLeaf, row: int) -> Shape:
    """Returns the start index, in the stored parameter, of the shard of a row."""
    stored = plan.abstract_stored["params"][place.leaf.name]
    device = next(device for device, own in place.row_of.items() if own == row)
    index = stored.sharding.addressable_devices_indices_map(stored.shape)[device]
    assert index is not None
    return tuple(part.start or 0 for part in index)


def restore_pieces(
    plan: Plan,
    portable: TrainState,
    state: TrainState,
    *,
    data_state: dict[str, Any] | None = None,
) -> TrainState:
    """Restores offloaded parameters from a checkpoint, slice by slice.

    Args:
      plan: a plan with slices on the host or in files.
      portable: state read from the checkpoint, with a `Saved` for each array of an offloaded
        parameter.
      state: state with all other values; its values of offloaded parameters are ignored.
      data_state: position of the data, for a durable store (files from which a killed run resumes).

    Returns:
      The complete state.

    Raises:
      StoreError, OSError: the store or the checkpoint reports an error.
    """
    assert isinstance(plan.mesh, Mesh)
    assert plan.offload is not None
    mesh, saved = plan.mesh, arrays_of(plan, portable, plan.offload.off_device)
    places = places_of(plan, plan.offload.off_device)
    tiers: dict[str, dict[str, Tiers]] = {}

    def source_of(place: DiskLeaf) -> Source:
        """Returns the source of a parameter's slices; reads its optimizer-state slices in memory
        into `tiers`.

        Doing both here opens each array of the checkpoint only once.
        """
        source = _read_slices(plan, place, saved[place.leaf.name])
        tiers[place.leaf.name] = {a: _tiers(place, a, source, mesh) for a in place.dtypes}
        return source

    def before_commit(disk: DiskState) -> None:
        rest_writer(plan, _with_slices(plan, state, tiers), data_state)(disk)

    for place in places.values():
        if not place.num_buckets:
            source_of(place)
    disk = filled_disk(plan, source_of, before_commit) if plan.offload.on_disk else None
    try:
        result = _with_slices(plan, state, tiers)
        if plan.precision.has_masters:
            masters = {name: result["masters"][name] for name in places}
            result["params"] = state["params"] | build_weights(plan, places, disk, masters)
        result["disk"] = {} if disk is None else disk
        return result
    except BaseException:
        if disk is not None:
            disk.close()
        raise


def _with_slices(
    plan: Plan, state: TrainState, tiers: Mapping[str, Mapping[str, Tiers]]
) -> TrainState:
    """Returns `state` with master weights and moments of offloaded parameters replaced by
    `tiers`.
    """
    result = state.copy()
    if plan.precision.has_masters:
        masters = {name: arrays[MASTER] for name, arrays in tiers.items()}
        result["masters"] = state["masters"] | masters
    result["opt_state"] = put_moments(plan, state["opt_state"], tiers)
    return result


def put_moments(plan: Plan, opt_state: Any, tiers: Mapping[str, Mapping[str, Tiers]]) -> Any:
    """Returns an optimizer state with its moments replaced by the moments in `tiers`."""
    assert plan.offload is not None
    moments = plan.offload.moments

    def put(leaf: SlicedLeaf, number: int, moment: Any) -> Any:
        return tiers[leaf.name][moments[number]] if leaf.name in tiers else moment

    return map_moments(plan.offload.leaves, put, opt_state)


def _tiers(place: DiskLeaf, array: str, source: Source, mesh: Mesh) -> Tiers:
    """Reads the slices of an array that belong in memory (device or host) from `source`."""
    result = {}
    for tier, target in abstract_tiers(place.leaf, place.dtypes[array], mesh).items():
        first, count = place.leaf.first(tier), place.leaf.counts[tier]
        rows = [source(array, number) for number in range(first, first + count)]
        shards = {d: np.stack([row[d] for row in rows if row is not None]) for d in place.row_of}
        assert isinstance(target.sharding, NamedSharding)
        result[tier] = array_of_shards(target.shape, target.sharding, shards)
    return result


def _read_slices(plan: Plan, place: DiskLeaf, saved: Mapping[str, Saved]) -> Source:
    """Returns a function that reads a parameter's slices from a checkpoint, one at a time."""
    reader = functools.cache(lambda array: saved[array].open())  # opened on first use, once
    whole = plan.placement.leaves[place.leaf.name]
    elements = place.leaf.slice_elements
    starts = [_start(plan, place, row) for row in range(len(place.shards))]

    def source(array: str, number: int) -> Mapping[jax.Device, np.ndarray]:
        rows = [
            _read_run(
                reader(array),
                (start, place.leaf.shard_shape),
                (number * elements, elements),
                (whole.shape, whole.layer_rows),
                place.dtypes[array],
            )
            for start in starts
        ]
        return {device: rows[row] for device, row in place.row_of.items()}

    return source


def _read_run(
    read: Read,
    shard: Box,
    run: tuple[int, int],
    whole: tuple[Shape, tuple[int, ...] | None],
    dtype: np.dtype,
) -> np.ndarray:
    """Reads `run` = (first, count), a range of elements of a shard of the stored parameter; padding
    is 0.

    Args:
      whole: (true shape of the parameter, for each stored row the number of the true row that it
        holds).
    """
    (_, count), (true_shape, rows) = run, whole
    result = np.zeros(count, dtype)
    limits = tuple(0 for _ in true_shape), true_shape
    for before, sizes, inside, box in parts_of_run(shard, run, rows, limits):
        part = result[before : before + math.prod(sizes)].reshape(sizes)
        part[inside] = read(box)
    return result
