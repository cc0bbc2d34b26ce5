"""Keeps the weights and gradients of streamed layers in files: one page of each per layer.

Files of weights hold copies in the compute dtype, files of gradients what the backward pass of a
step leaves for the update. Both are scratch space: masters and moments, in the store of the
optimizer's state, are the truth, and weights are made from them again when a run starts. Knows
rows of arrays and files; never the model.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import math
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax.checkpoint.store import BucketStore, StoreFailedError
from zerojax.checkpoint.store.sweep import Bucket
from zerojax.parallel.offload.disk_places import ALIGNMENT, DiskLeaf, DiskSlice
from zerojax.plan.make import Plan
from zerojax.plan.offload_costs import page_gradient_dtype
from zerojax.plan.state_layout import MASTER, store_folder

WEIGHTS, GRADIENTS = "weights", "gradients"
"""Names of the folders of pages, inside the folder of the optimizer's state."""


@dataclasses.dataclass(frozen=True, eq=False)
class PageLeaf:
    """One parameter's part of a page.

    Attributes:
      place: its shards and slices in the store of the optimizer's state.
      row: shape, dtype of the weights and sharding of one layer's row.
      shard_shape: of the row on one device.
      parts: slices of a layer in the store of the optimizer's state.
    """

    place: DiskLeaf
    row: jax.ShapeDtypeStruct
    shard_shape: tuple[int, ...]
    parts: int

    @property
    def name(self) -> str:
        return self.place.leaf.name

    def bucket_of(self, layer: int, part: int) -> int:
        """Returns the number of a slice's bucket in the store of the optimizer's state."""
        return self.place.first_bucket + layer * self.parts + part

    def part(self, rows: np.ndarray, number: int) -> np.ndarray:
        """Returns [rows, elements of a slice] of a layer's [rows, elements], sharing its memory.

        Args:
          rows: the layer's part of a page.
          number: number of the slice in its shard.
        """
        size = self.place.leaf.slice_elements
        start = number % self.parts * size
        return rows[:, start : start + size]


class PageSet:
    """Pages of one kind, {name: [rows of this process, elements of a layer]} each, in a store."""

    def __init__(
        self, folder: Path, leaves: Mapping[str, PageLeaf], dtypes: Mapping[str, Any], layers: int
    ) -> None:
        self._folder, self._leaves, self._layers = folder, leaves, layers
        self.dtypes = {name: np.dtype(dtype) for name, dtype in dtypes.items()}
        self.store = self._create()

    def _create(self) -> BucketStore:
        store = BucketStore.create(
            self._folder, num_buckets=self._layers, bucket_bytes=self.page_bytes, replace=True
        )
        weakref.finalize(self, store.close)  # if the owner does not close it
        return store

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, without padding to blocks of the disk."""
        return sum(self._size(leaf) for leaf in self._leaves.values())

    def _size(self, leaf: PageLeaf) -> int:
        elements = len(leaf.place.shards) * math.prod(leaf.shard_shape)
        return -(-elements * self.dtypes[leaf.name].itemsize // ALIGNMENT) * ALIGNMENT

    def views(self, page: np.ndarray) -> dict[str, np.ndarray]:
        """Returns {name: [rows, elements]} of a page's bytes, sharing its memory."""
        start, found = 0, {}
        for name, leaf in self._leaves.items():
            shape = len(leaf.place.shards), math.prod(leaf.shard_shape)
            size = math.prod(shape) * self.dtypes[name].itemsize
            found[name] = page[start : start + size].view(self.dtypes[name]).reshape(shape)
            start += self._size(leaf)
        return found

    def on_devices(self, page: np.ndarray) -> dict[str, Any]:
        """Starts to copy a page to the devices: {name: one layer's row, sharded as stored}.

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
        """Copies one layer's rows from the devices into a page; waits for them."""
        views = self.views(page)
        for name, row in rows.items():
            place = self._leaves[name].place
            shards = {place.row_of[shard.device]: shard.data for shard in row.addressable_shards}
            for number, shard in shards.items():
                views[name][number] = np.asarray(shard).reshape(-1)

    def renew(self) -> None:
        """Replaces the store by an empty one, after a sweep that did not end."""
        self.store.close()
        with _told():
            self.store = self._create()


