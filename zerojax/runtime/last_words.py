"""Watcher process that reports the end of a process that could not report it itself.

A process that is killed, for lack of memory for example, says nothing, and one that JAX aborts
since the coordinator is gone says it in fifteen lines of C++. A second, tiny process (Python
without any package) waits on a pipe from the first and speaks when it closes before `silence` was
called.
"""

from __future__ import annotations

import atexit
import contextlib
import subprocess
import sys

_WAIT = """
import signal, sys
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
text = ""
for line in sys.stdin:
    text = line
if text.strip():
    sys.stderr.write(text)
"""

_waiting: subprocess.Popen[str] | None = None


def prepare(process: int, processes: int) -> None:
    """From now on until `silence` the end of this process is told, whatever ends it.

    Args:
      process: which one this is.
      processes: how many there are.
    """
    global _waiting
    if _waiting is not None:
        return
    _waiting = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _WAIT],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        start_new_session=True,  # Ctrl-C in the terminal, and what ends the whole group, pass it by
    )
    atexit.register(silence)
    _tell(
        _waiting,
        f"zerojax: process {process} of {processes} exited without an error message "
        "(SIGKILL, out of memory, or aborted by JAX because another process ended first); "
        "saved checkpoints are complete, and the same command resumes from them\n",
    )


def silence() -> None:
    """This process says itself how it ends."""
    global _waiting
    waiting, _waiting = _waiting, None
    if waiting is None or waiting.stdin is None:
        return
    _tell(waiting, "\n")
    with contextlib.suppress(OSError):
        waiting.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        waiting.wait(timeout=1.0)


def _tell(waiting: subprocess.Popen[str], line: str) -> None:
    assert waiting.stdin is not None
    with contextlib.suppress(OSError):  # somebody has ended it
        waiting.stdin.write(line)
        waiting.stdin.flush()
