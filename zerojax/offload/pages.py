"""Stores the weights and gradients of layers in files: one page of each kind per layer.

Weight pages hold copies of the weights in the compute dtype. Gradient pages hold the gradients that
the backward pass leaves for the update. Both are scratch space: the masters and moments in the
store of the optimizer state are authoritative, and weights are computed from the masters when a run
starts.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax.config.late_dataclasses import dataclass
from zerojax.config.mesh import NVME
from zerojax.offload.disk_places import DiskLeaf, DiskSlice
from zerojax.offload.layer_inputs import InputPages
from zerojax.offload.page_files import PageFiles, PageSweep
from zerojax.placement.decisions import Decisions
from zerojax.placement.state_layout import MASTER, store_folder
from zerojax.tracing.loops.largest import carried_arrays, largest_loop

WEIGHTS, GRADIENTS, INPUTS = "weights", "gradients", "inputs"
NEW_WEIGHTS = "new_weights"
"""Names of the folders of pages, inside the folder of the optimizer's state."""


def page_gradient_dtype(plan: Decisions) -> Any:
    """Returns the dtype in which gradients of layers are stored in files until the update."""
    precision = plan.precision
    several = plan.num_microbatches > 1
    return jnp.dtype(precision.accumulate_dtype if several else precision.reduce_dtype)


@dataclass(frozen=True, eq=False)
class PageLeaf:
    """One parameter's part of a page.

    Attributes:
      place: position of the parameter's slices in the store of the optimizer state.
      row: shape, dtype and sharding of one layer of the weights.
      shard_shape: shape of one layer's shard on one device.
      parts: number of slices per layer in the store of the optimizer state.
    """

    place: DiskLeaf
    row: jax.ShapeDtypeStruct
    shard_shape: tuple[int, ...]
    parts: int

    @property
    def name(self) -> str:
        return self.place.leaf.name

    def bucket_of(self, layer: int, part: int) -> int:
        """Returns the number of the bucket (in the store of the optimizer state) of a slice of a
        layer.
        """
        return self.place.first_bucket + layer * self.parts + part

    def part(self, rows: np.ndarray, number: int) -> np.ndarray:
        """Returns a view of one slice, [rows, elements of a slice], in the parameter's part of a
        page.

        Args:
          rows: the parameter's part of a page, [rows, elements of a layer].
          number: number of the slice in its shard, counted over all layers.
        """
        size = self.place.leaf.slice_elements
        start = number % self.parts * size
        return rows[:, start : start + size]


class PageSet(PageFiles):
    """Files with pages of one kind; a page is {name: [rows of this process, elements of a
    layer]}.
    """

    def __init__(
        self, folder: Path, leaves: Mapping[str, PageLeaf], dtypes: Mapping[str, Any], layers: int
    ) -> None:
        self._leaves = leaves
        self.dtypes = {name: np.dtype(dtype) for name, dtype in dtypes.items()}
        arrays = {
            name: ((len(leaf.place.shards), math.prod(leaf.shard_shape)), self.dtypes[name])
            for name, leaf in leaves.items()
        }
        super().__init__(folder, arrays, layers)

    def on_devices(self, page: np.ndarray) -> dict[str, Any]:
        """Starts to copy a page to the devices; returns {name: one layer, sharded as stored}.

        A CPU device may use the page's memory without a copy.
        """
        found = {}
        for name, rows in self.views(page).items():
            leaf = self._leaves[name]
            sharding: Any = leaf.row.sharding
            shards = [
                jax.device_put(rows[leaf.place.row_of[device]].reshape(leaf.shard_shape), device)
                for device in sharding.addressable_devices
            ]
            found[name] = jax.make_array_from_single_device_arrays(leaf.row.shape, sharding, shards)
        return found

    def take(self, page: np.ndarray, rows: Mapping[str, jax.Array]) -> None:
        """Copies one layer's arrays from the devices into a page; waits until they are computed."""
        views = self.views(page)
        for name, row in rows.items():
            place = self._leaves[name].place
            shards = {place.row_of[shard.device]: shard.data for shard in row.addressable_shards}
            for number, shard in shards.items():
                views[name][number] = np.asarray(shard).reshape(-1)