class PageSweep:
    """A sweep over pages in which devices may still read a page when the next one is requested.

    Use it in a `with` statement. Errors of the disk become `StoreFailedError`.
    """

    def __init__(self, pages: PageSet, order: Sequence[int], *, read: bool = True) -> None:
        self._pages = pages
        self._sweep = pages.store.sweep(order=list(order), read=read)
        self._using: collections.deque[Any] = collections.deque()

    def __enter__(self) -> PageSweep:
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self._wait()
        self._sweep.close()

    def _wait(self, most: int = 0) -> None:
        """Waits until devices use at most this number of pages."""
        while len(self._using) > most:
            jax.block_until_ready(self._using.popleft())

    def next(self) -> Bucket:
        """Returns the next page of the order, once it has been read.

        Waits for what was computed from the page whose memory is filled next.
        """
        self._wait(self._pages.store.num_buffers - 2)
        self._using.append(())
        with _told():
            return next(self._sweep)

    def use(self, arrays: Any) -> None:
        """Notes arrays that are computed from the page last returned, which they may share."""
        self._using[-1] = arrays

    def write(self, page: Bucket) -> None:
        """Starts to write a page."""
        with _told():
            page.write()

    def end(self) -> None:
        """Ends the sweep: what was written is one generation."""
        self._wait()
        with _told():
            for _ in self._sweep:
                raise AssertionError("a page of the sweep was not visited")


class _told:
    """Turns an error of the disk into `StoreFailedError`, whose text is one sentence."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if isinstance(error, OSError):
            raise StoreFailedError(error.strerror or str(error)) from error


class Pages:
    """The pages of this process.

    Attributes:
      leaves: {name: its part of a page}, in the order of a page.
      num_layers: number of pages of each kind.
      weights, gradients: the pages.
      order: buckets of the store of the optimizer's state in the order of an update: parameters
        without pages, then layer by layer.
    """

    def __init__(self, plan: Plan, places: Mapping[str, DiskLeaf]) -> None:
        layout = plan.offload
        assert layout is not None
        self.leaves = {name: _page_leaf(plan, places[name]) for name in layout.paged_order}
        self.num_layers = next(iter(self.leaves.values())).place.leaf.shard_shape[0]
        folder = store_folder(plan.settings.offload)
        weights = {name: leaf.row.dtype for name, leaf in self.leaves.items()}
        gradients = dict.fromkeys(self.leaves, page_gradient_dtype(plan))
        self.weights = PageSet(folder / WEIGHTS, self.leaves, weights, self.num_layers)
        try:
            self.gradients = PageSet(folder / GRADIENTS, self.leaves, gradients, self.num_layers)
        except BaseException:
            self.weights.store.close()
            raise
        self.order = [
            bucket
            for name, place in places.items()
            if name not in self.leaves
            for bucket in range(place.first_bucket, place.first_bucket + place.num_buckets)
        ]
        self.order += [
            leaf.bucket_of(layer, part)
            for layer in range(self.num_layers)
            for leaf in self.leaves.values()
            for part in range(leaf.parts)
        ]

    def fill(self, slices: Callable[[Sequence[int]], Generator[DiskSlice]]) -> None:
        """Writes the weights of all layers, cast from the masters in files.

        Args:
          slices: reads the slices in these buckets, see `DiskState.slices`.

        Raises:
          StoreError: the disk reports an error.
        """
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
                raise AssertionError("more slices than the layers have")
            sweep.end()

    @property
    def slices_of_layer(self) -> int:
        """Number of slices of one layer in the store of the optimizer's state."""
        return sum(leaf.parts for leaf in self.leaves.values())

    def close(self) -> None:
        """Closes the files. May be called twice."""
        self.weights.store.close()
        self.gradients.store.close()


def _page_leaf(plan: Plan, place: DiskLeaf) -> PageLeaf:
    stored = plan.abstract_stored["params"][place.leaf.name]
    assert isinstance(plan.mesh, Mesh)
    sharding = NamedSharding(plan.mesh, P(*stored.sharding.spec[1:]))
    row = jax.ShapeDtypeStruct(
        stored.shape[1:], jnp.dtype(plan.precision.compute_dtype), sharding=sharding
    )
    layers, *shard_shape = place.leaf.shard_shape
    return PageLeaf(
        place=place,
        row=row,
        shard_shape=tuple(shard_shape),
        parts=place.leaf.num_slices // layers,
    )
