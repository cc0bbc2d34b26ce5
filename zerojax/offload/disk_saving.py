"""Saves and restores checkpoints of offloaded parameters slice by slice, from memory or files.

So no offloaded parameter has to fit unsharded into memory. Saving writes the slices of each shard
in the order in which the store yields them. Restoring reads those parts of a saved array that the
shards of the new mesh or storage tier need.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from zerojax.checkpoint.store.boxes import Box, Shape, parts_of_run
from zerojax.checkpoint.store.pieces import PieceWriter, ShardBlock
from zerojax.config.late_dataclasses import dataclass
from zerojax.config.tree_types import Tree
from zerojax.offload.disk import (
    DiskState,
    Source,
    arrays_of,
    filled_disk,
)
from zerojax.offload.disk_durable import rest_writer
from zerojax.offload.disk_places import DiskLeaf, places_of
from zerojax.offload.disk_step import build_weights
from zerojax.placement.decisions import Decisions
from zerojax.placement.layer_stacks import StackRows, group_rows
from zerojax.placement.slices import Tiers, abstract_tiers, array_of_shards, map_moments, shards_of
from zerojax.placement.state import TrainState
from zerojax.placement.state_layout import MASTER, SlicedLeaf
from zerojax.tracing.trees import path_name

Read = Callable[[Box], np.ndarray]
"""Function that reads a box of a saved array; the box is (start indices, sizes)."""


class Saved(Protocol):
    """An array of a checkpoint that has not been read yet."""

    def open(self) -> Read:
        """Returns a function that reads parts of the array; deleting the function frees its
        resources.
        """


def saved_names(plan: Decisions) -> dict[str, dict[str, tuple[str, ...]]]:
    """Returns {offloaded parameter: {array: names of that array in a portable state}}.

    Offloaded parameters are those with slices in host memory or in files; arrays are "master" and
    the moments. An array has one name, or one for each layer of a stack that the user's model has
    as a list.
    """
    assert plan.offload is not None
    names = jax.tree_util.tree_map_with_path(
        lambda path, _: path_name(path), plan.abstract_portable
    )
    found = arrays_of(plan, group_rows(names, plan.stacks), plan.offload.off_device)
    return {name: {a: _rows(x) for a, x in arrays.items()} for name, arrays in found.items()}


def _rows(leaf: Any) -> tuple[Any, ...]:
    return leaf.values if isinstance(leaf, StackRows) else (leaf,)


def write_pieces(
    plan: Decisions, state: TrainState, folder: Path, *, with_fingerprints: bool = True
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
                own = names[piece.place.leaf.name][array]
                for row in piece.place.own_rows:
                    first = piece.number * piece.place.leaf.slice_elements
                    for part in _parts(plan, piece.place, row, (first, rows[row].size)):
                        part.write(writer, own, rows[row], with_fingerprints)
        for place in places_of(plan, leaves).values():
            for array, tiers in arrays[place.leaf.name].items():
                for row, number, values in _slices_in_memory(place, tiers):
                    first = number * place.leaf.slice_elements
                    for part in _parts(plan, place, row, (first, values.size)):
                        part.write(writer, names[place.leaf.name][array], values, with_fingerprints)


def _slices_in_memory(place: DiskLeaf, tiers: Tiers) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yields (row, slice number, values) of a parameter's optimizer-state slices in memory that
    this process saves.
    """
    for tier, array in tiers.items():
        by_row = {place.row_of[device]: shard for device, shard in shards_of(array).items()}
        for row in place.own_rows:
            for index, values in enumerate(by_row[row]):
                yield row, place.leaf.first(tier) + index, values


@dataclass(frozen=True)
class _Part:
    """The part of a run of a shard's elements that belongs to one array of a checkpoint.

    Attributes:
      number: of the array, among the names of the parameter in `saved_names`.
      inside: the elements of the run.
      first: index of the first of them in `shard`.
      shard: (start, shape) of the device's part of the stored array.
      whole: shape of the array, and the row of it that each stored row holds, as `ShardBlock`.
    """

    number: int
    inside: slice
    first: int
    shard: Box
    whole: tuple[Shape, tuple[int, ...] | None]

    def write(
        self, writer: PieceWriter, names: Sequence[str], values: np.ndarray, with_sums: bool
    ) -> None:
        """Writes this part of a run to a checkpoint.

        Args:
          writer: writer of the checkpoint's pieces.
          names: names in the checkpoint of all layers of the array (see `saved_names`).
          values: all elements of the run.
          with_sums: whether to store the true shape of the array with the block.
        """
        block = ShardBlock(
            name=names[self.number],
            start=self.shard[0],
            shape=self.shard[1],
            rows=self.whole[1],
            whole=self.whole[0] if with_sums else None,
        )
        writer.write(block, self.first, values[self.inside])


