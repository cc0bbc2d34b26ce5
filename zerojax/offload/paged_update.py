"""Updates layers in files: in a sweep after the backward pass, or layer by layer during it.

An update in the backward pass cannot know the norm of all gradients. It assumes that they are
finite and not clipped, and writes the new state into the generation of the files that is not valid
yet. If the norm says otherwise, that generation is not committed: a skipped step ends there, and a
clipped one is updated in a sweep from the valid generation. So both ways compute the same update
from the same numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from zerojax.config.mesh import DEVICE
from zerojax.offload.disk import DiskState
from zerojax.offload.disk_errors import DiskErrors, in_one_sentence
from zerojax.offload.disk_places import DiskLeaf, DiskSlice
from zerojax.offload.disk_step import (
    SliceWeights,
    build_slice_update,
    place_rows,
    take_rows,
)
from zerojax.offload.page_files import PageSweep, SparePage
from zerojax.offload.pages import PageLeaf
from zerojax.placement.decisions import Decisions
from zerojax.placement.slices import take_slice, tier_sharding, without_moments
from zerojax.placement.state import TrainState

NewSlice = tuple[jax.Array, Mapping[str, jax.Array]]
"""(new weights, {array: new values}) of a slice, on the devices."""


class PageUpdates:
    """Updates the slices of layers, with jitted functions for each parameter.

    Attributes:
      functions: {parameter: update from a slice of the gradient}.
      row_functions: {parameter: update from the gradient of a layer}.
    """

    def __init__(self, plan: Decisions) -> None:
        self._plan = plan
        self.functions: dict[str, Any] = {}
        self.row_functions: dict[str, Any] = {}

    def __call__(
        self, piece: DiskSlice, grads: np.ndarray, weights: np.ndarray, pending: Any
    ) -> None:
        """Updates one slice: writes new master and moments into `piece`, and new weights into
        `weights`.

        Args:
          piece: one slice of the optimizer's state.
          grads, weights: gradients and weights of the same slice, [rows of this process, elements].
          pending: result of `zerojax.offload.disk_step.pending_of`.
        """
        name = piece.place.leaf.name
        if name not in self.functions:
            sharding = tier_sharding(piece.place.leaf, DEVICE, self._plan.mesh)
            self.functions[name] = self._build(
                piece.place, weights.dtype, sharding, lambda grad, number: grad[0]
            )
        grad = place_rows(piece.place, grads, self._plan)
        self.take(piece, self._run(self.functions[name], piece, grad, pending), weights)

    def start(self, piece: DiskSlice, leaf: PageLeaf, row: jax.Array, pending: Any) -> NewSlice:
        """Starts to update one slice on the devices; `take` waits for it.

        Args:
          piece: one slice of the optimizer's state, which may not change until `take`.
          leaf: the parameter's part of a page.
          row: gradient of the layer.
          pending: see `__call__`.
        """
        if leaf.name not in self.row_functions:
            elements = leaf.place.leaf.slice_elements

            def slice_of(grad: jax.Array, number: jax.Array) -> jax.Array:
                parts = grad.reshape(leaf.parts, elements)
                # Slices are numbered over all layers, and the row is that of one layer.
                return take_slice(parts, lax.rem(number, jnp.int32(leaf.parts)))

            sharding: Any = leaf.row.sharding
            self.row_functions[leaf.name] = self._build(
                leaf.place, leaf.row.dtype, sharding, slice_of
            )
        return self._run(self.row_functions[leaf.name], piece, row, pending)

    def take(self, piece: DiskSlice, new: NewSlice, weights: np.ndarray) -> None:
        """Waits for an update's result `new`; copies it into `weights` and `piece.arrays`."""
        jax.block_until_ready(new)  # a CPU device may use the files' buffers
        new_weights, arrays = new
        take_rows(piece.place, new_weights, weights)
        for key, target in piece.arrays.items():
            take_rows(piece.place, arrays[key], target)

    def _run(self, function: Any, piece: DiskSlice, grad: jax.Array, pending: Any) -> NewSlice:
        old = {key: place_rows(piece.place, x, self._plan) for key, x in piece.arrays.items()}
        number = np.int32(piece.number)
        return function(None, old, grad, number, pending["opt_state"], pending["numbers"])

    def _build(
        self,
        place: DiskLeaf,
        dtype: DTypeLike,
        of_grads: NamedSharding,
        slice_of: Callable[[jax.Array, jax.Array], jax.Array],
    ) -> Any:
        """Builds the jitted update of one slice.

        Args:
          place: position of the parameter's buckets.
          dtype: dtype of the weights.
          of_grads: sharding of the gradients.
          slice_of: traced function `(gradients of one device, slice number) -> gradient`.
        """

        def weights_of(_: None, grad: jax.Array) -> SliceWeights:
            return SliceWeights(
                start=jnp.zeros((1, place.leaf.slice_elements), dtype),
                gradient=lambda number: slice_of(grad, number),
                put=lambda rows, own, number: own.astype(dtype)[None],
                end=lambda rows: rows,
            )

        slices = tier_sharding(place.leaf, DEVICE, self._plan.mesh)
        return build_slice_update(
            self._plan, place, weights_of, given=(None, of_grads), result=slices
        )


