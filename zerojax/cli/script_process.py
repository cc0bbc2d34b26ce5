"""Runs a script of `zerojax check` in a child process with a time limit, and reports its end.

A script may never end or may kill its own process; only a parent process can report this. Imports
no JAX.
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
"""Lines that the child process writes to its notes file before and after the script. At the time
limit Python writes the stacks of all threads between them."""
GRACE = 5.0
"""Seconds to wait for a child process that should have ended by itself."""
_POLL = 1.0
_NAME_IT = "name a function that returns what to check: zerojax check {}:NAME"


def run_in_child(command: Sequence[str], target: str, limit: float) -> int:
    """Runs a command in a child process, and returns the child's exit code.

    The name of a temporary notes file is appended to the command; the child reports through this
    file. The child shares standard input and output with this process, and receives Ctrl-C as well.

    Args:
      target: script or function as the user typed it.
      limit: maximum seconds for the script, not counting the check.

    Returns:
      The exit code of a child that has printed its result.

    Raises:
      ValueError: the script exceeded the time limit, or ended its process.
      RuntimeError: a signal ended the child during the check.
    """
    with tempfile.TemporaryDirectory(prefix="zerojax-check-") as folder:
        notes = Path(folder) / "notes"
        notes.touch()
        # The folders that this process searches; "" in the list means the working folder.
        path = os.pathsep.join(each or os.getcwd() for each in sys.path)
        child = subprocess.Popen([*command, str(notes)], env={**os.environ, "PYTHONPATH": path})
        try:
            code = _wait(child, notes, limit)
        except KeyboardInterrupt:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(GRACE)
                return INTERRUPTED  # the child has reported it
            raise
        finally:
            child.kill()
            child.wait()
        return _code(code, notes.read_text(errors="replace"), target, limit)


def _wait(child: subprocess.Popen[bytes], notes: Path, limit: float) -> int | None:
    """Waits for a child process and returns its exit code; None if its script runs long beyond the
    limit."""
    begun = None
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return child.wait(_POLL)
        text = notes.read_text(errors="replace")
        if OVER in text:
            # The limit is for the script; the check after it may take any time.
            return child.wait()
        if begun is None and BEGUN in text:
            begun = time.monotonic()
        if begun is not None and time.monotonic() - begun > limit + GRACE:
            return None


def _code(code: int | None, notes: str, target: str, limit: float) -> int:
    """Returns the exit code for `run_in_child`; raises if the script exceeded its time or killed
    its process."""
    how = f"exit code {code}" if code is None or code >= 0 else signal.Signals(-code).name
    if OVER in notes or BEGUN not in notes:
        if how.startswith("SIG"):
            raise RuntimeError(f"the process that checked {target} was ended by {how}")
        return code or (OVER not in notes and FAILED)
    file = target.partition(":")[0]
    if code is None or "Timeout (" in notes:
        raise ValueError(
            f"{target} was still running after {limit:g} seconds, {_place(notes, file)}, and had "
            "not called zerojax yet; raise --time-limit, shorten "
            f"the work before that call, or {_NAME_IT.format(file)}"
        )
    raise ValueError(
        f"{target} ended its own process ({how}), for example by os._exit, os.kill or an abort, "
        f"before it called zerojax with a model; remove that call, or {_NAME_IT.format(file)}"
    )


def _place(notes: str, file: str) -> str:
    """Describes the line that a script executed at its time limit, from the stacks of all threads,
    of which the main thread is the last."""
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
    """Ends this process, the child, when the script in this context exceeds its time limit.

    Python's faulthandler then writes the stacks, even if the script never releases the interpreter.

    Args:
      notes: name of the notes file that the parent reads; None sets no limit.
      limit: maximum time in seconds.
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
