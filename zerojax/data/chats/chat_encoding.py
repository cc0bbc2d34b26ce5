"""Encodes rendered chats as token ids, and marks the tokens of answers.

The whole text is encoded at once, so that tokens may span the borders of messages. Tokens of
answers are found from the characters that each token covers.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from zerojax.config.late_dataclasses import dataclass
from zerojax.data.chats.conversations import Pair, RecordError
from zerojax.data.tokenizer import Tokenizer

# Some templates write this before an answer without reasoning.
_EMPTY_THOUGHT = re.compile(r"\s*<think>\s*</think>\s*")


@runtime_checkable
class OffsetTokenizer(Tokenizer, Protocol):
    """Interface of a tokenizer for chats: returns ids with the characters that they cover."""

    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns (ids, offsets) for each text: ids int32 [n], and offsets int64 [n, 2], which are
        the characters [start, end) that each id covers."""
        ...


@dataclass(frozen=True, kw_only=True)
class MarkedText:
    """Text with the positions of its answers.

    Attributes:
      text: rendered text.
      answers: positions [start, end) of the answers, in characters.
      is_pair: whether the text was made without a template, so that prefix and end ids must be
        added.
    """

    text: str
    answers: tuple[tuple[int, int], ...]
    is_pair: bool = False


@dataclass(frozen=True, kw_only=True)
class EncodedChat:
    """Token ids of a text, with a mask of the tokens to predict.

    Attributes:
      ids: int32 [n], token ids.
      asked: bool [n], whether the token is part of an answer.
      num_seams: number of answers whose first token also covers the end of the question.
    """

    ids: np.ndarray
    asked: np.ndarray
    num_seams: int


def marked_pair(pair: Pair) -> MarkedText:
    """Joins a prompt and its completion to one text; the completion is the answer."""
    text = pair.prompt + pair.completion
    return MarkedText(text=text, answers=((len(pair.prompt), len(text)),), is_pair=True)


def without_frame(
    text: str, answers: Sequence[tuple[int, int]], special: tuple[str, ...]
) -> tuple[tuple[int, int], ...]:
    """Returns the positions of answers, shortened to the text that the model has to write.

    Two parts are excluded. The first is an empty thought before an answer without reasoning, which
    belongs to the prompt. The second is white space after the token that ends the answer, which is
    never predicted.

    Args:
      text: rendered text.
      answers: positions [start, end) of the answers, in characters.
      special: texts of the tokenizer's special tokens.
    """
    found = []
    for start, end in answers:
        thought = _EMPTY_THOUGHT.match(text, start, end)
        # Otherwise the empty thought is the whole answer.
        if thought and thought.end() < end:
            start = thought.end()
        kept = text[start:end].rstrip()
        if kept.endswith(special):
            end = start + len(kept)
        found.append((start, end))
    return tuple(found)


def encode_marked(tokenizer: OffsetTokenizer, texts: Sequence[MarkedText]) -> list[EncodedChat]:
    """Encodes texts as token ids, and marks the tokens of their answers."""
    encoded = tokenizer.encode_with_offsets([one.text for one in texts])
    return [
        _framed(tokenizer, made) if one.is_pair else made
        for one, (ids, offsets) in zip(texts, encoded, strict=True)
        for made in [_encoded(one, ids, offsets)]
    ]


def check_asked(encoded: EncodedChat, marks: str | None = None) -> None:
    """Checks that some, but not all, tokens of a text are part of an answer.

    Args:
      encoded: ids of the text, and which of them are part of an answer.
      marks: line of the template that marks answers; None if the template marks none.

    Raises:
      RecordError: no token, or every token, is part of an answer.
    """
    check = "" if marks is None else f", or correct the marks of the template ({marks})"
    if not encoded.asked.any():
        raise RecordError(
            "no token of the chat is part of an answer, so nothing can be trained on; leave the "
            f"row out{check}"
        )
    if encoded.asked.all():
        raise RecordError(
            "every token of the text is part of an answer, so it has no question; add the "
            f"question, prepare such text with --format text{check}"
        )


def _encoded(one: MarkedText, ids: np.ndarray, offsets: np.ndarray) -> EncodedChat:
    asked, num_seams = np.zeros(len(ids), bool), 0
    # Sorted, so that the tokens of each of many answers are found without reading all offsets.
    starts = np.minimum.accumulate(offsets[::-1, 0])[::-1]
    ends = np.maximum.accumulate(offsets[:, 1])
    for start, end in one.answers:
        first, last = np.searchsorted(ends, start, "right"), np.searchsorted(starts, end)
        if first < last:
            # The range includes tokens inside the answer that cover no character.
            asked[first:last] = True
            num_seams += bool(starts[first] < start)
    return EncodedChat(ids=ids, asked=asked, num_seams=num_seams)


def _framed(tokenizer: OffsetTokenizer, made: EncodedChat) -> EncodedChat:
    """Adds missing ids that begin and end a text; the former count as part of the question, the
    latter of the answer."""
    prefix = np.asarray(getattr(tokenizer, "prefix", ()), np.int32)
    closing = _closing(tokenizer)
    if prefix.size and np.array_equal(made.ids[: len(prefix)], prefix):
        prefix = prefix[:0]
    if closing.size and np.array_equal(made.ids[-len(closing) :], closing):
        closing = closing[:0]
    ids = np.concatenate([prefix, made.ids, closing]).astype(np.int32)
    asked = np.concatenate([np.zeros(len(prefix), bool), made.asked, np.ones(len(closing), bool)])
    return dataclasses.replace(made, ids=ids, asked=asked)


def _closing(tokenizer: OffsetTokenizer) -> np.ndarray:
    """Returns the ids that end a text; none for bytes, which separate texts by a blank line."""
    if tokenizer.to_dict().get("kind") == "bytes":
        return np.zeros(0, np.int32)
    separator = np.asarray(tokenizer.separator, np.int32)
    return separator[: len(separator) - len(getattr(tokenizer, "prefix", ()))]
