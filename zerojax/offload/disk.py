"""Stores slices of the training state in files: creates, fills and reads the files.

Every process has a store (`BucketStore`) in its own folder. A store consists of buckets, one per
slice of a parameter; `disk_places` defines their layout.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from zerojax.checkpoint.agreement import from_process_0
from zerojax.checkpoint.store import BucketStore, StoreError, StoreFailedError
from zerojax.checkpoint.store.sweep import Bucket
from zerojax.config.mesh import NVME
from zerojax.offload.disk_errors import DiskErrors, failing_together
from zerojax.offload.disk_places import DiskLeaf, DiskSlice, disk_leaves
from zerojax.offload.pages import Pages
from zerojax.optim import EMA
from zerojax.placement.decisions import Decisions
from zerojax.placement.slices import cut_leaf, map_moments, shards_of
from zerojax.placement.state import TrainState
from zerojax.placement.state_layout import MASTER, SlicedLeaf, store_folder

SIDE_FILES = re.compile(r"(frozen|state-\d+)\.npz")
"""Files that `offload.disk_durable` writes beside the buckets of a store."""

Rows = Mapping[jax.Device, np.ndarray]
"""{device of this process: slices of an array, [elements] for one or [slices, elements] for
several}.
"""

Source = Callable[[str, int], Rows | None]
"""`(array, number of a slice) -> values of the slice on each device`; None means zeros."""


class DiskState:
    """The open store of this process and the position of each slice in it.

    In a state's pytree it is a node without leaves: JAX never copies it. So there is only one: a
    step changes the optimizer-state slices in files of the state that it was given, even if it does
    not change the arrays of that state.

    Attributes:
      store: store with the buckets of this process.
      leaves: {parameter: position of its buckets}, in the order of the buckets.
      failure: the reason why the slices no longer belong to one step; None if they do.
      data_state: position of the data after the next step, for a durable store (files from which a
        killed run resumes).
      has_frozen: whether the frozen parameters were written beside the buckets of a durable store.
      filling: number of the call that filled the files, drawn at random; equal in all processes.
      pages: weights and gradients of layers in files (`offload.params: nvme`); None without them.
    """

    def __init__(self, store: BucketStore, leaves: Mapping[str, DiskLeaf]) -> None:
        self.store, self.leaves = store, leaves
        weakref.finalize(self, store.close)  # if the owner does not close it
        self.failure: str | None = None
        self.data_state: dict[str, Any] | None = None
        self.has_frozen = False
        self.filling = 0
        self.pages: Pages | None = None

    def slices(
        self,
        *,
        read: bool = True,
        order: Sequence[int] | None = None,
        at_once: int = 1,
        may_stop: bool = False,
        before_commit: Callable[[], None] | None = None,
    ) -> Generator[DiskSlice]:
        """Yields each slice in files once, to be read or overwritten (see `BucketStore.sweep`).

        Args:
          order: numbers of the buckets to visit; None: all buckets in order.
          read: False skips reading, for buckets that are overwritten completely.
          at_once: number of slices that may be used together: a slice may be used until that many
            others were requested, and as many are read ahead.
          may_stop: whether the caller may stop before the end although it wrote slices. The store
            has to be durable: it then keeps its previous generation.
          before_commit: called after all buckets are written, before they replace the previous
            generation.

        Raises:
          StoreFailedError: the disk reports an error, or an earlier sweep failed.
          StoreError: the store reports an error.
        """
        self._check_whole()
        places = [place for place in self.leaves.values() for _ in range(place.num_buckets)]
        visits = range(len(places)) if order is None else order
        wrote = False
        assert self.store.is_durable or not may_stop

        def write(bucket: Bucket) -> None:
            nonlocal wrote
            # Noted first, because a write that fails may have changed the file, too.
            wrote = True
            bucket.write()

        try:
            sweep = self.store.sweep(order=visits, read=read, ahead=at_once, held=at_once)
            for count, bucket in enumerate(sweep, 1):
                place = places[bucket.index]
                number = place.leaf.first(NVME) + bucket.index - place.first_bucket
                views = place.views(bucket.array)
                yield DiskSlice(place, number, views, lambda b=bucket: write(b))
                # The end of the sweep commits, so this is the last moment before it.
                if wrote and count == len(visits) and before_commit is not None:
                    before_commit()
        except BaseException as error:
            # Without a write all slices still belong to one step.
            if wrote and not may_stop:
                self._fail(error)
            if isinstance(error, OSError):
                raise StoreFailedError(self.failure or _text_of(error)) from error
            raise

    def _fail(self, error: BaseException) -> None:
        self.failure = (
            f"{self.store.folder}: an update of the optimizer state in these files stopped "
            f"half-way ({_text_of(error)}); start the run again: it continues from the "
            + ("last whole step" if self.store.is_durable else "last checkpoint")
        )

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Marks the state as failed in all processes if an update fails in one of them.

        Collective.

        Raises:
          StoreError: the disk of a process reports an error.
        """
        try:
            with failing_together():
                yield
        except StoreError as error:
            # Another process may have written its slices, so the state of the run is mixed.
            if jax.process_count() > 1:
                self.failure = self.failure or str(error)
            raise

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """Marks the state as failed if the body of the `with` statement, an update, ends with an
        error.

        Raises:
          StoreFailedError: the disk reports an error.
        """
        try:
            yield
        except BaseException as error:
            # The sweep has described this error already.
            if isinstance(error, StoreFailedError) and str(error) == self.failure:
                raise
            self._fail(error)
            if isinstance(error, (OSError, StoreError)):
                raise StoreFailedError(self.failure) from error
            raise

    def fill(
        self,
        source_of: Callable[[DiskLeaf], Source],
        *,
        before_commit: Callable[[], None] | None = None,
    ) -> None:
        """Overwrites every slice in files with values from `source_of`.

        Args:
          source_of: function that returns the source of a parameter's new values. It is called once
            for each parameter, in order, after the previous parameter's source is released.
          before_commit: called after all buckets are written, before they replace the previous
            generation.
        """
        errors, source = DiskErrors(), None
        pieces = self.slices(read=False, before_commit=before_commit)
        with contextlib.closing(pieces):
            for place in self.leaves.values():
                # Frees the arrays of the parameter before it.
                source = None
                source = source_of(place)
                first = place.leaf.first(NVME)
                for number in range(first, first + place.num_buckets):
                    _fill_slice(place, number, source, pieces, errors)
            if errors.first is None:
                with errors.kept():
                    # Asking for one more ends the sweep, which commits it.
                    for _ in pieces:
                        raise AssertionError("more slices than the parameters have")
        errors.raise_together()

    def read(self, leaf: SlicedLeaf, array: str) -> Rows:
        """Reads one array's optimizer-state slices in files: {device: copies, [slices, elements]};
        {} if there are none.

        Raises:
          StoreFailedError: the disk reports an error, or a sweep failed.
          StoreError: the store reports an error.
        """
        if leaf.name not in self.leaves:
            return {}
        self._check_whole()
        place = self.leaves[leaf.name]
        order = range(place.first_bucket, place.first_bucket + place.num_buckets)
        shape = (len(place.shards), place.num_buckets, leaf.slice_elements)
        result = np.empty(shape, place.dtypes[array])
        try:
            for bucket in self.store.sweep(order=order):
                rows = place.views(bucket.array)[array]
                result[:, bucket.index - place.first_bucket] = rows
        except OSError as error:
            raise StoreFailedError(_text_of(error)) from error
        return {device: result[row] for device, row in place.row_of.items()}

    def close(self) -> None:
        """Closes the store's files. May be called twice."""
        self.store.close()
        if self.pages is not None:
            self.pages.close()

    def add_pages(self, plan: Decisions) -> None:
        """Creates the files of layer weights (pages) from the master weights.

        Raises:
          StoreError, OSError: as in `create_disk`.
        """
        if plan.offload is not None and plan.offload.paged:
            self.pages = Pages(plan, self.leaves)
            self.pages.fill(lambda order: self.slices(order=order))

    def _check_whole(self) -> None:
        if self.failure is not None:
            raise StoreFailedError(self.failure)


