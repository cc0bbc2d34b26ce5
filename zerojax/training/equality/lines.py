"""Lines of the user's code behind errors and equations of a traced program."""

from __future__ import annotations

import linecache
import os
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import flax
import jax
import numpy as np
import optax
from jax.extend.core import Jaxpr

from zerojax.models.jaxpr import inner_programs

_OURS = Path(__file__).resolve().parents[2]
_CHECK = str(Path(__file__).resolve().parent) + os.sep
_LIBRARIES = tuple(
    str(Path(module.__file__ or "").resolve().parent) + os.sep for module in (jax, flax, np, optax)
)
_STANDARD = str(Path(os.__file__).resolve().parent) + os.sep
_WRITTEN_BY_USERS_TOO = (str(_OURS / "models") + os.sep, str(_OURS / "losses.py"))
"""Parts of zerojax that stand for a user's code where there is none further in."""


def line_of_error(error: BaseException) -> str | None:
    """The innermost line of the user that the check called, as "file:line: source"."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [i for i, frame in enumerate(frames) if frame.filename.startswith(_CHECK)]
    called = frames[ours[-1] + 1 :] if ours else frames  # before that: who asked for the check
    return _innermost((frame.filename, frame.lineno or 0) for frame in reversed(called))


def line_of_equation(equation: Any) -> str | None:
    """The innermost line of the user that an equation comes from, as "file:line: source"."""
    trace = getattr(getattr(equation, "source_info", None), "traceback", None)
    if trace is None:
        return None
    return _innermost((frame.file_name, frame.line_num) for frame in trace.frames)


def lines_of_rules(program: Jaxpr) -> list[tuple[str | None, str]]:
    """(line of the call, line of its backward rule) of each `jax.custom_vjp` of users in a program
    and in those inside of it, as "file:line: source"."""
    found = []
    for equation in program.eqns:
        source = getattr(
            getattr(equation.params.get("bwd"), "debug_info", None), "func_src_info", None
        )
        filename, _, number = (source or "").rpartition(" at ")[2].rpartition(":")
        if number.isdigit() and is_of_users(filename):
            found.append((line_of_equation(equation), _line(filename, int(number))))
        for inner in inner_programs(equation.params):
            found += lines_of_rules(inner)
    return found


def is_of_users(filename: str) -> bool:
    """Whether a file is neither of a library nor of zerojax nor of Python."""
    path = os.path.abspath(filename)
    if filename.startswith("<"):
        return bool(linecache.getlines(filename))
    if path.startswith((*_LIBRARIES, str(_OURS) + os.sep)) or "site-packages" in path:
        return False
    return not path.startswith(_STANDARD) and not path.startswith(sys.base_prefix + "/lib")


def _innermost(frames: Iterable[tuple[str, int]]) -> str | None:
    """Of frames from the innermost outwards: the first of the user, else of our models."""
    found = list(frames)
    for belongs in (is_of_users, lambda name: name.startswith(_WRITTEN_BY_USERS_TOO)):
        for filename, number in found:
            if belongs(filename):
                return _line(filename, number)
    return None


def _line(filename: str, number: int) -> str:
    source = linecache.getline(filename, number).strip()
    return f"{_short(filename)}:{number}: {source}".rstrip(": ")


def _short(filename: str) -> str:
    try:
        return str(Path(filename).relative_to(Path.cwd()))
    except ValueError:
        return filename