def _parts(plan: Decisions, place: DiskLeaf, row: int, run: tuple[int, int]) -> Iterator[_Part]:
    """Yields the parts of a run (first, count) of the shard of a row; of a list one per layer.

    Padding layers are left out.
    """
    leaf, (first, count) = plan.placement.leaves[place.leaf.name], run
    start, shape = _start(plan, place, row), place.leaf.shard_shape
    if place.leaf.name not in plan.stacks:
        yield _Part(0, slice(0, count), first, (start, shape), (leaf.shape, leaf.layer_rows))
        return
    size, done = math.prod(shape[1:]), 0
    # A run may begin and end inside a layer.
    while done < count:
        layer, at = divmod(first + done, size)
        length, stored = min(size - at, count - done), start[0] + layer
        number = stored if leaf.layer_rows is None else leaf.layer_rows[stored]
        if 0 <= number < leaf.shape[0]:
            shard, whole = (start[1:], shape[1:]), (leaf.shape[1:], None)
            yield _Part(number, slice(done, done + length), at, shard, whole)
        done += length


def _start(plan: Decisions, place: DiskLeaf, row: int) -> Shape:
    """Returns the start index, in the stored parameter, of the shard of a row."""
    stored = plan.abstract_stored["params"][place.leaf.name]
    # Devices with copies of a shard hold the same part.
    device = next(device for device, own in place.row_of.items() if own == row)
    index = stored.sharding.addressable_devices_indices_map(stored.shape)[device]
    assert index is not None
    return tuple(part.start or 0 for part in index)


def restore_pieces(
    plan: Decisions,
    portable: TrainState,
    state: TrainState,
    *,
    data_state: dict[str, Any] | None = None,
) -> TrainState:
    """Restores offloaded parameters from a checkpoint, slice by slice.

    Args:
      plan: a plan with slices on the host or in files.
      portable: state read from the checkpoint, with a `Saved` for each array of an offloaded
        parameter, in `StackRows` for a stack.
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

    # `filled_disk` asks only for parameters with slices in files.
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
    plan: Decisions, state: TrainState, tiers: Mapping[str, Mapping[str, Tiers]]
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


def put_moments(plan: Decisions, opt_state: Tree, tiers: Mapping[str, Mapping[str, Tiers]]) -> Any:
    """Returns an optimizer state with its moments replaced by the moments in `tiers`."""
    assert plan.offload is not None
    moments = plan.offload.moments

    def put(leaf: SlicedLeaf, number: int, moment: Any) -> Any:
        return tiers[leaf.name][moments[number]] if leaf.name in tiers else moment

    return map_moments(plan.offload.leaves, put, opt_state)


def _tiers(place: DiskLeaf, array: str, source: Source, mesh: Mesh) -> Tiers:
    """Reads an array's slices for device and host memory from `source`: {memory: array}."""
    result = {}
    for tier, target in abstract_tiers(place.leaf, place.dtypes[array], mesh).items():
        first, count = place.leaf.first(tier), place.leaf.counts[tier]
        rows = [source(array, number) for number in range(first, first + count)]
        shards = {d: np.stack([row[d] for row in rows if row is not None]) for d in place.row_of}
        assert isinstance(target.sharding, NamedSharding)
        result[tier] = array_of_shards(target.shape, target.sharding, shards)
    return result


def _read_slices(
    plan: Decisions, place: DiskLeaf, saved: Mapping[str, Saved | StackRows]
) -> Source:
    """Returns a function that reads a parameter's slices from a checkpoint, one at a time."""
    elements = place.leaf.slice_elements
    # Each array is opened on first use, once: slices are read in order. Of a list only the layers
    # of one slice are open.
    layers = 1 + elements // max(math.prod(place.leaf.shard_shape[1:]), 1)

    @functools.lru_cache(maxsize=len(saved) * layers)
    def reader(array: str, number: int) -> Read:
        return _rows(saved[array])[number].open()

    def read(array: str, number: int, row: int) -> np.ndarray:
        # Padding is not in the checkpoint and stays 0.
        result = np.zeros(elements, place.dtypes[array])
        for part in _parts(plan, place, row, (number * elements, elements)):
            _read_part(reader(array, part.number), part, result[part.inside])
        return result

    def source(array: str, number: int) -> Mapping[jax.Device, np.ndarray]:
        rows = [read(array, number, row) for row in range(len(place.shards))]
        return {device: rows[row] for device, row in place.row_of.items()}

    return source


def _read_part(read: Read, part: _Part, result: np.ndarray) -> None:
    """Reads the elements of a part into `result`; padding is not changed."""
    true_shape, rows = part.whole
    limits = tuple(0 for _ in true_shape), true_shape
    run = part.first, len(result)
    for before, sizes, inside, box in parts_of_run(part.shard, run, rows, limits):
        target = result[before : before + math.prod(sizes)].reshape(sizes)
        target[inside] = read(box)
