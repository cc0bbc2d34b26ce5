"""Termination of Orbax threads that wait forever after a failed save of one process.

Its threads wait for a signal that the folder is there before they write. Where making the folder is
what failed, the signal never comes, and Python waits for them when it ends: the process hung there
(seen where a folder was removed, and where two runs wrote into one). With several processes the
signal comes through their group, and `runtime.shutdown.leave_group_when_over` ends the wait.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
import time
from types import FrameType

LOOK_SECONDS = 0.5
STUCK_SECONDS = 2.0
"""Making a folder takes less: after a failed save, a wait of this length will not end."""

_FUNCTION, _PACKAGE = "blocking_key_value_get", "orbax"


class SaveFailed(Exception):
    """Raised in a thread of a save that has failed."""


@functools.cache
def end_stuck_threads() -> None:
    """From now on waits of Orbax's threads for a folder that nobody makes are ended."""
    threading.Thread(target=_watch, name="zerojax-stuck-threads", daemon=True).start()


def _watch() -> None:
    since: dict[tuple[int, str], float] = {}
    while True:
        now = time.monotonic()
        waits = {(thread, key): frame for thread, frame, key in _waits()}
        since = {wait: since.get(wait, now) for wait in waits}
        for wait, began in since.items():
            if now - began >= STUCK_SECONDS:
                _end(wait[0], waits[wait])
        del waits  # frames keep arrays
        time.sleep(LOOK_SECONDS)


def _waits() -> list[tuple[int, FrameType, str]]:
    """(thread, the frame of the waiting call, what it waits for)."""
    found = []
    for thread, top in sys._current_frames().items():
        frame: FrameType | None = top
        while frame is not None:
            code = frame.f_code
            if code.co_name == _FUNCTION and _PACKAGE in code.co_filename:
                found.append((thread, frame, str(frame.f_locals.get("key"))))
                break
            frame = frame.f_back
    return found


def _end(thread: int, frame: FrameType) -> None:
    """Raises `SaveFailed` in a thread, and wakes it.

    It is raised when the thread next runs Python code, so whatever it waits for is notified: any
    key does that. Setting the key that it waits for would let it write the state once more.
    """
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(SaveFailed))
    client = frame.f_locals.get("self")
    if hasattr(client, "key_value_set"):
        client.key_value_set("zerojax/a save has failed", "", allow_overwrite=True)
