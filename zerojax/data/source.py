"""Sources: the rows of each batch as a pure function of one integer."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from zerojax.config.checks import names_keywords
from zerojax.data.packing import Boundary
from zerojax.data.shuffle import permute
from zerojax.data.tokens import Tokens, check_block, check_not_cut, gather_windows


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RowSource(abc.ABC):
    """Source of the rows of batches, each row a pure function of its number; base class of all text
    sources."""

    kind: ClassVar[str] = "tokens"
    """Type of the data, stored in a saved position."""

    seq_len: int
    """Inputs per row."""
    global_batch_size: int
    """Rows per batch, over all processes."""
    vocab_size: int | None = None
    """Bound of the ids that are read (all are below); None: unknown."""

    @property
    @abc.abstractmethod
    def num_rows(self) -> int:
        """Rows in one epoch."""

    @property
    @abc.abstractmethod
    def tokenizer(self) -> Mapping[str, Any] | None:
        """`Tokenizer.to_dict` of the tokenizer that made the ids; None: unknown."""

    @property
    def template(self) -> str | None:
        """Chat template that made the texts; None if there was none."""
        return None

    @abc.abstractmethod
    def rows_at(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the rows with these numbers, counted over all epochs; pure.

        Args:
          numbers: int64 [rows], at least 0, in any order.
        """

    @abc.abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """Returns the settings that define what a row number means; JSON-able, saved with the
        position."""

    @abc.abstractmethod
    def describe(self) -> str:
        """Returns a one-line description for the log."""

    @property
    def steps_per_epoch(self) -> float:
        """Batches in one epoch; a batch may hold the end of one epoch and the start of the next."""
        return self.num_rows / self.global_batch_size

    def rows(self, first: int, last: int) -> dict[str, np.ndarray]:
        """Returns rows `first` to `last` (exclusive), counted over all epochs; pure."""
        return self.rows_at(np.arange(first, last, dtype=np.int64))

    def epochs(self, row: int) -> dict[str, int]:
        """Returns the epoch of each part of the data, from 1, after `row` rows.

        Empty for a single set of data, where the step shows the epoch.
        """
        del row
        return {}

    def batch(self, step: int, lo: int = 0, hi: int | None = None) -> dict[str, np.ndarray]:
        """Returns rows [lo, hi) of the batch of `step` (counted from 0); pure.

        Concatenating the rows of any partition of [0, global_batch_size) gives the same batch.

        Returns:
          The arrays of `rows`, [hi - lo, ...] each.

        Raises:
          ValueError: a negative step, rows outside the batch, or an id outside the vocabulary.
        """
        size = self.global_batch_size
        hi = size if hi is None else hi
        if step < 0 or not 0 <= lo <= hi <= size:
            raise ValueError(
                f"step={step}, rows [{lo}, {hi}): the step must be at least 0, and the rows "
                f"within [0, {size})"
            )
        return self.rows(step * size + lo, step * size + hi)


def check_sizes(source: RowSource) -> None:
    """Raises if `seq_len` or `global_batch_size` is below 1.

    Raises:
      ValueError: names the field.
    """
    for field in ("seq_len", "global_batch_size"):
        if getattr(source, field) < 1:
            raise ValueError(f"{field}={getattr(source, field)}: it must be at least 1")


def in_epochs(rows: np.ndarray, size: int, seed: int | None) -> np.ndarray:
    """Returns the item that each row of an endless sequence shows; every item occurs once per
    epoch.

    Args:
      rows: int64 [n], numbers of rows.
      size: number of items.
      seed: row r holds `permute(r mod size, size, (seed, r div size))`; None: r mod size.

    Returns:
      int64 [n] in [0, size).
    """
    epochs, positions = rows // size, rows % size
    if seed is None:
        return positions
    things = np.empty_like(rows)
    for epoch in np.unique(epochs).tolist():
        mine = epochs == epoch
        things[mine] = permute(positions[mine], size, (seed, epoch))
    return things


