"""What a signal does to a training loop: it asks for a stop between two steps, on all processes.

Knows signals, and how processes agree on a moment; nothing of training.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Self

import jax
from jax.experimental import multihost_utils

from zerojax import exit_codes, last_words

SAME_REQUEST_SECONDS = 1.0
"""Signals so close together are one request that came by two ways, as when a scheduler tells a
launcher and its processes alike."""

_MARK = b"Stack ("
_SERVICE = "jax_enable_preemption_service"
# Calls of this process, over all runs in it: JAX compares these numbers between processes, and one
# that is not below the next would be waited for in vain.
_calls = itertools.count(1)


class Interrupted(KeyboardInterrupt):
    """Training was stopped by a signal after a step was finished and, where asked for, saved.

    Attributes:
      signal_name: "SIGINT" (Ctrl-C) or "SIGTERM".
      saved: whether the state of that step is on disk.
      exit_code: of a process that ends with this.
    """

    def __init__(self, message: str, signal_name: str, *, saved: bool = False):
        super().__init__(message)
        self.signal_name = signal_name
        self.saved = saved
        number = signal.Signals[signal_name]
        self.exit_code = exit_codes.SAVED_AND_STOPPED if saved else 128 + number


class StopRequest:
    """While entered, the first Ctrl-C or SIGTERM is noted instead of raised; a second acts at once.

    With several processes one that is told to any of them stops all of them, after the same step:
    JAX's coordinator finds the moment, within about a second. JAX's own handler of SIGTERM passes
    it on, so it stays installed, and Ctrl-C becomes a SIGTERM. Where JAX's preemption service is
    switched off nobody can agree, and signals act at once.

    With one process, outside the main thread, where Python allows no signal handlers, it notes
    nothing.

    Attributes:
      signal_name: what came, to this process; None: nothing yet.
      is_due: whether the run ends now: with several processes since `due` has said so.
    """

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self._previous: dict[int, object] = {}
        self._processes = jax.process_count()
        self._agreed = False
        self._listener: _Listener | None = None

    @property
    def is_due(self) -> bool:
        return self._agreed if self._processes > 1 else self.signal_name is not None

    def due(self) -> bool:
        """Whether to stop now. With several processes all ask, once before each step."""
        if self._processes > 1 and getattr(jax.config, _SERVICE):
            self._agreed = self._agreed or multihost_utils.reached_preemption_sync_point(
                next(_calls)
            )
        return self.is_due

    def interrupted(self, step: int, text: str, *, saved: bool = False) -> Interrupted:
        """What a run raises that ends for this, after a step.

        Args:
          text: what became of the state of that step.
          saved: whether it is on disk.
        """
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
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._restore()
        if self._listener is not None:
            self._listener.close()

    def _restore(self) -> None:
        """Gives the signals back to who had them."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal_name = signal.Signals(number).name
        for again, handler in self._previous.items():
            # Python's own handlers only act once the main thread comes back from where it hangs.
            at_once = signal.SIG_DFL if again == signal.SIGTERM else handler
            signal.signal(again, at_once)  # type: ignore[arg-type]
        if self._listener is not None:
            os.kill(os.getpid(), signal.SIGTERM)  # to JAX's handler, which tells the others

    def _note_term(self, is_first: bool) -> None:
        if is_first:
            self.signal_name = self.signal_name or "SIGTERM"
            return
        text = "zerojax: SIGTERM again: ended at once, without saving\n"
        with contextlib.suppress(OSError):
            os.write(2, text.encode())
        last_words.silence()
        os._exit(128 + signal.SIGTERM)


@contextlib.contextmanager
def sigterm_raised() -> Iterator[None]:
    """SIGTERM raises `Interrupted` where nothing else is done about it, as Ctrl-C raises.

    With several processes, or outside the main thread, it changes nothing.
    """
    if jax.process_count() > 1 or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        text = "SIGTERM outside of the steps: nothing was under way; what was saved is whole"
        raise Interrupted(text, "SIGTERM")

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Listener:
    """Hears a signal whose handler is not Python's, and leaves it to that handler.

    `signal.signal` would put itself in the place of JAX's handler. `faulthandler` calls the one
    before it: what it writes into a pipe says that the signal came, also while the main thread is
    inside of C++.

    Args:
      number: of the signal.
      heard: called in another thread, with whether this was the first.
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
        """Gives the signal back."""
        faulthandler.unregister(self._number)
        os.close(self._writer)
