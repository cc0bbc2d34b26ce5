"""Boundaries of texts within rows: segments, and weights that exclude targets of another text.

Rows are cut from one stream of texts, without loss and without padding. A row may therefore contain
the end of one text, whole texts, and the beginning of another; `segments` separates them.
"""

from __future__ import annotations

import numpy as np

from zerojax.config.late_dataclasses import dataclass
from zerojax.data.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Boundary:
    """Rule that finds where texts begin in a stream of tokens: after an id, or at an id.

    Attributes:
      end_token: id that ends each text, such as <|endoftext|>.
      start_token: id that begins each text, such as [CLS]; only without an `end_token`.
    """

    end_token: int | None = None
    start_token: int | None = None

    def __post_init__(self) -> None:
        if (self.end_token is None) == (self.start_token is None):
            raise ValueError(
                f"end_token={self.end_token} and start_token={self.start_token}: pass exactly one "
                "of them, the id that ends or begins each text"
            )

    def describe(self, windows: np.ndarray) -> dict[str, np.ndarray]:
        """Computes the segment of each token of a batch, and the weight of each target.

        Args:
          windows: integers [rows, seq_len + 1], the tokens and the token that follows them.

        Returns:
          "segments": int32 [rows, seq_len], index of each token's text, from 0 in each row.
          "weights": float32 [rows, seq_len], 0 if the target begins another text, else 1.
        """
        begins = np.zeros(windows.shape, bool)
        if self.end_token is None:
            begins[:, 1:] = windows[:, 1:] == self.start_token
        else:
            begins[:, 1:] = windows[:, :-1] == self.end_token
        segments = np.cumsum(begins, axis=1, dtype=np.int32)
        same = segments[:, :-1] == segments[:, 1:]
        return {
            "segments": np.ascontiguousarray(segments[:, :-1]),
            "weights": same.astype(np.float32),
        }


def boundary_of(tokenizer: Tokenizer | None, name: str) -> Boundary:
    """Returns the boundary rule for texts that a tokenizer has joined.

    Args:
      tokenizer: tokenizer that made the tokens; None if unknown.
      name: name of the tokens, for messages.

    Raises:
      ValueError: the tokenizer is unknown, or has no id between two texts.
    """
    if tokenizer is None:
        raise ValueError(
            f"data.pack needs the tokenizer of {name}, but its files name none; prepare them with "
            "`zerojax data prepare`, or leave data.pack out"
        )
    prefix = getattr(tokenizer, "prefix", np.zeros(0, np.int32))
    closing = tokenizer.separator[: len(tokenizer.separator) - len(prefix)]
    # Byte tokens separate two texts by a blank line, which also occurs within many texts.
    if tokenizer.to_dict().get("kind") == "bytes" or not (len(closing) or len(prefix)):
        raise ValueError(
            "data.pack needs a tokenizer with an id between two texts, but this tokenizer has "
            "none; use "
            "data.tokenizer=bpe:4096 or a model's tokenizer.json, or leave data.pack out"
        )
    if len(closing):
        return Boundary(end_token=int(closing[-1]))
    return Boundary(start_token=int(prefix[0]))
