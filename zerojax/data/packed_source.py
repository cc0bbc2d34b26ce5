"""Packed source: rows of whole texts, as a pure function of the row index."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import numpy as np

from zerojax.config.checks import names_keywords
from zerojax.config.late_dataclasses import dataclass
from zerojax.data.best_fit import Packing, packing_of
from zerojax.data.source import RowSource, check_sizes, in_epochs
from zerojax.data.text_set import TextSet, check_targets

LongTexts = Literal["refuse", "split", "drop"]
LONG_TEXTS: tuple[str, ...] = ("refuse", "split", "drop")
PACKED_NAMES = ("tokens", "targets", "segments", "weights", "positions")
"""Names of a row's arrays; a row of a `TokenSource` has the first two, with `pack` four."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Pieces:
    """Units that are packed into rows: texts, and parts of texts that are longer than a row.

    Attributes:
      starts: int64 [pieces], where each piece begins in the tokens of the text set.
      lengths: int64 [pieces], number of tokens of each piece.
      texts: int64 [pieces], index of the text of each piece, from 0.
      num_long: number of texts that are longer than a row.
    """

    starts: np.ndarray
    lengths: np.ndarray
    texts: np.ndarray
    num_long: int


@names_keywords()
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PackedSource(RowSource):
    """Rows of whole texts, packed by best fit and shuffled again in every epoch.

    The assignment of texts to rows depends only on their lengths, so it is the same on every
    process. With n packed rows, row r of the endless sequence is packed row `permute(r mod n, n,
    (seed, r div n))`. There must be at least `global_batch_size` packed rows.
    """

    kind: ClassVar[str] = "packed texts"

    texts: TextSet
    seq_len: int
    """Number of tokens of a row."""
    global_batch_size: int
    """Number of rows per batch, over all processes."""
    seed: int = 0
    shuffle: bool = True
    vocab_size: int | None = None
    """Every id must be below this number; None uses the vocabulary size that the text set
    states."""
    long_texts: LongTexts = "refuse"
    """Handling of texts longer than a row: "refuse" raises an error, "split" makes rows of their
    parts, "drop" leaves them out."""
    fill: bool = False
    """Whether rows of padding fill the last batch of an epoch, so that an evaluation reads each
    text exactly once. In training, epochs follow each other without such rows."""

    def __post_init__(self) -> None:
        check_sizes(self)
        if self.long_texts not in LONG_TEXTS:
            raise ValueError(
                f"long_texts={self.long_texts!r} is not one of {', '.join(LONG_TEXTS)}"
            )
        if self.num_rows < self.global_batch_size:
            raise ValueError(
                f"{self.texts.name} has {self.texts.num_texts} texts: {self.num_rows} rows of "
                f"seq_len={self.seq_len}, but one batch has global_batch_size="
                f"{self.global_batch_size}; lower seq_len or global_batch_size, or give more texts"
            )

    @functools.cached_property
    def pieces(self) -> Pieces:
        """Texts and parts of texts to pack, in the order of the texts.

        Raises:
          ValueError: texts are longer than a row and long_texts="refuse", or no text is left.
        """
        lengths, size = self.texts.lengths, self.seq_len
        long = lengths > size
        num_long = int(np.count_nonzero(long))
        if num_long and self.long_texts == "refuse":
            longest = int(np.argmax(lengths))
            raise ValueError(
                f"{num_long} of the {len(lengths)} texts of {self.texts.name} are longer than a "
                f"row of seq_len={size} tokens (the longest, {self.texts.where(longest)},"
                f" has {lengths[longest]}); raise seq_len to {lengths[longest]}, or set "
                "data.long_texts to split or drop (in Python: long_texts= of as_source)"
            )
        numbers = np.arange(len(lengths))
        if self.long_texts == "drop" and num_long:
            numbers = numbers[~long]
        if not numbers.size:
            raise ValueError(
                f"all {len(lengths)} texts of {self.texts.name} are longer than a row of "
                f"seq_len={size} tokens, so none is left; raise seq_len, or set long_texts to split"
            )
        counts = -(-lengths[numbers] // size)
        texts = np.repeat(numbers, counts)
        within = np.arange(len(texts)) - np.repeat(np.cumsum(counts) - counts, counts)
        starts = self.texts.offsets[texts] + within * size
        ends = self.texts.offsets[texts + 1]
        return Pieces(
            starts=starts,
            lengths=np.minimum(ends - starts, size),
            texts=texts,
            num_long=num_long,
        )

    @functools.cached_property
    def packing(self) -> Packing:
        """Assignment of the pieces to rows."""
        return packing_of(self.pieces.lengths, self.seq_len)

    @property
    def num_rows(self) -> int:
        """Number of packed rows, including rows of padding that fill the last batch."""
        size, count = self.global_batch_size, self.packing.num_rows
        return -(-count // size) * size if self.fill else count

    @property
    def tokenizer(self) -> Mapping[str, Any] | None:
        """Tokenizer that made the ids of the texts."""
        return self.texts.tokenizer

    @property
    def template(self) -> str | None:
        """Chat template that made the texts."""
        return self.texts.template

    def rows_at(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
        """Returns rows by index, counted over all epochs; a pure function.

        Returns:
          Arrays [rows, seq_len]. "tokens": int32. "targets": int32, the next token of the same
          text, or 0 if there is none. "weights": float32, 1 if the target is to be predicted, else
          0. "segments": int32, index of each token's text, from 0 in each row; -1 for padding.
          "positions": int32, position of each token in its text, or in its part of a text.

        Raises:
          ValueError: an id is outside the vocabulary.
        """
        self.texts.check_not_cut()
        packed = in_epochs(numbers, self.num_rows, self.seed if self.shuffle else None)
        shape = len(numbers), self.seq_len
        # Rows of padding come after the last packed row, and have no pieces.
        first = self.packing.starts[np.minimum(packed, self.packing.num_rows)]
        counts = self.packing.starts[np.minimum(packed + 1, self.packing.num_rows)] - first
        segments = _counted(counts)
        pieces = self.packing.order[np.repeat(first, counts) + segments]
        lengths = self.pieces.lengths[pieces]
        row_of_piece = np.repeat(np.arange(len(numbers)), counts)
        used = np.bincount(row_of_piece, weights=lengths, minlength=len(numbers)).astype(np.int64)
        # For all tokens of all pieces: where they are read, and where they are written.
        positions = _counted(lengths)
        at = np.arange(len(positions)) + np.repeat(
            row_of_piece * self.seq_len - (np.cumsum(used) - used)[row_of_piece], lengths
        )
        places = np.repeat(self.pieces.starts[pieces], lengths) + positions
        following = places + 1
        has_next = following < np.repeat(self.texts.offsets[self.pieces.texts[pieces] + 1], lengths)
        # The value read here has weight 0, but the place after the last text would be out of range.
        following = np.where(has_next, following, places)
        ids = self.texts.tokens[places].astype(np.int64)
        self._check(ids, places)
        targets = self.texts.tokens[following].astype(np.int64)
        self._check(targets, following)
        padding = np.arange(self.seq_len) - used[:, None]
        made = {
            "tokens": np.zeros(shape, np.int32),
            "targets": np.zeros(shape, np.int32),
            "weights": np.zeros(shape, np.float32),
            "segments": np.full(shape, -1, np.int32),
            "positions": np.maximum(padding, 0).astype(np.int32),
        }
        values = {
            "tokens": ids,
            "targets": np.where(has_next, targets, 0),
            "weights": has_next & self.texts.asked(following),
            "segments": np.repeat(segments, lengths),
            "positions": positions,
        }
        for name, value in values.items():
            made[name].reshape(-1)[at] = value
        return made

    def _check(self, ids: np.ndarray, places: np.ndarray) -> None:
        limit = self.vocab_size or self.texts.vocab_size or 1 << 31
        if not ids.size or ids.max() < limit:
            return
        place = places[np.flatnonzero(ids >= limit)[0]]
        text = int(np.searchsorted(self.texts.offsets, place, side="right")) - 1
        raise ValueError(
            f"{self.texts.name}: {self.texts.where(text)} holds token id "
            f"{self.texts.tokens[place]}, outside the vocabulary [0, {limit}); set the model's "
            f"vocab_size to {self.texts.tokens[place] + 1} or more, or prepare the texts again "
            "with the model's tokenizer"
        )

    def fingerprint(self) -> dict[str, Any]:
        """Returns the settings that determine which data a row index refers to; saved in
        checkpoints."""
        return {
            "texts": self.texts.fingerprint,
            "seq_len": self.seq_len,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "long_texts": self.long_texts,
            "fill": self.fill,
        }

    def describe(self) -> str:
        """Describes the source in one line for the log."""
        pieces = self.pieces
        padding = 1 - pieces.lengths.sum() / (self.packing.num_rows * self.seq_len)
        long = ""
        if pieces.num_long and self.long_texts == "split":
            long = f" ({pieces.num_long:,} longer than a row were split)"
        elif pieces.num_long:
            long = f" ({pieces.num_long:,} longer than a row were left out)"
        note = check_targets(self.texts, None)
        return (
            f"{self.texts.name}: {self.texts.num_texts:,} texts of {self.texts.num_tokens:,} "
            f"tokens{long} in {self.packing.num_rows:,} rows of {self.seq_len}, "
            f"{100 * padding:.1f} % of them padding, {self.steps_per_epoch:,.1f} steps per epoch"
        ) + (f"; {note}" if note else "")


def _counted(counts: np.ndarray) -> np.ndarray:
    """Counts from 0 for each element of `counts`: 0, ..., counts[0] - 1, 0, ..., counts[1] - 1, and
    so on; int64 [sum of counts]."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)
