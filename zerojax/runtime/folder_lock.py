"""Writer lock of a folder, across processes and hosts.

The file says host, process and time, and its holder renews it every `BEAT` seconds. A holder on
this machine is never waited for: the kernel ends its flock(2) with the process, however that ends.
Where file servers are involved flock says less (NFS may keep it local to a host, or keep that of a
dead host), so a holder on another machine is watched: one that renews its file is alive, one that
does not for `EXPIRES` seconds has lost the folder. These are seconds of the process that waits, and
any change of the file's time is a renewal: clocks are compared only to shorten the wait.

A holder that was stopped meanwhile, or cut off from the server, finds out by `Hold.keep`, which
whoever writes calls before it makes anything visible.

Within one process the last one to ask usually has the folder: a script or notebook that begins
anew has often not closed what it had before.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import errno
import fcntl
import functools
import os
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
BEAT = 5.0
"""Seconds between renewals."""

EXPIRES = 60.0
"""Seconds without a renewal after which the hold of another machine is over."""

_OLD_BEATS = 3
"""So many are waited for where the last renewal was longer ago than `EXPIRES`, as times of the file
system tell: those may be made by clocks that differ."""

_DYING = 10.0
"""Seconds in which a killed process ends; a write to a disk may have to end first."""

_MOST_BYTES = 4096
_NO_FLOCK = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL, errno.EBADF}
_NO_LINKS = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK}


class FolderTakenError(RuntimeError):
    """Another process writes into a folder; the text names it and says what to do."""


class _Holder:
    """What a file says of its holder: texts, empty where it does not say."""

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
        """Whether it runs, or ran, on this machine since its last start."""
        return bool(self.kernel) and self.kernel == _kernel()

    @property
    def is_seen(self) -> bool:
        """Whether its number means the same here: containers have numbers of their own."""
        return self.is_of_this_kernel and self.namespace == _namespace()

    @property
    def is_gone(self) -> bool:
        """Whether its process has ended, as far as can be seen."""
        return self.is_seen and self.process.isdecimal() and not _runs(self.process, self.began)


class Hold:
    """A folder held by this process; `hold` makes it.

    Attributes:
      folder: which.
      note: a sentence about the holder before, where that had not closed it; None: there was none.
      number: below 10**6, drawn anew each time, so that two writers give different names.
    """

    def __init__(self, folder: Path, name: str) -> None:
        """Use `hold`.

        Raises:
          FolderTakenError: another process has it.
          OSError: what the system says.
        """
        self.folder = folder
        self.note: str | None = None
        self.number = secrets.randbelow(10**6)
        self._path = folder / name
        self._process = os.getpid()
        self._descriptor, self._token = -1, ""
        self._refusal: str | None = None  # why nothing may be written any more
        self._changing = threading.Lock()
        self._is_over = threading.Event()
        self._take()
        threading.Thread(target=self._beat, name="zerojax-folder-lock", daemon=True).start()

    @property
    def is_over(self) -> bool:
        """Whether it was released, or lost to another."""
        return self._refusal is not None

    def keep(self) -> None:
        """Makes sure that the folder is still held; takes it again where the file was deleted.

        Raises:
          FolderTakenError: another process has it, or it was released.
          OSError: what the system says.
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
                f"{self.folder} was taken over by {holder}: this process had given no sign of life "
                f"for {EXPIRES:g} s; end one of the two, and go on from the newest checkpoint"
            )
            raise FolderTakenError(self._refusal)

    def give_up(self, why: str) -> None:
        """Ends the hold; from now on `keep` says why. The file is left as it is."""
        self._refusal = self._refusal or why
        self._is_over.set()
        self._close()

    def release(self) -> None:
        """Lets others have the folder. May be called twice; does nothing in a forked process."""
        if self._refusal is not None or os.getpid() != self._process:
            return
        with contextlib.suppress(OSError, FolderTakenError):
            if _Holder(_read(self._path)[0]).token == self._token:
                os.unlink(self._path)
        self.give_up(f"{self.folder} is no longer open for writing; open it again")
        atexit.unregister(self.release)

    def _beat(self) -> None:
        while not self._is_over.wait(BEAT):
            with self._changing, contextlib.suppress(OSError):  # others see that too
                if self._descriptor >= 0:
                    os.utime(self._descriptor)

    def _close(self) -> None:
        with self._changing:
            self.close_descriptor()

    def close_descriptor(self) -> None:
        """Gives up flock alone, which a forked process would keep when this one has ended."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    # --- taking -----------------------------------------------------------------------------------

    def _take(self) -> None:
        token = secrets.token_hex(8)
        draft = self._path.with_name(f"{self._path.name}.{token}")
        descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            os.write(descriptor, _record(token).encode())
            os.fsync(descriptor)
            _flock(descriptor)
            while not (_put(draft, self._path) or self._replace(draft, token)):
                pass
            self._remove_drafts(os.fstat(descriptor).st_mtime)
        except BaseException:
            os.close(descriptor)
            raise
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(draft)
        self._descriptor, self._token = descriptor, token

    def _replace(self, draft: Path, token: str) -> bool:
        """Puts `draft` in the place of a file whose holder has ended; False: try all again.

        Raises:
          FolderTakenError: its holder is alive.
          OSError: what the system says.
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
                    time.sleep(0.05)  # killed, and not all of it has ended; or another asks as well
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
                # Another machine may have seen the same and done the same, a moment later.
                time.sleep(BEAT / 2)
                now = _Holder(_read(self._path)[0])
                if now.token != token:
                    raise FolderTakenError(_taken(self.folder, now, "end it"))
            self.note = f"{self.folder} is taken over from {holder}: it ended without closing it"
            return True
        finally:
            os.close(descriptor)

    def _watch(self, descriptor: int, draft: Path) -> None:
        """Returns when a holder on another machine has given no sign of life for long enough.

        Raises:
          FolderTakenError: it has given one.
        """
        text, changed = _contents(descriptor)
        holder = _Holder(text)
        age = os.stat(draft).st_mtime - changed / 1e9
        seconds = EXPIRES if age < EXPIRES else _OLD_BEATS * BEAT
        warn_user(
            f"{self.folder} is held by {holder}; if it gives no sign of life within {seconds:g} s, "
            "this process takes the folder over",
            RuntimeWarning,
        )
        end = time.monotonic() + seconds
        is_last = False
        while not is_last:
            is_last = time.monotonic() >= end
            with contextlib.suppress(FileNotFoundError):  # released: nobody holds it
                now = _read(self._path)
                if now != (text, changed):
                    remedy = f"end it (a machine that is gone loses the folder after {EXPIRES:g} s)"
                    raise FolderTakenError(_taken(self.folder, _Holder(now[0]), remedy))
            os.utime(draft)  # or it would be removed as what a killed process has left
            time.sleep(0 if is_last else min(BEAT / 5, max(0.0, end - time.monotonic())))

    def _remove_drafts(self, now: float) -> None:
        """Removes what processes have left that were killed while they asked."""
        for path in self.folder.glob(f"{self._path.name}.*"):
            with contextlib.suppress(OSError):
                if now - path.stat().st_mtime > EXPIRES:
                    path.unlink()


