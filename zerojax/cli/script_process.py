"""Runs a script of `zerojax check` in a child process with a time limit, and reports its end.

A script may run for ever or end its process, which only another process can report. Imports no JAX.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from zerojax.runtime.shutdown import FAILED, INTERRUPTED, end_with_parent

BEGUN, OVER = "the script has begun\n", "the script is over\n"
"""Lines that the child writes to its notes file. Between them are the stacks that Python writes
when the time is over."""
GRACE = 5.0
"""Seconds to wait for a child process that should have ended by itself."""
_POLL = 1.0
_NAME_IT = "name a function that returns what to check: zerojax check {}:NAME"


def run_in_child(command: Sequence[str], target: str, limit: float) -> int:
    """Runs a command in a child process, which writes to the file whose name is appended to the
    command.

    The child has this process's standard input and output, and gets its Ctrl-C as well.

    Args:
      target: script or function as the user named it.
      limit: seconds for the script alone.

    Returns:
      The child's exit code, if the child itself has printed its result.

    Raises:
      ValueError: the time was over, or the script ended its process.
      RuntimeError: a signal ended the check that followed.
    """
    with tempfile.TemporaryDirectory(prefix="zerojax-check-") as folder:
        notes = Path(folder) / "notes"
        notes.touch()
        path = os.pathsep.join(each or os.getcwd() for each in sys.path)
        child = subprocess.Popen([*command, str(notes)], env={**os.environ, "PYTHONPATH": path})
        try:
            code = _wait(child, notes, limit)
        except KeyboardInterrupt:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(GRACE)
                return INTERRUPTED  # which it has reported
            raise
        finally:
            child.kill()
            child.wait()
        return _code(code, notes.read_text(errors="replace"), target, limit)


def _wait(child: subprocess.Popen[bytes], notes: Path, limit: float) -> int | None:
    """Returns the exit code of a child process; None if its script still runs long after
    the limit."""
    begun = None
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return child.wait(_POLL)
        text = notes.read_text(errors="replace")
        if OVER in text:
            return child.wait()
        if begun is None and BEGUN in text:
            begun = time.monotonic()
        if begun is not None and time.monotonic() - begun > limit + GRACE:
            return None


def _code(code: int | None, notes: str, target: str, limit: float) -> int:
    """Returns the exit code for `run_in_child`, or raises if the script did not end as
    it should."""
    how = f"exit code {code}" if code is None or code >= 0 else signal.Signals(-code).name
    if OVER in notes or BEGUN not in notes:
        if how.startswith("SIG"):
            raise RuntimeError(f"the process that checked {target} was ended by {how}")
        return code or (OVER not in notes and FAILED)
    file = target.partition(":")[0]
    if code is None or "Timeout (" in notes:
        raise ValueError(
            f"{target} was still running after {limit:g} seconds, {_place(notes, file)}; "
            "`zerojax check` "
            "waits for the script's first call of zerojax. Raise --time-limit, shorten "
            f"the work before that call, or {_NAME_IT.format(file)}"
        )
    raise ValueError(
        f"{target} ended its own process ({how}), for example by os._exit, os.kill or an abort, "
        f"before it called zerojax with a model; remove that call, or {_NAME_IT.format(file)}"
    )


def _place(notes: str, file: str) -> str:
    """Returns the line at which a script was when its time was over, from the stacks of all
    threads, main thread last."""
    written = file.encode("ascii", "backslashreplace").decode()
    if not file.endswith(".py"):
        written = written.replace(".", os.sep)
    line = re.compile(rf'File "[^"]*{re.escape(written)}[^"]*", line (\d+) in (\S+)')
    for stack in reversed(re.split(r"(?m)^(?=Thread|Current thread)", notes)):
        if found := line.search(stack):
            return f"at line {found[1]} in {found[2]}"
    return "at an unknown line"


@contextlib.contextmanager
def until_training(notes: str | None, limit: float) -> Iterator[None]:
    """Ends this process, in the child, when a script exceeds its time limit.

    Python then writes the stacks itself, even if a script holds the interpreter.

    Args:
      notes: file for the parent; None: there is none, and no limit.
      limit: seconds.
    """
    if notes is None:
        yield
        return
    end_with_parent(os.getppid())
    with open(notes, "a", buffering=1) as file:
        file.write(BEGUN)
        faulthandler.dump_traceback_later(limit, exit=True, file=file)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
            file.write(OVER)
