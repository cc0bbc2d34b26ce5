"""Regular files: opened for reading, while pipes, devices, sockets and folders are refused.

Reading such a thing would wait for its other end, or never come to an end.
"""

from __future__ import annotations

import os
import stat
from typing import TextIO

_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a symbolic link",
}
_OF_PROCESSES = ("/proc/", "/dev/fd/")
"""Where the system names what a process has open already, such as `<(command)` of a shell."""


class UnreadableError(ValueError):
    """A file is not what is read here.

    Attributes:
      what: the rest of a sentence whose subject is the file, such as "is a named pipe, ...".
    """

    def __init__(self, what: str, path: str | os.PathLike[str] | None = None) -> None:
        super().__init__(what if path is None else f"{os.fspath(path)} {what}")
        self.what = what


def open_regular(path: str | os.PathLike[str], *, follow: bool = True) -> int:
    """Opens a regular file for reading, and nothing else.

    Opening a pipe waits for its other end, and opening a device may do something, so the kind is
    asked for first, and again of what was opened, in case the name was given away in between.

    Args:
      path: of the file.
      follow: whether it may be a symbolic link, as in caches of Hugging Face. Folders on the way to
        it always may.

    Returns:
      A descriptor, to be closed.

    Raises:
      UnreadableError: it is not a regular file.
      OSError: what the system says.
    """
    check_regular(os.stat(path) if follow else os.lstat(path), path)
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    descriptor = os.open(path, flags)
    try:
        check_regular(os.fstat(descriptor), path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_text(path: str | os.PathLike[str], *, encoding: str = "utf-8") -> TextIO:
    """Opens a short text that a user may also give as `<(command)` or /dev/stdin.

    The caller bounds how much it reads: a device may be endless.

    Raises:
      UnreadableError: it is a pipe that has a name in a folder, a socket or a folder.
      OSError: what the system says.
    """
    kind = os.stat(path).st_mode
    is_open_already = os.path.realpath(path).startswith(_OF_PROCESSES)
    if stat.S_ISCHR(kind) or (stat.S_ISFIFO(kind) and is_open_already):
        return open(path, encoding=encoding)
    return open(open_regular(path), encoding=encoding)


def check_regular(status: os.stat_result, path: str | os.PathLike[str]) -> None:
    """Refuses what is not a regular file.

    Raises:
      UnreadableError: names the file and its kind.
    """
    if not stat.S_ISREG(status.st_mode):
        raise UnreadableError(f"is {kind_of(status)}, not a regular file", path)


def kind_of(status: os.stat_result) -> str:
    """Tells what a file is that is no regular one: "a named pipe"."""
    return _KINDS.get(stat.S_IFMT(status.st_mode), "of an unknown kind")
