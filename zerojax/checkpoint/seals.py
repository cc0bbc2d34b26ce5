"""Checksums inside JSON files that show an edit and name the edited value.

The last line is a checksum of all bytes before it; every later format of ours ends in the same
line. Within it are checksums of the values, so that an edited one can be named.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

SECTIONS = "sections"
_LAST_LINE = re.compile(rb',\n "checksum": "([0-9a-f]{8})"\n\}\n\Z')
_NAMED_BY_LEAF = ("config", "data_state")
_MOST = 3


def seal(body: Mapping[str, Any]) -> str:
    """The text of a JSON object, sealed."""
    text = json.dumps({**body, SECTIONS: dict(_checksums(body))}, indent=1)
    inside = text.removesuffix("\n}")
    return f'{inside},\n "checksum": "{_checksum(inside.encode())}"\n}}\n'


def is_sealed(content: bytes) -> bool:
    """Whether a file ends as sealed ones do, or did before it was damaged."""
    return _LAST_LINE.search(content) is not None or f'"{SECTIONS}": '.encode() in content


def is_unbroken(content: bytes) -> bool:
    """Whether the bytes of a sealed file are those that were written."""
    last = _LAST_LINE.search(content)
    return last is not None and last[1].decode() == _checksum(content[: last.start()])


def changed_values(body: Mapping[str, Any]) -> list[str]:
    """The values that do not match their checksums, at most three, such as "config.seed"."""
    saved = body.get(SECTIONS)
    if not isinstance(saved, dict):
        return []
    now = dict(_checksums({name: x for name, x in body.items() if name != "checksum"}))
    names = sorted(name for name in now.keys() | saved.keys() if now.get(name) != saved.get(name))
    return names[:_MOST]


def _checksums(body: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(name, checksum) of each value; of every leaf of what people edit."""
    for name, value in body.items():
        if name == SECTIONS:
            continue
        parts = _leaves(name, value) if name in _NAMED_BY_LEAF else [(name, value)]
        for part, item in parts:
            yield part, _checksum(json.dumps(item, sort_keys=True).encode())


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict) or not value:
        yield name, value
        return
    for key, item in value.items():
        yield from _leaves(f"{name}.{key}", item)


def _checksum(content: bytes) -> str:
    return f"{zlib.crc32(content):08x}"
