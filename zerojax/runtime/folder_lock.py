"""Locks a folder for one writer, across processes and hosts.

The lock file names host, process and time of its holder, which renews the file every `BEAT`
seconds. On one machine no wait is needed: the kernel releases a process's flock(2) when the process
ends, for whatever reason. On network file systems flock is less reliable: NFS may apply it to one
host only, or keep the lock of a dead host. So a holder on another machine is watched. If it renews
its file, it is alive. If it does not within `EXPIRES` seconds, it loses the folder. The waiting
process measures these seconds, and any change of the file's time counts as a renewal. Clocks of
machines are compared only to shorten the wait.

A holder that was suspended, or cut off from the file server, learns from `Hold.keep` that it lost
the folder. Every writer calls `Hold.keep` before it makes anything visible.

Within one process the last request usually gets the folder, because a script or notebook that is
started again has often not closed its earlier lock.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import errno
import fcntl
import functools
import os
import re
import secrets
import socket
import stat
import threading
import time
from pathlib import Path
from typing import Literal

from zerojax.config.checks import warn_user
from zerojax.config.display import cut, printable

NAME = "writer.lock"
_TOKEN = re.compile(r"[0-9a-f]{16}")
BEAT = 5.0
"""Seconds between two renewals of a lock by its holder."""

EXPIRES = 60.0
"""Seconds without a renewal after which a lock held by another machine expires."""

_OLD_BEATS = 3
"""Number of renewal periods to wait if the last renewal, by the times of the file system, was more
than `EXPIRES` seconds ago. These times may come from clocks that differ."""

_DYING = 10.0
"""Seconds within which a killed process ends and releases its lock; its last disk write may have to
finish first."""

_MOST_BYTES = 4096
_NO_FLOCK = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL, errno.EBADF}
_NO_LINKS = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK}


class FolderTakenError(RuntimeError):
    """Another process has locked a folder for writing; the message names it and a remedy."""


class _Holder:
    """The process that holds a lock, as described in its lock file; missing fields are ""."""

    def __init__(self, text: str) -> None:
        fields = {key: value for key, _, value in (x.partition(": ") for x in text.splitlines())}
        self.process, self.host = fields.get("process", ""), fields.get("host", "")
        self.since, self.began = fields.get("since", ""), fields.get("began", "")
        self.kernel, self.namespace = fields.get("kernel", ""), fields.get("namespace", "")
        self.token = fields.get("token", "")

    def __str__(self) -> str:
        texts = (self.process, self.host, self.since)
        process, host, since = (printable(cut(text, 80)) or "unknown" for text in texts)
        return f"process {process} on {host}, since {since}"

    @property
    def is_of_this_kernel(self) -> bool:
        """True if the holder runs, or ran, on this machine since the last boot."""
        return bool(self.kernel) and self.kernel == _kernel()

    @property
    def is_seen(self) -> bool:
        """True if the holder's process id is valid in this process; containers have process ids of
        their own."""
        return self.is_of_this_kernel and self.namespace == _namespace()

    @property
    def is_gone(self) -> bool:
        """True if the holder has ended, as far as this process can see."""
        return self.is_seen and self.process.isdecimal() and not _runs(self.process, self.began)


class Hold:
    """This process's lock on a folder; created by `hold`.

    Attributes:
      folder: path of the locked folder.
      note: a sentence about the previous holder if it ended without releasing the lock; else None.
      number: a random number below 10**6, new for each lock, so that two writers use different
        file names.
    """

    def __init__(self, folder: Path, name: str) -> None:
        """Locks the folder; callers use `hold` instead.

        Raises:
          FolderTakenError: another process holds the lock.
          OSError: the operating system reports an error.
        """
        self.folder = folder
        self.note: str | None = None
        self.number = secrets.randbelow(10**6)
        self._path = folder / name
        self._process = os.getpid()
        self._descriptor, self._token = -1, ""
        self._refusal: str | None = None  # the reason why writing is no longer allowed
        self._changing = threading.Lock()
        self._is_over = threading.Event()
        self._take()
        threading.Thread(target=self._beat, name="zerojax-folder-lock", daemon=True).start()

    @property
    def is_over(self) -> bool:
        """True if the lock was released, or lost to another process."""
        return self._refusal is not None

    def keep(self) -> None:
        """Checks that this process still holds the lock, and locks the folder again if the lock
        file was deleted.

        Raises:
          FolderTakenError: another process holds the lock, or this process has released it.
          OSError: the operating system reports an error.
        """
        if self._refusal is not None:
            raise FolderTakenError(self._refusal)
        try:
            holder = _Holder(_read(self._path)[0])
        except FileNotFoundError:
            self._close()
            self.folder.mkdir(parents=True, exist_ok=True)
            self._take()
            return
        if holder.token != self._token:
            self.give_up(
                f"{self.folder} was locked by {holder}, because this process had not renewed "
                "its lock "
                f"for {EXPIRES:g} s; end one of the two processes, and continue from the newest "
                "checkpoint"
            )
            raise FolderTakenError(self._refusal)

    def give_up(self, why: str) -> None:
        """Ends this lock without changing the lock file; later calls of `keep` raise an error with
        the reason `why`.
        """
        self._refusal = self._refusal or why
        self._is_over.set()
        self._close()

    def release(self) -> None:
        """Releases the lock on the folder. May be called twice; does nothing in a forked
        process."""
        if self._refusal is not None or os.getpid() != self._process:
            return
        with contextlib.suppress(OSError, FolderTakenError):
            if _Holder(_read(self._path)[0]).token == self._token:
                os.unlink(self._path)
        self.give_up(f"{self.folder} is no longer open for writing; open it again")
        atexit.unregister(self.release)

    def _beat(self) -> None:
        while not self._is_over.wait(BEAT):
            with self._changing, contextlib.suppress(OSError):  # other calls report the error
                if self._descriptor >= 0:
                    os.utime(self._descriptor)

    def _close(self) -> None:
        with self._changing:
            self.close_descriptor()

    def close_descriptor(self) -> None:
        """Releases only the flock of the lock file, because a forked process would still hold it
        after this process has ended."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    # --- locking ----------------------------------------------------------------------------------

    def _take(self) -> None:
        token = secrets.token_hex(8)
        # The lock gets its name when it is complete and locked, so that nobody reads half of it or
        # locks it first.
        draft = self._path.with_name(f"{self._path.name}.{token}")
        descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            os.write(descriptor, _record(token).encode())
            os.fsync(descriptor)
            _flock(descriptor)
            while not (_put(draft, self._path) or self._replace(draft, token)):
                pass
            # Both times come from the file server: the clocks of machines may differ.
            self._remove_drafts(os.fstat(descriptor).st_mtime)
        except BaseException:
            os.close(descriptor)
            raise
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(draft)
        self._descriptor, self._token = descriptor, token

    def _replace(self, draft: Path, token: str) -> bool:
        """Replaces the lock file of an ended holder by `draft`.

        Returns:
          False if another attempt is needed.

        Raises:
          FolderTakenError: the holder is alive.
          OSError: the operating system reports an error.
        """
        end = time.monotonic() + _DYING
        try:
            descriptor = _open(self._path)
        except FileNotFoundError:
            return False  # just released
        try:
            while True:
                locked = _flock(descriptor)
                holder = _Holder(_contents(descriptor)[0])
                if not _is_at(descriptor, self._path):
                    return False  # just released or replaced
                if locked is False and holder.is_gone and time.monotonic() < end:
                    time.sleep(0.05)  # the holder is ending, or another process asks for the lock
                    continue
                break
            if holder.is_of_this_kernel and locked is not None:
                is_known, is_alive = True, not locked
            else:
                is_known, is_alive = holder.is_seen, not holder.is_gone
            if is_known and is_alive:
                raise FolderTakenError(_taken(self.folder, holder, "end it"))
            if not is_known:
                self._watch(descriptor, draft)
            os.rename(draft, self._path)
            if not is_known:
                # Another machine may have done the same a moment later.
                time.sleep(BEAT / 2)
                now = _Holder(_read(self._path)[0])
                if now.token != token:
                    raise FolderTakenError(_taken(self.folder, now, "end it"))
            self.note = (
                f"{self.folder} was locked by {holder}, which ended without releasing the "
                "lock; this process takes the lock over"
            )
            return True
        finally:
            os.close(descriptor)

    def _watch(self, descriptor: int, draft: Path) -> None:
        """Waits until a holder on another machine has not renewed its lock for `EXPIRES` seconds.

        Raises:
          FolderTakenError: the holder has renewed its lock.
        """
        text, changed = _contents(descriptor)
        holder = _Holder(text)
        # Both times come from the file server.
        age = os.stat(draft).st_mtime - changed / 1e9
        seconds = EXPIRES if age < EXPIRES else _OLD_BEATS * BEAT
        warn_user(
            f"{self.folder} is locked by {holder}; if that process does not renew its lock "
            f"within {seconds:g} "
            "s, this process takes the lock over",
            RuntimeWarning,
        )
        end = time.monotonic() + seconds
        is_last = False
        while not is_last:
            # The last look comes when the time is over, and not up to a second before.
            is_last = time.monotonic() >= end
            with contextlib.suppress(FileNotFoundError):  # the lock was released
                now = _read(self._path)
                if now != (text, changed):
                    remedy = (
                        f"end that process (the lock of a lost machine expires after {EXPIRES:g} s)"
                    )
                    raise FolderTakenError(_taken(self.folder, _Holder(now[0]), remedy))
            os.utime(draft)  # so that others do not remove it as the file of a killed process
            time.sleep(0 if is_last else min(BEAT / 5, max(0.0, end - time.monotonic())))

    def _remove_drafts(self, now: float) -> None:
        """Removes draft lock files of processes that were killed while they waited for the lock."""
        for path in self.folder.glob(f"{self._path.name}.*"):
            with contextlib.suppress(OSError):
                if not _TOKEN.fullmatch(path.suffix[1:]):
                    continue  # of somebody else
                if now - path.stat().st_mtime > EXPIRES:
                    path.unlink()


