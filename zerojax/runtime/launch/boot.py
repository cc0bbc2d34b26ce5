"""Starts a script, a module or a program as one process of a group.

    python -m zerojax.runtime.launch.boot script.py ... | -m module ... | --exec program ...

Imports no JAX. A failure ends the process at once with its own exit code; JAX alone would wait for
the other processes. The process also ends when its launcher ends.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

from zerojax.runtime.shutdown import (
    AGREED,
    BAD_INPUT,
    FAILED,
    OK,
    end_with_parent,
    exit_code_of,
    in_group,
    leave,
    print_error,
)

_LAUNCHER = "--launcher="


def main() -> int:
    """Runs the script, module or program named in this process's arguments.

    Returns:
      The exit code. A process of a group returns only with a code in `AGREED`; with other codes it
      ends at once.
    """
    words = sys.argv[1:]
    if words and words[0].startswith(_LAUNCHER):
        end_with_parent(int(words.pop(0).removeprefix(_LAUNCHER)))
    if not words or words == ["-m"] or words == ["--exec"]:
        print(f"zerojax: error: nothing to run; {__doc__.splitlines()[2].strip()}", file=sys.stderr)
        return BAD_INPUT
    if words[0] == "--exec":
        return _become(words[1:])
    code = OK
    try:
        _run(words)
    except SystemExit as error:
        code = exit_code_of(error)
        # Python prints the text of `sys.exit(text)` only for an exception that nobody catches.
        if code == FAILED and isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException as error:
        code = exit_code_of(error)
        print_error(_without_boot(error))
    if code not in AGREED and in_group():
        leave(code)
    return code


def _run(words: list[str]) -> None:
    """Runs a command line `script.py ...` or `-m module ...` as Python would."""
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    if not Path(words[0]).is_file():
        print(f"zerojax: error: the script {words[0]!r} does not exist", file=sys.stderr)
        raise SystemExit(BAD_INPUT)
    sys.argv = words
    with _first_on_path(str(Path(words[0]).resolve().parent)):
        runpy.run_path(words[0], run_name="__main__")


@contextlib.contextmanager
def _first_on_path(folder: str) -> Iterator[None]:
    """Puts the script's folder first on `sys.path`, instead of the working folder."""
    # With `python -P` the first entry of the path is not the working folder.
    if not sys.flags.safe_path:
        sys.path[0] = folder
    yield


def _become(words: list[str]) -> int:
    """Replaces this process by another program, which the kernel kills when the parent ends."""
    try:
        os.execvp(words[0], words)
    except OSError as error:
        print(f"zerojax: error: {words[0]}: {error.strerror}", file=sys.stderr)
        return BAD_INPUT


def _without_boot(error: BaseException) -> BaseException:
    """Removes the frames of this module and of `runpy` from an error's traceback."""
    outside = (__file__, runpy.run_path.__code__.co_filename)
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in outside:
        trace = trace.tb_next
    return error.with_traceback(trace)


if __name__ == "__main__":
    raise SystemExit(main())