_holds: dict[str, Hold] = {}


def hold(
    folder: str | os.PathLike[str],
    *,
    name: str = NAME,
    twice: Literal["take", "share", "refuse"] = "take",
) -> Hold:
    """Takes a folder for this process, until `Hold.release` or its end.

    Waits for nothing but a holder on another machine, and for that at most `EXPIRES` seconds.

    Args:
      folder: made where it is missing.
      name: of the file in it.
      twice: where this process holds it already: "take" it, so that the earlier one loses it,
        "share" the earlier one, or "refuse".

    Raises:
      FolderTakenError: another process has it, or this one and `twice` is "refuse".
      OSError: what the system says.
    """
    path = Path(folder).absolute()
    path.mkdir(parents=True, exist_ok=True)
    _let_go_in_forks()
    key = os.fspath(path.resolve() / name)
    former = _holds.get(key)
    if former is not None and not former.is_over and os.getpid() == former._process:
        if twice == "refuse":
            raise FolderTakenError(
                f"{path} is open for writing in this process already; close it there first, or use "
                "another folder"
            )
        if twice == "share":
            former.keep()
            return former
        former.release()
        former._refusal = (
            f"{path} is written by a later run of this process; close the earlier one, or use "
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
    """Gives `draft` a name that nobody has; False: somebody has it."""
    try:
        os.link(draft, path)
        return True
    except FileExistsError:
        # NFS: the answer to a first request may have been lost, and this is that to its repetition.
        return os.stat(draft).st_nlink == 2
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644))
    except FileExistsError:
        return False
    os.rename(draft, path)
    return True


def _open(path: Path) -> int:
    if not stat.S_ISREG(os.lstat(path).st_mode):
        raise FolderTakenError(
            f"{path} is not a regular file, so nobody can hold its folder; move it"
        )
    flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        return os.open(path, flags | os.O_RDWR)
    except PermissionError:  # of another user; NFS then knows no lock
        return os.open(path, flags | os.O_RDONLY)


def _contents(descriptor: int) -> tuple[str, int]:
    """(text, time of the last change, in nanoseconds)."""
    text = os.pread(descriptor, _MOST_BYTES, 0).decode(errors="replace")
    return text, os.fstat(descriptor).st_mtime_ns


def _read(path: Path) -> tuple[str, int]:
    """As `_contents`; opening a file makes an NFS client ask its server."""
    descriptor = _open(path)
    try:
        return _contents(descriptor)
    finally:
        os.close(descriptor)


def _flock(descriptor: int) -> bool | None:
    """Whether it was locked; None: the file system has no locks."""
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
    """Another text for every machine, and after every start of it."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"host {socket.gethostname()}"


def _namespace() -> str:
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


def _began(process: str) -> str:
    """When a process began, in ticks since its machine did; empty where that cannot be seen."""
    fields = _fields_of(process)
    return fields[19] if len(fields) > 19 else ""


def _runs(process: str, began: str) -> bool:
    """Whether a process runs that has this number and began then."""
    if not Path("/proc/self/stat").exists():
        try:
            os.kill(int(process), 0)
        except ProcessLookupError:
            return False
        except (OSError, OverflowError):
            return True
        return True
    fields = _fields_of(process)
    # Z and X: it has ended, and nobody has asked for its exit code yet.
    return bool(fields) and fields[0] not in ("Z", "X") and began in ("", _began(process))


def _fields_of(process: str) -> list[str]:
    """The fields of /proc/PROCESS/stat from the third on; the second may have spaces in it."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return []
