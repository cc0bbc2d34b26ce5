"""Reads arrays of a checkpoint, whole or in part, from each of the four places that store arrays.

An array is in Orbax's files, in a pack (`packs`: small arrays stacked), in pieces (`store.pieces`:
arrays that do not fit into memory), or in a folder of pretrained weights (`BaseReader`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from zerojax.checkpoint import arrays, packs
from zerojax.checkpoint.arrays import array_of_parts
from zerojax.checkpoint.base_weights import BaseReader
from zerojax.checkpoint.store.boxes import Box, box_of, slices_of
from zerojax.checkpoint.store.pieces import PieceReader


class Unread:
    """An array of a checkpoint that has not been read yet; `open` reads any part of it.

    Attributes:
      shape: shape of the whole array.
      dtype: dtype of the array.
    """

    def __init__(
        self,
        leaf: jax.Array | jax.ShapeDtypeStruct,
        open_array: Callable[[], Callable[[Box], np.ndarray]],
        open_layers: Callable[[], Callable[[int], np.ndarray] | None],
    ) -> None:
        self.shape, self.dtype = tuple(leaf.shape), np.dtype(leaf.dtype)
        self._open, self._open_layers = open_array, open_layers

    def open(self) -> Callable[[Box], np.ndarray]:
        """Returns a function that reads any part (box) of the array.

        An array in Orbax's files, alone or in a pack, is read as a whole into host memory, and
        every process must call this method; the memory is freed with the returned function. From
        pieces and from a folder of frozen weights, only the requested part is read.
        """
        return self._open()

    def open_layers(self) -> Callable[[int], np.ndarray] | None:
        """Returns a function that reads one layer (index of the first dimension) of the array.

        A single process may call it. Returns None if no layer can be read alone: the files hold
        several in one chunk or pack, or the array has no dimension of layers. `open` then costs
        less.
        """
        return self._open_layers()


class StoredArrays:
    """Reader of the arrays of one checkpoint, wherever each array is stored."""

    def __init__(self, folder: Path, pieces: Path, base: BaseReader) -> None:
        """Opens the tables that say where each array is stored.

        Args:
          folder: folder of Orbax's files.
          pieces: folder of files written by `checkpoint.store.pieces`; it may be missing.
          base: reader of the arrays that the checkpoint does not store.
        """
        self._base = base
        self._folder = folder
        self._reader = PieceReader(pieces) if pieces.is_dir() else None
        self._table = packs.load_table(folder.parent)
        self._pack: tuple[str, np.ndarray] | None = None  # the pack that was read last

    def read(
        self, wanted: Mapping[str, Any], *, unread: Collection[str], subset: bool
    ) -> dict[str, Any]:
        """Returns {name: array} for `wanted`, with an `Unread` in place of each array in `unread`.

        Args:
          wanted: {name: `ShapeDtypeStruct` with a sharding}.
          unread: names of arrays to be read later.
          subset: True: the checkpoint may hold more arrays than `wanted`.
        """
        in_pieces = frozenset() if self._reader is None else self._reader.names
        in_packs, in_base = self._table.names, self._base.names
        result: dict[str, Any] = {}
        now = {n: leaf for n, leaf in wanted.items() if n not in unread}
        alone = {n: leaf for n, leaf in now.items() if n not in in_pieces | in_packs | in_base}
        if alone:
            # The folder of Orbax then also holds packs, or arrays that are not read from it now.
            subset = subset or bool(in_packs) or len(alone) < len(wanted)
            result |= arrays.read(self._folder, alone, subset=subset)
        for name in now.keys() & in_pieces:
            result[name] = self._from_pieces(name, now[name])
        # Pack by pack, since only the last one is kept, and in an order that is the same for all
        # processes, since they read a pack together.
        for name in sorted(now.keys() & in_packs, key=lambda name: (self._pack_of(name), name)):
            result[name] = self._from_pack(name, now[name])
        self._pack = None
        for name in sorted(now.keys() & in_base):  # last: may fail in a single process
            result[name] = self._from_base(name, now[name])
        for name, leaf in wanted.items():
            if name in unread:
                opener = self._opener(name, leaf, name in in_pieces)
                result[name] = Unread(leaf, opener, self._opener_of_layers(name, leaf))
        return result

    def _from_pieces(self, name: str, leaf: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
        """Reads an array from pieces, one device's part after the other; holds only one part in
        host memory."""
        reader = self._reader
        assert reader is not None
        return array_of_parts(
            leaf.shape, leaf.sharding, lambda index: reader.read(name, box_of(index, leaf.shape))
        )

    def _from_base(self, name: str, leaf: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
        """Reads an array from the folder of frozen weights, one device's part after the other. If
        consecutive devices have the same part, it is read once."""
        last: tuple[Box, np.ndarray] | None = None

        def part(index: tuple[slice, ...]) -> np.ndarray:
            nonlocal last
            box = box_of(index, leaf.shape)
            if last is None or last[0] != box:
                last = None  # frees the old part before the next is read
                last = box, self._base.read(name, box)
                return last[1]
            # `array_of_parts` needs memory of its own for each device.
            return last[1].copy()

        return array_of_parts(leaf.shape, leaf.sharding, part)

    def _from_pack(self, name: str, leaf: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
        pack, table = self._read_pack(name), self._table
        return array_of_parts(
            leaf.shape,
            leaf.sharding,
            lambda index: table.part(name, pack, box_of(index, leaf.shape)),
        )

    def _pack_of(self, name: str) -> str:
        return self._table.pack_of(name)[0]

    def _read_pack(self, name: str) -> np.ndarray:
        """Reads the whole pack that contains an array, and caches the last pack. Every process must
        call it."""
        pack, leaf = self._table.pack_of(name)
        if self._pack is None or self._pack[0] != pack:
            self._pack = None  # frees the old pack before the next is read
            self._pack = pack, arrays.read_on_host(self._folder, pack, leaf)
        return self._pack[1]

    def _opener(
        self, name: str, leaf: jax.Array | jax.ShapeDtypeStruct, in_pieces: bool
    ) -> Callable[[], Callable[[Box], np.ndarray]]:
        def open_pieces() -> Callable[[Box], np.ndarray]:
            reader = self._reader
            assert reader is not None
            return lambda box: reader.read(name, box)

        def open_pack() -> Callable[[Box], np.ndarray]:
            pack = self._read_pack(name)
            return lambda box: self._table.part(name, pack, box)

        def open_whole() -> Callable[[Box], np.ndarray]:
            array = arrays.read_on_host(self._folder, name, leaf)
            return lambda box: array[slices_of(box, (0,) * len(leaf.shape))]

        if name in self._base.names:
            return lambda: functools.partial(self._base.read, name)
        if in_pieces:
            return open_pieces
        return open_pack if name in self._table.names else open_whole

    def _opener_of_layers(
        self, name: str, leaf: jax.Array | jax.ShapeDtypeStruct
    ) -> Callable[[], Callable[[int], np.ndarray] | None]:
        def open_layers() -> Callable[[int], np.ndarray] | None:
            if name in self._base.names:
                return self._base.layers(name)
            reader, rest = self._reader, tuple(leaf.shape[1:])
            if reader is not None and name in reader.names:
                start = (0,) * len(rest)
                return lambda index: reader.read(name, ((index, *start), (1, *rest)))[0]
            if name in self._table.names:
                return None  # a pack is small
            return arrays.open_layers(self._folder, name)

        return open_layers
