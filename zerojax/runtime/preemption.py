"""Handles preemption: a signal stops the run between two steps, the same two for all processes."""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from types import FrameType, TracebackType
from typing import Any, Self

import jax
from jax.experimental import multihost_utils

from zerojax.runtime import shutdown

SAME_REQUEST_SECONDS = 1.0
"""Seconds within which repeated signals count as one request, because a scheduler may signal both a
launcher and its processes."""

STOP_SECONDS = 60.0
"""Seconds after a signal within which work outside of steps, such as compiling, has to end."""
AGAIN_SECONDS = 3.0
"""Seconds for Python to raise the exception of a second signal, before the process is ended without
that exception."""
_POLL_SECONDS = 1.0
_TELL_SECONDS = 3.0
"""Maximum seconds for writing the last message: the disk that it reads, or the reader of standard
error, may hang."""

_MARK = b"Stack ("
_SERVICE = "jax_enable_preemption_service"
# Number of calls of this process, over all its runs. JAX compares these numbers between processes,
# and would wait forever for a number that is not below the next one.
_calls = itertools.count(1)


class Interrupted(KeyboardInterrupt):
    """Raised when a signal stopped training after a step was finished and, if configured, saved.

    Attributes:
      signal_name: "SIGINT" (Ctrl-C) or "SIGTERM".
      saved: True if the state after that step is on disk.
      exit_code: exit code of a process that ends with this exception.
      trainer: the `Trainer` that was stopped, with its state; `trainer.fit` continues the run. In
        an interactive interpreter it is `sys.last_value.trainer`.
    """

    def __init__(self, message: str, signal_name: str, *, saved: bool = False):
        super().__init__(message)
        self.trainer: Any = None
        self.signal_name = signal_name
        self.saved = saved
        number = signal.Signals[signal_name]
        self.exit_code = shutdown.SAVED_AND_STOPPED if saved else 128 + number


class StopRequest:
    """Context manager that records the first Ctrl-C or SIGTERM; a second signal acts at once.

    With several processes, a signal to any of them stops all of them after the same step. JAX's
    coordinator chooses the step, within about a second. JAX's own SIGTERM handler distributes the
    signal, so it stays installed, and Ctrl-C is converted to SIGTERM. If JAX's preemption service
    is switched off, the processes cannot agree, and signals act at once.

    With one process and outside the main thread, it records nothing, because Python allows signal
    handlers only in the main thread.

    Python runs its handlers only when the main thread returns from compiled code, and one step may
    take half an hour. So another thread receives signals too. It ends the process if the current
    work has not finished within `limit` seconds, or if a second signal arrives.

    Args:
      limit: function called at the first signal; returns the seconds within which the current step
        must finish, or None for no limit.
      describe: function that returns a sentence for the last message: what is lost if the step does
        not finish, and what is not.
      end: function that ends the process with an exit code, without any cleanup.

    Attributes:
      signal_name: name of the signal that this process received; None: no signal so far.
      is_due: True if the run stops now; with several processes, True since `due` returned True.
    """

    def __init__(
        self,
        *,
        limit: Callable[[], float | None] = lambda: STOP_SECONDS,
        describe: Callable[[], str] = lambda: "all earlier saves are complete",
        end: Callable[[int], object] = os._exit,
    ) -> None:
        self.signal_name: str | None = None
        self._previous: dict[int, object] = {}
        self._processes = jax.process_count()
        self._agreed = False
        self._listener: _Listener | None = None
        self._watcher = _Watcher(limit, describe, end, heard=self._heard)

    @property
    def is_due(self) -> bool:
        return self._agreed if self._processes > 1 else self.signal_name is not None

    def due(self) -> bool:
        """Returns True if the run must stop now. Every process calls it once before each step."""
        if self._processes > 1 and getattr(jax.config, _SERVICE):
            self._agreed = self._agreed or multihost_utils.reached_preemption_sync_point(
                next(_calls)
            )
        return self.is_due

    def step_over(self) -> None:
        """Records that no step is running; a stop request then has no time limit any more."""
        if self.is_due:
            self._watcher.cancel()

    def unhurried(self) -> contextlib.AbstractContextManager[None]:
        """Suspends the time limit after a signal inside a `with` block, for example while a
        checkpoint is saved.
        """
        return self._watcher.paused()

    def interrupted(self, step: int, text: str, *, saved: bool = False) -> Interrupted:
        """Returns the exception that ends a run which stops after `step` because of this request.

        Args:
          step: the last finished step.
          text: clause that says what happened to the state after that step.
          saved: True if that state is on disk.
        """
        _say_in_one_line()
        name = self.signal_name or "SIGTERM"
        where = "" if self.signal_name else ", sent to one of the run's processes,"
        return Interrupted(f"{name}{where} after step {step}: {text}", name, saved=saved)

    def __enter__(self) -> Self:
        numbers = (signal.SIGINT, signal.SIGTERM)
        if self._processes > 1:
            if not getattr(jax.config, _SERVICE):
                return self
            self._listener = _Listener(signal.SIGTERM, self._note_term)
            numbers = (signal.SIGINT,)
        if threading.current_thread() is threading.main_thread():
            for number in numbers:
                self._previous[number] = signal.signal(number, self._note)
        self._watcher.open(self._previous)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._restore()
        self._watcher.close()
        if self._listener is not None:
            self._listener.close()

    def _restore(self) -> None:
        """Restores the signal handlers that were installed before this context manager."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal_name = signal.Signals(number).name
        for again, handler in self._previous.items():
            # Python's own handlers act only when the main thread returns from compiled code.
            at_once = signal.SIG_DFL if again == signal.SIGTERM else handler
            signal.signal(again, at_once)  # type: ignore[arg-type]

    def _heard(self, number: int) -> None:
        """Records the first signal `number`; called in the watcher's thread."""
        self.signal_name = self.signal_name or signal.Signals(number).name
        if self._listener is not None and number == signal.SIGINT:
            os.kill(os.getpid(), signal.SIGTERM)  # JAX's handler informs the other processes

    def _note_term(self, is_first: bool) -> None:
        if is_first:
            self._watcher.note(signal.SIGTERM)
        else:
            self._watcher.end_now(signal.SIGTERM)


