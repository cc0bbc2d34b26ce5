"""Durable direct I/O: complete, ordered transfers that bypass the page cache.

`O_DIRECT` moves data between the disk and the memory of this process without a copy in the page
cache. The address, the length and the offset must be multiples of the disk's block size (open(2)).

`StreamFile` appends data to a file: data is copied into aligned buffers, and threads write full
buffers while the next ones are filled. On a machine with two cores it wrote 522 MB in 0.28 s
including a CRC-32; `write` and `fsync` took 0.35 s without a CRC-32 (medians of 6, alternating).
It also takes no page cache from other processes.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import errno
import mmap
import os
from pathlib import Path

import numpy as np

from zerojax.runtime.folder_lock import FolderTakenError, Hold, hold

BLOCK = 4096  # bytes; a multiple of the logical block of common disks
_MIB = 2**20
_LIBC = ctypes.CDLL(None, use_errno=True)
BUFFER_BYTES = 4 * 2**20
NUM_BUFFERS = 6
NUM_THREADS = 3
_RESERVE = 64 * 2**20  # bytes by which the file is extended ahead of the written data


class StoreError(RuntimeError):
    """A store cannot be used as requested; the message gives the reason and the remedy.

    Failures of the operating system (a full disk, a broken disk) are `OSError`s with their number.
    """


class StoreFailedError(StoreError):
    """The disk of a store failed in the middle of a run; a restart continues from an earlier
    state."""

    is_bad_input = False


def pad_to_block(num_bytes: int) -> int:
    """Rounds a number of bytes up to a multiple of `BLOCK`.

    >>> pad_to_block(1), pad_to_block(4096)
    (4096, 4096)
    """
    return -(-num_bytes // BLOCK) * BLOCK


def aligned_buffer(num_bytes: int) -> np.ndarray:
    """Allocates `num_bytes` zeros (a multiple of `BLOCK`) as uint8, aligned to a memory page."""
    return np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)


def read_into(descriptor: int, buffer: memoryview, offset: int) -> None:
    """Fills `buffer` with the file's bytes from `offset`.

    Raises:
      OSError: EIO if the file ends before `buffer` is full, or another error of the system.
    """
    done = 0
    while done < len(buffer):
        count = os.preadv(descriptor, [buffer[done:]], offset + done)
        if count == 0:
            raise OSError(errno.EIO, f"the file ends at byte {offset + done}")
        done = _whole_blocks(done + count, len(buffer))


def write_from(descriptor: int, buffer: memoryview, offset: int) -> None:
    """Writes all of `buffer` to byte `offset` of the file.

    Raises:
      OSError: the operating system reports an error, such as ENOSPC.
    """
    done = 0
    while done < len(buffer):
        count = os.pwritev(descriptor, [buffer[done:]], offset + done)
        if count == 0:
            raise OSError(errno.EIO, f"nothing can be written at byte {offset + done}")
        done = _whole_blocks(done + count, len(buffer))


def _whole_blocks(done: int, length: int) -> int:
    """Rounds `done` bytes down to whole blocks: a transfer that stopped inside a block continues
    from there."""
    return done if done == length else done // BLOCK * BLOCK


def open_direct(path: Path) -> tuple[int, bool]:
    """Opens an allocated file for reading and writing, bypassing the page cache if possible.

    Returns:
      The file descriptor, and True if it bypasses the page cache. tmpfs and some network and
      overlay file systems do not support that; some fail at open, some at the first transfer.
    """
    flags = os.O_RDWR | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return os.open(path, flags), False
    try:
        os.preadv(descriptor, [aligned_buffer(BLOCK).data], 0)
    except OSError as error:
        os.close(descriptor)
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return os.open(path, flags), False
    return descriptor, True


def check_space(folder: Path, needed: int, *, remedy: str | None) -> None:
    """Raises if the disk of `folder` has too little space.

    Args:
      folder: an existing folder.
      needed: number of bytes that will be written in addition to the present files.
      remedy: additional remedy for the message, a clause that begins with "or"; None: no additional
        remedy.

    Raises:
      OSError: ENOSPC; the message has the bytes needed and the bytes that this user may write.
    """
    disk = os.statvfs(folder)
    there = disk.f_bavail * disk.f_frsize
    if needed > there:
        other = "choose a folder on another disk"
        others = f"or {other}" if remedy is None else f"{other}, {remedy}"
        raise OSError(
            errno.ENOSPC,
            f"{folder}: {needed / _MIB:,.1f} MiB of disk are needed, {there / _MIB:,.1f} MiB "
            "are free; "
            f"free {(needed - there) / _MIB:,.1f} MiB, {others}",
        )


def allocate(path: Path, num_bytes: int) -> None:
    """Creates a file of `num_bytes`, or extends it, and reserves its disk blocks, so that no later
    write runs out of space."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def reserve(descriptor: int, num_bytes: int) -> None:
    """Extends a file that is being written, and reserves its blocks if the file system supports it.

    Does not use `posix_fallocate`: on a file system without support, such as NFS before 4.2, the C
    library itself writes to every block, at the same time as the threads that write data to them.

    Raises:
      OSError: the operating system reports an error, such as ENOSPC.
    """
    fallocate = getattr(_LIBC, "fallocate64", None) or getattr(_LIBC, "fallocate", None)
    if fallocate is not None:
        length = ctypes.c_int64(num_bytes)
        if fallocate(ctypes.c_int(descriptor), ctypes.c_int(0), ctypes.c_int64(0), length) == 0:
            return
        number = ctypes.get_errno()
        if number not in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise OSError(number, os.strerror(number))
    os.ftruncate(descriptor, num_bytes)


