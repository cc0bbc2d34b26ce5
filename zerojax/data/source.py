"""Sources: batches whose rows are a pure function of one integer, the row index."""

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
    """Source of the rows of batches; base class of all sources. Each row is a pure function of its
    index."""

    kind: ClassVar[str] = "tokens"
    """Type of the data, stored with a saved position."""

    seq_len: int
    """Number of input tokens per row."""
    global_batch_size: int
    """Number of rows per batch, over all processes."""
    vocab_size: int | None = None
    """Every id must be below this number; None if unknown."""

    @property
    @abc.abstractmethod
    def num_rows(self) -> int:
        """Number of rows in one epoch."""

    @property
    @abc.abstractmethod
    def tokenizer(self) -> Mapping[str, Any] | None:
        """`Tokenizer.to_dict` of the tokenizer that made the ids; None if unknown."""

    @property
    def template(self) -> str | None:
        """Chat template that made the texts; None if there was none."""
        return None

    @abc.abstractmethod
    def rows_at(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
        """Returns rows by index, counted over all epochs; a pure function.

        Args:
          numbers: int64 [rows], row indices of at least 0, in any order.
        """

    @abc.abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """Returns the settings that determine which data a row index refers to. They are
        JSON-compatible and are saved in checkpoints."""

    @abc.abstractmethod
    def describe(self) -> str:
        """Describes the source in one line for the log."""

    @property
    def steps_per_epoch(self) -> float:
        """Number of batches in one epoch; a batch may contain the end of one and the start of the
        next."""
        return self.num_rows / self.global_batch_size

    def rows(self, first: int, last: int) -> dict[str, np.ndarray]:
        """Returns rows `first` to `last` (exclusive), counted over all epochs; a pure function."""
        return self.rows_at(np.arange(first, last, dtype=np.int64))

    def epochs(self, row: int) -> dict[str, int]:
        """Returns {name of a data set: its epoch, from 1} after `row` rows.

        Empty for a single data set, whose epoch follows from the step.
        """
        del row
        return {}

    def batch(self, step: int, lo: int = 0, hi: int | None = None) -> dict[str, np.ndarray]:
        """Returns rows [lo, hi) of the batch of `step` (counted from 0); a pure function.

        The batch does not depend on how [0, global_batch_size) is divided into ranges [lo, hi).

        Returns:
          The arrays of `rows`, each [hi - lo, ...].

        Raises:
          ValueError: the step is negative, rows are outside the batch, or an id is outside the
            vocabulary.
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
    """Checks that `seq_len` and `global_batch_size` are at least 1.

    Raises:
      ValueError: one of them is below 1; names the field.
    """
    for field in ("seq_len", "global_batch_size"):
        if getattr(source, field) < 1:
            raise ValueError(f"{field}={getattr(source, field)}: it must be at least 1")


def in_epochs(rows: np.ndarray, size: int, seed: int | None) -> np.ndarray:
    """Returns the item of each row of an endless sequence in which every item occurs once per
    epoch.

    Args:
      rows: int64 [n], row indices.
      size: number of items.
      seed: random seed of the order: row r has item `permute(r mod size, size, (seed, r div
        size))`. None: row r has item r mod size.

    Returns:
      Indices of items, int64 [n] in [0, size).
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
    """Source of rows of consecutive tokens and their next tokens, shuffled again in every epoch.

    A window is seq_len + 1 consecutive tokens. With n windows, row r of the endless sequence of
    rows is window `permute(r mod n, n, (seed, r div n))`. No window is read twice within an epoch,
    and any process can compute any row of any batch without the earlier rows. There must be at
    least `global_batch_size` windows.
    """

    tokens: Tokens
    seq_len: int
    """Number of input tokens per row; a window is one token longer."""
    global_batch_size: int
    """Number of rows per batch, over all processes."""
    seed: int = 0
    shuffle: bool = True
    vocab_size: int | None = None
    """Every id must be below this number; None uses the vocabulary size that the token files
    state."""
    boundary: Boundary | None = None
    """Rule for text boundaries; batches then have segments and weights. None: each row is one
    text."""

    def __post_init__(self) -> None:
        check_sizes(self)
        if self.num_windows < self.global_batch_size:
            wanted = self.global_batch_size * self.seq_len + 1
            raise ValueError(
                f"{self.tokens.name} has {self.tokens.count} tokens{self.tokens.share}: "
                f"{self.num_windows} windows of seq_len={self.seq_len}, but one batch has "
                f"global_batch_size={self.global_batch_size} (at least {wanted} tokens); lower "
                "seq_len or global_batch_size, or give more text"
            )

    @functools.cached_property
    def _last_windows(self) -> np.ndarray:
        return np.cumsum(self.tokens.windows_per_part(self.seq_len))

    @property
    def num_windows(self) -> int:
        """Number of windows, which is the number of rows of one epoch."""
        return int(self._last_windows[-1]) if len(self._last_windows) else 0

    @property
    def num_rows(self) -> int:
        """Number of rows of one epoch, which is the number of windows."""
        return self.num_windows

    @property
    def tokenizer(self) -> Mapping[str, Any] | None:
        """Tokenizer that made the token files."""
        return self.tokens.tokenizer

    def rows_at(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
        """Returns rows by index, counted over all epochs; a pure function.

        Returns:
          {"tokens": int32 [rows, seq_len], "targets": int32 [rows, seq_len]}; the targets are the
          next tokens. With a `boundary` also "segments" and "weights", see `Boundary.describe`.

        Raises:
          ValueError: an id is outside the vocabulary.
        """
        seed = self.seed if self.shuffle else None
        windows = self._read(in_epochs(numbers, self.num_windows, seed))
        rows = {
            "tokens": np.ascontiguousarray(windows[:, :-1], np.int32),
            "targets": np.ascontiguousarray(windows[:, 1:], np.int32),
        }
        return rows if self.boundary is None else rows | self.boundary.describe(windows)

    def fingerprint(self) -> dict[str, Any]:
        """Returns the settings that determine which data a row index refers to; saved in
        checkpoints."""
        own = {
            "tokens": self.tokens.fingerprint,
            "seq_len": self.seq_len,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }
        return own if self.boundary is None else own | dataclasses.asdict(self.boundary)

    def describe(self) -> str:
        """Describes the source in one line for the log."""
        return (
            f"{self.tokens.name}: {self.tokens.count:,} tokens, {self.num_windows:,} windows of "
            f"{self.seq_len}, {self.steps_per_epoch:,.1f} steps per epoch"
        )

    def _read(self, numbers: np.ndarray) -> np.ndarray:
        """Reads windows of tokens, integers [rows, seq_len + 1], by one indexing operation per part
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
        """Raises for ids of `windows` outside the vocabulary; if its size is unknown, for ids that
        int32 cannot represent."""
        limit = self.vocab_size or self.tokens.vocab_size or 1 << 31
        # If the dtype holds no invalid id, the windows are not searched.
        bounds = np.iinfo(windows.dtype)
        if bounds.min >= 0 and bounds.max < limit:
            return
        if windows.max() >= limit or windows.min() < 0:
            for window, offset in zip(windows, offsets, strict=True):
                check_block(window, limit, name=name, offset=int(offset))
