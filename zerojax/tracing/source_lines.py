"""Finds the lines of the user's code from which a traced program comes."""

from __future__ import annotations

import linecache
import os
import sys
import threading
import traceback
from collections.abc import Iterable
from pathlib import Path

import flax
import jax
import numpy as np
import optax

from zerojax.operators.equations import Equation

PREFETCH = "zerojax-prefetch"
"""Name of threads that read batches ahead."""

_OURS = Path(__file__).resolve().parents[1]
_LIBRARIES = tuple(
    str(Path(module.__file__ or "").resolve().parent) + os.sep for module in (jax, flax, np, optax)
)
_KERNELS = str(_OURS.parent / "pallas_kernels") + os.sep
_STANDARD = str(Path(os.__file__).resolve().parent) + os.sep
_WRITTEN_BY_USERS_TOO = (str(_OURS / "zoo") + os.sep, str(_OURS / "models" / "losses.py"))
"""Parts of zerojax that count as user code if no stack frame is in the user's code."""


def line_of_equation(equation: Equation) -> str | None:
    """Returns the innermost line of user code that created an equation, as "file:line: source"."""
    trace = getattr(getattr(equation, "source_info", None), "traceback", None)
    if trace is None:
        return None
    return innermost_line((frame.file_name, frame.line_num) for frame in trace.frames)


def is_of_users(filename: str) -> bool:
    """Returns whether a file belongs neither to a library nor to zerojax nor to Python."""
    path = os.path.abspath(filename)
    # Code without a file, such as a notebook's, is known to `linecache`.
    if filename.startswith("<"):
        return bool(linecache.getlines(filename))
    if path.startswith((*_LIBRARIES, str(_OURS) + os.sep, _KERNELS)) or "site-packages" in path:
        return False
    return not path.startswith(_STANDARD) and not path.startswith(sys.base_prefix + "/lib")


def innermost_line(frames: Iterable[tuple[str, int]]) -> str | None:
    """Returns the first frame in user code, or else in zerojax's models, as "file:line: source".

    Args:
      frames: (file name, line number) of the stack frames, innermost first.
    """
    innermost_first = list(frames)
    for belongs in (is_of_users, lambda name: name.startswith(_WRITTEN_BY_USERS_TOO)):
        for filename, number in innermost_first:
            if belongs(filename):
                return source_line(filename, number)
    return None


def line_of_user(reads_data: bool = False) -> str | None:
    """Returns the line of user code that runs in this process, as "file:line: source".

    Args:
      reads_data: whether to look first into the thread that reads batches, then into the main one.
    """
    main = threading.main_thread().ident
    threads = [thread.ident for thread in threading.enumerate() if thread.name == PREFETCH]
    stacks = sys._current_frames()
    for thread in [*threads * reads_data, main]:
        if (frame := stacks.get(thread or 0)) is None:
            continue
        frames = traceback.walk_stack(frame)
        line = innermost_line((one.f_code.co_filename, number) for one, number in frames)
        if line is not None:
            return line
    return None


def source_line(filename: str, number: int) -> str:
    """Returns a line of a file as "file:line: source"; the path is relative if it can be."""
    source = linecache.getline(filename, number).strip()
    return f"{_short(filename)}:{number}: {source}".rstrip(": ")


def _short(filename: str) -> str:
    try:
        return str(Path(filename).relative_to(Path.cwd()))
    except ValueError:
        return filename


def is_of_zerojax(error: BaseException) -> bool:
    """Returns whether zerojax itself raised an error, whose message then states the remedy."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and Path(frames[-1].filename).is_relative_to(_OURS)
