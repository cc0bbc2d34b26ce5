"""Batches for masked-token prediction, as a pure function of seed and row index."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from zerojax.data.shuffle import derive_words, mix_bits
from zerojax.data.source import TokenSource

MASK_FRACTION = 0.15
MASK_SHARE, RANDOM_SHARE = 0.8, 0.1
# Part of random keys, to differ from the keys of the shuffle, which are (seed, epoch).
_STREAM = (0, 1)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class MaskedSource(TokenSource):
    """`TokenSource` whose rows have masked tokens, for `Bert.loss` (arXiv:1810.04805, 3.1).

    Every row has the same number of positions to predict: `mask_fraction` of its tokens. Of these
    positions, 80 % contain the mask token, 10 % a random token of the vocabulary, and 10 % the
    original token. A row gets other positions in each epoch (arXiv:1907.11692), but the same ones
    on every process.

    `as_masked_source` makes a `MaskedSource`.
    """

    mask_token: int
    """Id of the mask token; it may be outside the data's vocabulary."""
    special_tokens: tuple[int, ...] = ()
    """Ids that are never masked and never drawn as random tokens, such as [CLS] and [SEP]."""
    mask_fraction: float = MASK_FRACTION
    """Fraction of a row's tokens that are positions to predict."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.mask_fraction <= 1:
            raise ValueError(
                f"mask_fraction={self.mask_fraction}: the value must be above 0 and at most 1; "
                "BERT uses "
                f"{MASK_FRACTION}"
            )
        for token in (self.mask_token, *self.special_tokens):
            if token < 0:
                raise ValueError(f"token id {token} is negative; pass ids of at least 0")
        if not self._ordinary.size:
            raise ValueError(
                f"the vocabulary of {self.vocab_size} ids has only special ones, so no random "
                "token can be drawn; pass the special tokens of this tokenizer"
            )

    @property
    def num_places(self) -> int:
        """Number of positions to predict in a row."""
        return max(1, round(self.seq_len * self.mask_fraction))

    @functools.cached_property
    def _ordinary(self) -> np.ndarray:
        """Ids that may replace a token, int32."""
        size = self.vocab_size or self.tokens.vocab_size
        if size is None:
            raise ValueError(
                f"{self.tokens.name} does not state its vocabulary size, so no random token can be "
                "drawn; pass vocab_size to as_source"
            )
        ids = np.arange(size, dtype=np.int32)
        return ids[~np.isin(ids, (self.mask_token, *self.special_tokens))]

    def rows_at(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
        """Returns rows by index, counted over all epochs, with masked tokens; a pure function.

        Returns:
          "tokens": int32 [rows, seq_len], some of them masked. "positions": int32 [rows,
          num_places], increasing, positions to predict. "targets": int32 [rows, num_places],
          original tokens at these positions. "weights": float32 [rows, num_places]; 0 for surplus
          positions of a row that has too few ordinary tokens.
        """
        tokens = super().rows_at(numbers)["tokens"]
        counters = self._counters(numbers)
        positions, weights = self._places(tokens, counters)
        targets = np.take_along_axis(tokens, positions, axis=1)
        at = np.take_along_axis(counters, positions.astype(np.int64), axis=1)
        drawn = self._ordinary[(self._words(at, 1) % np.uint64(self._ordinary.size)).astype(int)]
        share = self._words(at, 2) / 2.0**64
        shown = np.where(share < MASK_SHARE + RANDOM_SHARE, drawn, targets)
        shown = np.where(share < MASK_SHARE, np.int32(self.mask_token), shown)
        shown = np.where(weights > 0, shown, targets)
        np.put_along_axis(tokens, positions, shown.astype(np.int32), axis=1)
        return {"tokens": tokens, "positions": positions, "targets": targets, "weights": weights}

    def _places(self, tokens: np.ndarray, counters: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Chooses the positions to predict: (positions int32, weights float32), both [rows,
        num_places]."""
        can_be = ~np.isin(tokens, (self.mask_token, *self.special_tokens))
        # Positions are sorted by random words, ordinary tokens first.
        words = self._words(counters, 0) >> np.uint64(1)
        words |= np.where(can_be, np.uint64(0), np.uint64(1) << np.uint64(63))
        chosen = np.argsort(words, axis=1, kind="stable")[:, : self.num_places]
        positions = np.sort(chosen, axis=1)
        weights = np.take_along_axis(can_be, positions, axis=1).astype(np.float32)
        return positions.astype(np.int32), weights

    def _counters(self, numbers: np.ndarray) -> np.ndarray:
        """Computes a unique number for every token position of the rows `numbers`, uint64 [rows,
        seq_len]."""
        rows = numbers.astype(np.uint64)[:, None] * np.uint64(self.seq_len)
        return rows + np.arange(self.seq_len, dtype=np.uint64)[None, :]

    def _words(self, counters: np.ndarray, stream: int) -> np.ndarray:
        """Computes 64 random bits for each counter; they differ between streams."""
        return mix_bits(counters, derive_words((self.seed, *_STREAM))[stream])

    def fingerprint(self) -> dict[str, Any]:
        """Returns the fingerprint of the `TokenSource` together with the settings of the masks."""
        return {
            **super().fingerprint(),
            "mask_token": self.mask_token,
            "special_tokens": list(self.special_tokens),
            "mask_fraction": self.mask_fraction,
        }


def as_masked_source(
    source: TokenSource,
    *,
    mask_token: int,
    special_tokens: Sequence[int] = (),
    mask_fraction: float = MASK_FRACTION,
) -> MaskedSource:
    """Makes a source that masks some tokens of another source's rows.

    With a Hugging Face tokenizer, pass `mask_token=tokenizer.id_of("[MASK]")` and
    `special_tokens=tokenizer.special_ids`. Bytes have no mask token; use 256, the next id, and a
    model with a vocabulary of 257.

    Args:
      source: result of `as_source`, for training or validation.
      mask_token: id of the mask token.
      special_tokens: ids that are never masked and never drawn as random tokens.
      mask_fraction: fraction of a row's tokens to predict.

    Raises:
      ValueError: the fraction is outside (0, 1], there is no ordinary token to draw, or the source
        is packed.
    """
    if source.boundary is not None:
        raise ValueError(
            "the source separates the texts of a row (pack), which masked-token batches do not "
            "support; make it without pack"
        )
    own = {field.name: getattr(source, field.name) for field in dataclasses.fields(TokenSource)}
    return MaskedSource(
        **own,
        mask_token=int(mask_token),
        special_tokens=tuple(int(token) for token in special_tokens),
        mask_fraction=mask_fraction,
    )
