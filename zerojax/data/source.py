"""Token source: the rows of each batch as a pure function of one integer."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zerojax.config.checks import names_keywords
from zerojax.data.corpus import existing_path
from zerojax.data.packing import Boundary, boundary_of
from zerojax.data.preparation import tokens_of_text
from zerojax.data.shuffle import permute
from zerojax.data.tokenizer import Tokenizer, as_tokenizer, bpe_size, tokenizer_from_dict
from zerojax.data.tokens import (
    Tokens,
    check_block,
    check_ids,
    gather_windows,
    is_token_path,
    open_tokens,
    tokens_of_array,
)


@names_keywords()
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TokenSource:
    """Batches of next-token windows from tokens, in an order shuffled anew in every epoch.

    Row r of the endless sequence of rows is window `permute(r mod n, n, (seed, r div n))` of the n
    windows there are, so no window is read twice within an epoch, and any process can make any
    row of any batch without having made the ones before.
    """

    tokens: Tokens
    seq_len: int
    """Inputs per row; a window is one token longer."""
    global_batch_size: int
    """Rows per batch, over all processes."""
    seed: int = 0
    shuffle: bool = True
    vocab_size: int | None = None
    """Ids read are checked against it; None: against the vocabulary the token files state."""
    boundary: Boundary | None = None
    """Where a new text begins; batches then have segments, and weights. None: rows are one text."""

    def __post_init__(self) -> None:
        for field in ("seq_len", "global_batch_size"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}={getattr(self, field)}: it must be at least 1")
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
        """Rows in one epoch."""
        return int(self._last_windows[-1]) if len(self._last_windows) else 0

    @property
    def steps_per_epoch(self) -> float:
        """Batches in one epoch; a batch may hold the end of one epoch and the start of the next."""
        return self.num_windows / self.global_batch_size

    def batch(self, step: int, lo: int = 0, hi: int | None = None) -> dict[str, np.ndarray]:
        """Rows [lo, hi) of the batch of `step` (counted from 0); pure.

        Concatenating the rows of any partition of [0, global_batch_size) gives the same batch.

        Returns:
          {"tokens": int32 [hi - lo, seq_len], "targets": int32 [hi - lo, seq_len]}, the targets
          being the tokens one place further on. With a `boundary` also "segments" and "weights",
          see `Boundary.describe`.

        Raises:
          ValueError: a negative step, rows outside the batch, or an id outside the vocabulary.
        """
        size = self.global_batch_size
        hi = size if hi is None else hi
        if step < 0 or not 0 <= lo <= hi <= size:
            raise ValueError(
                f"step={step}, rows [{lo}, {hi}): a step is at least 0 and rows lie in [0, {size})"
            )
        return self.rows(step * size + lo, step * size + hi)

    def rows(self, first: int, last: int) -> dict[str, np.ndarray]:
        """Rows [first, last) of the endless sequence that the batches cut up; pure."""
        windows = self._read(self._window_numbers(first, last))
        rows = {
            "tokens": np.ascontiguousarray(windows[:, :-1], np.int32),
            "targets": np.ascontiguousarray(windows[:, 1:], np.int32),
        }
        return rows if self.boundary is None else rows | self.boundary.describe(windows)

    def fingerprint(self) -> dict[str, Any]:
        """What the meaning of a row number depends on; saved beside the position."""
        own = {
            "tokens": self.tokens.fingerprint,
            "seq_len": self.seq_len,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }
        return own if self.boundary is None else own | dataclasses.asdict(self.boundary)

    def describe(self) -> str:
        """One line for the screen."""
        return (
            f"{self.tokens.name}: {self.tokens.count:,} tokens, {self.num_windows:,} windows of "
            f"{self.seq_len}, {self.steps_per_epoch:,.1f} steps per epoch"
        )

    def _window_numbers(self, first: int, last: int) -> np.ndarray:
        """int64 [last - first]: the window of each row."""
        size = self.num_windows
        rows = np.arange(first, last, dtype=np.int64)
        positions = rows % size
        if not self.shuffle:
            return positions
        epochs = rows // size
        numbers = np.empty_like(rows)
        for epoch in range(first // size, -(-last // size)):
            mine = epochs == epoch
            numbers[mine] = permute(positions[mine], size, (self.seed, epoch))
        return numbers

    def _read(self, numbers: np.ndarray) -> np.ndarray:
        """[b, seq_len + 1] integers; one indexing operation per part that is touched."""
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
        windows = gather_windows(part.ids, starts, self.seq_len + 1)
        self._check(windows, part.name, part.offset + starts)
        return windows

    def _check(self, windows: np.ndarray, name: str, offsets: np.ndarray) -> None:
        """Refuses ids outside the vocabulary; where none is known, ids that int32 cannot hold."""
        limit = self.vocab_size or self.tokens.vocab_size or 1 << 31
        bounds = np.iinfo(windows.dtype)
        if bounds.min >= 0 and bounds.max < limit:
            return
        if windows.max() >= limit or windows.min() < 0:
            for window, offset in zip(windows, offsets, strict=True):
                check_block(window, limit, name=name, offset=int(offset))


def as_source(
    data: Any,
    *,
    tokenizer: Any = "bytes",
    seq_len: int,
    global_batch_size: int,
    seed: int = 0,
    validation_fraction: float = 0.05,
    vocab_size: int | None = None,
    pack: bool = False,
) -> tuple[TokenSource, TokenSource | None, Tokenizer | None]:
    """What a user calls data, as a source to train on, one to validate on, and the tokenizer.

    Args:
      data: None (the embedded Shakespeare), a text file, a folder of text files, a token file, a
        folder or a sequence of token files, an integer array [n], or a `TokenSource`.
      tokenizer: how text becomes ids (`as_tokenizer`). Token files bring their own: there
        "bytes", the default, gives way to it, and anything else must agree with it.
      seq_len: inputs per row.
      global_batch_size: rows per batch over all processes.
      seed: of the order of the training windows.
      validation_fraction: the tail of the tokens kept for validation; not used where the folder
        holds validation files (`validation.bin`); 0 for none.
      vocab_size: of the model, if already fixed; ids are checked against it.
      pack: batches tell the texts of a row apart (`TokenSource.boundary`), by the id that the
        tokenizer puts between two.

    Returns:
      `(train, validation, tokenizer)`; the validation source is not shuffled and None without a
      validation part; the tokenizer is None for token files that do not name theirs.

    Raises:
      FileNotFoundError, ValueError, TypeError: each with value, limit and remedy.
    """
    if isinstance(data, TokenSource):
        return _given_source(data, tokenizer, seq_len, global_batch_size)
    if vocab_size is not None and vocab_size < 1:
        raise ValueError(f"vocab_size={vocab_size}: it must be at least 1")
    tokens, validation, ready = _open(data, tokenizer)
    if validation is None:
        tokens, validation = tokens.split(validation_fraction)
        _check_validation_size(tokens, validation, validation_fraction, seq_len, global_batch_size)
    for part in (tokens, validation):
        if vocab_size is not None and part is not None:
            check_ids(part, vocab_size)
    train = TokenSource(
        tokens=tokens,
        seq_len=seq_len,
        global_batch_size=global_batch_size,
        seed=seed,
        vocab_size=vocab_size or tokens.vocab_size,
        boundary=boundary_of(ready, tokens.name) if pack else None,
    )
    if validation is None:
        return train, None, ready
    return train, dataclasses.replace(train, tokens=validation, shuffle=False), ready


def _open(data: Any, tokenizer: Any) -> tuple[Tokens, Tokens | None, Tokenizer | None]:
    if data is None:
        tokens, ready = tokens_of_text(None, tokenizer)
        return tokens, None, ready
    if isinstance(data, np.ndarray):
        return tokens_of_array(data), None, _stated_tokenizer(tokenizer)
    paths = [data] if isinstance(data, str | Path) else data
    if not (
        isinstance(paths, Sequence) and paths and all(isinstance(p, str | Path) for p in paths)
    ):
        raise TypeError(
            f"data is a {type(data).__name__}; pass None, a path, a list of token files, an "
            "integer numpy array, or a TokenSource. Batches (an iterable, a callable) are given "
            "as `batches`, not as text"
        )
    found = [existing_path(path) for path in paths]
    if len(found) == 1 and not is_token_path(found[0]):
        tokens, ready = tokens_of_text(found[0], tokenizer)
        return tokens, None, ready
    for path in found:
        if not is_token_path(path):
            raise ValueError(
                f"{str(path)!r} is not a token file (.bin, .npy); a list may hold token files "
                "only: put text files into one folder and pass the folder"
            )
    train, validation = open_tokens(found)
    if train is None:
        raise ValueError(
            f"{[str(path) for path in found]} hold only validation files; add the training files"
        )
    return train, validation, _tokenizer_of(train, tokenizer)


def _tokenizer_of(tokens: Tokens, spec: Any) -> Tokenizer | None:
    """The tokenizer of token files: their own; checked against an explicit other one."""
    if tokens.tokenizer is None:
        return _stated_tokenizer(spec)
    own = tokenizer_from_dict(tokens.tokenizer)
    if spec is None or spec == "bytes":
        return own
    size = bpe_size(spec)
    agrees = (
        tokens.tokenizer.get("kind") == "bpe" and own.vocab_size <= size
        if size is not None
        else as_tokenizer(spec).to_dict() == own.to_dict()
    )
    if not agrees:
        raise ValueError(
            f"tokenizer={spec!r} is not what made {tokens.name} ({own!r}); leave the option out, "
            "token files bring their own tokenizer, or prepare the text again"
        )
    return own


def _stated_tokenizer(spec: Any) -> Tokenizer | None:
    """For ids of unknown origin: a tokenizer given as such; a mere default names none."""
    return None if spec is None or spec == "bytes" or bpe_size(spec) else as_tokenizer(spec)


def _given_source(
    source: TokenSource, tokenizer: Any, seq_len: int, global_batch_size: int
) -> tuple[TokenSource, None, Tokenizer | None]:
    for name, wanted in (("seq_len", seq_len), ("global_batch_size", global_batch_size)):
        if getattr(source, name) != wanted:
            raise ValueError(
                f"the TokenSource has {name}={getattr(source, name)}, the run wants {wanted}; "
                f"make both {wanted}"
            )
    return source, None, _tokenizer_of(source.tokens, tokenizer)


def _check_validation_size(
    train: Tokens,
    validation: Tokens | None,
    fraction: float,
    seq_len: int,
    global_batch_size: int,
) -> None:
    if validation is None or validation.windows_per_part(seq_len).sum() >= global_batch_size:
        return
    total = train.count + validation.count
    wanted = global_batch_size * seq_len + 1
    enough = f"validation_fraction={wanted / total + 0.001:.3f}, " if wanted * 2 < total else ""
    raise ValueError(
        f"validation_fraction={fraction} of {total} tokens leaves {validation.count}, but one "
        f"batch of {global_batch_size} x {seq_len} needs {wanted}; set {enough}a smaller "
        "global_batch_size or seq_len, or validation_fraction=0 for no validation"
    )
