"""Best-fit-decreasing packing of texts into rows of one size, as a pure function.

Texts are placed from the longest to the shortest, each into the row with the smallest sufficient
free space (Johnson 1973). All texts of one length are placed at once, and rows are grouped by free
space. The work therefore grows with the number of different lengths and free spaces, without a
search for each text.
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import io
import logging
import os
import re
import stat
from pathlib import Path

import numpy as np

from zerojax.config.late_dataclasses import dataclass
from zerojax.config.regular_files import UnreadableError
from zerojax.runtime.bounded_json import read_bytes
from zerojax.runtime.user_files import (
    CACHE_VARIABLE,
    check_private,
    make_private,
    replacing,
    seal_of,
    user_cache,
)

logger = logging.getLogger("zerojax.data")

# Below this number of texts, packing takes at most 0.3 s on one core; ten million texts take 3 s.
CACHED_TEXTS = 1 << 20
KEPT_FILES = 8
"""Maximum number of packings in the user's cache; a file has 4 bytes per text and 8 per row."""
_VERSION = 2
_NAME = re.compile(r"[0-9a-f]{64}\.npz")


@dataclass(frozen=True, kw_only=True, eq=False)
class Packing:
    """Assignment of texts to rows of fixed length.

    Attributes:
      order: int32 or int64 [texts], indices of the texts of row 0, then of row 1, and so on.
        Indices increase within a row, and the first texts of the rows increase as well.
      starts: int64 [rows + 1]: row r has the texts order[starts[r]:starts[r + 1]].
    """

    order: np.ndarray
    starts: np.ndarray

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.starts) - 1


class _OpenRows:
    """Rows that still have free space, grouped by their number of free tokens."""

    def __init__(self) -> None:
        self._rooms: list[int] = []
        self._rows: dict[int, list[np.ndarray]] = {}

    def tightest(self, length: int) -> int | None:
        """Returns the smallest free space of at least `length` tokens; None if no row has that
        much."""
        place = bisect.bisect_left(self._rooms, length)
        return self._rooms[place] if place < len(self._rooms) else None

    def add(self, room: int, rows: np.ndarray) -> None:
        if room == 0 or not rows.size:
            return
        if room not in self._rows:
            bisect.insort(self._rooms, room)
            self._rows[room] = []
        self._rows[room].append(rows)

    def take(self, room: int, count: int) -> np.ndarray:
        """Removes and returns at most `count` rows with exactly `room` free tokens, the oldest
        first."""
        waiting, taken = self._rows[room], []
        while waiting and count:
            rows = waiting.pop(0)
            if len(rows) > count:
                waiting.insert(0, rows[count:])
                rows = rows[:count]
            taken.append(rows)
            count -= len(rows)
        if not waiting:
            del self._rows[room]
            self._rooms.remove(room)
        return np.concatenate(taken)


