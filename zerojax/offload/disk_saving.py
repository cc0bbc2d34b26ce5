"""Parameters that have left the device, saved and restored slice by slice, whatever their tiers.

Knows layouts, shards and files of pieces; never which checkpoint they belong to.

Such a parameter is never whole in memory. Saved are the slices of its shards as they come from the
store; restored is any part that a shard of another mesh or tier needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from zerojax.offload.disk import DiskLeaf, DiskState, Source, create_disk, places_of
from zerojax.offload.disk_fill import arrays_of
from zerojax.offload.disk_weights import build_weights
from zerojax.offload.slices import (
    Tiers,
    abstract_tiers,
    array_of_shards,
    map_moments,
    shards_of,
)
from zerojax.offload_layout import MASTER, SlicedLeaf
from zerojax.planned import Planned
from zerojax.state import TrainState
from zerojax.store.boxes import Box, Shape, boxes_of_run, overlap, rows_of_array, slices_of
from zerojax.store.pieces import Block, PieceWriter
from zerojax.trees import path_name

Read = Callable[[Box], np.ndarray]
"""The part of a saved array in a box: where it begins, and its sizes."""


class Saved(Protocol):
    """An array of a checkpoint that was not read yet."""

    def open(self) -> Read:
        """What reads parts of it; dropping it frees what it holds."""


def saved_names(plan: Planned) -> dict[str, dict[str, str]]:
    """{parameter with slices off the device: {array: its name in a canonical state}}."""
    assert plan.offload is not None
    names = jax.tree_util.tree_map_with_path(
        lambda path, _: path_name(path), plan.abstract_canonical
    )
    return arrays_of(plan, names, plan.offload.off_device)


def write_pieces(plan: Planned, state: TrainState, folder: Path) -> None:
    """Writes this process's slices of the parameters with slices on the host or in files.

    Raises:
      StoreError, OSError: what the store or the disk of `folder` says.
    """
    assert plan.offload is not None
    leaves, names = plan.offload.off_device, saved_names(plan)
    held = {"params": state["masters"], "opt_state": state["opt_state"]}
    arrays = arrays_of(plan, held, leaves)
    with PieceWriter(folder, jax.process_index()) as writer:
        for piece in state["disk"].slices() if state["disk"] else ():
            for array, rows in piece.arrays.items():
                name = names[piece.place.leaf.name][array]
                for row, values in enumerate(rows):
                    block = _block(plan, piece.place, row, name)
                    writer.write(block, piece.number * piece.place.leaf.slice_elements, values)
        for place in places_of(plan, leaves).values():
            for array, tiers in arrays[place.leaf.name].items():
                for row, number, values in _slices_in_memory(place, tiers):
                    block = _block(plan, place, row, names[place.leaf.name][array])
                    writer.write(block, number * place.leaf.slice_elements, values)


def _slices_in_memory(place: DiskLeaf, tiers: Tiers) -> Iterator[tuple[int, int, np.ndarray]]:
    """(row, number, values) of the slices of a parameter that are not in files."""
    for tier, array in tiers.items():
        by_row = {place.row_of[device]: shard for device, shard in shards_of(array).items()}
        for row, shard in by_row.items():
            for index, values in enumerate(shard):
                yield row, place.leaf.first(tier) + index, values


def _block(plan: Planned, place: DiskLeaf, row: int, name: str) -> Block:
    return Block(
        name=name,
        start=_start(plan, place, row),
        shape=place.leaf.shard_shape,
        rows=plan.placement.leaves[place.leaf.name].layer_rows,
    )


def _start(plan: Planned, place: DiskLeaf, row: int) -> Shape:
    """Where the shard of a row begins in the stored parameter."""
    stored = plan.abstract_stored["params"][place.leaf.name]
    device = next(device for device, own in place.row_of.items() if own == row)
    index = stored.sharding.addressable_devices_indices_map(stored.shape)[device]
    assert index is not None
    return tuple(part.start or 0 for part in index)


def restore_pieces(plan: Planned, canonical: TrainState, state: TrainState) -> TrainState:
    """A state whose parameters off the device come from a checkpoint, slice by slice.

    Args:
      plan: with slices on the host or in files.
      canonical: has a `Saved` for each array of such a parameter.
      state: everything else; has anything in these places.

    Raises:
      StoreError, OSError: what the store or the checkpoint says.
    """
    assert isinstance(plan.mesh, Mesh)
    assert plan.offload is not None
    saved = arrays_of(plan, canonical, plan.offload.off_device)
    places = places_of(plan, plan.offload.off_device)
    tiers: dict[str, dict[str, Tiers]] = {}
    for place in places.values():
        name = place.leaf.name
        source = _read_slices(plan, place, saved[name])
        tiers[name] = {array: _tiers(place, array, source, plan.mesh) for array in place.dtypes}
    disk = create_disk(plan) if plan.offload.on_disk else None
    try:
        if disk is not None:
            disk.fill(lambda place: _read_slices(plan, place, saved[place.leaf.name]))
        return assemble(plan, state, places, disk, tiers)
    except BaseException:
        if disk is not None:
            disk.close()
        raise


def assemble(
    plan: Planned,
    state: TrainState,
    places: Mapping[str, DiskLeaf],
    disk: DiskState | None,
    tiers: Mapping[str, Mapping[str, Tiers]],
) -> TrainState:
    """A state with the slices of these parameters, in memory and in files, and their weights."""
    result = state.copy()
    if plan.precision.has_masters:
        masters = {name: arrays[MASTER] for name, arrays in tiers.items()}
        result["masters"] = state["masters"] | masters
        result["params"] = state["params"] | build_weights(plan, places, disk, masters)
    result["opt_state"] = put_moments(plan, state["opt_state"], tiers)
    result["disk"] = {} if disk is None else disk
    return result


def put_moments(plan: Planned, opt_state: Any, tiers: Mapping[str, Mapping[str, Tiers]]) -> Any:
    """An optimizer's state with these moments in the places of theirs."""
    assert plan.offload is not None
    moments = [name for name in plan.offload.arrays if name != MASTER]

    def put(leaf: SlicedLeaf, number: int, moment: Any) -> Any:
        return tiers[leaf.name][moments[number]] if leaf.name in tiers else moment

    return map_moments(plan.offload.leaves, put, opt_state)