_holds: dict[str, Hold] = {}


def hold(
    folder: str | os.PathLike[str],
    *,
    name: str = NAME,
    twice: Literal["take", "share", "refuse"] = "take",
) -> Hold:
    """Locks a folder for this process, until `Hold.release` or the end of the process.

    Waits for a holder on another machine, about `EXPIRES` seconds at most, and for one on this
    machine only while it is ending (`_DYING`).

    Args:
      folder: path of the folder; created if it is missing.
      name: name of the lock file in the folder.
      twice: action if this process already holds the lock: "take" ends the earlier hold and makes a
        new one, "share" returns the earlier hold, "refuse" raises.

    Raises:
      FolderTakenError: another process holds the lock, or this process does and `twice` is
        "refuse".
      OSError: the operating system reports an error.
    """
    path = Path(folder).absolute()
    path.mkdir(parents=True, exist_ok=True)
    _let_go_in_forks()
    key = os.fspath(path.resolve() / name)
    former = _holds.get(key)
    if former is not None and not former.is_over and os.getpid() == former._process:
        if twice == "refuse":
            raise FolderTakenError(
                f"{path} is already open for writing in this process; close it first, or use "
                "another folder"
            )
        if twice == "share":
            former.keep()
            return former
        former.release()
        # More exact than the reason that `release` has set.
        former._refusal = (
            f"{path} is written by a later run of this process; close the earlier run, or use "
            "another folder"
        )
    made = Hold(path, name)
    _holds[key] = made
    atexit.register(made.release)
    return made


