"""Runs a script up to its first call of zerojax and returns the arguments of that call.

Imports JAX.
"""

from __future__ import annotations

import contextlib
import inspect
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import zerojax
from zerojax.cli.script_errors import as_the_scripts
from zerojax.deepspeed_engine import engine
from zerojax.plan import make
from zerojax.training import entry

End = Callable[[Any], NoReturn]
Read = Callable[[Mapping[str, Any], End], Any]
"""Function (arguments of a call by name, end) that returns the result of the call. It may call
`end(parts)` instead, which ends the script."""

_FUNCTIONS = {"train": entry, "make_plan": make, "initialize": engine}
"""{name of a public function whose call ends a script: name of the module that defines it}."""


class _Captured(BaseException):
    """Exception that ends a script at its first call of zerojax; `except Exception` misses it."""


class _Calls:
    """Record of a script's calls of zerojax, which survives if the script catches all exceptions.

    Attributes:
      parts: what readers made from the arguments of each call.
      failures: errors of calls whose arguments could not be used.
    """

    def __init__(self) -> None:
        self.parts: list[Any] = []
        self.failures: list[Exception] = []

    def end(self, parts: object) -> NoReturn:
        """Stores what a reader made from a call's arguments, and ends the script by an error."""
        self.parts.append(parts)
        raise _Captured

    def stand_in(self, function: Callable[..., Any], read: Read) -> Any:
        """Returns a replacement of `function` that passes its arguments to `read`."""
        signature = inspect.signature(function)

        def call(*args: object, **options: object) -> Any:
            try:
                try:
                    bound = signature.bind(*args, **options)
                except TypeError:
                    return function(*args, **options)  # raises an error that names the mistake
                bound.apply_defaults()
                return read(bound.arguments, self.end)
            except Exception as error:
                self.failures.append(error)
                raise

        return call


def first_call(
    path: str, readers: Mapping[str, Read], otherwise: str, *, command: str = "check"
) -> Any:
    """Runs a script until its first call of one of the functions in `readers`, which ends it.

    Args:
      path: path of the script, which runs as with `python SCRIPT`.
      readers: {name of a public function: function that reads the arguments of its call}.
      otherwise: remedy to print for a script without such a call.
      command: sub-command of zerojax that runs the script, for messages.

    Returns:
      What the reader passed to `end`.

    Raises:
      ValueError: the script ended without such a call, or raised an error before it.
    """
    calls = _Calls()
    ended: BaseException | None = None
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(as_script(path))
            for name, read in readers.items():
                module = _FUNCTIONS[name]
                stand_in = calls.stand_in(getattr(module, name), read)
                # Replaced first, so restored last, when `zerojax` finds the original function
                # again.
                stack.enter_context(mock.patch.object(zerojax, name, stand_in))
                stack.enter_context(mock.patch.object(module, name, stand_in))
            runpy.run_path(path, run_name="__main__")
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        ended = error
    if calls.parts:
        return calls.parts[0]
    if calls.failures and (ended is None or isinstance(ended, SystemExit)):
        ended = calls.failures[-1]  # the script caught the exception
    if ended is not None:
        if (own := as_the_scripts(ended, path, command)) is None:
            raise ended
        raise own from ended
    names = ", ".join(f"zerojax.{name}" for name in readers)
    raise ValueError(f"{path} calls none of {names}; {otherwise}")


@contextlib.contextmanager
def as_script(path: str) -> Iterator[None]:
    """Sets `sys.argv` and `sys.path` in the block as Python does when it runs a script."""
    folder = str(Path(path).resolve().parent)
    with mock.patch.object(sys, "argv", [path]), mock.patch.object(sys, "path", [*sys.path]):
        sys.path.insert(0, folder)
        yield
