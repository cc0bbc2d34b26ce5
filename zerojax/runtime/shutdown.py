"""Defines exit codes, and ends one process of a group: at once, or together with the others.

This module imports no JAX.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import ctypes
import functools
import io
import os
import signal
import sys
import threading
import time
import traceback
from types import TracebackType
from typing import NoReturn

from zerojax.runtime import fatal_messages

OK = 0
FAILED = 1
BAD_INPUT = 2
"""Exit code of a command that would fail again with the same input; do not restart it."""
DIFFERS = 4
"""Exit code of `zerojax check` if runs of a model differ, or the model is refused."""
SAVED_AND_STOPPED = 75
"""Exit code after a signal requested the end and everything was saved: the same command resumes.
sysexits.h uses this number for a temporary failure, and schedulers are often configured to requeue
such jobs."""
HUNG = 79
"""Exit code of a process that the watchdog ended because a step did not finish."""
INTERRUPTED = 130
"""Exit code after Ctrl-C, as in shells. After another signal n without a save, the exit code is
128 + n."""


AGREED = (OK, SAVED_AND_STOPPED)
"""Exit codes with which all processes of a run end together."""

COORDINATOR_WAITS = 1.0
"""Seconds that process 0 waits before it ends. JAX's runtime ends every other process when process
0 ends; before, each process should report a failure that all have in common."""

_LOOK_SECONDS = 0.5
_is_coordinator = False
_PR_SET_PDEATHSIG = 1


def in_group() -> bool:
    """Returns True if this process has joined the process group of a run."""
    jax = sys.modules.get("jax")
    return jax is not None and jax.distributed.is_initialized()


def leave(code: int) -> NoReturn:
    """Ends this process, which belongs to a group, with exit code `code`.

    After a failure JAX would first wait five minutes at exit for all other processes, which wait
    for this process in a collective; then it would abort. So after a failure the process ends at
    once, without its exit handlers. With a code in `AGREED` it waits for the other processes.
    """
    # `os._exit` writes out no buffers.
    sys.stdout.flush()
    sys.stderr.flush()
    if code in AGREED and in_group():
        sys.modules["jax"].distributed.shutdown()
    elif _is_coordinator:
        time.sleep(COORDINATOR_WAITS)
    os._exit(code)


@functools.cache
def leave_group_when_over() -> None:
    """Makes this process leave its process group when its script has ended.

    Python ends only after all threads of its executors. Such a thread may wait for a process that
    has failed, and no public call interrupts it. The other processes meanwhile wait for this
    process at their exit, and after five minutes JAX aborts all. Once every process has left the
    group, the wait of the thread ends.
    """
    probe = concurrent.futures.ThreadPoolExecutor(1)

    def watch() -> None:
        # An executor refuses work as soon as Python begins to exit; `atexit` runs later.
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
    atexit.register(watching.join)  # before JAX leaves the group, which is allowed only once


def exit_code_of(error: BaseException) -> int:
    """Returns the exit code for an uncaught `error`; zerojax's own errors define their codes."""
    code = getattr(error, "exit_code", None)
    if isinstance(code, int):
        return code
    if isinstance(error, SystemExit):
        code = error.code
        return OK if code is None else code if isinstance(code, int) else FAILED
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else FAILED


def print_error(error: BaseException) -> None:
    """Prints the traceback of an uncaught `error`; only its message if all processes agreed to
    end."""
    if exit_code_of(error) in AGREED:
        print(f"zerojax: {error}", file=sys.stderr, flush=True)
    else:
        traceback.print_exception(error)


def leave_on_uncaught_errors(*, is_coordinator: bool) -> None:
    """Makes an uncaught exception end this process through `leave`.

    Python does not treat `sys.exit` as an uncaught exception. For a script that may end with its
    own exit code, use `python -m zerojax.runtime.launch.boot script.py`.
    """
    global _is_coordinator
    _is_coordinator = is_coordinator
    if sys.excepthook is not _leave_after_saying:
        _leave_after_saying.previous = sys.excepthook
        sys.excepthook = _leave_after_saying


