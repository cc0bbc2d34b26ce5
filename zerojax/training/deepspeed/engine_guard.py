"""Watchdog of an engine's loop, messages about lost processes, and closing at exit.

Python clears the globals of modules while the generators of an open engine still wait to be closed,
which then fail in a way that nobody can read; and a log that is never closed lacks its last steps.
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

_RESUME = "run the same command again; load_checkpoint goes on from the last save_checkpoint"

_known: weakref.WeakSet[Closable] = weakref.WeakSet()


class Guard:
    """Watches the calls of a loop, and the steps that are under way between two of them.

    What the loop does while the devices have nothing to do is its own: nothing limits it.

    Args:
      watch: the limits; None: the defaults.
      folder: of the run, for the stacks of a process that hangs; None: it has none.

    Attributes:
      is_broken: whether devices or numbers have failed since the last step that went well, so that
        nothing more should be read from them.
      is_open: whether the watch has begun and not ended.
    """

    def __init__(self, watch: WatchConfig | None, folder: Path | None) -> None:
        self.is_broken = False
        self._under_way = _UnderWay()
        self._watchdog = Watchdog(
            watch or WatchConfig(),
            folder=folder,
            process=jax.process_index(),
            processes=jax.process_count(),
            resume_hint=_RESUME,
            sign=self._under_way.sign,
        )
        self._open, self.is_open = contextlib.ExitStack(), False
        # Many a loop never closes its engine: the threads end with it.
        weakref.finalize(self, _end, self._watchdog, self._under_way)

    def open(self) -> None:
        """Starts to watch; does nothing where that has been done."""
        if self.is_open:
            return
        self.is_open = True
        self._open.enter_context(self._watchdog)
        self._open.enter_context(self._watchdog.during("in a step"))

    def close(self) -> None:
        """Ends the watch. May be called twice; the next call of the loop starts it again."""
        self._open.close()
        self.is_open = False

    @contextlib.contextmanager
    def during(self, what: str, *, is_long: bool = False, is_apart: bool = False) -> Iterator[None]:
        """A call of the loop; arguments as `Watchdog.during` takes them.

        Raises:
          PeerLostError: another process has ended.
        """
        self.open()
        with self._under_way.calling():
            try:
                with self._watchdog.during(what, is_long=is_long, is_apart=is_apart):
                    yield
            except Exception as error:
                if isinstance(error, FloatingPointError | jax.errors.JaxRuntimeError):
                    self.is_broken = True
                if isinstance(error, PeerLostError) or not _is_of_a_peer(error):
                    raise
                raise self._under_way.lost() from error

    def begun(self, step: int, result: jax.Array) -> None:
        """A step is on the devices; `result` is one of its numbers."""
        self._under_way.step, self.is_broken = step, False
        self._under_way.follow(result)

    def follow(self, result: jax.Array) -> None:
        """The devices are at work on something that is not a step."""
        self._under_way.follow(result)

    def saved(self, step: int) -> None:
        """There is a checkpoint of this step."""
        self._under_way.saved.append(step)

    def plan_changed(self) -> None:
        """How long steps take is not known any more."""
        self._watchdog.plan_changed()

    def finished(self, step: int) -> None:
        """The numbers of a step are there."""
        self._watchdog.finished(step)


class _UnderWay:
    """What the devices were given and have not finished, seen by a thread of its own."""

    def __init__(self) -> None:
        self.step, self.saved = 0, list[int]()
        self._calls = self._given = self._finished = 0
        self._results: queue.SimpleQueue | None = None
        self._has_told = False

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """In which the loop is inside of a call, and waits for it."""
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1

    def sign(self) -> int | None:
        """A number that changes with every result; None: nothing is under way, and nobody waits."""
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
        """Ends the thread, once it has seen what it was given."""
        if self._results is not None:
            self._results.put(None)

    def lost(self) -> PeerLostError:
        return PeerLostError(self.step, self.saved, _RESUME)

    def _wait(self, results: queue.SimpleQueue) -> None:
        while (following := results.get()) is not None:
            number, result = following
            try:
                result.block_until_ready()
            except Exception as error:  # whoever reads the result is told
                self._say(error)
            self._finished = number
            del following, result

    def _say(self, error: Exception) -> None:
        """A loop that reads a loss itself gets the error of JAX, which says less."""
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
    """What is closed."""

    @property
    def is_open(self) -> bool:
        """Whether there is something to close."""
        ...

    def close(self) -> None:
        """Reports what is left, and ends threads and files."""


def close_at_exit(engine: Closable) -> None:
    """From now on the engine is closed when the script is over, if it is still there and open.

    A process of a group that fails leaves without this, see `zerojax.runtime.shutdown`.
    """
    _register()
    _known.add(engine)


@functools.cache
def _register() -> None:
    # JAX, imported before, has registered its own ending: that one runs after this.
    atexit.register(_close_all)


def _close_all() -> None:
    for engine in list(_known):
        if engine.is_open:
            try:
                engine.close()
            except Exception as error:  # there is nobody left to catch it
                print(f"zerojax: {error}", file=sys.stderr, flush=True)
