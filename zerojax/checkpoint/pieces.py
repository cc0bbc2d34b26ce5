"""Which arrays of a checkpoint lie in Orbax's files and which in pieces, and how parts are read.

Knows names, boxes and folders; never touches steps, retention, or who asks for a part.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from zerojax.checkpoint import arrays
from zerojax.host_parts import array_of_parts
from zerojax.store.boxes import Box
from zerojax.store.pieces import PieceReader


class Unread:
    """An array of a checkpoint that was not read yet.

    Attributes:
      shape, dtype: of the whole array.
    """

    def __init__(self, leaf: Any, open_array: Callable[[], Callable[[Box], np.ndarray]]) -> None:
        self.shape, self.dtype = tuple(leaf.shape), np.dtype(leaf.dtype)
        self._open = open_array

    def open(self) -> Callable[[Box], np.ndarray]:
        """What reads any part of it, a box.

        From Orbax's files the whole array comes at once, onto the host, collectively over all
        processes; it is freed when what this returned is dropped. From pieces only the part comes.
        """
        return self._open()


class Pieces:
    """The arrays of one checkpoint."""

    def __init__(self, folder: Path, pieces: Path) -> None:
        """Opens the tables.

        Args:
          folder: Orbax's; pieces: of `store.pieces`, if there is one.
        """
        self._folder = folder
        self._reader = PieceReader(pieces) if pieces.is_dir() else None

    def read(
        self, wanted: Mapping[str, Any], *, unread: Collection[str], subset: bool
    ) -> dict[str, Any]:
        """The arrays with these names, and `Unread` for those that are to be read later.

        Args:
          wanted: name -> `ShapeDtypeStruct` with a sharding.
          unread: names.
          subset: the checkpoint may hold more.
        """
        in_pieces = frozenset() if self._reader is None else self._reader.names
        now = {n: leaf for n, leaf in wanted.items() if n not in unread and n not in in_pieces}
        result: dict[str, Any] = {}
        if now:
            subset = subset or len(now) < len(wanted)
            result |= arrays.read(self._folder, now, subset=subset)
        for name, leaf in wanted.items():
            if name in unread:
                result[name] = Unread(leaf, self._opener(name, leaf, name in in_pieces))
            elif name in in_pieces:
                result[name] = self._from_pieces(name, leaf)
        return result

    def _from_pieces(self, name: str, leaf: Any) -> jax.Array:
        """Every device's part, one in host memory at a time."""
        reader = self._reader
        assert reader is not None

        return array_of_parts(
            leaf.shape, leaf.sharding, lambda index: reader.read(name, _box(index, leaf.shape))
        )

    def _opener(
        self, name: str, leaf: Any, in_pieces: bool
    ) -> Callable[[], Callable[[Box], np.ndarray]]:
        def open_pieces() -> Callable[[Box], np.ndarray]:
            reader = self._reader
            assert reader is not None
            return lambda box: reader.read(name, box)

        def open_whole() -> Callable[[Box], np.ndarray]:
            array = arrays.read_on_host(self._folder, name, leaf)
            return lambda box: array[_index(box)]

        return open_pieces if in_pieces else open_whole


def _box(index: tuple[slice, ...], shape: tuple[int, ...]) -> Box:
    ranges = [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]
    return tuple(low for low, _ in ranges), tuple(high - low for low, high in ranges)


def _index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(low, low + size) for low, size in zip(*box, strict=True))
