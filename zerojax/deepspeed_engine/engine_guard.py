"""Supervises an engine's loop: watchdog, messages about lost processes, closing at exit.

An open engine must be closed before Python exits. Python clears module globals before it closes the
engine's generators, which would then fail with unreadable errors. A log that is not closed lacks
its last steps.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import queue
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import jax

from zerojax.config import WatchConfig
from zerojax.runtime.distributed import PeerLostError, is_peer_loss
from zerojax.runtime.watchdog import Watchdog
from zerojax.tracing.source_lines import line_of_user

_RESUME = "run the same command again; load_checkpoint continues from the last save_checkpoint"

_known: weakref.WeakSet[Closable] = weakref.WeakSet()


class Guard:
    """Supervises the engine calls of a user's loop, and the steps that run on the devices between
    two calls.

    There is no time limit while the devices are idle and the loop does other work.

    Args:
      watch: time limits; None: the defaults.
      folder: folder of the run, for stack traces of a hanging process; None if there is none.

    Attributes:
      is_broken: True if a device error or non-finite numbers occurred since the last step was
        dispatched; then nothing more should be read from the devices.
      is_open: True while supervision is running.
      watchdog: the watchdog; active while supervision is running.
    """

    def __init__(self, watch: WatchConfig | None, folder: Path | None) -> None:
        self.is_broken = False
        self._under_way = _UnderWay()
        self.watchdog = Watchdog(
            watch or WatchConfig(),
            folder=folder,
            process=jax.process_index(),
            processes=jax.process_count(),
            resume_hint=_RESUME,
            line=line_of_user,
            sign=self._under_way.sign,
        )
        self._open, self.is_open = contextlib.ExitStack(), False
        # Users may never close their engine, so the threads end when it is garbage-collected.
        weakref.finalize(self, _end, self.watchdog, self._under_way)

    def open(self) -> None:
        """Starts supervision; does nothing if it is running already."""
        if self.is_open:
            return
        self.is_open = True
        self._open.enter_context(self.watchdog)
        self._open.enter_context(self.watchdog.during("in a step"))

    def close(self) -> None:
        """Ends supervision. May be called twice; the next call of the loop starts it again."""
        self._open.close()
        self.is_open = False

    @contextlib.contextmanager
    def during(self, what: str, *, is_long: bool = False, is_apart: bool = False) -> Iterator[None]:
        """Supervises a call of the loop inside a `with` block.

        Args:
          what: description of the activity for messages.
          is_long: True: the limit is `long_timeout` instead of `step_timeout`.
          is_apart: True: the activity is not part of a step.

        Raises:
          PeerLostError: another process has ended.
        """
        with self.supervising(), self.watchdog.during(what, is_long=is_long, is_apart=is_apart):
            yield

    @contextlib.contextmanager
    def supervising(self) -> Iterator[None]:
        """Supervises a call of the loop that itself reports its activity to the watchdog.

        Raises:
          PeerLostError: another process has ended.
        """
        self.open()
        with self._under_way.calling():
            try:
                yield
            except Exception as error:
                if isinstance(error, FloatingPointError | jax.errors.JaxRuntimeError):
                    self.is_broken = True
                if isinstance(error, PeerLostError) or not _is_of_a_peer(error):
                    raise
                raise self._under_way.lost() from error

    def begun(self, step: int, result: jax.Array) -> None:
        """Registers a step that was dispatched to the devices.

        Args:
          step: number of the step.
          result: one of the step's output arrays; it is ready when the step has finished.
        """
        self._under_way.step, self.is_broken = step, False
        self._under_way.follow(result)

    def follow(self, result: jax.Array) -> None:
        """Registers dispatched work other than a step, represented by one of its output arrays."""
        self._under_way.follow(result)

    def saved(self, step: int) -> None:
        """Registers the number of a step whose checkpoint was saved, for messages."""
        self._under_way.saved.append(step)


class _UnderWay:
    """Work that was dispatched to the devices and has not finished; a thread waits for it."""

    def __init__(self) -> None:
        self.step, self.saved = 0, list[int]()
        self._calls = self._given = self._finished = 0
        self._results: queue.SimpleQueue | None = None
        self._has_told = False

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """Marks a `with` block as a call of the engine for which the user's loop waits."""
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1

    def sign(self) -> int | None:
        """Returns a number that changes whenever a result becomes ready; None if nothing is
        running."""
        if self._calls == 0 and self._given == self._finished:
            return None
        return self._finished

    def follow(self, result: jax.Array) -> None:
        if self._results is None:
            self._results = queue.SimpleQueue()
            wait = threading.Thread(target=self._wait, args=(self._results,), daemon=True)
            wait.name = "zerojax-engine"
            wait.start()
        self._given += 1
        self._results.put((self._given, result))

    def end(self) -> None:
        """Ends the waiting thread after it has processed all registered work."""
        if self._results is not None:
            self._results.put(None)

    def lost(self) -> PeerLostError:
        return PeerLostError(self.step, self.saved, _RESUME)

    def _wait(self, results: queue.SimpleQueue) -> None:
        while (following := results.get()) is not None:
            number, result = following
            try:
                result.block_until_ready()
            except Exception as error:  # the reader of the result gets the same error
                self._say(error)
            self._finished = number
            del following, result

    def _say(self, error: Exception) -> None:
        """Prints once that another process is lost, because a loop that reads a loss itself would
        get only JAX's error."""
        if self._calls or self._has_told or not _is_of_a_peer(error):
            return
        self._has_told = True
        with contextlib.suppress(OSError, ValueError):
            print(f"zerojax: {self.lost()}", file=sys.stderr, flush=True)


def _is_of_a_peer(error: BaseException) -> bool:
    return jax.process_count() > 1 and is_peer_loss(error)


def _end(watchdog: Watchdog, under_way: _UnderWay) -> None:
    watchdog.stop()
    under_way.end()


class Closable(Protocol):
    """An object that can be closed, such as an engine."""

    @property
    def is_open(self) -> bool:
        """True if the object has to be closed."""
        ...

    def close(self) -> None:
        """Reports the last steps, ends threads and closes files."""


def close_at_exit(engine: Closable) -> None:
    """Registers the engine to be closed when the script ends, if it still exists and is open.

    A failing process of a group ends without closing the engine (`zerojax.runtime.shutdown`).
    """
    _register()
    _known.add(engine)


@functools.cache
def _register() -> None:
    # JAX was imported before, so its own exit handler runs after this one.
    atexit.register(_close_all)


def _close_all() -> None:
    for engine in list(_known):
        if engine.is_open:
            try:
                engine.close()
            except Exception as error:  # no caller could catch it
                print(f"zerojax: {error}", file=sys.stderr, flush=True)
