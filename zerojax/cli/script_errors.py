"""Reports errors that a script raises before its training as errors of the script.

Errors that zerojax raises keep their own sentence. Imports JAX.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Iterator

from zerojax.config.display import show
from zerojax.tracing.source_lines import is_of_users, source_line

SHOWN = 4
"""Maximum number of lines of the script in the printed traceback."""
_FROZEN, _OURS = "<frozen", "zerojax"
_AT_END = ("EOF when reading a line", "input(): lost sys.stdin")


@contextlib.contextmanager
def told_as_the_scripts(target: str) -> Iterator[None]:
    """Reports errors of the code in this context, a user's script or function, as script errors.

    Raises:
      ValueError: replaces an error that the script raised, or its `sys.exit`.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        own = as_the_scripts(error, target)
        if own is None:
            raise
        raise own from error


def as_the_scripts(error: BaseException, target: str, command: str = "check") -> ValueError | None:
    """Prints the traceback of an error of a user's script, and returns the error to report for it.

    Args:
      target: script or function as the user typed it.
      command: sub-command of zerojax that runs the script.

    Returns:
      The error to report, or None if zerojax raised `error`, not the script.
    """
    if isinstance(error, SystemExit):
        return ValueError(
            f"{target} ended ({error.code}) before it passed a model to zerojax; remove its "
            "sys.exit, or provide what the script needs"
        )
    frames = list(traceback.walk_tb(error.__traceback__))
    names = [frame.f_code.co_filename for frame, _ in frames]
    own = [place for place, name in enumerate(names) if _is_own(name)]
    modules = [frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in frames]
    inside = [place for place, module in enumerate(modules) if module == _OURS]
    is_unread = isinstance(error, SyntaxError) and not own
    if not is_unread and (not own or own[-1] < max(inside, default=-1)):
        return None
    where = f"{error.filename}:{error.lineno}" if is_unread else ""
    if own:
        where = source_line(names[own[-1]], frames[own[-1]][1])
    if isinstance(error, EOFError | RuntimeError) and str(error) in _AT_END:
        return ValueError(
            f"{target} waits for input at {where}, and standard input has ended; write the "
            f"value into the script, or pipe it: echo VALUE | zerojax {command} {target}"
        )
    _print(error, own)
    reason = (str(error).splitlines() or [""])[0]
    other = ""
    if command == "check":
        other = (
            ", or name a function that returns what to check: zerojax check "
            f"{target.partition(':')[0]}:NAME"
        )
    return ValueError(
        f"{target} raised {type(error).__name__}{': ' * bool(reason)}{reason} before its training "
        f"({where}); fix the script{other}"
    )


def _is_own(filename: str) -> bool:
    return not filename.startswith(_FROZEN) and is_of_users(filename)


def _print(error: BaseException, own: list[int]) -> None:
    """Prints the traceback of an error: the script's own lines, and the line that raised."""
    frames = traceback.extract_tb(error.__traceback__)
    shown = sorted({*own[-SHOWN:], *([len(frames) - 1] if own else [])})
    lines = traceback.format_list([frames[place] for place in shown])
    text = "".join([*lines, *traceback.format_exception_only(error)])
    show(f"Traceback of the script (most recent call last):\n{text}", file=sys.stderr, end="")