class _OneLine:
    """Hook for `sys.excepthook` that prints an `Interrupted` as one line. Other errors are passed
    to the previous hook.

    A user who pressed Ctrl-C wants to know what was saved, not where the loop was interrupted.
    """

    previous = staticmethod(sys.__excepthook__)

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        # If it was raised while another error was handled, that error must be seen too.
        if isinstance(error, Interrupted) and error.__context__ is None:
            print(f"\nzerojax: {error}", file=sys.stderr, flush=True)
        else:
            self.previous(kind, error, trace)


_one_line = _OneLine()


def _say_in_one_line() -> None:
    """Installs `_OneLine` as `sys.excepthook`, unless another hook is installed."""
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _one_line


@contextlib.contextmanager
def sigterm_raised() -> Iterator[None]:
    """Makes SIGTERM raise `Interrupted` inside a `with` block, except while an inner block, such as
    a `StopRequest`, has its own handler.

    With several processes, outside the main thread, or if the caller has a handler or ignores
    SIGTERM, it changes nothing.
    """
    is_main = threading.current_thread() is threading.main_thread()
    is_default = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    if jax.process_count() > 1 or not is_main or not is_default:
        yield
        return

    watcher = _Watcher(
        lambda: STOP_SECONDS,
        lambda: "the current state was not saved; earlier saves are complete",
        os._exit,
    )

    def stop(number: int, frame: FrameType | None) -> None:
        watcher.cancel()
        text = "SIGTERM received while no step was running; all earlier saves are complete"
        raise Interrupted(text, "SIGTERM")

    before = signal.signal(signal.SIGTERM, stop)
    watcher.open([signal.SIGTERM])
    try:
        yield
    finally:
        watcher.close()
        signal.signal(signal.SIGTERM, before)


_watchers: list[_Watcher] = []
"""Watchers that use Python's wakeup pipe, outermost first."""


