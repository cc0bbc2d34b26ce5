"""Lays out a training state: slices of each parameter in tiers, layers of each pipeline stage.

A device's shard of a parameter is viewed as one long vector and cut into `num_slices` slices of
`slice_elements`: parts of a layer, or several whole layers. Masters and moments are stored as
[slices, elements] on each device: the first `device` slices in device memory, the next `host` in
pinned host memory, the rest in files.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import jax

from zerojax.config.loader import user_path
from zerojax.config.mesh import DEVICE, HOST, NVME, OffloadConfig
from zerojax.plan.schedules import ExecutorTable, Schedule

MASTER = "master"
"""Name of the float32 weights in `OffloadLayout.arrays`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlicedLeaf:
    """The slices of one parameter.

    Attributes:
      name: of the parameter.
      shard_shape: of the stored parameter on one device.
      axes: mesh axes that shard it, outermost first; all of the mesh's axes that split any of its
        dimensions.
      num_shards: devices among which these axes divide it.
      slice_elements: of one slice.
      counts: {tier: slices of each shard in it}, of every tier, nearest first.
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
        """Returns the index of the first slice in a memory tier."""
        before = {DEVICE: (), HOST: (DEVICE,), NVME: (DEVICE, HOST)}[tier]
        return sum(self.counts[nearer] for nearer in before)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightTiles:
    """The tiles in which the weights of a layer are gathered for their only product.

    Attributes:
      dim: dimension of the layer's weight along which tiles are cut.
      count: number of tiles, at least 2.
      groups: number of devices whose shards lie along `dim`; 1 where another one is sharded.
      again: times that a backward pass gathers them because it computes the product again.
    """

    dim: int
    count: int
    groups: int
    again: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerTiles:
    """Weights of layers that are larger than `offload.tile_bytes`.

    Attributes:
      cut: {name: tiles} of those that are gathered tile by tile.
      whole: (name, reason) of those that are gathered whole nevertheless.
    """

    cut: Mapping[str, WeightTiles] = dataclasses.field(default_factory=dict)
    whole: tuple[tuple[str, str], ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class OffloadLayout:
    """Assignment of a plan's state to memory tiers.

    Attributes:
      leaves: {name: slices} of the parameters whose masters and moments are offloaded, in the order
        of the state.
      arrays: the state arrays of a slice, in the order of a bucket on disk: "master" (where the
        precision has masters), then names of the optimizer's moments, of which "ema" is an average
        of the weights.
      streamed: names of the parameters whose weights are on the host and are read layer by layer.
      paged: names of the parameters whose weights are in files and are read layer by layer.
      activations: tier in which the input of each layer waits for the backward pass.
      update_in_backward: whether layers are updated as soon as their gradients are computed.
      kept: (name, reason) of every parameter that stays on the device while others are offloaded.
    """

    leaves: Mapping[str, SlicedLeaf]
    arrays: tuple[str, ...]
    streamed: frozenset[str]
    paged: frozenset[str]
    activations: str
    update_in_backward: bool
    kept: tuple[tuple[str, str], ...]

    @property
    def moments(self) -> tuple[str, ...]:
        """The names in `arrays` of the optimizer's moments."""
        return tuple(name for name in self.arrays if name != MASTER)

    @property
    def by_layer(self) -> frozenset[str]:
        """Names of the parameters whose weights are copied to the device layer by layer."""
        return self.streamed | self.paged

    @property
    def paged_order(self) -> tuple[str, ...]:
        """The names in `paged`, in the order of the state."""
        return tuple(name for name in self.leaves if name in self.paged)

    @property
    def off_device(self) -> tuple[SlicedLeaf, ...]:
        """The names of parameters that have slices in host memory or in files."""
        leaves = self.leaves.values()
        return tuple(leaf for leaf in leaves if leaf.counts[HOST] or leaf.counts[NVME])

    @property
    def on_disk(self) -> tuple[SlicedLeaf, ...]:
        """The names of parameters that have slices in files."""
        return tuple(leaf for leaf in self.leaves.values() if leaf.counts[NVME])


def store_folder(config: OffloadConfig) -> Path:
    """Returns the folder of the files of this process.

    Raises:
      ValueError: the settings name no folder.
    """
    if config.folder is None:
        raise ValueError(
            "offload.opt_state uses nvme, but offload.folder is not set, and the run has no "
            "folder for the files; set offload.folder to a folder on the disk to use"
        )
    return user_path(config.folder).absolute() / f"process_{jax.process_index()}"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PipelineLayout:
    """The layout of a pipeline, before anything runs.

    "Virtual stages" are the parts of the model in its own order; a stage that holds several calls
    them chunks (see `zerojax.pipeline_schedules.Schedule`).

    Attributes:
      table: the schedule as the executor reads it.
      layers: number of layers on each virtual stage.
      stacked: names of the parameters that the layer loop slices; a stage holds only its rows of
        them. All others are on every stage.
      activations: the arrays sent from stage to stage for one microbatch of one data shard, as
        `ShapeDtypeStruct`s.
      embed_flops, layer_flops, head_flops: of the forward pass of one microbatch of one data shard;
        matrix products alone.
      stash_bytes: bytes that one chunk keeps for one microbatch of one data shard between its
        forward and its backward.
      skips_padding: whether a stage with fewer layers than another waits instead of computing rows
        that hold none.
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
        """Rows of a stack on each chunk: as many as the longest needs."""
        return max(self.layers)

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """The layer in each row of a stored stack, -1 for padding.

        Ordered by stage, then chunk, then layer, so that cutting the stack evenly over the stages
        gives each its own.
        """
        return layer_rows(self.schedule, self.layers)


def layer_rows(schedule: Schedule, layers: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the layer in each row of a stored stack, -1 for padding rows.

    >>> from zerojax.plan.schedules import make_schedule
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