class UpdateInBackward:
    """The update of layers during one backward pass. Use it in a `with` statement.

    For each layer, from the last to the first, the step calls `start` and, after it has started the
    backward pass of the layer below, `finish`. Nothing is valid until `rest` has ended; leaving the
    `with` statement before drops the update.
    """

    def __init__(
        self, disk: DiskState, updates: PageUpdates, state: TrainState, errors: DiskErrors
    ) -> None:
        """Begins an update.

        Args:
          disk: files of the state, which are durable.
          updates: compiled updates of slices.
          state: state before the step.
          errors: keeps errors of the disk.
        """
        pages = disk.pages
        assert pages is not None
        assert pages.new_weights is not None
        self._pages, self._updates, self._errors = pages, updates, errors
        self._pending: dict[str, Any] = {"opt_state": without_moments(state["opt_state"])}
        self._before_commit: Callable[[], None] | None = None
        layers = [*reversed(range(pages.num_layers))]
        self._pieces = disk.slices(
            order=pages.order_of(layers) + pages.others,
            at_once=pages.slices_of_layer,
            may_stop=True,
            before_commit=self._end,
        )
        if pages.new_weights.store.is_broken:  # an earlier pass failed
            with errors.kept():
                pages.new_weights.renew()
        self._new_weights = pages.new_weights
        self._sweep = PageSweep(pages.new_weights, layers, read=False, errors=errors)
        self._page: Any = None
        self._started: list[tuple[DiskSlice, NewSlice]] = []

    def __enter__(self) -> UpdateInBackward:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._drop()
        self._sweep.__exit__(kind, error, traceback)
        self._pieces.close()

    def begin(self, scale: jax.Array, key_data: jax.Array) -> None:
        """Sets the numbers of the update, before the first layer.

        Args:
          scale: float32 []; factor by which gradients are multiplied if they are not clipped.
          key_data: data of the step's random key.
        """
        # An overflow drops the whole update, so no slice is skipped here.
        self._pending["numbers"] = scale, np.False_, key_data

    def start(self, grads: Mapping[str, jax.Array]) -> None:
        """Starts the update of the next layer, from its gradients."""
        self._page = self._sweep.next()
        for _ in range(self._pages.slices_of_layer):
            if self._errors.first is not None:
                return
            with self._errors.kept(), in_one_sentence():
                piece = next(self._pieces)
                leaf = self._pages.leaves[piece.place.leaf.name]
                new = self._updates.start(piece, leaf, grads[leaf.name], self._pending)
                self._started.append((piece, new))

    def finish(self) -> None:
        """Waits for the update of the layer that was started last, and writes it to files."""
        if self._errors.first is not None or isinstance(self._page, SparePage):
            self._drop()
            return
        views = self._new_weights.views(self._page.array)
        for piece, new in self._started:
            leaf = self._pages.leaves[piece.place.leaf.name]
            self._updates.take(piece, new, leaf.part(views[leaf.name], piece.number))
            with self._errors.kept(), in_one_sentence():
                piece.write()
        self._started.clear()
        self._sweep.write(self._page)

    def end(self) -> None:
        """Ends the update of layers, after the first layer; it is not valid yet."""
        self._sweep.end()

    def is_right(self, pending: Mapping[str, Any]) -> bool:
        """Returns whether the update used the factor of the gradients that the whole norm gives.

        Args:
          pending: result of `zerojax.offload.disk_step.pending_of` of a step that is not
            skipped.
        """
        # Equal in every bit, or the update would differ from that of a sweep.
        return bool(np.asarray(self._pending["numbers"][0]) == np.asarray(pending["numbers"][0]))

    def rest(self, before_commit: Callable[[], None]) -> Iterator[DiskSlice]:
        """Yields the slices of parameters outside the layers, to be updated, and commits.

        Args:
          before_commit: called after all slices are written, before they replace the previous
            generation.
        """
        self._before_commit = before_commit
        yield from self._pieces

    def _end(self) -> None:
        assert self._before_commit is not None
        self._before_commit()

    def _drop(self) -> None:
        """Waits until no device uses the memory of the files any more."""
        with contextlib.suppress(RuntimeError):  # of the devices, which is being raised already
            jax.block_until_ready([new for _, new in self._started])
        self._started.clear()