class _ExceptHook:
    """Hook for `sys.excepthook` that calls the previous hook, then leaves the process group."""

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


def leave_when_one_is_lost(process: int, num_processes: int) -> None:
    """Makes the end of another process end this one with a sentence and code `FAILED`.

    JAX's runtime would write a C++ stack and abort. From now on its standard error, descriptor 2,
    passes through a small program (`fatal_messages`), which writes the sentence instead and then
    informs a thread of this process. Python's own `sys.stderr` is not redirected.

    Args:
      process: index of this process.
      num_processes: number of processes of the run.
    """
    try:
        shown = os.dup(2)
    except OSError:  # it is closed: nothing is shown anyway
        return
    (source, sink), (said, saying) = os.pipe(), os.pipe()
    # Isolated and without `site`, so that the program imports nothing of the user's.
    words = [sys.executable, "-I", "-S", fatal_messages.__file__, str(process), str(num_processes)]
    files = [(os.POSIX_SPAWN_DUP2, source, 0), (os.POSIX_SPAWN_DUP2, saying, 1)]
    try:
        # In a session of its own: Ctrl-C in a terminal must not end it before this process.
        os.posix_spawn(sys.executable, words, os.environ, file_actions=files, setsid=True)
    except OSError as error:
        print(
            f"zerojax: {sys.executable!r} cannot be started ({error.strerror}); if another process "
            "of this run ends, JAX's runtime aborts this one with a C++ stack",
            file=sys.stderr,
            flush=True,
        )
        for descriptor in (shown, source, sink, said, saying):
            os.close(descriptor)
        return
    _show_python_at(shown)
    os.dup2(sink, 2)
    # Only the program keeps these ends. `_leave_when_said` then notices when the program ends.
    for descriptor in (source, sink, saying):
        os.close(descriptor)
    leaving = threading.Thread(target=_leave_when_said, args=(said,), name="zerojax-lost")
    leaving.daemon = True
    leaving.start()
    _delay_aborts()


def _show_python_at(descriptor: int) -> None:
    """Makes Python's standard error write to `descriptor`, if it writes to descriptor 2."""
    for name in ("stderr", "__stderr__"):
        stream = getattr(sys, name)
        if _descriptor(stream) == 2:
            direct = io.TextIOWrapper(
                os.fdopen(descriptor, "wb", closefd=False),
                encoding=stream.encoding,
                errors=stream.errors,
                line_buffering=True,
                write_through=stream.write_through,
            )
            setattr(sys, name, direct)


def _descriptor(stream: object) -> int | None:
    try:
        return stream.fileno()  # type: ignore[attr-defined]
    except (AttributeError, OSError, ValueError):
        return None


def _leave_when_said(said: int) -> None:
    if os.read(said, 1):
        if _is_coordinator:
            time.sleep(COORDINATOR_WAITS)
        os._exit(FAILED)


def _delay_aborts() -> None:
    """Delays an abort by 6 s: if JAX's runtime aborts because a process is lost, the thread of
    `_leave_when_said` ends this process first, with its message.

    The handler of SIGABRT is the C function `sleep`, which gets the signal's number, 6, as its
    seconds. A Python function would need the interpreter's lock in the thread that aborts. An abort
    for another reason ends the process as usual after that time. A handler that somebody else has
    installed, such as that of `faulthandler`, stays.
    """
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    earlier = libc.signal(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))
    if earlier is not None:  # None is SIG_DFL
        libc.signal(signal.SIGABRT, earlier)


def end_with_parent(parent: int) -> None:
    """Makes the kernel kill this process when its parent ends for any reason.

    Only Linux supports this. On other systems a killed launcher leaves its processes running.

    Args:
      parent: process id of the parent. If the parent has already ended, this process ends now.
    """
    if not sys.platform.startswith("linux"):
        return
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL)) != 0:
        raise OSError(
            ctypes.get_errno(),
            "the kernel cannot end this process with its launcher (prctl failed)",
        )
    # The parent may have ended before the call above, and then no signal comes.
    if os.getppid() != parent:
        os._exit(FAILED)