@names_keywords()
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TokenSource(RowSource):
    """Source of rows of consecutive tokens and the tokens after them, shuffled again in every
    epoch.

    Row r of the endless sequence of rows is window `permute(r mod n, n, (seed, r div n))` of all n
    windows. So no window is read twice within an epoch, and any process can compute any row of any
    batch without the rows before it.
    """

    tokens: Tokens
    seq_len: int
    """Inputs per row; a window is one token longer."""
    global_batch_size: int
    """Rows per batch, over all processes."""
    seed: int = 0
    shuffle: bool = True
    vocab_size: int | None = None
    """Bound of the ids that are read (all are below); None: the vocabulary that the token files
    state."""
    boundary: Boundary | None = None
    """Rule for text boundaries; batches then have segments and weights. None: a row counts as one
    text."""

    def __post_init__(self) -> None:
        check_sizes(self)
        if self.num_windows < self.global_batch_size:
            wanted = self.global_batch_size * self.seq_len + 1
            raise ValueError(
                f"{self.tokens.name} has {self.tokens.count} tokens: {self.num_windows} windows of "
                f"seq_len={self.seq_len}, but one batch has global_batch_size="
                f"{self.global_batch_size} (at least {wanted} tokens); lower seq_len or "
                "global_batch_size, or give more text"
            )

    @functools.cached_property
    def _last_windows(self) -> np.ndarray:
        return np.cumsum(self.tokens.windows_per_part(self.seq_len))

    @property
    def num_windows(self) -> int:
        """Number of windows, which are the rows of one epoch."""
        return int(self._last_windows[-1]) if len(self._last_windows) else 0

    @property
    def num_rows(self) -> int:
        """Number of rows of one epoch, which are the windows."""
        return self.num_windows

    @property
    def tokenizer(self) -> Mapping[str, Any] | None:
        """Tokenizer that made the token files."""
        return self.tokens.tokenizer

    def rows_at(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the rows with these numbers, counted over all epochs; pure.

        Returns:
          {"tokens": int32 [rows, seq_len], "targets": int32 [rows, seq_len]}; the targets are the
          next tokens. With a `boundary` also "segments" and "weights", see `Boundary.describe`.

        Raises:
          ValueError: an id outside the vocabulary.
        """
        seed = self.seed if self.shuffle else None
        windows = self._read(in_epochs(numbers, self.num_windows, seed))
        rows = {
            "tokens": np.ascontiguousarray(windows[:, :-1], np.int32),
            "targets": np.ascontiguousarray(windows[:, 1:], np.int32),
        }
        return rows if self.boundary is None else rows | self.boundary.describe(windows)

    def fingerprint(self) -> dict[str, Any]:
        """Returns the settings that define what a row number means; saved with the position."""
        own = {
            "tokens": self.tokens.fingerprint,
            "seq_len": self.seq_len,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }
        return own if self.boundary is None else own | dataclasses.asdict(self.boundary)

    def describe(self) -> str:
        """Returns a one-line description for the log."""
        return (
            f"{self.tokens.name}: {self.tokens.count:,} tokens, {self.num_windows:,} windows of "
            f"{self.seq_len}, {self.steps_per_epoch:,.1f} steps per epoch"
        )

    def _read(self, numbers: np.ndarray) -> np.ndarray:
        """Reads windows of the tokens, integers [b, seq_len + 1]; one indexing operation per part
        of the tokens."""
        part_numbers = np.searchsorted(self._last_windows, numbers, side="right")
        touched = np.unique(part_numbers)
        if len(touched) == 1:
            return self._read_part(int(touched[0]), numbers)
        windows = np.empty((len(numbers), self.seq_len + 1), np.int32)
        for index in touched:
            mine = part_numbers == index
            windows[mine] = self._read_part(int(index), numbers[mine])
        return windows

    def _read_part(self, index: int, numbers: np.ndarray) -> np.ndarray:
        part = self.tokens.parts[index]
        before = self._last_windows[index - 1] if index else 0
        starts = (numbers - before) * self.seq_len
        check_not_cut(part.ids, part.name)
        windows = gather_windows(part.ids, starts, self.seq_len + 1)
        self._check(windows, part.name, part.offset + starts)
        return windows

    def _check(self, windows: np.ndarray, name: str, offsets: np.ndarray) -> None:
        """Raises for ids of `windows` outside the vocabulary; if that is unknown, for ids that
        int32 cannot hold."""
        limit = self.vocab_size or self.tokens.vocab_size or 1 << 31
        bounds = np.iinfo(windows.dtype)
        if bounds.min >= 0 and bounds.max < limit:
            return
        if windows.max() >= limit or windows.min() < 0:
            for window, offset in zip(windows, offsets, strict=True):
                check_block(window, limit, name=name, offset=int(offset))