class _Watcher:
    """Thread that receives signals, and ends the process if the main thread does not.

    Python writes the number of every handled signal into a pipe at once, even while the main thread
    is in compiled code (`signal.set_wakeup_fd`). This thread reads the pipe.

    Args:
      limit: function that returns the seconds within which the current work must finish, or None.
      describe: function that returns a sentence for the last message.
      end: function that ends the process with an exit code.
      heard: function called in this thread at the first signal.
    """

    def __init__(
        self,
        limit: Callable[[], float | None],
        describe: Callable[[], str],
        end: Callable[[int], object],
        heard: Callable[[int], object] = lambda number: None,
    ) -> None:
        self._limit, self._describe, self._end, self._heard = limit, describe, end, heard
        self._numbers: Collection[int] = ()
        self._writer, self._foreign, self._before = -1, -1, -1
        self._has_pipe = self._is_cancelled = False
        self._num_paused = 0

    def open(self, numbers: Collection[int]) -> None:
        """Starts listening to the signals `numbers`, for which Python has handlers. Must be called
        in the main thread if there are any."""
        self._numbers = tuple(int(number) for number in numbers)
        reader, self._writer = os.pipe()
        # `set_wakeup_fd` refuses a descriptor that can block.
        os.set_blocking(self._writer, False)
        if self._numbers:
            before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
            # An outer watcher must not count down too; another library's pipe still gets signals.
            outer = next((x for x in _watchers if x._writer == before), None)
            self._foreign = before if outer is None else outer._foreign
            self._before = before
            self._has_pipe = True
            _watchers.append(self)
        threading.Thread(
            target=self._watch, args=(reader,), name="zerojax-stop", daemon=True
        ).start()

    def close(self) -> None:
        """Stops listening and restores the previous wakeup pipe."""
        if self._has_pipe:
            signal.set_wakeup_fd(self._before)
            _watchers.remove(self)
            self._has_pipe = False
        writer, self._writer = self._writer, -1
        os.close(writer)

    def note(self, number: int) -> None:
        """Forwards the signal `number`, for which Python has no handler. May be called from any
        thread.
        """
        with contextlib.suppress(OSError):
            os.write(self._writer, bytes([number]))

    def cancel(self) -> None:
        """Cancels the time limit after a signal, because the run has stopped. Afterwards only a
        second signal ends the process.
        """
        self._is_cancelled = True

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Suspends the time limit in a `with` block; only a second signal ends the process."""
        self._num_paused += 1
        try:
            yield
        finally:
            self._num_paused -= 1

    def _watch(self, reader: int) -> None:
        first: tuple[int, float] | None = None
        deadline: float | None = None
        last: int | None = None  # number of the second signal
        with open(reader, "rb", buffering=0) as stream:
            while True:
                wait = None if deadline is None else max(0.0, deadline - time.monotonic())
                if not select.select([stream], [], [], wait)[0]:
                    if last is not None:
                        self.end_now(last)
                        return
                    assert first is not None
                    if not (self._num_paused or self._is_cancelled):
                        self._give_up(first[0], time.monotonic() - first[1])
                        return
                    deadline = time.monotonic() + _POLL_SECONDS
                    continue
                # The end of the stream: `close` was called.
                if not (numbers := stream.read(4096)):
                    return
                if self._foreign >= 0:
                    with contextlib.suppress(OSError):
                        os.write(self._foreign, numbers)
                now = time.monotonic()
                for number in numbers:
                    # The pipe also gets other signals that Python handles. SIGTERM may come from
                    # `note`.
                    if number not in (*self._numbers, signal.SIGTERM):
                        continue
                    if first is None:
                        first = number, now
                        self._heard(number)
                        limit = self._limit()
                        deadline = None if limit is None else now + limit
                    elif now - first[1] > SAME_REQUEST_SECONDS and not _is_kept(number):
                        # The main thread may be able to raise KeyboardInterrupt and clean up.
                        waits = number == signal.SIGINT and last is None
                        last, deadline = number, now + AGAIN_SECONDS * waits

    def end_now(self, number: int) -> None:
        """Ends the process at once, because a second signal was received."""
        self._say(
            f"{signal.Signals(number).name} received again: the process "
            "ends at once, without saving",
            number,
        )

    def _give_up(self, number: int, waited: float) -> None:
        name = signal.Signals(number).name
        found: list[str] = []
        # The description reads a disk and flushes output, so it may hang.
        ask = threading.Thread(target=lambda: found.append(self._describe()), daemon=True)
        ask.start()
        ask.join(_TELL_SECONDS)
        told = found[0] if found else "all earlier saves are complete"
        self._say(
            f"{name}: the current work did not end within {waited:.0f} s and cannot be saved, so "
            f"the process ends with code {128 + number}; {told}",
            number,
        )

    def _say(self, sentence: str, number: int) -> None:
        def tell() -> None:
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
            with contextlib.suppress(OSError):
                os.write(2, f"zerojax: {sentence}\n".encode())

        telling = threading.Thread(target=tell, daemon=True)
        telling.start()
        telling.join(_TELL_SECONDS)
        self._end(128 + number)


def _is_kept(number: int) -> bool:
    """Returns True if a second Ctrl-C must not end the process, because it is interactive."""
    return number == signal.SIGINT and hasattr(sys, "ps1")


class _Listener:
    """Listens for a signal without removing the handler of another library.

    `signal.signal` would replace JAX's handler. `faulthandler` also calls the previous handler. Its
    output into a pipe shows that the signal arrived, even while the main thread is in C++.

    Args:
      number: number of the signal.
      heard: function called in another thread; its argument is True for the first signal.
    """

    def __init__(self, number: int, heard: Callable[[bool], object]) -> None:
        self._number, self._heard = number, heard
        reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)  # a full pipe must not stop the handler
        faulthandler.register(number, file=self._writer, all_threads=False, chain=True)
        thread = threading.Thread(
            target=self._listen, args=(reader,), name="zerojax-signals", daemon=True
        )
        thread.start()

    def _listen(self, reader: int) -> None:
        last = None
        with open(reader, "rb", buffering=0) as stream:
            while text := stream.read(65536):
                if _MARK not in text:
                    continue
                now = time.monotonic()
                if last is None or now - last > SAME_REQUEST_SECONDS:
                    self._heard(last is None)
                    last = now

    def close(self) -> None:
        """Stops listening to the signal and removes the handler."""
        faulthandler.unregister(self._number)
        os.close(self._writer)
