"""Displays untrusted text and values without control characters and with limited length.

The name of an array in a model, a path or a configuration value may contain bytes that move a
terminal's cursor, clear its screen or set its title, or characters that reverse the order of the
displayed text.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from typing import Any, TextIO

MAX_VALUE = 80
"""Largest number of characters of a value that is quoted in a sentence."""
MAX_MESSAGE = 4000
"""Largest number of characters of a message."""
_MESSAGE_END = 1000
_MAX_DEPTH = 4
_MAX_BITS = 512
"""Limit of bits of an integer that is shown with its digits; Python itself refuses 4,300 digits."""
_BRACKETS = {dict: "{}", list: "[]", tuple: "()", set: "{}", frozenset: ("frozenset({", "})")}

# C0 and C1 controls with DEL; marks, embeddings, overrides and isolates of direction (Unicode
# Standard Annex 9); line and paragraph separators, which some terminals interpret; byte order
# marks; surrogates, which streams cannot encode; tags.
_CONTROLS = (
    "\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff"
    "\U000e0000-\U000e007f"
)
_UNSAFE = re.compile(f"[{_CONTROLS}]")
_UNSAFE_IN_PAGE = re.compile(f"(?![\n\t])[{_CONTROLS}]")


def printable(text: object, *, is_page: bool = False) -> str:
    r"""Returns the text with control characters as escapes, such as `\x1b`, `\n` and `\u202e`.

    Args:
      text: a name, a path or a sentence; any other object is converted with `str`.
      is_page: whether line feeds and tabs are kept, for a text of several lines. Pass each name
        through this function alone before it becomes part of a page, so that no name adds a line.
    """
    text = text if isinstance(text, str) else str(text)
    return (_UNSAFE_IN_PAGE if is_page else _UNSAFE).sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape", "surrogatepass").decode("ascii")


def show(*values: object, end: str = "\n", file: TextIO | None = None, flush: bool = False) -> None:
    """Prints like `print`, but with control characters as escapes; all commands print with it."""
    text = " ".join(map(str, values))
    print(printable(text, is_page=True), end=end, file=file, flush=flush)


def as_html(text: object) -> str:
    """Escapes text for an HTML page, so that it contains no tags and no control characters."""
    return html.escape(printable(text, is_page=True))


def cut(text: str, limit: int) -> str:
    """Shortens `text` to its first `limit` characters followed by its full length; returns shorter
    text unchanged."""
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text):,} characters)"


def shorten(text: str) -> str:
    """Shortens the middle of a message to about `MAX_MESSAGE` characters in all; the end is kept
    because it states the remedy."""
    if len(text) <= MAX_MESSAGE:
        return text
    return f"{cut(text, MAX_MESSAGE - _MESSAGE_END)} ... {text[-_MESSAGE_END:]}"


def quoted(value: object, limit: int = MAX_VALUE) -> str:
    """Returns the `repr` of a value, cut to about `limit` characters.

    Lists and mappings are read only as far as they are shown. So a list that contains itself, or a
    list of millions of items, takes no more time than a short list.
    """
    text = ""
    for piece in _pieces(value, limit, 0):
        text += piece
        if len(text) > limit:
            return printable(text[:limit]) + "..."
    return printable(text)


def _pieces(value: Any, limit: int, depth: int) -> Iterator[str]:
    """Yields successive parts of the `repr` of a value, so that the caller can stop early."""
    kind = type(value)
    if isinstance(value, str):
        yield repr(str(value[: limit + 1]))
    elif isinstance(value, bytes | bytearray):
        yield repr(bytes(value[: limit + 1]))
    elif isinstance(value, int) and value.bit_length() > _MAX_BITS:
        yield f"an integer of {value.bit_length():,} bits"
    elif kind not in _BRACKETS:
        yield _repr(value)
    elif depth == _MAX_DEPTH:
        yield "..."
    else:
        start, stop = _BRACKETS[kind] if value else (f"{kind()!r}", "")
        yield start
        for number, item in enumerate(value):
            yield ", " if number else ""
            yield from _pieces(item, limit, depth + 1)
            if kind is dict:
                yield ": "
                yield from _pieces(value[item], limit, depth + 1)
        yield ",)" if kind is tuple and len(value) == 1 else stop


def _repr(value: object) -> str:
    try:
        return repr(value)
    except Exception:  # a class of the user may raise anything in __repr__
        return f"<{type(value).__name__}>"


def as_details(title: str, page: str) -> str:
    """Returns text as HTML for notebooks: a title line that expands to the whole text when
    clicked."""
    return (
        f"<details><summary><code>{as_html(title)}</code></summary><pre>{as_html(page)}</pre>"
        "</details>"
    )
