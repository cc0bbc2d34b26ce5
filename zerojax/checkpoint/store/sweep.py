"""Sweeps over buckets: while the caller uses bucket i, bucket i+1 is read and i-1 is written.

Several threads transfer the pieces of a bucket and compute checksums, because a disk serves
concurrent requests faster than sequential ones. Transfers and checksums release the GIL.
"""

from __future__ import annotations

import collections
import concurrent.futures
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from zerojax.checkpoint.store.direct_io import BLOCK, StoreError, read_into, write_from

FEWEST_BUFFERS = 3  # one being read, one computed on, one being written
Start = Callable[[int, np.ndarray], Callable[[], None]]
"""Function that starts to move a bucket, given the bucket's number and a buffer. It returns a
function that waits for the end of the transfer."""


class BucketTransfer:
    """The transfer of one bucket between disk and memory, in progress."""

    def __init__(self, pieces: list[concurrent.futures.Future[int]]):
        self._pieces = pieces

    def wait(self) -> int:
        """Waits for all pieces, even after one has failed, so that the buffer is free again.

        Returns:
          The checksum of the bucket: CRC-32 over the checksums of its pieces, little-endian. It
            detects torn, stale and bit-flipped buckets, not deliberate changes.

        Raises:
          OSError: the error of the first piece that failed.
        """
        concurrent.futures.wait(self._pieces)
        checksums = [piece.result() for piece in self._pieces]
        return zlib.crc32(struct.pack(f"<{len(checksums)}I", *checksums))


class TransferPool:
    """Threads that read and write pieces of at most `piece_bytes`, a multiple of the block size."""

    def __init__(self, *, num_threads: int, piece_bytes: int):
        self.piece_bytes = piece_bytes
        self._executor = concurrent.futures.ThreadPoolExecutor(num_threads, "zerojax-store")

    def read(self, descriptor: int, buffer: np.ndarray, offset: int) -> BucketTransfer:
        """Starts to fill the uint8 array `buffer` with the file's bytes from `offset`."""
        return self._start(_read_piece, descriptor, buffer, offset)

    def write(self, descriptor: int, buffer: np.ndarray, offset: int) -> BucketTransfer:
        """Starts to write the uint8 array `buffer` at byte `offset`. The buffer must not change
        until the transfer ends."""
        return self._start(_write_piece, descriptor, buffer, offset)

    def _start(
        self,
        move: Callable[[int, memoryview, int], int],
        descriptor: int,
        buffer: np.ndarray,
        offset: int,
    ) -> BucketTransfer:
        view, step = buffer.data, self.piece_bytes
        return BucketTransfer(
            [
                self._executor.submit(move, descriptor, view[at : at + step], offset + at)
                for at in range(0, len(view), step)
            ]
        )

    def close(self) -> None:
        """Waits for transfers in progress and ends the threads."""
        self._executor.shutdown(wait=True)


def checksum_piece(piece: memoryview) -> int:
    """Returns a checksum of a piece: the CRC-32 over the sums of its blocks.

    Each block of 4096 bytes is summed as 512 words of 64 bits. Disk errors affect whole blocks, and
    the CRC-32 detects their order; a flipped bit changes its block's sum. Words that swap places
    inside a block are not detected. CRC-32 over all bytes is ten times slower (4 against 45 GB/s on
    one core) and reduced the rate of a sweep by a quarter.
    """
    words = np.frombuffer(piece, np.uint64).reshape(-1, BLOCK // 8)
    return zlib.crc32(words.sum(axis=1).data)


def _read_piece(descriptor: int, piece: memoryview, offset: int) -> int:
    read_into(descriptor, piece, offset)
    return checksum_piece(piece)


def _write_piece(descriptor: int, piece: memoryview, offset: int) -> int:
    checksum = checksum_piece(piece)
    write_from(descriptor, piece, offset)
    return checksum


class Bucket:
    """One bucket of a sweep, valid until the loop requests the next bucket (or, with `held`
    buckets, as many later).

    Attributes:
      index: number of the bucket.
      array: bytes of the bucket in memory of the store, with the dtype of the sweep; shape
        [elements]. Change it in place, then call `write`. Another bucket reuses that memory later,
        so copy values that must stay. `jax.device_put` on the CPU does not copy an aligned array:
        wait for results computed from it (`jax.block_until_ready`) while the bucket is valid.
    """

    def __init__(self, index: int, array: np.ndarray, start_write: Callable[[], None]):
        self.index = index
        self.array = array
        self._start_write: Callable[[], None] | None = start_write

    def write(self) -> None:
        """Starts to write `array` and returns immediately; afterwards the array is read-only.

        Without this call the bucket on disk does not change.

        Raises:
          StoreError: the bucket was already written, or the loop requested another bucket since.
        """
        if self._start_write is None:
            raise StoreError(
                f"bucket {self.index} was already written or is no longer in memory; call "
                "bucket.write() once, before the next bucket (with `held` buckets, as many later) "
                "is requested"
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
    ahead: int = 1,
    held: int = 1,
) -> Iterator[Bucket]:
    """Yields one bucket after the other, reading ahead; on any exit, waits for all transfers.

    Args:
      order: numbers of the buckets; a bucket that occurs more than once cannot be written.
      ring: at least `FEWEST_BUFFERS` buffers, and at least `ahead` + `held`; bucket number p of
        `order` uses ring[p % len(ring)].
      as_array: function that returns the caller's view of a bucket, given its number and buffer.
      start_read: function that starts to read a bucket into a buffer.
      start_write: function that starts to write a bucket from a buffer.
      ahead: number of buckets that are read ahead of the current one.
      held: number of buckets that stay valid, the current one included.
    """
    repeated = {index for index, times in collections.Counter(order).items() if times > 1}
    reads: dict[int, Callable[[], None]] = {}
    writes: dict[int, Callable[[], None]] = {}

    def read(place: int) -> None:
        # The buffer is free once its previous bucket has been written.
        if last := writes.pop(place - len(ring), None):
            last()
        reads[place] = start_read(order[place], ring[place % len(ring)])

    def write(place: int) -> None:
        if order[place] in repeated:
            raise StoreError(
                f"bucket {order[place]} occurs more than once in the order of this sweep, so it "
                "may have been "
                "prefetched already; write it in a sweep whose order has it once"
            )
        writes[place] = start_write(order[place], ring[place % len(ring)])

    live: collections.deque[Bucket] = collections.deque()
    started = 0
    try:
        for place, index in enumerate(order):
            while started < min(place + ahead + 1, len(order)):
                read(started)
                started += 1
            reads[place]()
            del reads[place]
            buffer = ring[place % len(ring)]
            bucket = Bucket(index, as_array(index, buffer), lambda place=place: write(place))
            live.append(bucket)
            yield bucket
            while len(live) >= held:
                live.popleft()._expire()
        while live:
            live.popleft()._expire()
        while writes:
            writes.pop(next(iter(writes)))()
    finally:
        for bucket in live:
            bucket._expire()
        _drain([*reads.values(), *writes.values()])


def _drain(waits: Sequence[Callable[[], None]]) -> None:
    """Waits for transfers and ignores their errors: the first error is already being raised."""
    for wait in waits:
        try:
            wait()
        except (OSError, StoreError):
            continue
