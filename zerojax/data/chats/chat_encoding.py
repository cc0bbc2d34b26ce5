"""Token ids of rendered chats, and which of them are answers.

The text is encoded once and as a whole, so that no seam is tokenised twice, and answers are found
by the characters that each token stands for.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from zerojax.data.chats.conversations import Pair, RecordError

# What some templates put before an answer for which nothing was thought.
_EMPTY_THOUGHT = re.compile(r"\s*<think>\s*</think>\s*")


@runtime_checkable
class OffsetTokenizer(Protocol):
    """What chats need of a tokenizer, besides what every one has."""

    @property
    def separator(self) -> np.ndarray:
        """The ids between two documents."""
        ...

    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """(int32 [n] ids, int64 [n, 2] of the characters [start, end) of each) of each text."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class MarkedText:
    """A text and the places of its answers.

    Attributes:
      text: rendered.
      answers: [start, end) in characters.
      is_pair: whether it was rendered by no template, so that ids go around it.
    """

    text: str
    answers: tuple[tuple[int, int], ...]
    is_pair: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncodedChat:
    """A text as a model takes it.

    Attributes:
      ids: int32 [n].
      asked: bool [n], whether it is part of an answer.
      num_seams: answers that begin inside of a token, of which the question has a part.
    """

    ids: np.ndarray
    asked: np.ndarray
    num_seams: int


def marked_pair(pair: Pair) -> MarkedText:
    """A text and its continuation as one text."""
    text = pair.prompt + pair.completion
    return MarkedText(text=text, answers=((len(pair.prompt), len(text)),), is_pair=True)


def without_frame(
    text: str, answers: Sequence[tuple[int, int]], special: tuple[str, ...]
) -> tuple[tuple[int, int], ...]:
    """Places of answers that were found by rendering, without what belongs to the frame.

    That is an empty thought before an answer, which is part of the request where nothing is to be
    thought, and white space behind the token that ends it, which a model is never asked for.

    Args:
      special: texts of the tokenizer's special tokens.
    """
    found = []
    for start, end in answers:
        thought = _EMPTY_THOUGHT.match(text, start, end)
        if thought and thought.end() < end:
            start = thought.end()
        kept = text[start:end].rstrip()
        if kept.endswith(special):
            end = start + len(kept)
        found.append((start, end))
    return tuple(found)


def encode_marked(tokenizer: OffsetTokenizer, texts: Sequence[MarkedText]) -> list[EncodedChat]:
    """Ids of texts, and which of them are answers."""
    encoded = tokenizer.encode_with_offsets([one.text for one in texts])
    return [
        _framed(tokenizer, made) if one.is_pair else made
        for one, (ids, offsets) in zip(texts, encoded, strict=True)
        for made in [_encoded(one, ids, offsets)]
    ]


def check_asked(encoded: EncodedChat) -> None:
    """Refuses a text of which nothing, or everything, is an answer.

    Raises:
      RecordError: says which.
    """
    if not encoded.asked.any():
        raise RecordError(
            "no token of it is an answer, so that there is nothing to learn; leave the row out, or "
            "look at the template's generation marks"
        )
    if encoded.asked.all():
        raise RecordError(
            "every token of it is an answer, so that nothing is a question; give it a question, or "
            "prepare such text with --format text"
        )


def _encoded(one: MarkedText, ids: np.ndarray, offsets: np.ndarray) -> EncodedChat:
    asked, num_seams = np.zeros(len(ids), bool), 0
    starts, ends = offsets[:, 0], offsets[:, 1]
    for start, end in one.answers:
        mine = np.flatnonzero((starts < end) & (ends > start))
        if mine.size:
            # With tokens between them that stand for no character.
            asked[mine[0] : mine[-1] + 1] = True
            num_seams += bool(starts[mine[0]] < start)
    return EncodedChat(ids=ids, asked=asked, num_seams=num_seams)


def _framed(tokenizer: Any, made: EncodedChat) -> EncodedChat:
    """With the ids around a text, those before it as a question; none that is there already."""
    prefix = np.asarray(getattr(tokenizer, "prefix", ()), np.int32)
    closing = _closing(tokenizer)
    if prefix.size and np.array_equal(made.ids[: len(prefix)], prefix):
        prefix = prefix[:0]
    if closing.size and np.array_equal(made.ids[-len(closing) :], closing):
        closing = closing[:0]
    ids = np.concatenate([prefix, made.ids, closing]).astype(np.int32)
    asked = np.concatenate([np.zeros(len(prefix), bool), made.asked, np.ones(len(closing), bool)])
    return dataclasses.replace(made, ids=ids, asked=asked)


def _closing(tokenizer: Any) -> np.ndarray:
    """The ids that end a text; none for bytes, which have a blank line between two."""
    if tokenizer.to_dict().get("kind") == "bytes":
        return np.zeros(0, np.int32)
    separator = np.asarray(tokenizer.separator, np.int32)
    return separator[: len(separator) - len(getattr(tokenizer, "prefix", ()))]
