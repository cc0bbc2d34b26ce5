"""Exit statuses, and the exit of one process of a group: at once, or together with the others.

This module imports no JAX.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import ctypes
import functools
import os
import signal
import sys
import threading
import time
import traceback
from types import TracebackType
from typing import NoReturn

OK = 0
FAILED = 1
BAD_INPUT = 2
"""The same command fails again; starting it again is of no use."""
DIFFERS = 4
"""`zerojax check`: runs of a model differ, or it is refused."""
SAVED_AND_STOPPED = 75
"""A signal asked for the end and everything is saved: the same command goes on. It is the number of
sysexits.h for a failure that passes, which schedulers are often told to requeue."""
HUNG = 79
"""The watchdog ended a step that did not come to its end."""
INTERRUPTED = 130
"""Ctrl-C, as shells count it. Another signal n, with nothing saved, is 128 + n."""


AGREED = (OK, SAVED_AND_STOPPED)
"""Codes with which all processes of a run end together."""

COORDINATOR_WAITS = 1.0
"""Seconds. When process 0 goes, the runtime of every other process aborts it; whatever fails on all
of them alike should be said by each of them first."""

_LOOK_SECONDS = 0.5
_is_coordinator = False
_PR_SET_PDEATHSIG = 1


def in_group() -> bool:
    """Whether this process has joined others."""
    jax = sys.modules.get("jax")
    return jax is not None and jax.distributed.is_initialized()


def leave(code: int) -> NoReturn:
    """Ends this process of a group with `code`.

    After a failure JAX would first wait at exit for all other processes, which wait in a collective
    for this one, for five minutes; and it would end as aborted. So the process ends at once then,
    without what is registered for its exit. Codes of `AGREED` are waited for together.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if code in AGREED and in_group():
        sys.modules["jax"].distributed.shutdown()
    elif _is_coordinator:
        time.sleep(COORDINATOR_WAITS)
    os._exit(code)


@functools.cache
def leave_group_when_over() -> None:
    """From now on this process leaves its group as soon as its script is over.

    Python ends only after all threads of its executors. One of them may wait for the word of a
    process that has failed, with no public call to take it out, and meanwhile the others wait for
    this one at their exit: after five minutes JAX aborts all. Once all have left, that wait ends.
    """
    probe = concurrent.futures.ThreadPoolExecutor(1)

    def watch() -> None:
        # An executor takes no more work from when Python ends on; `atexit` comes too late.
        while True:
            try:
                probe.submit(int)
            except RuntimeError:
                break
            time.sleep(_LOOK_SECONDS)
        if in_group():
            sys.modules["jax"].distributed.shutdown()

    watching = threading.Thread(target=watch, name="zerojax-leaving", daemon=True)
    watching.start()
    atexit.register(watching.join)  # before JAX leaves the group itself: once is allowed


def exit_code_of(error: BaseException) -> int:
    """With which code an uncaught `error` ends a process; ours say it themselves."""
    code = getattr(error, "exit_code", None)
    if isinstance(code, int):
        return code
    if isinstance(error, SystemExit):
        code = error.code
        return OK if code is None else code if isinstance(code, int) else FAILED
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else FAILED


def print_error(error: BaseException) -> None:
    """The traceback of an uncaught `error`; of an end that all have agreed on its sentence only."""
    if exit_code_of(error) in AGREED:
        print(f"zerojax: {error}", file=sys.stderr, flush=True)
    else:
        traceback.print_exception(error)


def leave_on_uncaught_errors(*, is_coordinator: bool) -> None:
    """From now on an uncaught exception ends this process by `leave`.

    `sys.exit` is not an uncaught exception to Python: where a script may end with a code of its
    own, `python -m zerojax.runtime.launch.boot script.py` runs it.
    """
    global _is_coordinator
    _is_coordinator = is_coordinator
    if sys.excepthook is not _leave_after_saying:
        _leave_after_saying.previous = sys.excepthook
        sys.excepthook = _leave_after_saying


class _ExceptHook:
    """`sys.excepthook`: says what the hook before it says, then leaves."""

    previous = staticmethod(sys.__excepthook__)

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if exit_code_of(error) in AGREED:
            print_error(error)
        else:
            self.previous(kind, error, trace)
        if in_group():
            leave(exit_code_of(error))


_leave_after_saying = _ExceptHook()


def end_with_parent(parent: int) -> None:
    """From now on the kernel kills this process when its parent ends, however that ends.

    Only Linux can; elsewhere a killed launcher leaves its processes behind.

    Args:
      parent: process id. Where it has ended already, this process ends now.
    """
    if not sys.platform.startswith("linux"):
        return
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL)) != 0:
        raise OSError(ctypes.get_errno(), "the kernel does not tie this process to its launcher")
    if os.getppid() != parent:
        os._exit(FAILED)