class Pages:
    """The open page files of this process.

    Attributes:
      leaves: {name: the parameter's part of a page}, in the order of a page.
      num_layers: number of pages of each kind.
      weights, gradients: files with the weights and the gradients of layers.
      new_weights: files for the weights after an update in the backward pass, while those before it
        are read; None without such an update.
      inputs: files with the inputs of layers (`offload.activations: nvme`); None without them.
      others: numbers of the buckets of the optimizer state of parameters without pages.
      order: numbers of all buckets in the order of an update: first `others`, then layer by layer.
    """

    def __init__(self, plan: Decisions, places: Mapping[str, DiskLeaf]) -> None:
        layout = plan.offload
        assert layout is not None
        self.leaves = {name: _page_leaf(plan, places[name]) for name in layout.paged_order}
        self.num_layers = next(iter(self.leaves.values())).place.leaf.shard_shape[0]
        folder = store_folder(plan.settings.offload)
        weights = {name: leaf.row.dtype for name, leaf in self.leaves.items()}
        gradients = dict.fromkeys(self.leaves, page_gradient_dtype(plan))
        self.inputs: InputPages | None = None
        self.new_weights: PageSet | None = None
        self.weights = PageSet(folder / WEIGHTS, self.leaves, weights, self.num_layers)
        try:
            if layout.update_in_backward:
                self.new_weights = PageSet(
                    folder / NEW_WEIGHTS, self.leaves, weights, self.num_layers
                )
            self.gradients = PageSet(folder / GRADIENTS, self.leaves, gradients, self.num_layers)
            # The backward pass starts with the input of the last layer, which is never stored.
            if layout.activations == NVME and self.num_layers > 1:
                assert isinstance(plan.mesh, Mesh)
                loop, devices = largest_loop(plan.traced.forward.jaxpr), plan.mesh.local_devices
                arrays = () if loop is None else carried_arrays(loop)
                self.inputs = InputPages(folder / INPUTS, arrays, devices, self.num_layers - 1)
        except BaseException:
            self.close()
            raise
        self.others = [
            bucket
            for name, place in places.items()
            if name not in self.leaves
            for bucket in range(place.first_bucket, place.first_bucket + place.num_buckets)
        ]
        self.order = self.others + self.order_of(range(self.num_layers))

    def order_of(self, layers: Iterable[int]) -> list[int]:
        """Returns the numbers of the buckets of layers, layer by layer."""
        return [
            leaf.bucket_of(layer, part)
            for layer in layers
            for leaf in self.leaves.values()
            for part in range(leaf.parts)
        ]

    def take_new_weights(self) -> None:
        """Makes the weights in `new_weights` current; the old ones are overwritten next."""
        assert self.new_weights is not None
        # The files swap their roles, so that nothing is copied.
        self.weights, self.new_weights = self.new_weights, self.weights

    def fill(self, slices: Callable[[Sequence[int]], Generator[DiskSlice]]) -> None:
        """Writes the weights of all layers, cast from the master weights in files.

        Args:
          slices: function that reads the slices in the given buckets (see `DiskState.slices`).

        Raises:
          StoreError: the disk reports an error.
        """
        # The buckets of layers are the last ones of the order.
        pieces = slices(self.order[-self.num_layers * self.slices_of_layer :])
        with (
            contextlib.closing(pieces),
            PageSweep(self.weights, range(self.num_layers), read=False) as sweep,
        ):
            for _ in range(self.num_layers):
                page = sweep.next()
                views = self.weights.views(page.array)
                for piece in itertools.islice(pieces, self.slices_of_layer):
                    leaf = self.leaves[piece.place.leaf.name]
                    target = leaf.part(views[leaf.name], piece.number)
                    target[:] = piece.arrays[MASTER].astype(target.dtype)
                sweep.write(page)
            for _ in pieces:
                raise AssertionError("the store has more slices than the layers need")
            sweep.end()

    @property
    def slices_of_layer(self) -> int:
        """Number of slices of one layer in the store of the optimizer's state."""
        return sum(leaf.parts for leaf in self.leaves.values())

    def close(self) -> None:
        """Closes the files. May be called twice."""
        # `__init__` calls this, too, if it fails; then some files do not exist yet.
        every = self.weights, self.new_weights, getattr(self, "gradients", None), self.inputs
        for pages in every:
            if pages is not None:
                pages.store.close()


def _page_leaf(plan: Decisions, place: DiskLeaf) -> PageLeaf:
    layer, dtype = row_struct(plan, place.leaf.name), jnp.dtype(plan.precision.compute_dtype)
    return PageLeaf(
        place=place,
        row=jax.ShapeDtypeStruct(layer.shape, dtype, sharding=layer.sharding),
        shard_shape=tuple(place.leaf.shard_shape[1:]),
        parts=place.leaf.num_slices // place.leaf.shard_shape[0],
    )


def row_struct(plan: Decisions, name: str) -> jax.ShapeDtypeStruct:
    """Returns shape, dtype and sharding of one layer of a stored parameter."""
    stored = plan.abstract_stored["params"][name]
    sharding = NamedSharding(plan.mesh, P(*stored.sharding.spec[1:]))
    return jax.ShapeDtypeStruct(stored.shape[1:], stored.dtype, sharding=sharding)