def _tiers(place: DiskLeaf, array: str, source: Source, mesh: Mesh) -> Tiers:
    """The slices of an array in memory."""
    result = {}
    for tier, target in abstract_tiers(place.leaf, place.dtypes[array], mesh).items():
        first, count = place.leaf.first(tier), place.leaf.counts[tier]
        rows = [source(array, number) for number in range(first, first + count)]
        shards = {d: np.stack([row[d] for row in rows if row is not None]) for d in place.row_of}
        assert isinstance(target.sharding, NamedSharding)
        result[tier] = array_of_shards(target.shape, target.sharding, shards)
    return result


def _read_slices(plan: Planned, place: DiskLeaf, saved: Mapping[str, Saved]) -> Source:
    """What a checkpoint has of each slice, one in memory at a time where it can be read so."""
    readers = {array: one.open() for array, one in saved.items()}
    whole = plan.placement.leaves[place.leaf.name]
    elements = place.leaf.slice_elements
    starts = [_start(plan, place, row) for row in range(len(place.shards))]

    def source(array: str, number: int) -> Mapping[jax.Device, np.ndarray]:
        rows = [
            _read_run(
                readers[array],
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
    """A run of elements (first, count) of a shard of the stored parameter; padding is zeros.

    Args:
      whole: the true shape, and which row of it each stored row is.
    """
    (start, shape), (first, count), (true_shape, rows) = shard, run, whole
    result, at = np.zeros(count, dtype), 0
    limits = tuple(0 for _ in true_shape), true_shape
    for inside, sizes in boxes_of_run(shape, first, count):
        part = result[at : at + math.prod(sizes)].reshape(sizes)
        at += part.size
        begin = tuple(a + b for a, b in zip(inside, start, strict=True))
        for stored, array in rows_of_array((begin, sizes), rows):
            common = overlap(array, limits)
            if common is not None:
                shifted = (stored[0][0] + common[0][0] - array[0][0], *common[0][1:]), common[1]
                part[slices_of(shifted, begin)] = read(common)
    return result
