"""Lines of the user's code that a traced program comes from."""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import flax
import jax
import numpy as np
import optax

_OURS = Path(__file__).resolve().parents[1]
_LIBRARIES = tuple(
    str(Path(module.__file__ or "").resolve().parent) + os.sep for module in (jax, flax, np, optax)
)
_STANDARD = str(Path(os.__file__).resolve().parent) + os.sep
_WRITTEN_BY_USERS_TOO = (str(_OURS / "models") + os.sep, str(_OURS / "losses.py"))
"""Parts of zerojax that stand for a user's code where there is none further in."""


def line_of_equation(equation: Any) -> str | None:
    """The innermost line of the user that an equation comes from, as "file:line: source"."""
    trace = getattr(getattr(equation, "source_info", None), "traceback", None)
    if trace is None:
        return None
    return innermost_line((frame.file_name, frame.line_num) for frame in trace.frames)


def is_of_users(filename: str) -> bool:
    """Whether a file is neither of a library nor of zerojax nor of Python."""
    path = os.path.abspath(filename)
    if filename.startswith("<"):
        return bool(linecache.getlines(filename))
    if path.startswith((*_LIBRARIES, str(_OURS) + os.sep)) or "site-packages" in path:
        return False
    return not path.startswith(_STANDARD) and not path.startswith(sys.base_prefix + "/lib")


def innermost_line(frames: Iterable[tuple[str, int]]) -> str | None:
    """Of frames from the innermost outwards: the first of the user, else of our models."""
    found = list(frames)
    for belongs in (is_of_users, lambda name: name.startswith(_WRITTEN_BY_USERS_TOO)):
        for filename, number in found:
            if belongs(filename):
                return source_line(filename, number)
    return None


def source_line(filename: str, number: int) -> str:
    """A line of a file as "file:line: source", the file relative to the current folder."""
    source = linecache.getline(filename, number).strip()
    return f"{_short(filename)}:{number}: {source}".rstrip(": ")


def _short(filename: str) -> str:
    try:
        return str(Path(filename).relative_to(Path.cwd()))
    except ValueError:
        return filename