jax.tree_util.register_pytree_node(DiskState, lambda disk: ((), disk), lambda disk, _: disk)


def _text_of(error: BaseException) -> str:
    if isinstance(error, GeneratorExit):  # the caller's error is not known here
        return "an error while one of the slices was updated"
    text = error.strerror if isinstance(error, OSError) else str(error)
    return text or type(error).__name__


def _fill_slice(
    place: DiskLeaf,
    number: int,
    source: Source,
    pieces: Generator[DiskSlice],
    errors: DiskErrors,
) -> None:
    """Writes the next of `pieces`: a slice whose values are from `source`.

    After an error the source is called all the same, since it may compute with other processes.
    """
    piece = None
    if errors.first is None:
        with errors.kept():
            piece = next(pieces)
    for name in place.dtypes:
        rows = source(name, number)
        if piece is None:
            continue
        assert (piece.place, piece.number) == (place, number)
        target = piece.arrays[name]
        if rows is None:
            target[:] = 0
            continue
        for device, row in place.row_of.items():
            target[row] = rows[device]
    if piece is not None:
        with errors.kept():
            piece.write()


def create_disk(plan: Decisions) -> DiskState:
    """Creates an empty store for the slices of a plan in files; replaces an existing store.

    Raises:
      ValueError: the plan names no folder.
      StoreError: another process has the store open.
      OSError: the disk has too little space; the message says how many bytes are missing and what
        to change.
    """
    assert plan.offload is not None
    folder = store_folder(plan.settings.offload)
    leaves = disk_leaves(plan)
    sizes = [place.bucket_bytes for place in leaves.values() for _ in range(place.num_buckets)]
    store = BucketStore.create(
        folder,
        num_buckets=len(sizes),
        bucket_bytes=sizes,
        durable=plan.settings.offload.durable,
        replace=True,
        num_buffers=plan.offload.num_buffers,
    )
    for path in folder.iterdir():
        if SIDE_FILES.fullmatch(path.name):
            path.unlink()  # of the replaced store: generations are counted from the beginning
    return DiskState(store, leaves)


