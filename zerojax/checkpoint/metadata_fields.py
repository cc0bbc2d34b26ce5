"""Valid values of each field of a checkpoint's metadata.

A seal says that nobody changed the file by accident; this holds for files that somebody wrote on
purpose, too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp

from zerojax.config.display import quoted
from zerojax.runtime.bounded_json import inside

_LARGEST = 2**48
"""Of one dimension, in elements, and of one array or file, in bytes: 256 TiB."""

_SIZE = "(?:0|[1-9][0-9]{0,17})"
_ARRAY = re.compile(rf"([a-z][a-z0-9_]{{0,31}})\[({_SIZE}(?:,{_SIZE})*)?\]")
_CHECKSUM = re.compile(r"[0-9a-f]{8}")
_FINGERPRINT = re.compile(r"[0-9a-f]{16}")
_MOST_DIMENSIONS = 32


def problem_with(body: Mapping[str, Any]) -> str | None:
    """What is wrong with the fields of a checkpoint's metadata, as a clause; None: nothing.

    Args:
      body: a whole object of metadata.json; fields that it lacks are not looked at.
    """
    for name, is_right, kind in _FIELDS:
        if name in body and not is_right(body[name]):
            return f"{name!r} is {quoted(body[name])} in place of {kind}"
    for name, is_key, is_value, kind in _TABLES:
        if name not in body:
            continue
        if not isinstance(body[name], dict):
            return f"{name!r} is {quoted(body[name])} in place of an object"
        for key, value in body[name].items():
            if not is_key(key):
                return f"{name!r} has {quoted(key)}, which is no {kind[0]}"
            if not is_value(value):
                return f"{name!r} has {quoted(value)} for {quoted(key)} in place of {kind[1]}"
    for name, of in (("checksums", "files"), ("fingerprints", "arrays")):
        unknown = body.get(name, {}).keys() - body.get(of, {}).keys()
        if unknown:
            return f"{name!r} has {quoted(min(unknown))}, which {of!r} has not"
    return None


def is_array(description: Any) -> bool:
    """Whether this is dtype and shape of an array, as `metadata.describe` writes them.

    >>> is_array("float32[2,3]"), is_array("float33[2]"), is_array("float32[-1]")
    (True, False, False)
    """
    found = _ARRAY.fullmatch(description) if isinstance(description, str) else None
    if found is None:
        return False
    shape = [int(size) for size in (found[2] or "").split(",") if size]
    try:
        dtype = jnp.dtype(found[1])
    except TypeError:
        return False
    if dtype.kind in "OSUMm" or not dtype.itemsize or len(shape) > _MOST_DIMENSIONS:
        return False
    # Zeros count as ones, so that no dimension beside them is beyond what NumPy can hold.
    return math.prod(max(1, size) for size in shape) * dtype.itemsize <= _LARGEST


def _is_int(least: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and least <= value <= _LARGEST


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _matches(pattern: re.Pattern[str]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and pattern.fullmatch(value) is not None


_FIELDS = (
    ("format", _is_int(1), "a number of 1 or more"),
    ("step", _is_int(0), "a whole number of 0 or more"),
    ("num_devices", _is_int(1), "a whole number of 1 or more"),
    ("num_processes", _is_int(1), "a whole number of 1 or more"),
    ("saved", _is_text, "a time"),
    ("data_state", _is_object, "an object"),
    ("config", _is_object, "an object"),
    ("plan", _is_object, "an object"),
)
_TABLES = (
    ("versions", _is_text, _is_text, ("name", "a version")),
    ("arrays", _is_text, is_array, ("name", "a dtype and a shape")),
    ("files", inside, _is_int(0), ("name of a file inside the step's folder", "its bytes")),
    ("checksums", inside, _matches(_CHECKSUM), ("name of a file", "its checksum")),
    ("fingerprints", _is_text, _matches(_FINGERPRINT), ("name", "a fingerprint")),
)
