"""Prefetches batches in a background thread, ahead of the step that uses them."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from zerojax.data.feed import Batch, Feed, State, logger
from zerojax.tracing.source_lines import PREFETCH

# Seconds that `close` waits for a read in progress before it abandons the thread.
JOIN_SECONDS = 5.0


class Prefetch(Iterator[tuple[Any, State]]):
    """Iterator of `(placed batch, data state after it)`, made by `prefetch`.

    A checkpoint stores the state that came with the batch of its step, never `feed.state()`, which
    is up to `depth` batches ahead. Use it as a context manager, or call `close`: batches that were
    read ahead are put back, so that the feed continues at the consumer's position.
    """

    def __init__(self, feed: Feed, put: Callable[[Batch], Any], depth: int):
        self._feed = feed
        self._state = feed.state()  # before the thread advances the feed
        self._worker = _Worker(feed, put, depth)
        self._ended = False
        self.waited_seconds = 0.0
        """Total time that the consumer has waited for data, in seconds; near 0 if reading is fast
        enough."""
        # At exit, a thread that still transfers arrays would use a backend that is shut down. The
        # finalizer refers to the worker only; a reference to `self` would keep it alive.
        self._finalizer = weakref.finalize(self, self._worker.stop)

    def __iter__(self) -> Prefetch:
        return self

    def __next__(self) -> tuple[Any, State]:
        if self._ended:
            raise StopIteration
        before = time.perf_counter()
        item = self._worker.take()
        self.waited_seconds += time.perf_counter() - before
        if isinstance(item, BaseException):
            self._ended = True
            raise item
        _, placed, self._state = item
        return placed, self._state

    @property
    def state(self) -> State:
        """Data state to save after the last consumed batch."""
        return self._state

    def close(self) -> None:
        """Stops reading ahead and puts unused batches back into the feed; may be called twice."""
        if not self._finalizer.alive:
            return
        self._finalizer.detach()
        self._ended = True
        unused = self._worker.stop()
        self._feed.give_back(unused, self._state)

    def __enter__(self) -> Prefetch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def prefetch(feed: Feed, *, put: Callable[[Batch], Any], depth: int = 2) -> Prefetch:
    """Reads and places batches in a background thread while the step runs.

    An error of the feed or of `put` is raised by `next()` in the consumer, after all earlier
    batches. After Ctrl-C in the consumer the thread is harmless; `close` or the `with` block ends
    it.

    Args:
      feed: feed of batches; only the thread uses it until `close`.
      put: function `batch -> placed batch`, such as `lambda batch: shard_batch(plan, batch)`.
      depth: largest number of batches that are ready ahead of the consumer, at least 1; each one
        needs device memory. From 4 on, the thread pauses until half of them are used.

    Raises:
      ValueError: `depth` is below 1.
      TypeError: `feed` is not a Feed.
    """
    if depth < 1:
        raise ValueError(f"depth={depth} is below 1 batch to read ahead; 2 is a good value")
    if not isinstance(feed, Feed):
        raise TypeError(f"feed is a {type(feed).__name__}; make one with as_feed(batches)")
    return Prefetch(feed, put, depth)


class _Worker:
    """Thread that reads ahead, and its queue; holds no reference to its `Prefetch`.

    The queues are `SimpleQueue`s, which are written in C; neither side polls, and the thread is
    woken once per half of `depth` batches. With a small model, a step takes only as long as a few
    switches between threads.
    """

    def __init__(self, feed: Feed, put: Callable[[Batch], Any], depth: int):
        self._ready: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._room: queue.SimpleQueue[int] = queue.SimpleQueue()  # numbers of batches to read
        self._room.put(depth + 1)  # one more than are ready: the one that is being read
        self._taken, self._share = 0, max(1, depth // 2)
        self._late: list[tuple[Batch, State]] = []
        self._is_stopping = False
        self._thread = threading.Thread(
            target=self._run, args=(feed, put), name=PREFETCH, daemon=True
        )
        self._thread.start()

    def _run(self, feed: Feed, put: Callable[[Batch], Any]) -> None:
        try:
            while True:
                for _ in range(self._room.get()):
                    if self._is_stopping:
                        return
                    batch = next(feed)
                    state = feed.state()
                    # This batch was read while `stop` was called: it goes back to the feed and to
                    # no device.
                    if self._is_stopping:
                        self._late.append((batch, state))
                        return
                    self._ready.put((batch, put(batch), state))
        except BaseException as error:  # StopIteration too, because the consumer handles every end
            self._ready.put(error)

    def take(self) -> Any:
        """Waits for the next (batch, placed batch, state after it), or an error, and returns it."""
        item = self._ready.get()
        self._taken += 1
        if self._taken == self._share:
            self._room.put(self._taken)
            self._taken = 0
        return item

    def stop(self) -> list[tuple[Batch, State]]:
        """Ends the thread; returns the batches that were read and not consumed, in order."""
        self._is_stopping = True
        self._room.put(1)  # wakes a thread that waits for space
        self._thread.join(JOIN_SECONDS)
        if self._thread.is_alive():
            logger.warning(
                "data: reading the next batch has not ended within %g s; its thread is abandoned",
                JOIN_SECONDS,
            )
        unused = []
        while not self._ready.empty():
            item = self._ready.get_nowait()
            if not isinstance(item, BaseException):
                unused.append((item[0], item[2]))
        return unused + self._late
