"""Describes the layout of a training state: the slices of each offloaded parameter, and the layers
of each pipeline stage.

A device's shard of a parameter is one long vector that is cut into `num_slices` slices of
`slice_elements` elements: parts of a layer, or several whole layers. Master weights and moments are
stored as [slices, elements] on each device: the first slices in device memory, the next in pinned
host memory, the rest in files.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import jax

from zerojax.checkpoint.store.sweep import FEWEST_BUFFERS
from zerojax.config.late_dataclasses import dataclass
from zerojax.config.loader import user_path
from zerojax.config.mesh import DEVICE, HOST, NVME, OffloadConfig
from zerojax.schedules import ExecutorTable, Schedule

MASTER = "master"
"""Name of the float32 master weights in `OffloadLayout.arrays`."""


@dataclass(frozen=True, kw_only=True)
class SlicedLeaf:
    """Slices of one offloaded parameter.

    Attributes:
      name: name of the parameter.
      shard_shape: shape of the stored parameter on one device.
      axes: mesh axes that shard the parameter, outermost first.
      num_shards: number of shards, which is the product of the sizes of these axes.
      slice_elements: number of elements of one slice.
      counts: {memory: number of slices of each shard in it}, in the order device, host, nvme.
    """

    name: str
    shard_shape: tuple[int, ...]
    axes: tuple[str, ...]
    num_shards: int
    slice_elements: int
    counts: Mapping[str, int]

    @property
    def num_slices(self) -> int:
        """Number of slices of one shard."""
        return sum(self.counts.values())

    def first(self, tier: str) -> int:
        """Returns the index, within a shard, of the first slice in memory `tier`."""
        before = {DEVICE: (), HOST: (DEVICE,), NVME: (DEVICE, HOST)}[tier]
        return sum(self.counts[nearer] for nearer in before)


@dataclass(frozen=True, kw_only=True)
class WeightTiles:
    """Tiles in which the weight of a layer is gathered for the only product that reads it.

    Attributes:
      dim: dimension of the layer's weight along which tiles are cut.
      count: number of tiles, at least 2.
      groups: number of devices among which `dim` is sharded; 1 if another dimension is sharded.
      again: number of times that the backward pass gathers the tiles again to recompute the
        product.
    """

    dim: int
    count: int
    groups: int
    again: int = 0


@dataclass(frozen=True, kw_only=True)
class LayerTiles:
    """Layer weights that are larger than `offload.tile_bytes`.

    Attributes:
      cut: {name: tiles} of the weights that are gathered tile by tile.
      whole: (name, reason) of the weights that are gathered in one piece nevertheless.
    """

    cut: Mapping[str, WeightTiles] = dataclasses.field(default_factory=dict)
    whole: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class OffloadLayout:
    """The memory (device, host or files) of each part of a plan's state.

    Attributes:
      leaves: {name: slices} of the parameters whose master weights and moments are offloaded, in
        the order of the state.
      arrays: names of the state arrays of a slice, in the order in which files store them: "master"
        (if there are master weights), then the optimizer's moments, of which "ema" is an average of
        the weights.
      streamed: names of the parameters whose weights are in host memory and are read layer by
        layer.
      paged: names of the parameters whose weights are in files and are read layer by layer.
      delayed: names of the parameters of layers that a pass updates with the gradients of the step
        before; their weights are on the device.
      in_forward: whether that pass is the forward pass, which uses the new weights, and not the
        backward pass.
      activations: memory in which the input of each layer is stored until the backward pass.
      update_in_backward: whether layers are updated as soon as their gradients are computed.
      kept: (name, reason) of every parameter that stays on the device while others are offloaded.
    """

    leaves: Mapping[str, SlicedLeaf]
    arrays: tuple[str, ...]
    streamed: frozenset[str]
    paged: frozenset[str]
    delayed: frozenset[str] = frozenset()
    in_forward: bool = False
    activations: str
    update_in_backward: bool
    kept: tuple[tuple[str, str], ...]

    @property
    def moments(self) -> tuple[str, ...]:
        """Names in `arrays` of the optimizer's moments."""
        return tuple(name for name in self.arrays if name != MASTER)

    @property
    def by_layer(self) -> frozenset[str]:
        """Names of the parameters whose weights are read layer by layer."""
        return self.streamed | self.paged | self.delayed

    @property
    def updated_in_pass(self) -> frozenset[str]:
        """Names of the parameters of layers that the program of a pass updates."""
        return self.delayed | (self.streamed if self.update_in_backward else frozenset())

    def updated_beside(self, name: str) -> int:
        """Returns the number of slices of a parameter outside of the layers that the backward pass
        of the layers updates."""
        count = self.beside_a_layer(name)
        return count * self.leaves[min(self.delayed)].shard_shape[0] if count else 0

    def beside_a_layer(self, name: str) -> int:
        """Returns the number of slices of a parameter outside of the layers that are updated beside
        each layer in the backward pass; 0 unless the update is delayed until then."""
        if not self.delayed or self.in_forward or name in self.delayed:
            return 0
        return self.leaves[name].counts[HOST] // self.leaves[min(self.delayed)].shard_shape[0]

    @property
    def paged_order(self) -> tuple[str, ...]:
        """Names in `paged`, in the order of the state."""
        return tuple(name for name in self.leaves if name in self.paged)

    @property
    def slices_at_once(self) -> int:
        """Number of slices in files that are read, updated and written together: those of a layer
        if layers in files are updated in the backward pass, else 1."""
        if not (self.update_in_backward and self.paged):
            return 1
        leaves = [self.leaves[name] for name in self.paged]
        return sum(leaf.num_slices // leaf.shard_shape[0] for leaf in leaves)

    @property
    def num_buffers(self) -> int:
        """Number of buffers for slices of the optimizer state in files: one set of slices is read,
        one is updated and one is written."""
        return FEWEST_BUFFERS * self.slices_at_once

    @property
    def off_device(self) -> tuple[SlicedLeaf, ...]:
        """Parameters that have slices in host memory or in files."""
        leaves = self.leaves.values()
        return tuple(leaf for leaf in leaves if leaf.counts[HOST] or leaf.counts[NVME])

    @property
    def on_disk(self) -> tuple[SlicedLeaf, ...]:
        """Parameters that have slices in files."""
        return tuple(leaf for leaf in self.leaves.values() if leaf.counts[NVME])


def store_folder(config: OffloadConfig) -> Path:
    """Returns the folder for the files of offloaded state of this process.

    Raises:
      ValueError: `offload.folder` is not set.
    """
    if config.folder is None:
        raise ValueError(
            "offload.opt_state uses nvme, but offload.folder is not set, and the run has no "
            "folder for the files; set offload.folder to a folder on the disk to use"
        )
    return user_path(config.folder).absolute() / f"process_{jax.process_index()}"


@dataclass(frozen=True, kw_only=True, eq=False)
class PipelineLayout:
    """Layout of a pipeline, before anything runs.

    A virtual stage is one of the consecutive parts into which the model is divided. A stage may
    have several virtual stages, which are called its chunks.

    Attributes:
      table: the schedule in the form for the executor.
      layers: number of layers of each virtual stage.
      stacked: names of the parameters that the loop over layers slices; a stage stores only its own
        rows of them. All other parameters are on every stage.
      activations: arrays sent from one stage to the next for one microbatch of one data shard, as
        `ShapeDtypeStruct`s.
      embed_flops, layer_flops, head_flops: FLOPs of matrix products in the forward pass of one
        microbatch of one data shard, for the embedding, a layer and the head.
      stash_bytes: bytes that one chunk stores for one microbatch of one data shard between forward
        and backward.
      skips_padding: whether a stage with fewer layers than another waits instead of computing rows
        of padding.
    """

    table: ExecutorTable
    layers: tuple[int, ...]
    stacked: frozenset[str]
    activations: tuple[Any, ...]
    embed_flops: float
    layer_flops: float
    head_flops: float
    stash_bytes: int
    skips_padding: bool = False

    @property
    def schedule(self) -> Schedule:
        return self.table.schedule

    @property
    def num_layers(self) -> int:
        return sum(self.layers)

    @property
    def chunk_rows(self) -> int:
        """Number of rows of a stacked parameter in each chunk: the number of layers of the longest
        virtual stage."""
        return max(self.layers)

    @property
    def stage_layers(self) -> list[range]:
        """Numbers of the layers of each virtual stage."""
        ends = list(itertools.accumulate(self.layers))
        return [range(end - count, end) for end, count in zip(ends, self.layers, strict=True)]

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """Layer in each row of a stored stack, -1 for a row of padding.

        Rows are ordered by stage, then chunk, then layer, so that an even split over the stages
        gives each stage its own layers.
        """
        return layer_rows(self.schedule, self.layers)


def layer_rows(schedule: Schedule, layers: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the layer in each row of a stored stack, -1 for a row of padding.

    >>> from zerojax.schedules import make_schedule
    >>> layer_rows(make_schedule("1f1b", stages=2, microbatches=2), (2, 1))
    (0, 1, 2, -1)
    """
    starts = [0, *itertools.accumulate(layers)]
    longest = max(layers)
    rows = [-1] * (schedule.num_virtual_stages * longest)
    for virtual, count in enumerate(layers):
        stage, chunk = schedule.locate(virtual)
        place = (stage * schedule.num_chunks + chunk) * longest
        rows[place : place + count] = range(starts[virtual], starts[virtual] + count)
    return tuple(rows)
