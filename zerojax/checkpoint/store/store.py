"""The bucket store: buckets on disk with generations and checksums."""

from __future__ import annotations

import dataclasses
import errno
import functools
import os
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import DTypeLike

from zerojax.checkpoint.store import direct_io
from zerojax.checkpoint.store.direct_io import StoreError
from zerojax.checkpoint.store.manifest import (
    NAME,
    Manifest,
    check_at_least,
    check_files,
    first_manifest,
    go_back,
    load_manifest,
    make_files,
    save_manifest,
    slot_path,
    tell_mixed,
)
from zerojax.checkpoint.store.sweep import (
    FEWEST_BUFFERS,
    Bucket,
    BucketTransfer,
    TransferPool,
    sweep_buckets,
)
from zerojax.config.checks import warn_user
from zerojax.runtime.folder_lock import FolderTakenError, Hold

PIECE_BYTES = 4 * 2**20
NUM_THREADS = 4


class BucketStore:
    """Store of numbered buckets of bytes in the files of a folder, read and written in sweeps.

    A sweep is one pass over the buckets; each finished sweep that writes makes a new generation of
    the data. By default a store is scratch space: a sweep overwrites the only copy. If a process
    ends inside such a sweep, the buckets are of two generations, and the store cannot be opened any
    more. A durable store has two slots for each bucket: a sweep writes to the inactive slots, and
    one rename makes them active. It can be opened after a kill at any moment, with its last
    complete generation.

    Attributes:
      folder: folder of the store's files.
      is_direct: True if transfers bypass the page cache.
      buffer_bytes: memory in bytes of the ring of buffers, independent of the number of buckets.
      num_buffers: number of buffers in the ring. A sweep reuses the memory of a bucket only when
        the loop requests the bucket `num_buffers` - 1 places later.
    """

    def __init__(
        self, folder: Path, manifest: Manifest, lock: Hold, *, num_threads: int, num_buffers: int
    ):
        """Initializes a store; callers use `create` or `open` instead."""
        self.folder = folder
        self._manifest = manifest
        self._sweeping = False
        self._refusal: str | None = None  # reason why no further sweep may start
        self._descriptors: list[int] = []
        self._lock: Hold | None = lock
        self._pool = TransferPool(num_threads=num_threads, piece_bytes=manifest.piece_bytes)
        largest = direct_io.pad_to_block(manifest.bucket_bytes)
        self._ring = [direct_io.aligned_buffer(largest) for _ in range(num_buffers)]
        self.buffer_bytes = num_buffers * largest
        self.num_buffers = num_buffers
        self.is_direct = self._open_slots()

    @classmethod
    def create(
        cls,
        folder: str | os.PathLike[str],
        *,
        num_buckets: int,
        bucket_bytes: int | Sequence[int],
        durable: bool = False,
        replace: bool = False,
        num_threads: int = NUM_THREADS,
        num_buffers: int = FEWEST_BUFFERS,
    ) -> Self:
        """Creates a store of zeros and opens it.

        Args:
          folder: folder of the store, created if missing; only the store's own files are changed.
          num_buckets: number of buckets, at least 1.
          bucket_bytes: bytes of every bucket, or a sequence with the bytes of each; at least 1. On
            disk each is padded to a multiple of 4096; in memory all have the largest size.
          durable: True: store two generations, which needs twice the disk space.
          replace: True: overwrite an existing store, whatever its condition.
          num_threads: number of concurrent transfers, each of at most 4 MiB.
          num_buffers: number of buckets in memory, at least 3.

        Raises:
          ValueError: a number is too small, or `bucket_bytes` does not have `num_buckets` sizes.
          StoreError: a store exists and `replace` is False, the store is open elsewhere, or another
            program's file has the name of the manifest.
          OSError: ENOSPC if the disk has too little space; then no files remain.
        """
        # Invalid numbers are refused before anything is created.
        manifest = first_manifest(num_buckets, bucket_bytes, PIECE_BYTES, durable=durable)
        _check_counts(num_threads, num_buffers)
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        lock = direct_io.lock_folder(path)
        try:
            if (path / NAME).exists() and not replace:
                raise StoreError(
                    f"{path}: a store exists already; open it, pass replace=True to overwrite it, "
                    "or choose another folder"
                )
            make_files(path, manifest)
            # Last: without a manifest the folder counts as an interrupted creation.
            save_manifest(path, manifest)
            return cls(path, manifest, lock, num_threads=num_threads, num_buffers=num_buffers)
        except BaseException:
            lock.release()
            raise

    @classmethod
    def open(
        cls,
        folder: str | os.PathLike[str],
        *,
        generation: int | None = None,
        num_threads: int = NUM_THREADS,
        num_buffers: int = FEWEST_BUFFERS,
    ) -> Self:
        """Opens a store with its last complete generation, or the one before.

        Args:
          folder: folder of the store.
          generation: generation to continue from; None: the last complete one. A durable store can
            also go back to the previous one, until a sweep writes.
          num_threads: number of concurrent transfers, each of at most 4 MiB.
          num_buffers: number of buckets in memory, at least 3.

        Raises:
          StoreError: there is no store, it is open elsewhere, a file has the wrong length, a sweep
            of a scratch store did not finish, so that its buckets are of two generations, or the
            store does not have `generation`.
        """
        _check_counts(num_threads, num_buffers)
        path = Path(folder)
        if not path.is_dir():
            raise StoreError(
                f"{path}: this folder does not exist, so it holds no store; create the store first"
            )
        lock = direct_io.lock_folder(path)
        try:
            manifest = load_manifest(path)
            check_files(path, manifest)
            if generation is not None and generation != manifest.generation:
                manifest = go_back(path, manifest, generation)
            return cls(path, manifest, lock, num_threads=num_threads, num_buffers=num_buffers)
        except BaseException:
            lock.release()
            raise

    @property
    def num_buckets(self) -> int:
        """Number of buckets in the store."""
        return self._manifest.num_buckets

    @property
    def bucket_bytes(self) -> int:
        """Bytes of one bucket, without padding; if sizes differ, bytes of the largest one."""
        return self._manifest.bucket_bytes

    @property
    def bucket_sizes(self) -> tuple[int, ...]:
        """Number of bytes of each bucket, without padding."""
        return self._manifest.sizes

    @property
    def is_durable(self) -> bool:
        """True if the store holds two generations on disk."""
        return self._manifest.durable

    @property
    def generation(self) -> int:
        """Number of finished sweeps that wrote something since the store was created."""
        return self._manifest.generation

    @property
    def is_broken(self) -> bool:
        """True if no further sweep can start: a writing sweep of a scratch store did not finish,
        the manifest could not be written, the lock was lost, or the store is closed."""
        return self._refusal is not None

    @property
    def is_closed(self) -> bool:
        """True if `close` was called."""
        return not self._descriptors

    @property
    def disk_bytes(self) -> int:
        """Number of bytes of all bucket files."""
        return self._manifest.num_slots * self._manifest.file_bytes

    def sweep(
        self,
        *,
        dtype: DTypeLike = np.uint8,
        order: Sequence[int] | None = None,
        read: bool = True,
        ahead: int = 1,
        held: int = 1,
    ) -> Generator[Bucket]:
        """Iterates over the buckets once; a finished loop that wrote makes a new generation.

        Buckets that the loop did not write stay unchanged. If a loop ends early (`break`, an
        exception), a durable store stays unchanged, and a scratch store contains buckets of two
        generations if the loop wrote anything.

        Args:
          dtype: dtype of `bucket.array`; its size must divide the bytes of every bucket.
          order: numbers of the buckets to visit; None: all, from 0 on. A bucket that occurs more
            than once cannot be written, because it may have been prefetched already.
          read: False if the loop overwrites every byte; arrays then have undefined contents.
          ahead: number of buckets that are read ahead of the current one.
          held: number of buckets that stay valid, the current one included; `ahead` + `held` is at
            most `num_buffers`.

        Returns:
          An iterator, to be used immediately and to its end. It raises the errors of the threads.

        Raises:
          ValueError: `dtype` or `order` does not fit the buckets, or there are too few buffers.
          StoreError: another sweep is in progress, the store is closed or contains two generations,
            or a bucket differs from the written one (the message names the bucket).
          OSError: the disk reports an error, ENOSPC if it is full; the message names the bucket.
        """
        kind = np.dtype(dtype)
        uneven = [size for size in set(self.bucket_sizes) if size % kind.itemsize]
        if uneven:
            raise ValueError(
                f"dtype={kind} has {kind.itemsize} bytes, which does not divide "
                f"bucket_bytes={uneven[0]}; make the store with a multiple of it"
            )
        places = list(range(self.num_buckets)) if order is None else [int(i) for i in order]
        _check_order(places, self.num_buckets)
        if ahead < 1 or held < 1 or ahead + held > self.num_buffers:
            raise ValueError(
                f"ahead={ahead} and held={held} need at least one buffer each, and the store has "
                f"{self.num_buffers}; open it with num_buffers={ahead + held} or more"
            )
        return self._sweep(kind, places, read, ahead, held)

    def close(self) -> None:
        """Waits for transfers in progress, and releases files, threads and the lock. May be called
        twice."""
        if self._lock is None:
            return
        self._pool.close()
        for descriptor in self._descriptors:
            os.close(descriptor)
        # After the transfers: the next holder of the lock must find none in progress.
        self._lock.release()
        self._descriptors, self._lock, self._ring = [], None, []
        self._refusal = f"{self.folder}: this store is closed; open it again"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _open_slots(self) -> bool:
        all_direct = True
        try:
            for slot in range(self._manifest.num_slots):
                descriptor, direct = direct_io.open_direct(slot_path(self.folder, slot))
                self._descriptors.append(descriptor)
                all_direct &= direct
            if not all_direct:
                warn_user(
                    f"{self.folder}: this file system does not support O_DIRECT, so buckets go "
                    "through the page cache, which is slower and takes memory from other "
                    "programs; use another disk"
                )
        except BaseException:
            self._pool.close()
            for descriptor in self._descriptors:
                os.close(descriptor)
            raise
        return all_direct

    def _sweep(
        self, kind: np.dtype, order: list[int], read: bool, ahead: int, held: int
    ) -> Generator[Bucket]:
        if self._refusal:
            raise StoreError(self._refusal)
        if self._sweeping:
            raise StoreError(
                f"{self.folder}: another sweep (pass over the buckets) is in progress; finish "
                "its loop first"
            )
        self._sweeping = True
        written: dict[int, int] = {}  # bucket -> checksum
        begin = functools.cache(self._begin)  # runs once, before the first write of the sweep
        try:
            yield from sweep_buckets(
                order,
                self._ring,
                lambda index, buffer: buffer[: self.bucket_sizes[index]].view(kind),
                start_read=self._start_read if read else _read_nothing,
                start_write=lambda index, buffer: self._start_write(index, buffer, begin, written),
                ahead=ahead,
                held=held,
            )
            if written:
                self._commit(written)
        finally:
            self._sweeping = False

    def _start_read(self, index: int, buffer: np.ndarray) -> Callable[[], None]:
        checksum, slot = self._manifest.checksums[index], self._manifest.slots[index]
        offset, end = self._manifest.offsets[index : index + 2]
        buffer = buffer[: end - offset]
        if checksum is None:
            buffer[:] = 0
            return _nothing_to_wait_for
        transfer = self._pool.read(self._descriptors[slot], buffer, offset)

        def finish() -> None:
            if self._wait(transfer, f"bucket {index} could not be read") != checksum:
                raise StoreError(
                    f"{slot_path(self.folder, slot)}: bucket {index} (bytes {offset} to "
                    f"{offset + len(buffer)}) differs from what generation {self.generation} "
                    "wrote: the "
                    "write was incomplete, or the bytes changed on disk; delete the folder and "
                    "fill the store "
                    "again, from a checkpoint, and check that disk for errors"
                )

        return finish

    def _start_write(
        self,
        index: int,
        buffer: np.ndarray,
        begin: Callable[[], None],
        written: dict[int, int],
    ) -> Callable[[], None]:
        begin()
        slot = self._next_slot(index)
        offset, end = self._manifest.offsets[index : index + 2]
        transfer = self._pool.write(self._descriptors[slot], buffer[: end - offset], offset)

        def finish() -> None:
            written[index] = self._wait(transfer, f"bucket {index} could not be written")

        return finish

    def _next_slot(self, index: int) -> int:
        """Returns the number of the file to which bucket `index` is written next.

        A durable store alternates between two files, so that the valid copy is not overwritten.
        """
        return 1 - self._manifest.slots[index] if self.is_durable else 0

    def _wait(self, transfer: BucketTransfer, complaint: str) -> int:
        try:
            return transfer.wait()
        except OSError as error:
            remedy = f"generation {self.generation} is intact" if self.is_durable else ""
            if error.errno == errno.ENOSPC:
                remedy = f"free some space on it{'; ' if remedy else ''}{remedy}"
            text = f"{self.folder}: {complaint}: {error.strerror}"
            raise OSError(error.errno, f"{text}; {remedy}" if remedy else text) from error

    def _begin(self) -> None:
        """Marks a scratch store on disk as incomplete, before a sweep overwrites its
        first bucket."""
        if self.is_durable:
            return
        self._keep_lock()
        begun = dataclasses.replace(self._manifest, begun=self.generation + 1)
        # Until the manifest is replaced, it is unknown which one is on disk. From then until the
        # end of the sweep, the buckets are of two generations.
        self._refusal = _tell_unsure(self.folder, begun)
        save_manifest(self.folder, begun)
        self._refusal = tell_mixed(self.folder, begun)

    def _keep_lock(self) -> None:
        """Raises if another process locked the folder while this process was suspended."""
        assert self._lock is not None
        try:
            self._lock.keep()
        except FolderTakenError as error:
            self._refusal = str(error)
            raise StoreError(self._refusal) from None

    def _check_linked(self) -> None:
        """Raises StoreError if a bucket file was deleted, because no later start could read it."""
        for slot, descriptor in enumerate(self._descriptors):
            if os.fstat(descriptor).st_nlink == 0:
                raise StoreError(
                    f"{slot_path(self.folder, slot)} was deleted while it was in use, so the last "
                    "complete step is in no file; start again from a checkpoint"
                )

    def _commit(self, written: dict[int, int]) -> None:
        """Makes the written buckets active. The old manifest stays valid until it is replaced."""
        if self.is_durable:
            self._check_linked()
        slots, checksums = list(self._manifest.slots), list(self._manifest.checksums)
        for index, checksum in written.items():
            slots[index], checksums[index] = self._next_slot(index), checksum
        generation = self.generation + 1
        new = dataclasses.replace(
            self._manifest,
            generation=generation,
            begun=generation,
            slots=tuple(slots),
            checksums=tuple(checksums),
            slots_before=self._manifest.slots if self.is_durable else (),
            checksums_before=self._manifest.checksums if self.is_durable else (),
        )
        # From here until the return it is unknown which of two manifests is on disk.
        self._refusal = self._refusal or _tell_unsure(self.folder, new)
        self._keep_lock()
        # The data before the manifest that refers to it.
        if self.is_durable:
            # A scratch store may be written in any order: checksums detect data lost by a power
            # failure.
            for slot in {slots[index] for index in written}:
                os.fdatasync(self._descriptors[slot])
        save_manifest(self.folder, new)
        self._manifest, self._refusal = new, None


def _tell_unsure(folder: Path, manifest: Manifest) -> str:
    return (
        f"{folder}: the manifest of generation {manifest.begun} could not be written; close the "
        "store, fix the problem with the disk, and open it: the store then has the last "
        "complete generation"
    )


def _nothing_to_wait_for() -> None:
    return None


def _read_nothing(index: int, buffer: np.ndarray) -> Callable[[], None]:
    return _nothing_to_wait_for


def _check_counts(num_threads: int, num_buffers: int) -> None:
    check_at_least("num_threads", num_threads, 1)
    check_at_least("num_buffers", num_buffers, FEWEST_BUFFERS)


def _check_order(order: list[int], num_buckets: int) -> None:
    beyond = [index for index in order if not 0 <= index < num_buckets]
    if beyond:
        raise ValueError(
            f"order contains bucket {beyond[0]}; use numbers from 0 to {num_buckets - 1}"
        )
