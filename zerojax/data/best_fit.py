"""Best-fit decreasing: texts of given lengths in rows of one size, as a pure function.

Texts go in from the longest to the shortest, each into the row with the least room that it fits in
(Johnson 1973). All texts of one length are placed at once: rows are kept by their room, so the
work grows with the number of different lengths and rooms and not with a search for each text.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import hashlib
import logging
import os
from pathlib import Path

import numpy as np

from zerojax.runtime.user_files import CACHE_VARIABLE, replacing, user_cache

logger = logging.getLogger("zerojax.data")

# Fewer texts are packed anew in about 0.3 s of one core, ten million in 3 s.
CACHED_TEXTS = 1 << 20
KEPT_FILES = 8
"""Of the user's cache; 4 bytes for each text and 8 for each row."""
_VERSION = 1


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Packing:
    """Which texts lie in which row.

    Attributes:
      order: int32 or int64 [texts], the texts of row 0, then those of row 1, and so on; within a
        row they rise, and so do the first texts of the rows.
      starts: int64 [rows + 1]: row r has the texts order[starts[r]:starts[r + 1]].
    """

    order: np.ndarray
    starts: np.ndarray

    @property
    def num_rows(self) -> int:
        """Rows in all."""
        return len(self.starts) - 1


class _OpenRows:
    """Rows that have room left, by their room."""

    def __init__(self) -> None:
        self._rooms: list[int] = []
        self._rows: dict[int, list[np.ndarray]] = {}

    def tightest(self, length: int) -> int | None:
        """The least room of at least `length`; None: no row has that much."""
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
        """At most `count` rows with this room, those that have had it for the longest first."""
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
    """Texts in as few rows as best-fit decreasing finds; pure.

    Args:
      lengths: integers [n] in [1, capacity], tokens of each text.
      capacity: tokens of a row.

    Raises:
      ValueError: a length outside [1, capacity].
    """
    lengths = np.asarray(lengths)
    if lengths.size and not 1 <= lengths.min() <= lengths.max() <= capacity:
        raise ValueError(
            f"texts of {lengths.min()} to {lengths.max()} tokens do not fit into rows of "
            f"{capacity}; take lengths from 1 to {capacity}"
        )
    counts = np.bincount(lengths, minlength=1)
    # Narrow integers are sorted by their digits, in one pass.
    narrow = np.uint16 if capacity <= np.iinfo(np.uint16).max else np.int64
    by_length = np.argsort(lengths.astype(narrow), kind="stable")
    ends = np.cumsum(counts)
    row_of_text = np.empty(len(lengths), np.int32 if len(lengths) < 1 << 31 else np.int64)
    rows, num_rows = _OpenRows(), 0
    for length in np.flatnonzero(counts)[::-1].tolist():
        texts = by_length[ends[length] - counts[length] : ends[length]]
        while texts.size:
            room = rows.tightest(length)
            per_row = (room or capacity) // length
            needed = -(-len(texts) // per_row)
            if room is None:
                taken = np.arange(num_rows, num_rows + needed, dtype=row_of_text.dtype)
                num_rows, room = num_rows + needed, capacity
            else:
                taken = rows.take(room, needed)
            placed = min(len(texts), len(taken) * per_row)
            row_of_text[texts[:placed]] = np.repeat(taken, per_row)[:placed]
            # The last row may have got fewer texts than it has room for.
            in_last = placed - (len(taken) - 1) * per_row
            rows.add(room - per_row * length, taken[:-1])
            rows.add(room - in_last * length, taken[-1:])
            texts = texts[placed:]
    return _numbered(row_of_text, num_rows)


def _numbered(row_of_text: np.ndarray, num_rows: int) -> Packing:
    """Rows in the order of their first texts, so that a part of them is a sample of all lengths."""
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
    """`best_fit_decreasing`, kept in the user's cache where there are many texts."""
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
    """What was kept; None where there is nothing, or where it is damaged, which is said."""
    try:
        # The archive has checksums. A damaged one is closed by nobody but who opened the file.
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as kept:
            order, starts = kept["order"], kept["starts"]
    except FileNotFoundError:
        return None
    except Exception as error:  # of a damaged archive there are many kinds
        logger.warning("data: %s is damaged (%s); the texts are packed again", file, error)
        return None
    if order.shape != (num_texts,) or starts[-1] != num_texts:
        logger.warning("data: %s is of other texts; the texts are packed again", file)
        return None
    with contextlib.suppress(OSError):
        os.utime(file)  # the longest unused one goes first
    return Packing(order=order, starts=starts)


def _store(file: Path, packing: Packing) -> None:
    """Keeps a packing: a reader sees all of it or nothing."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file, mode=0o600) as stream:
            np.savez(stream, order=packing.order, starts=packing.starts)
        kept = sorted(file.parent.glob("*.npz"), key=lambda path: path.stat().st_mtime_ns)
        for old in kept[:-KEPT_FILES]:
            old.unlink(missing_ok=True)
    except OSError as error:
        logger.warning(
            "data: the packing of the texts was not kept in %s (%s); set %s to another folder, or "
            "to off",
            file.parent,
            error.strerror or error,
            CACHE_VARIABLE,
        )
