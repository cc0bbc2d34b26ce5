"""Sweep over buckets: i+1 is read and i-1 written while i is in use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from zerojax.checkpoint.store.errors import StoreError

FEWEST_BUFFERS = 3  # one being read, one computed on, one being written

Start = Callable[[int, np.ndarray], Callable[[], None]]
"""Starts to move a bucket, given its number and buffer; what it returns waits for the end."""


class Bucket:
    """One bucket, in the caller's hands until the next one is asked for.

    Attributes:
      index: its number.
      array: its bytes in the store's own memory, as the dtype of the sweep; shape [elements].
        Change it in place, then call `write`. Another bucket comes into that memory later: what
        must stay is to be copied. `jax.device_put` on the CPU does not copy an aligned array:
        wait for what was computed of it (`jax.block_until_ready`) before the next bucket.
    """

    def __init__(self, index: int, array: np.ndarray, start_write: Callable[[], None]):
        self.index = index
        self.array = array
        self._start_write: Callable[[], None] | None = start_write

    def write(self) -> None:
        """Starts to write `array` and returns at once; from then on it is read-only.

        Without it the bucket stays on disk as it was.

        Raises:
          StoreError: it was written already, or the sweep has gone on.
        """
        if self._start_write is None:
            raise StoreError(
                f"bucket {self.index} was written already or is no longer in memory; call "
                "bucket.write() once, before the next bucket is asked for"
            )
        start_write = self._release()
        start_write()

    def _release(self) -> Callable[[], None]:
        start_write, self._start_write = self._start_write, None
        self.array.setflags(write=False)
        assert start_write is not None
        return start_write

    def _expire(self) -> None:
        if self._start_write is not None:
            self._release()


def sweep_buckets(
    order: Sequence[int],
    ring: Sequence[np.ndarray],
    as_array: Callable[[int, np.ndarray], np.ndarray],
    *,
    start_read: Start,
    start_write: Start,
) -> Iterator[Bucket]:
    """Yields one bucket after the other; whatever ends it, no transfer is left under way.

    Args:
      order: numbers of buckets, each at most once.
      ring: at least `FEWEST_BUFFERS` buffers; bucket number p of `order` uses ring[p % len(ring)].
      as_array: the caller's view of a bucket, given its number and buffer.
      start_read: starts to read a bucket into a buffer.
      start_write: starts to write one from it.
    """
    reads: dict[int, Callable[[], None]] = {}
    writes: dict[int, Callable[[], None]] = {}

    def read(place: int) -> None:
        # The buffer is free once the bucket that was in it before has been written.
        if last := writes.pop(place - len(ring), None):
            last()
        reads[place] = start_read(order[place], ring[place % len(ring)])

    def write(place: int) -> None:
        writes[place] = start_write(order[place], ring[place % len(ring)])

    try:
        for place, index in enumerate(order):
            if place == 0:
                read(0)
            if place + 1 < len(order):
                read(place + 1)
            reads[place]()
            del reads[place]
            buffer = ring[place % len(ring)]
            bucket = Bucket(index, as_array(index, buffer), lambda place=place: write(place))
            try:
                yield bucket
            finally:
                bucket._expire()
        while writes:
            writes.pop(next(iter(writes)))()
    finally:
        _drain([*reads.values(), *writes.values()])


def _drain(waits: Sequence[Callable[[], None]]) -> None:
    """Waits for transfers whose outcome no longer matters: the first error is on its way."""
    for wait in waits:
        try:
            wait()
        except (OSError, StoreError):
            continue