def replace_file(path: Path, content: bytes) -> None:
    """Replaces a file by `content` atomically: after a crash, either the old or the new file exists
    and is complete.

    Steps: write and fsync a new file, rename it, fsync the folder (rename(2), fsync(2)).
    """
    new = path.with_name(path.name + ".new")
    new.unlink(missing_ok=True)  # remains of a crash; only this process uses the store
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        done = 0
        while done < len(content):
            done += os.write(descriptor, content[done:])
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.rename(new, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Syncs the list of names in `folder` to the disk, so that new and renamed files survive a
    crash."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock_folder(folder: Path) -> Hold:
    """Locks `folder` for this process, until the lock is released or the process has ended.

    The operating system holds the lock of a killed process until its last write in flight is done.
    So the next process that opens the folder finds no writes in progress.

    Raises:
      StoreError: another store, of this or another process, has locked the folder.
      OSError: the operating system reports an error.
    """
    try:
        return hold(folder, twice="refuse")
    except FolderTakenError as error:
        raise StoreError(str(error)) from None


class StreamFile:
    """A file that is written once, from start to end, with direct I/O.

    Attributes:
      path: path of the file.
      num_bytes: number of bytes appended so far.
    """

    def __init__(self, path: Path) -> None:
        """Creates the file, which must not exist yet.

        Raises:
          OSError: the operating system reports an error.
        """
        self.path = path
        self.num_bytes = 0
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
        self._descriptor, self._is_direct = open_direct(path)
        self._reserved = self._written = self._filled = self._turn = 0
        self._buffers: list[np.ndarray] = []
        self._writes: list[concurrent.futures.Future[None] | None] = []
        self._pool = concurrent.futures.ThreadPoolExecutor(NUM_THREADS, "zerojax-stream")

    def append(self, values: np.ndarray) -> None:
        """Appends the bytes of a contiguous array, which may change after this returns.

        Raises:
          OSError: the operating system reports an error, for this or an earlier append.
        """
        left = values.reshape(-1).view(np.uint8)
        while left.size:
            buffer = self._free_buffer()
            count = min(BUFFER_BYTES - self._filled, left.size)
            buffer[self._filled : self._filled + count] = left[:count]
            self.num_bytes += count
            self._filled += count
            left = left[count:]
            if self._filled == BUFFER_BYTES:
                self._flush()

    def close(self) -> None:
        """Finishes the file. When this returns, the whole file is on the disk.

        Raises:
          OSError: the operating system reports an error.
        """
        try:
            if self._filled:
                self._flush()
            for write in self._writes:
                if write is not None:
                    write.result()
            # Cuts off the padding of the last block and the reserved rest.
            os.ftruncate(self._descriptor, self.num_bytes)
            os.fsync(self._descriptor)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Closes the file and ends its threads without finishing the file. May be called twice."""
        # First, because a thread may still write to the descriptor.
        self._pool.shutdown(wait=True)
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor, self._buffers, self._writes = -1, [], []

    def _free_buffer(self) -> np.ndarray:
        """Returns the next buffer of the ring, after waiting until its last write has ended."""
        if self._turn == len(self._buffers):
            self._buffers.append(aligned_buffer(BUFFER_BYTES))
            self._writes.append(None)
        if write := self._writes[self._turn]:
            write.result()
            self._writes[self._turn] = None
        return self._buffers[self._turn]

    def _flush(self) -> None:
        """Starts to write the current buffer to the file, padded to a whole block."""
        length = pad_to_block(self._filled)
        buffer = self._buffers[self._turn]
        buffer[self._filled : length] = 0
        self._reserve(self._written + length)
        self._writes[self._turn] = self._pool.submit(
            write_from, self._descriptor, buffer.data[:length], self._written
        )
        self._written += length
        self._filled, self._turn = 0, (self._turn + 1) % NUM_BUFFERS

    def _reserve(self, num_bytes: int) -> None:
        """Extends the file ahead of the writes, because writes that extend a file wait for each
        other."""
        if not self._is_direct or num_bytes <= self._reserved:
            return
        # Not at the first flush: a file of one buffer needs no reserve.
        self._reserved = pad_to_block(num_bytes + (_RESERVE if self._reserved else 0))
        reserve(self._descriptor, self._reserved)
