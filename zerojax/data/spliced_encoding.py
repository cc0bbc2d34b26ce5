"""Encodes a text of any length in pieces, with the ids of one call on the whole text.

Neighbouring pieces share a stretch of text that begins and ends at a barrier and has some between
(`text_barriers.py`). What a tokenizer does at the start and the end of a text changes only what is
beyond the first and the last barrier of a stretch. Between them both pieces must have the same
tokens and the same ends of words; the ids change from one piece to the next at one of these ends.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from zerojax.config.late_dataclasses import dataclass
from zerojax.data.text_barriers import Barriers

_SHARED_BARRIERS = 8
"""Number of barriers of a shared stretch, its ends included: enough that some word ends in it."""


@dataclass(frozen=True, kw_only=True)
class PieceSizes:
    """Numbers of characters.

    Attributes:
      piece: text that one core encodes at a time.
      block: text that is encoded together, by all cores.
      whole: maximum of a piece that cannot be cut; the rest of the text is not read then.
    """

    piece: int
    block: int
    whole: int


@dataclass(frozen=True)
class _Stretch:
    """Text [start, stop) that two pieces share; between `low` and `high` they must agree."""

    start: int
    low: int
    high: int
    stop: int


def encode_spliced(
    pieces: Iterable[str],
    encode: Callable[[Sequence[str], bool], Sequence[Any]],
    barriers: Callable[[], Barriers | None],
    sizes: PieceSizes,
) -> Iterator[np.ndarray]:
    """Yields the ids of a text that comes in pieces: together int32 [n], those of one call.

    Args:
      pieces: the text, cut anywhere.
      encode: function of texts, and of whether offsets are needed, that returns the
        `tokenizers.Encoding` of each.
      barriers: function that returns the barriers of the tokenizer; None: no text can be cut. It
        is called for texts that are longer than a piece.
      sizes: numbers of characters.

    Raises:
      ValueError: a part of the text that cannot be cut is longer than `sizes.whole`.
    """
    held, first = "", 0
    for block, is_last in _blocks(pieces, sizes.block):
        held += block
        if not is_last and len(held) < sizes.block:
            continue
        known = barriers() if len(held) > sizes.piece else None
        stretches = [] if known is None else _stretches(held, known, sizes.piece)
        _check_parts(held, stretches, sizes.whole)
        if not stretches and not is_last:
            continue
        stretches, encodings, cuts = _agreeing(held, stretches, encode, known)
        _check_parts(held, stretches, sizes.whole)
        if not stretches and not is_last:
            continue
        starts = [first, *(after for _, after in cuts)]
        ends = [before for before, _ in cuts]
        for encoding, start, end in zip(encodings, starts, [*ends, None], strict=True):
            if is_last or end is not None:
                yield np.asarray(encoding.ids[start:end], np.int32)
        # The last part is encoded again with the text that follows it, without the tokens that were
        # yielded.
        if not is_last:
            held, first = held[stretches[-1].start :], starts[-1]


def _blocks(pieces: Iterable[str], size: int) -> Iterator[tuple[str, bool]]:
    """Yields (text, whether it is the last one), each of at most `size` characters."""
    held: str | None = None
    for piece in pieces:
        for at in range(0, len(piece), size):
            if held is not None:
                yield held, False
            held = piece[at : at + size]
    yield held or "", True


def _stretches(text: str, barriers: Barriers, size: int) -> list[_Stretch]:
    """Returns stretches that cut a text into parts of about `size` characters."""
    found: list[_Stretch] = []
    at = size
    while at < len(text):
        spots = list(itertools.islice(barriers.find(text, at, len(text)), _SHARED_BARRIERS))
        if len(spots) < _SHARED_BARRIERS:
            break
        found.append(_Stretch(spots[0], spots[1], spots[-2], spots[-1]))
        at = max(spots[-1] + 1, spots[0] + size)
    return found


def _spans(text: str, stretches: Sequence[_Stretch]) -> list[tuple[int, int]]:
    """Returns (start, stop) of the parts that stretches make of a text."""
    starts = [0, *(each.start for each in stretches)]
    return list(zip(starts, [*(each.stop for each in stretches), len(text)], strict=True))


def _check_parts(text: str, stretches: Sequence[_Stretch], limit: int) -> None:
    longest = max(_spans(text, stretches), key=lambda span: span[1] - span[0])
    if longest[1] - longest[0] > limit:
        shown = text[longest[0] : longest[0] + 40]
        raise ValueError(
            f"a text has {longest[1] - longest[0]:,} characters from {shown!r} on in which the "
            "tokenizer has no place where it can be cut without changing ids, more than the "
            f"{limit:,} that are encoded at once; make it several documents: one text per row of a "
            '.jsonl file, {"text": "..."}'
        )


def _agreeing(
    text: str,
    stretches: list[_Stretch],
    encode: Callable[[Sequence[str], bool], Sequence[Any]],
    barriers: Barriers | None,
) -> tuple[list[_Stretch], list[Any], list[tuple[int, int]]]:
    """Encodes the parts of a text, without cutting it where two parts disagree.

    Returns:
      (stretches where the parts agree; encoding of each part; for each stretch the number of tokens
      of the part before it up to the cut, and of the part after it).
    """
    known: dict[tuple[int, int], Any] = {}
    while True:
        spans = _spans(text, stretches)
        new = [span for span in spans if span not in known]
        found = encode([text[start:stop] for start, stop in new], len(spans) > 1 or bool(known))
        known.update(zip(new, found, strict=True))
        cuts = [
            _cut(text, stretch, barriers, (known[before], before[0]), (known[after], after[0]))
            for stretch, before, after in zip(stretches, spans, spans[1:], strict=False)
        ]
        if None not in cuts:
            return stretches, [known[span] for span in spans], [cut for cut in cuts if cut]
        stretches = [each for each, cut in zip(stretches, cuts, strict=True) if cut]


def _cut(
    text: str,
    stretch: _Stretch,
    barriers: Barriers | None,
    before: tuple[Any, int],
    after: tuple[Any, int],
) -> tuple[int, int] | None:
    """Returns the number of tokens before a cut in a stretch, for both of its parts; None if they
    disagree, or no word ends in it.

    Args:
      text: the text.
      stretch: the part of it where the cut is.
      barriers: barriers of the tokenizer.
      before: (encoding, its start in the text) of the part that ends with the stretch.
      after: the same of the part that begins with it.
    """
    assert barriers is not None, "a text without barriers has no stretches"
    ends = [
        list(_ends(text, stretch, encoding, start, splits_lines=barriers.splits_lines))
        for encoding, start in (before, after)
    ]
    places = [[place for _, *place in each] for each in ends]
    if not ends[0] or places[0] != places[1]:
        return None
    inside = [
        encoding.ids[found[0][0] : found[-1][0]]
        for (encoding, _), found in zip((before, after), ends, strict=True)
    ]
    middle = len(ends[0]) // 2
    return (ends[0][middle][0], ends[1][middle][0]) if inside[0] == inside[1] else None


def _ends(
    text: str, stretch: _Stretch, encoding: Any, offset: int, *, splits_lines: bool
) -> Iterator[tuple[int, int, int]]:
    """Yields the ends of words in a stretch.

    Yields:
      (number of tokens before it; end of the last of them in the text; start of the next token).
    """
    place = encoding.token_to_chars
    number = range(len(encoding))
    low = bisect.bisect_left(number, stretch.low - offset, key=lambda index: place(index)[0])
    for index in number[max(low, 1) :]:
        end, start = place(index - 1)[1] + offset, place(index)[0] + offset
        if start > stretch.high:
            break
        is_word_end = encoding.token_to_word(index - 1) != encoding.token_to_word(index)
        is_line_end = splits_lines and text[start : start + 1] == "\n"
        if stretch.low <= end <= start and (is_word_end or is_line_end):
            yield index, end, start
