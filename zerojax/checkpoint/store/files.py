"""Durable direct I/O: bytes past the page cache, whole and in order.

`O_DIRECT` moves data between the disk and memory of this process without a copy in the page cache;
in exchange the address, the length and the offset must be multiples of the disk's block (open(2)).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from pathlib import Path

import numpy as np

from zerojax.checkpoint.store.errors import StoreError
from zerojax.runtime.folder_lock import FolderTakenError, Hold, hold

BLOCK = 4096  # bytes; a multiple of the logical block of the disks that are sold
_MIB = 2**20
_LIBC = ctypes.CDLL(None, use_errno=True)


def pad_to_block(num_bytes: int) -> int:
    """The next multiple of `BLOCK`.

    >>> pad_to_block(1), pad_to_block(4096)
    (4096, 4096)
    """
    return -(-num_bytes // BLOCK) * BLOCK


def aligned_buffer(num_bytes: int) -> np.ndarray:
    """`num_bytes` (a multiple of `BLOCK`) of zeros as uint8 that start at a page of memory."""
    return np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)


def read_into(descriptor: int, buffer: memoryview, offset: int) -> None:
    """Fills `buffer` from byte `offset` of the file on.

    Raises:
      OSError: EIO when the file ends before that, or what the system says.
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
      OSError: what the system says, such as ENOSPC.
    """
    done = 0
    while done < len(buffer):
        count = os.pwritev(descriptor, [buffer[done:]], offset + done)
        if count == 0:
            raise OSError(errno.EIO, f"nothing can be written at byte {offset + done}")
        done = _whole_blocks(done + count, len(buffer))


def _whole_blocks(done: int, length: int) -> int:
    """Where to go on after `done` bytes: a transfer may stop inside a block, and begin in none."""
    return done if done == length else done // BLOCK * BLOCK


def open_direct(path: Path) -> tuple[int, bool]:
    """Opens an allocated file for reading and writing, past the page cache where that is possible.

    Returns:
      The descriptor, and whether it bypasses the page cache. tmpfs and some network and overlay
      file systems refuse that, some when the file is opened, some at the first transfer.
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


def check_space(folder: Path, needed: int, *, remedy: str) -> None:
    """Refuses what does not fit on the disk of `folder`.

    Args:
      folder: an existing folder.
      needed: bytes that will be written in addition to what is there.
      remedy: what else would help, a clause.

    Raises:
      OSError: ENOSPC, with the bytes needed and the bytes that this user may still write.
    """
    disk = os.statvfs(folder)
    there = disk.f_bavail * disk.f_frsize
    if needed > there:
        raise OSError(
            errno.ENOSPC,
            f"{folder}: needs {needed / _MIB:,.1f} MiB of disk, {there / _MIB:,.1f} MiB are free; "
            f"free {(needed - there) / _MIB:,.1f} MiB, choose a folder on another disk, {remedy}",
        )


def allocate(path: Path, num_bytes: int) -> None:
    """Makes the file, or makes it longer, and reserves its blocks, so that no sweep runs out."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def reserve(descriptor: int, num_bytes: int) -> None:
    """Makes a file that is being written longer, with its blocks where the file system can.

    Not by `posix_fallocate`: where a file system cannot, as NFS before 4.2, the C library touches
    every block itself, beside the threads that are writing those blocks.

    Raises:
      OSError: what the system says, such as ENOSPC.
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
    """Puts `content` in the place of `path`: after a crash the old or the new is there, whole.

    write + fsync of a new file, rename, fsync of the folder (rename(2), fsync(2)).
    """
    new = path.with_name(path.name + ".new")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
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
    """Makes the names in `folder` last."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock_folder(folder: Path) -> Hold:
    """Takes `folder` for this process, until it is released or the process has ended.

    The system keeps the lock until the last write in flight of a killed process is over, so
    whoever opens the folder next finds nothing moving.

    Raises:
      StoreError: another store, of this or another process, holds it.
      OSError: what the system says.
    """
    try:
        return hold(folder, twice="refuse")
    except FolderTakenError as error:
        raise StoreError(str(error)) from None
