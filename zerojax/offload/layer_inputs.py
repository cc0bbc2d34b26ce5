"""Stores the inputs of layers between forward and backward pass of one microbatch.

`offload.activations` selects the place: device memory, pinned host memory, or files. The forward
pass stores inputs in the order of the layers, the backward pass takes them in reverse. Arrays
without gradients and scalars always stay on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import NamedSharding

from zerojax.config.mesh import HOST, HOST_KIND
from zerojax.config.tree_types import Tree
from zerojax.offload.disk_errors import DiskErrors
from zerojax.offload.page_files import PageFiles, PageSweep
from zerojax.offload.streaming_layers import has_gradient

Activations = tuple[jax.Array, ...]
"""Input of a layer: arrays of shape [data shards, ...]."""


class LayerInputs(Protocol):
    """Storage for the inputs of all layers of one microbatch; a context manager."""

    def __enter__(self) -> LayerInputs: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

    def put(self, activations: Activations) -> None:
        """Stores the input of one layer in the forward pass; called in the order of the layers."""
        ...

    def turn(self) -> None:
        """Ends the forward pass; only `take` and `use` follow."""
        ...

    def take(self) -> Activations:
        """Removes and returns the last stored input (a stack: last in, first out)."""
        ...

    def use(self, arrays: Tree) -> None:
        """Registers arrays computed from the last taken input; its memory is reused when they are
        ready.
        """
        ...

    def end(self) -> None:
        """Ends the backward pass."""
        ...


class InputsInMemory(LayerInputs):
    """Stores layer inputs in device memory or in pinned host memory."""

    def __init__(self, tier: str) -> None:
        self._moves, self._kept = tier == HOST, []

    def __enter__(self) -> InputsInMemory:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._kept.clear()

    def put(self, activations: Activations) -> None:
        self._kept.append(_moved(activations, HOST_KIND) if self._moves else activations)

    def turn(self) -> None:
        return None

    def take(self) -> Activations:
        activations = self._kept.pop()
        return _moved(activations, None) if self._moves else activations

    def use(self, arrays: Tree) -> None:
        return None

    def end(self) -> None:
        return None


def _moved(activations: Activations, kind: str | None) -> Activations:
    def move(x: jax.Array) -> jax.Array:
        if not has_gradient(x):
            return x
        sharding: Any = x.sharding
        return jax.device_put(x, NamedSharding(sharding.mesh, sharding.spec, memory_kind=kind))

    return tuple(move(x) for x in activations)


class InputPages(PageFiles):
    """Files of layer inputs, one page per layer: {array number: [devices of this process,
    elements]}.
    """

    def __init__(
        self,
        folder: Path,
        arrays: Sequence[jax.ShapeDtypeStruct],
        devices: Sequence[jax.Device],
        number: int,
    ) -> None:
        """Creates the files; replaces existing ones.

        Args:
          folder: folder of the files.
          arrays: inputs of one layer on one data shard (`tracing.loops.largest.carried_arrays`).
          devices: devices of this process, each with one data shard of the batch.
          number: number of pages, one per layer input.
        """
        self._row_of = {device: row for row, device in enumerate(devices)}
        self._shapes = [((1, *x.shape), x.dtype) for x in arrays]
        flat = {str(n): ((len(devices), x.size), x.dtype) for n, x in enumerate(arrays)}
        super().__init__(folder, flat, number)

    def fill(self, page: np.ndarray, activations: Activations) -> Activations:
        """Copies a layer's input into a page; returns the arrays that stay on the device.

        The result has a `ShapeDtypeStruct` in place of each copied array. The call waits until the
        arrays are computed.
        """
        waiting = [x for x in activations if _waits(x)]
        shards = [(x.addressable_shards[0].data.shape, x.dtype) for x in waiting]
        assert shards == self._shapes, (shards, self._shapes)
        for x, rows in zip(waiting, self.views(page).values(), strict=True):
            for shard in x.addressable_shards:
                rows[self._row_of[shard.device]] = np.asarray(shard.data).reshape(-1)
        return tuple(_abstract(x) if _waits(x) else x for x in activations)

    def on_devices(self, page: np.ndarray, stayed: Activations) -> Activations:
        """Starts to copy a layer's input from a page back to the devices, the inverse of `fill`.

        A CPU device may use the page's memory without a copy.
        """
        views = iter(self.views(page).values())
        return tuple(self._place(next(views), x) if _waits(x) else x for x in stayed)

    def _place(self, rows: np.ndarray, like: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
        shape = like.sharding.shard_shape(like.shape)
        shards = [
            jax.device_put(rows[self._row_of[device]].reshape(shape), device)
            for device in like.sharding.addressable_devices
        ]
        return jax.make_array_from_single_device_arrays(like.shape, like.sharding, shards)


def _waits(x: Any) -> bool:
    """Returns whether an array of a layer's input is stored in files: it has a gradient and is no
    scalar.
    """
    # The first dimension counts data shards, so a scalar has one dimension.
    return has_gradient(x) and x.ndim > 1


def _abstract(x: jax.Array) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


class InputsInFiles(LayerInputs):
    """Stores layer inputs in files: threads write them in the forward pass and prefetch them
    backward.
    """

    def __init__(self, pages: InputPages, errors: DiskErrors) -> None:
        self._pages, self._stayed, self._errors = pages, [], errors
        self._order = range(pages.store.num_buckets)
        self._sweep: PageSweep | None = None
        self._taken = False

    def __enter__(self) -> InputsInFiles:
        if self._pages.store.is_broken:  # by a pass that failed
            with self._errors.kept():
                self._pages.renew()
        self._sweep = PageSweep(self._pages, self._order, read=False, errors=self._errors)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._sweep is not None:
            self._sweep.__exit__(kind, error, traceback)

    def put(self, activations: Activations) -> None:
        assert self._sweep is not None
        page = self._sweep.next()
        self._stayed.append(self._pages.fill(page.array, activations))
        self._sweep.write(page)

    def turn(self) -> None:
        assert self._sweep is not None
        self._sweep.end()
        self._sweep = PageSweep(self._pages, self._order[::-1], errors=self._errors)

    def take(self) -> Activations:
        assert self._sweep is not None
        page, self._taken = self._sweep.next(), True
        return self._pages.on_devices(page.array, self._stayed.pop())

    def use(self, arrays: Tree) -> None:
        # The input of the last layer was never stored: before the first `take`, arrays belong to
        # no page.
        if self._taken:
            assert self._sweep is not None
            self._sweep.use(arrays)

    def end(self) -> None:
        assert self._sweep is not None
        self._sweep.end()


def inputs_of(tier: str, pages: InputPages | None, errors: DiskErrors) -> LayerInputs:
    """Returns the storage for the layer inputs of one microbatch.

    Args:
      tier: value of `offload.activations`.
      pages: files of the layer inputs; None if inputs stay in memory.
      errors: errors of the disk in this pass.
    """
    return InputsInMemory(tier) if pages is None else InputsInFiles(pages, errors)
