"""Measures the bandwidth of a disk by sweeping over a bucket store."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Sequence

from zerojax.checkpoint.store.store import BucketStore
from zerojax.config.late_dataclasses import dataclass

BUCKET_BYTES = 16 * 2**20
THREADS = (1, 2, 4, 8)
_PASSES = 3


@dataclass(frozen=True)
class DiskRates:
    """Disk bandwidths in bytes per second for a number of threads, each the best of three sweeps.

    Attributes:
      num_threads: number of threads that read and write, each at most 4 MiB at once.
      is_direct: True if the page cache was bypassed. If False, reads may never reach the disk.
      write: bandwidth of a sweep that writes every bucket.
      read: bandwidth of a sweep that reads every bucket.
      both: bandwidth of a sweep that reads and writes every bucket, both directions added.
    """

    num_threads: int
    is_direct: bool
    write: float
    read: float
    both: float


def measure_rates(
    folder: str | os.PathLike[str], *, num_bytes: int, threads: Sequence[int] = THREADS
) -> Iterator[DiskRates]:
    """Measures the bandwidth of a disk with a store in a new folder, which is removed at the end.

    Args:
      folder: an existing folder on the disk; the new folder is created in it.
      num_bytes: size of the store in bytes; rounded up to buckets of 16 MiB, at least 4 of them.
      threads: numbers of threads to try.

    Yields:
      One `DiskRates` for each of `threads`, as soon as it is measured.

    Raises:
      OSError: the folder does not exist or is not writable, or the disk has too little space.
    """
    num_buckets = max(-(-num_bytes // BUCKET_BYTES), 4)
    with tempfile.TemporaryDirectory(prefix="zerojax-bench-", dir=folder) as place:
        # The first write to a reserved block is slower, and later sweeps have no first writes.
        with BucketStore.create(place, num_buckets=num_buckets, bucket_bytes=BUCKET_BYTES) as store:
            _time_sweep(store, read=False, write=True)
        for num_threads in threads:
            with BucketStore.open(place, num_threads=num_threads) as store:
                best = {"write": 0.0, "read": 0.0, "both": 0.0}
                for _ in range(_PASSES):
                    for name in best:
                        read, write = name != "write", name != "read"
                        seconds = _time_sweep(store, read=read, write=write)
                        moved = (read + write) * num_buckets * BUCKET_BYTES
                        best[name] = max(best[name], moved / seconds)
                yield DiskRates(num_threads, store.is_direct, **best)


def _time_sweep(store: BucketStore, *, read: bool, write: bool) -> float:
    start = time.perf_counter()
    for bucket in store.sweep(read=read):
        if write:
            bucket.write()
    return time.perf_counter() - start
