"""Writes large arrays into files piece by piece, and reads any part of them.

Every process writes a file of bytes and a table that describes the file. A block is a part of an
array, such as the shard of one device. A piece is a run of elements of a block. A reader requests
any part of an array, whatever the blocks were. Writer and reader hold in memory only one piece and
the requested part.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import ml_dtypes  # noqa: F401  (teaches NumPy the name "bfloat16")
import numpy as np

from zerojax.checkpoint import fingerprint_math
from zerojax.checkpoint.fingerprint_math import Sums
from zerojax.checkpoint.store.boxes import Box, Shape, overlap, parts_of_run, slices_of
from zerojax.checkpoint.store.direct_io import StoreError, StreamFile, read_into
from zerojax.config.display import quoted
from zerojax.config.late_dataclasses import dataclass
from zerojax.config.regular_files import UnreadableError, open_regular
from zerojax.runtime.bounded_json import load

_FORMAT = 1
_MOST_BYTES = 256 << 20


@dataclass(frozen=True, kw_only=True)
class ShardBlock:
    """A block of an array, such as one device's shard, whose elements are written in pieces.

    Attributes:
      name: name of the array.
      start: index of the block's first element in the stored array.
      shape: shape of the block.
      rows: row in the array for each stored row, -1 for padding; None if rows were stored in the
        order of the array.
      whole: shape of the array without padding, for the fingerprint; None: compute no fingerprint.
    """

    name: str
    start: Shape
    shape: Shape
    rows: tuple[int, ...] | None = None
    whole: Shape | None = None


class PieceWriter:
    """Writes arrays of one process, piece by piece, into a file; `close` writes the file's table.

    When `close` returns, the file and the table are on the disk.
    """

    def __init__(self, folder: Path, process: int):
        """Creates the file of a process.

        Args:
          folder: an existing folder, which all processes may share.
          process: number of this process.

        Raises:
          OSError: the operating system reports an error.
        """
        self._file = StreamFile(folder / f"process_{process}.bin")
        self._tables: dict[ShardBlock, list[tuple[int, int, int]]] = {}
        self._sums: dict[ShardBlock, list[Sums]] = {}
        self._dtypes: dict[str, str] = {}

    def write(self, block: ShardBlock, first: int, piece: np.ndarray) -> None:
        """Appends elements of a block.

        Args:
          block: block that contains the elements.
          first: index of the first element in the block, in C order.
          piece: the elements, a 1-D contiguous array.
        """
        self._dtypes.setdefault(block.name, piece.dtype.name)
        if block.whole is not None:
            self._sums.setdefault(block, []).append(_sums_of_run(block, first, piece))
        at = self._file.num_bytes
        self._file.append(piece)
        self._tables.setdefault(block, []).append((first, len(piece), at))

    def close(self) -> None:
        """Writes the table and closes the file."""
        # Before the table, which says that the file is complete.
        self._file.close()
        blocks = [
            {
                **dataclasses.asdict(block),
                "dtype": self._dtypes[block.name],
                "pieces": pieces,
                "sums": self._sums.get(block),
            }
            for block, pieces in self._tables.items()
        ]
        length = self._file.num_bytes
        table = json.dumps({"format": _FORMAT, "bytes": length, "blocks": blocks}).encode()
        tables = StreamFile(self._file.path.with_suffix(".json"))
        tables.append(np.frombuffer(table, np.uint8))
        tables.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self._file.abandon()


@dataclass(frozen=True)
class _Pieces:
    path: Path
    block: ShardBlock
    dtype: np.dtype
    runs: Sequence[tuple[int, int, int]]  # first element, elements, byte in the file
    sums: Sequence[Sums] | None  # fingerprint of each run; None if not computed


class PieceReader:
    """Reads arrays that `PieceWriter`s of all processes have written into a folder."""

    def __init__(self, folder: Path):
        """Reads the tables of all processes, which list the arrays.

        Args:
          folder: folder that the `PieceWriter`s wrote.

        Raises:
          StoreError: a table is missing or of another version.
          OSError: the operating system reports an error.
        """
        self._pieces: dict[str, list[_Pieces]] = {}
        tables = sorted(folder.glob("process_*.json"))
        if not tables:
            raise StoreError(f"{folder} has no file process_*.json, which lists the arrays")
        for path in tables:
            for found in _read_table(path):
                self._pieces.setdefault(found.block.name, []).append(found)

    @property
    def names(self) -> frozenset[str]:
        """Names of the arrays in the folder."""
        return frozenset(self._pieces)

    def fingerprint(self, name: str) -> Sums | None:
        """Returns the fingerprint of an array, computed when it was written; None if it was not
        computed."""
        found: dict[tuple[Shape, int], Sums] = {}
        for one in self._pieces[name]:
            if one.sums is None:
                return None
            for (first, _, _), sums in zip(one.runs, one.sums, strict=True):
                # A run of a copy on another device counts once.
                found.setdefault((one.block.start, first), (sums[0], sums[1]))
        return fingerprint_math.add(*found.values())

    def read(self, name: str, box: Box) -> np.ndarray:
        """Reads a part of an array.

        Args:
          name: one of `names`.
          box: the part (rectangular) to read.

        Raises:
          StoreError: some elements of the part were never written.
        """
        pieces = self._pieces[name]
        result = np.empty(box[1], pieces[0].dtype)
        found = 0
        seen: set[tuple[Shape, int]] = set()
        for one in pieces:
            # With `rows`, the place of a stored row says nothing about its place in the array.
            if one.block.rows is None and overlap((one.block.start, one.block.shape), box) is None:
                continue
            for first, count, offset in one.runs:
                if (one.block.start, first) in seen:  # a copy on another device
                    continue
                seen.add((one.block.start, first))
                found += _read_run(one, (first, count, offset), box, result)
        if found != result.size:
            raise StoreError(
                f"{name}: {result.size - found} of {result.size} elements from {box[0]} on were "
                "never written"
            )
        return result


def _read_table(path: Path) -> list[_Pieces]:
    """Reads the table that one process wrote: its blocks and the positions of their pieces.

    Raises:
      StoreError: the table was not written by this version, or does not match its file.
      OSError: the operating system reports an error.
    """
    try:
        table = load(path, max_bytes=_MOST_BYTES, follow=False)
        if not isinstance(table, dict) or table.get("format") != _FORMAT:
            found = table.get("format") if isinstance(table, dict) else table
            raise StoreError(
                f"{path}: written as format {quoted(found)}, this version reads {_FORMAT}; use the "
                "version that wrote it"
            )
        data = path.with_suffix(".bin")
        with open(open_regular(data, follow=False), "rb") as file:
            size = os.fstat(file.fileno()).st_size
        if size != table["bytes"]:
            raise StoreError(
                f"{data}: {size} bytes instead of {quoted(table['bytes'])} (from the table of "
                "arrays)"
            )
        return [_as_pieces(data, entry, size) for entry in table["blocks"]]
    except UnreadableError as error:
        raise StoreError(str(error)) from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StoreError(
            f"{path}: not a table of arrays ({type(error).__name__}: {error})"
        ) from None


def _as_pieces(data: Path, entry: dict[str, Any], size: int) -> _Pieces:
    """Converts an entry of the table (one block) to `_Pieces`.

    Raises:
      KeyError, TypeError, ValueError: the entry is invalid, or its pieces are not in the file.
    """
    dtype, runs, sums = np.dtype(entry["dtype"]), entry["pieces"], entry.get("sums")
    start, shape = tuple(entry["start"]), tuple(entry["shape"])
    rows = None if entry["rows"] is None else tuple(entry["rows"])
    # One is added, because the row of padding is -1.
    numbers = [*start, *shape, *(row + 1 for row in rows or ())]
    for first, count, offset in runs:
        numbers += [first, count, offset]
        if offset + count * dtype.itemsize > size or first + count > math.prod(shape):
            raise ValueError(f"a part of {quoted(entry['name'])} is missing in the file")
    for pair in sums or ():
        numbers += pair
    if not all(type(number) is int and 0 <= number < 2**62 for number in numbers):
        raise ValueError(f"{quoted(entry['name'])} has invalid positions")
    is_even = len(start) == len(shape) and (rows is None or len(rows) >= start[0] + shape[0])
    has_sums = sums is None or (len(sums) == len(runs) and all(len(pair) == 2 for pair in sums))
    if not (isinstance(entry["name"], str) and is_even and has_sums) or dtype.hasobject:
        raise ValueError(f"{quoted(entry['name'])} has no valid block")
    block = ShardBlock(name=entry["name"], start=start, shape=shape, rows=rows)
    return _Pieces(data, block, dtype, runs, sums)


def _read_run(pieces: _Pieces, run: tuple[int, int, int], wanted: Box, result: np.ndarray) -> int:
    """Copies the elements of a run that are in the box `wanted` into `result`; returns their
    number."""
    (first, count, offset), block, found = run, pieces.block, 0
    parts = parts_of_run((block.start, block.shape), (first, count), block.rows, wanted)
    for before, size, inside, box in parts:
        byte = offset + before * pieces.dtype.itemsize
        target = result[(*slices_of(box, wanted[0]), ...)]
        # Read directly if the values are one stretch in the file and in the result.
        if box[1] == size and target.flags.c_contiguous:
            _fill(pieces.path, byte, target)
        else:
            target[...] = np.memmap(pieces.path, pieces.dtype, "r", byte, size)[inside]
        found += target.size
    return found


def _fill(path: Path, byte: int, target: np.ndarray) -> None:
    """Fills the contiguous array `target` with bytes of a file, from position `byte` on."""
    view = target.reshape(-1).view(np.uint8).data
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        read_into(descriptor, view, byte)
    finally:
        os.close(descriptor)


def _sums_of_run(block: ShardBlock, first: int, piece: np.ndarray) -> Sums:
    """Returns the fingerprint of a run of a block's elements, without padding rows."""
    assert block.whole is not None
    whole = (0,) * len(block.whole), block.whole
    parts = parts_of_run((block.start, block.shape), (first, len(piece)), block.rows, whole)
    sums = []
    for before, size, inside, box in parts:
        values = piece[before : before + math.prod(size)].reshape(size)[inside]
        sums.append(fingerprint_math.of_part(values, box[0], block.whole))
    return fingerprint_math.add(*sums)
