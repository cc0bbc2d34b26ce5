"""Validation of a GGUF file's table, before the package `gguf` reads it.

The package gguf walks as many items as a file claims to have, one by one, and takes what lies
behind the end for empty: a length of 2^40 keeps it busy for weeks.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

from zerojax.config.display import quoted
from zerojax.runtime.bounded_json import JsonError, open_regular

MAX_ITEMS = 2**22
"""Of all lists together, each of which takes the package a microsecond or two. The longest lists
of files that exist are vocabularies: some hundred thousand tokens, and as many merges."""
MAX_DEPTH = 4
MAX_DIMENSIONS = 4
"""GGML_MAX_DIMS."""
MAX_NAME = 2**16 - 1
_MAX_TABLE = 2**28
"""Bytes of a table that are read; the arrays lie behind it."""
_STRING, _ARRAY = 8, 9
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a single value of each kind."""


class Damage(Exception):
    """What is wrong with a file, to be read behind its path."""


def check_table(path: Path) -> None:
    """Reads the table of a file to its end, without keeping it.

    Raises:
      Damage: it cannot be one. OSError: what the disk says.
    """
    try:
        with open(open_regular(path), "rb") as file:
            _Walk(file.read(_MAX_TABLE)).table()
    except JsonError as error:
        raise Damage(error.what) from None


class _Walk:
    """One pass over the bytes of a table."""

    def __init__(self, content: bytes) -> None:
        self._content, self._at, self._items = content, 0, 0
        self._order = "<"

    def table(self) -> None:
        """All fields and all tensors."""
        if self._take(4, "its first bytes") != b"GGUF":
            raise Damage("does not begin as a GGUF file")
        (version,) = struct.unpack("<I", self._take(4, "the version"))
        if version & 0xFFFF == 0:  # of a machine with the other order of bytes
            self._order = ">"
            version = int.from_bytes(version.to_bytes(4, "little"), "big")
        if version not in (2, 3):
            raise Damage(f"has version {version} of the format; 2 and 3 are read")
        num_tensors, num_fields = self._number("Q"), self._number("Q")
        self._check_count(num_fields, 8 + 4 + 1, "fields")
        self._check_count(num_tensors, 8 + 4 + 4 + 8, "tensors")
        self._named(num_fields, "field", lambda name: self._value(name, self._number("I"), 0))
        self._named(num_tensors, "tensor", self._tensor)

    def _named(self, count: int, what: str, read: Callable[[str], None]) -> None:
        seen: set[str] = set()
        for _ in range(count):
            raw = self._string(f"the name of a {what}", MAX_NAME)
            try:
                name = raw.decode("utf-8")
            except UnicodeDecodeError:
                raise Damage(f"has a {what} whose name is no text: {quoted(raw)}") from None
            if name in seen:
                raise Damage(f"has the {what} {quoted(name)} twice")
            seen.add(name)
            read(name)

    def _value(self, name: str, kind: int, depth: int) -> None:
        if kind == _STRING:
            self._string(f"the text of {quoted(name)}")
        elif kind in _SIZES:
            self._take(_SIZES[kind], f"the value of {quoted(name)}")
        elif kind != _ARRAY:
            raise Damage(f"has {quoted(name)} of the unknown kind {kind}")
        elif depth == MAX_DEPTH:
            raise Damage(f"has {quoted(name)} with lists nested more than {MAX_DEPTH} levels deep")
        else:
            self._list(name, depth)

    def _list(self, name: str, depth: int) -> None:
        kind, length = self._number("I"), self._number("Q")
        least = _SIZES.get(kind, 8 if kind == _STRING else 12)
        self._check_count(length, least, f"items of {quoted(name)}")
        self._items += length
        if self._items > MAX_ITEMS:
            raise Damage(f"has {quoted(name)} with {length} items; {MAX_ITEMS} in all are read")
        if kind in _SIZES:
            self._take(length * least, f"the items of {quoted(name)}")
        else:
            for _ in range(length):
                self._value(name, kind, depth + 1)

    def _tensor(self, name: str) -> None:
        count = self._number("I")
        if not 1 <= count <= MAX_DIMENSIONS:
            raise Damage(f"has the tensor {quoted(name)} with {count} dimensions, not 1 to 4")
        shape = [self._number("Q") for _ in range(count)]
        if not all(1 <= size < 2**31 for size in shape):
            raise Damage(f"has the tensor {quoted(name)} of shape {quoted(shape)}")
        self._number("I")  # the package knows kinds, and where the arrays begin
        self._number("Q")

    def _check_count(self, count: int, least: int, what: str) -> None:
        left = len(self._content) - self._at
        if count * least > left:
            raise Damage(f"is cut short: it should have {count} {what}, and {left} bytes are left")

    def _string(self, what: str, most: int = _MAX_TABLE) -> bytes:
        length = self._number("Q")
        if length > most:
            raise Damage(f"has {length} bytes for {what}")
        return self._take(length, what)

    def _number(self, kind: str) -> int:
        return struct.unpack(self._order + kind, self._take(struct.calcsize(kind), "a number"))[0]

    def _take(self, count: int, what: str) -> bytes:
        found = self._content[self._at : self._at + count]
        if len(found) < count:
            raise Damage(f"is cut short within {what}")
        self._at += count
        return found