@functools.cache
def _let_go_in_forks() -> None:
    def let_go() -> None:
        for one in _holds.values():
            one.close_descriptor()

    os.register_at_fork(after_in_child=let_go)


# --- files ----------------------------------------------------------------------------------------


def _record(token: str) -> str:
    fields = {
        "process": os.getpid(),
        "host": socket.gethostname(),
        "since": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M:%S} UTC",
        "kernel": _kernel(),
        "namespace": _namespace(),
        "began": _began(str(os.getpid())),
        "token": token,
    }
    return "".join(f"{key}: {value}\n" for key, value in fields.items())


def _put(draft: Path, path: Path) -> bool:
    """Renames the file `draft` to `path` if `path` does not exist; returns False if it exists."""
    try:
        os.link(draft, path)
        return True
    except FileExistsError:
        # On NFS the answer to the first request may be lost; this is the answer to a repetition.
        return os.stat(draft).st_nlink == 2
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
    # Without hard links an empty file takes the name first, since a rename alone would replace a
    # lock that another process has just put there.
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644))
    except FileExistsError:
        return False
    os.rename(draft, path)
    return True


def _open(path: Path) -> int:
    if not stat.S_ISREG(os.lstat(path).st_mode):
        raise FolderTakenError(
            f"{path} is not a regular file, so its folder cannot be locked; move this file away"
        )
    # Without blocking, in case a pipe takes this name after the check.
    flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        # An exclusive lock on NFS needs a file that is open for writing (flock(2)).
        return os.open(path, flags | os.O_RDWR)
    except PermissionError:  # another user's file; NFS then supports no lock
        return os.open(path, flags | os.O_RDONLY)


def _contents(descriptor: int) -> tuple[str, int]:
    """Returns (text, time of the last change in nanoseconds) of an open file."""
    text = os.pread(descriptor, _MOST_BYTES, 0).decode(errors="replace")
    return text, os.fstat(descriptor).st_mtime_ns


def _read(path: Path) -> tuple[str, int]:
    """Returns the `_contents` of a file by its path. Opening the file makes an NFS client ask its
    server for the current contents."""
    descriptor = _open(path)
    try:
        return _contents(descriptor)
    finally:
        os.close(descriptor)


def _flock(descriptor: int) -> bool | None:
    """Locks an open file and returns True; returns False if another process holds the lock, and
    None if the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_FLOCK:
            raise
        return None
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _taken(folder: Path, holder: _Holder, remedy: str) -> str:
    return (
        f"{folder} is being written by {holder}; two writers would damage each other's files; "
        f"{remedy}, or use another folder"
    )


# --- processes ------------------------------------------------------------------------------------


@functools.cache
def _kernel() -> str:
    """Returns a text that identifies this machine and its current boot."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"host {socket.gethostname()}"


def _namespace() -> str:
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


def _began(process: str) -> str:
    """Returns the start time of a process in ticks since boot; "" if it cannot be read."""
    fields = _fields_of(process)
    return fields[19] if len(fields) > 19 else ""


def _runs(process: str, began: str) -> bool:
    """Returns True if a process with this id and this start time is running."""
    if not Path("/proc/self/stat").exists():
        try:
            os.kill(int(process), 0)
        except ProcessLookupError:
            return False
        except (OSError, OverflowError):
            return True
        return True
    fields = _fields_of(process)
    # Z and X: the process has ended, but its parent has not collected its exit code.
    return bool(fields) and fields[0] not in ("Z", "X") and began in ("", _began(process))


def _fields_of(process: str) -> list[str]:
    """Returns the fields of /proc/PROCESS/stat from the third on; the second may have spaces."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return []
