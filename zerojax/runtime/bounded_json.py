"""Reads JSON from untrusted files and connections, with limits of size, depth and digits.

Any input stays within these limits or raises `JsonError`, or `OSError` if the operating system
refuses a file:

    kind of file   regular; a pipe, a device or a socket is refused before it is opened
    size           `max_bytes`, 64 MiB unless the caller says otherwise
    depth          64 nested lists and objects
    numbers        100 digits; no number that is infinite as a float, no NaN
    keys           no key twice in one object
    text           UTF-8 without lone surrogates, so that it can be written again

`json.loads` alone recurses as deep as its input (RecursionError), accepts NaN, keeps the last of
two equal keys, and has no limit of size.
"""

from __future__ import annotations

import codecs
import functools
import itertools
import json
import math
import os
import re
from typing import Any

from zerojax.config.display import quoted
from zerojax.config.regular_files import UnreadableError, check_encoding, open_regular

MAX_BYTES = 64 << 20
MAX_DEPTH = 64
MAX_DIGITS = 100
"""Maximum number of digits of one number. Integers of a random generator's state have 39 digits;
a float has 17 and an exponent."""

# Possessive quantifiers, so that a string without its end costs no backtracking.
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


class JsonError(UnreadableError):
    """A file or text is not valid JSON, or exceeds a limit of this module."""


def read_bytes(
    path: str | os.PathLike[str], *, max_bytes: int = MAX_BYTES, follow: bool = True
) -> bytes:
    """Reads the bytes of a regular file.

    Args:
      path: path of the file.
      max_bytes: maximum size; a larger file is refused before it is read.
      follow: False: refuse a path that is a symbolic link.

    Raises:
      JsonError: the path is not a regular file, or the file is too large.
      OSError: the operating system reports an error.
    """
    try:
        descriptor = open_regular(path, follow=follow)
    except UnreadableError as error:
        raise JsonError(error.what, path) from None
    with open(descriptor, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        # Requests one byte more, because a file may grow meanwhile, and /proc files have size 0.
        content = b"" if size > max_bytes else file.read(max_bytes + 1)
    if max(size, len(content)) > max_bytes:
        raise JsonError(f"has more than {max_bytes} bytes, the limit", path)
    return content


def loads(content: str | bytes, *, max_bytes: int = MAX_BYTES, finite: bool = True) -> Any:
    """Parses a JSON text.

    Args:
      content: the text; bytes are decoded as UTF-8.
      max_bytes: maximum number of bytes of the text.
      finite: False: accept `NaN`, `Infinity` and numbers that are infinite as a float.

    Returns:
      The parsed value, made of dicts, lists, strings, ints, floats, bools and None.

    Raises:
      JsonError: the text is not valid JSON, or exceeds a limit; the message names the limit.
    """
    try:
        text = content if isinstance(content, str) else content.decode("utf-8")
        raw = content if isinstance(content, bytes) else content.encode("utf-8")
    except UnicodeError as error:
        raise JsonError(f"is not UTF-8 at byte {getattr(error, 'start', 0)}") from None
    if len(raw) > max_bytes:
        raise JsonError(f"has {len(raw)} bytes; at most {max_bytes} are read")
    if depth_of(raw) > MAX_DEPTH:
        raise JsonError(f"is nested deeper than {MAX_DEPTH} levels")
    try:
        value = json.loads(
            text,
            object_pairs_hook=_without_equal_keys,
            parse_int=lambda text: int(_checked_number(text)),
            parse_float=functools.partial(_float, finite),
            parse_constant=_refuse_constant if finite else None,
        )
    except JsonError:
        raise
    except json.JSONDecodeError as error:
        line, column = error.lineno, error.colno
        raise JsonError(f"is not valid JSON at line {line}, column {column}: {error.msg}") from None
    # Only an escape can be a lone surrogate, because the bytes are UTF-8. Most texts have none.
    if rb"\ud" in raw.lower():
        _check_text(value)
    return value


def load(
    path: str | os.PathLike[str],
    *,
    max_bytes: int = MAX_BYTES,
    follow: bool = True,
    finite: bool = True,
) -> Any:
    """Reads and parses a JSON file.

    Args:
      path: path of the file.
      max_bytes: maximum size of the file.
      follow: False: refuse a path that is a symbolic link.
      finite: False: accept `NaN`, `Infinity` and numbers that are infinite as a float.

    Raises:
      JsonError: the path is not a regular file, the file is not JSON, or it exceeds a limit. The
        message names the file.
      OSError: the operating system reports an error.
    """
    content = read_bytes(path, max_bytes=max_bytes, follow=follow)
    try:
        check_encoding(content)
        content = content.removeprefix(codecs.BOM_UTF8)
        return loads(content, max_bytes=max_bytes, finite=finite)
    except UnreadableError as error:
        raise JsonError(error.what, path) from None


def depth_of(text: bytes) -> int:
    """Returns the nesting depth of lists and objects in a JSON text, without recursion.

    >>> depth_of(b'{"a": [1, "]["]}')
    2
    """
    if text.count(b"[") + text.count(b"{") < 2:
        return text.count(b"[") + text.count(b"{")
    brackets = _STRING.sub(b"", text).translate(None, _NOT_BRACKETS)
    steps = (1 if one in b"[{" else -1 for one in brackets)
    return max(itertools.accumulate(steps, initial=0))


def inside(name: object) -> bool:
    """Returns True if `name`, read from a file, is a path that stays below a folder: relative and
    without "..".

    >>> inside("arrays/d/1"), inside("../../x"), inside("/dev/zero"), inside("")
    (True, False, False, False)
    """
    if not isinstance(name, str) or not name or "\0" in name or name.startswith("/"):
        return False
    return all(part not in ("", ".", "..") for part in name.split("/"))


def _without_equal_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise JsonError(f"has the key {quoted(key)} twice in one object")
            seen.add(key)
    return found


def _float(finite: bool, text: str) -> float:
    value = float(_checked_number(text))
    if finite and math.isinf(value):
        raise JsonError(f"has the number {quoted(text)}, which is beyond the range of a float")
    return value


def _checked_number(text: str) -> str:
    """Returns the text of a number; raises if it is too long, since Python converts long numbers in
    quadratic time."""
    if len(text) > MAX_DIGITS:
        raise JsonError(f"has a number of {len(text)} characters; at most {MAX_DIGITS} are read")
    return text


def _refuse_constant(text: str) -> None:
    raise JsonError(f"has {text}, which is not valid JSON")


def _check_text(value: object) -> None:
    """Raises JsonError if a parsed value contains text with lone surrogates. The limit of depth
    also limits the recursion."""
    if isinstance(value, dict):
        for key, item in value.items():
            _check_text(key)
            _check_text(item)
    elif isinstance(value, list):
        for item in value:
            _check_text(item)
    elif isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise JsonError(f"has a text with an unpaired surrogate: {quoted(value)}") from None