def best_fit_decreasing(lengths: np.ndarray, capacity: int) -> Packing:
    """Packs texts by best-fit decreasing into few rows; a pure function.

    Args:
      lengths: integers [n] in [1, capacity], number of tokens of each text.
      capacity: number of tokens of a row.

    Raises:
      ValueError: a length is outside [1, capacity].
    """
    lengths = np.asarray(lengths)
    if lengths.size and not 1 <= lengths.min() <= lengths.max() <= capacity:
        raise ValueError(
            f"texts of {lengths.min()} to {lengths.max()} tokens do not fit into rows of "
            f"{capacity}; use lengths from 1 to {capacity}"
        )
    counts = np.bincount(lengths, minlength=1)
    # NumPy uses a radix sort for narrow integers, in one pass.
    narrow = np.uint16 if capacity <= np.iinfo(np.uint16).max else np.int64
    by_length = np.argsort(lengths.astype(narrow), kind="stable")
    ends = np.cumsum(counts)
    row_of_text = np.empty(len(lengths), _index_type(len(lengths)))
    rows, num_rows = _OpenRows(), 0
    for length in np.flatnonzero(counts)[::-1].tolist():
        texts = by_length[ends[length] - counts[length] : ends[length]]
        while texts.size:
            room = rows.tightest(length)
            # A row with space for several texts of this length is the tightest row for each of
            # them, so it gets as many as fit.
            per_row = (room or capacity) // length
            needed = -(-len(texts) // per_row)
            if room is None:
                taken = np.arange(num_rows, num_rows + needed, dtype=row_of_text.dtype)
                num_rows, room = num_rows + needed, capacity
            else:
                taken = rows.take(room, needed)
            placed = min(len(texts), len(taken) * per_row)
            row_of_text[texts[:placed]] = np.repeat(taken, per_row)[:placed]
            # The last row may have received fewer texts than fit into it.
            in_last = placed - (len(taken) - 1) * per_row
            rows.add(room - per_row * length, taken[:-1])
            rows.add(room - in_last * length, taken[-1:])
            texts = texts[placed:]
    return _numbered(row_of_text, num_rows)


def _index_type(num_texts: int) -> type[np.signedinteger]:
    return np.int32 if num_texts < 1 << 31 else np.int64


def _numbered(row_of_text: np.ndarray, num_rows: int) -> Packing:
    """Renumbers rows in the order of their first texts, so that any part of the rows is a sample
    of all lengths."""
    order = np.argsort(row_of_text, kind="stable")
    sizes = np.bincount(row_of_text, minlength=num_rows)
    first = order[np.cumsum(sizes) - sizes]
    number = np.empty(num_rows, row_of_text.dtype)
    number[np.argsort(first, kind="stable")] = np.arange(num_rows, dtype=row_of_text.dtype)
    row_of_text = number[row_of_text]
    starts = np.zeros(num_rows + 1, np.int64)
    np.cumsum(np.bincount(row_of_text, minlength=num_rows), out=starts[1:])
    order = np.argsort(row_of_text, kind="stable").astype(row_of_text.dtype)
    return Packing(order=order, starts=starts)


def packing_of(lengths: np.ndarray, capacity: int) -> Packing:
    """Returns the result of `best_fit_decreasing`; for `CACHED_TEXTS` texts or more it is read from
    or stored in the user's cache."""
    folder = user_cache()
    if folder is None or len(lengths) < CACHED_TEXTS:
        return best_fit_decreasing(lengths, capacity)
    digest = hashlib.sha256(f"{_VERSION} {capacity} {len(lengths)}:".encode())
    digest.update(np.ascontiguousarray(lengths, "<i8").tobytes())
    file = folder / "packings" / f"{digest.hexdigest()}.npz"
    packing = _load(file, len(lengths))
    if packing is None:
        packing = best_fit_decreasing(lengths, capacity)
        _store(file, packing)
    return packing


def _load(file: Path, num_texts: int) -> Packing | None:
    """Loads a cached packing of `num_texts` texts; returns None if there is none or, with a
    warning, if it is damaged or was stored under another name."""
    try:
        check_private(file)
        # There are at most as many rows as texts.
        content = read_bytes(file, max_bytes=16 * num_texts + 4096, follow=False)
        with np.load(io.BytesIO(content), allow_pickle=False) as kept:
            order, starts = kept["order"], kept["starts"]
            seal = kept.get("seal", np.empty(0)).tobytes()
    except FileNotFoundError:
        return None
    except Exception as error:  # a damaged archive raises many types
        logger.warning("data: %s is not used (%s); the texts are packed again", file, error)
        return None
    if seal != seal_of(file.name, order.data, starts.data):
        logger.warning("data: %s was made for other texts; the texts are packed again", file)
        return None
    with contextlib.suppress(OSError):
        os.utime(file)  # the least recently used file is deleted first
    return Packing(order=order, starts=starts)


def _store(file: Path, packing: Packing) -> None:
    """Writes a packing to the cache atomically, and deletes all but the `KEPT_FILES` last used
    ones; warns if the cache cannot be written."""
    try:
        make_private(file.parent)
        seal = seal_of(file.name, packing.order.data, packing.starts.data)
        with replacing(file, mode=0o600) as stream:
            np.savez(
                stream, order=packing.order, starts=packing.starts, seal=np.frombuffer(seal, "u1")
            )
        kept = sorted(_packings(file.parent), key=lambda path: path.stat().st_mtime_ns)
        for old in kept[:-KEPT_FILES]:
            old.unlink(missing_ok=True)
    except (OSError, UnreadableError) as error:
        logger.warning(
            "data: the packing of the texts could not be cached in %s (%s); set %s to another "
            "folder, or to off",
            file.parent,
            getattr(error, "strerror", None) or error,
            CACHE_VARIABLE,
        )


def _packings(folder: Path) -> list[Path]:
    """Returns the regular files in a folder that have names of packings."""
    return [
        path
        for path in folder.iterdir()
        if _NAME.fullmatch(path.name) and stat.S_ISREG(path.lstat().st_mode)
    ]