def fill_new_disk(
    plan: Decisions,
    stored: Callable[[str], jax.Array],
    by_layer: Callable[[str], Callable[[int], jax.Array] | None],
) -> DiskState:
    """Creates a store for a new state: master weights from initial parameters, moments of zeros.

    An average of the weights (EMA) begins as a copy of the weights.

    Args:
      plan: a plan with optimizer-state slices in files.
      stored: `name -> parameter in its stored form`; called once for each parameter.
      by_layer: `name -> (layer number -> this layer's part of the stored form)`, for a parameter
        whose slices do not cross layers; for other parameters it returns None, and `stored` is
        used.
    """

    def source_of(place: DiskLeaf) -> Source:
        as_weights = [array for array in (MASTER, EMA) if array in place.dtypes]
        layer = by_layer(place.leaf.name) if as_weights else None
        if layer is not None:
            return _layer_source(place, as_weights, layer)
        arrays = dict.fromkeys(as_weights, stored(place.leaf.name)) if as_weights else {}
        return array_source(plan, place, arrays)

    return filled_disk(plan, source_of)


def _layer_source(
    place: DiskLeaf, arrays: Sequence[str], layer: Callable[[int], jax.Array]
) -> Source:
    """Returns a source of a parameter's slices that has only one layer in memory at a time.

    Args:
      place: the parameter's buckets.
      arrays: names of the arrays that begin as copies of the weights; all others are zeros.
      layer: `layer number -> this layer's part of the stored form`.
    """
    slices = place.leaf.num_slices // place.leaf.shard_shape[0]
    held: tuple[int, Rows] = -1, {}

    def source(name: str, number: int) -> Rows | None:
        nonlocal held
        if name not in arrays:
            return None
        index, part = divmod(number, slices)
        if index != held[0]:
            held = -1, {}  # frees the layer before it
            shards = shards_of(layer(index)).items()
            held = index, {device: shard.reshape(slices, -1) for device, shard in shards}
        return {device: shard[part] for device, shard in held[1].items()}

    return source


def fill_disk(
    plan: Decisions, stored: TrainState, before_commit: Callable[[DiskState], None]
) -> DiskState:
    """Creates a store from a complete state, which has the form of `plan.abstract_stored`.

    Args:
      plan: a plan with optimizer-state slices in files.
      stored: training state without slices, as arrays on the devices.
      before_commit: called after all buckets are written, before they replace the previous
        generation.
    """
    assert plan.offload is not None
    arrays = arrays_of(plan, stored, plan.offload.on_disk)
    return filled_disk(
        plan, lambda place: array_source(plan, place, arrays[place.leaf.name]), before_commit
    )


def filled_disk(
    plan: Decisions,
    source_of: Callable[[DiskLeaf], Source],
    before_commit: Callable[[DiskState], None] = lambda disk: None,
) -> DiskState:
    """Creates a store and fills it with the slices that `source_of` returns (see
    `DiskState.fill`). All processes call it together.

    Raises:
      StoreError, OSError: as in `create_disk`; in all processes if one of them fails.
    """
    disk: DiskState | None = None
    try:
        with failing_together():
            disk = create_disk(plan)
        assert disk is not None
        made = disk
        made.filling = from_process_0(secrets.randbelow(2**31))
        made.fill(source_of, before_commit=lambda: before_commit(made))
        # Pages are made from the masters, which are in the files now.
        with failing_together():
            made.add_pages(plan)
    except BaseException:
        if disk is not None:
            disk.close()
        raise
    return made


def array_source(plan: Decisions, place: DiskLeaf, arrays: Mapping[str, jax.Array]) -> Source:
    """Returns a source of a parameter's slices, cut from `arrays`; missing arrays are zeros."""
    assert isinstance(plan.mesh, Mesh)
    mesh = plan.mesh
    rows = {name: cut_leaf(place.leaf, array, mesh)[1] for name, array in arrays.items()}
    first = place.leaf.first(NVME)

    def source(name: str, number: int) -> Rows | None:
        if name not in rows:
            return None
        return {device: slices[number - first] for device, slices in rows[name].items()}

    return source


def arrays_of(
    plan: Decisions, state: Mapping[str, Any], leaves: Sequence[SlicedLeaf]
) -> dict[str, dict[str, Any]]:
    """Returns {parameter: {"master" or moment: leaf}} from a tree with a state's structure."""
    layout = plan.offload
    assert layout is not None
    result: dict[str, dict[str, Any]] = {leaf.name: {} for leaf in leaves}
    masters = [name for name in layout.arrays if name == MASTER]

    def note(leaf: Any, number: int, moment: Any) -> None:
        if leaf.name in result:
            result[leaf.name][layout.arrays[len(masters) + number]] = moment

    if masters:
        for name, arrays in result.items():
            arrays[MASTER] = state["params"][name]
    map_moments(layout.leaves, note, state["opt_state"])
    return result
