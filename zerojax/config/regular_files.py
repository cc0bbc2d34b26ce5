"""Opens regular files for reading; raises for named pipes, devices, sockets and folders, because
reading a pipe or device could wait forever."""

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
"""Paths of files that a process has already open, such as `<(command)` of a shell."""


class UnreadableError(ValueError):
    """Error for a path that cannot be read as a regular file.

    Attributes:
      what: the reason, as the rest of a sentence whose subject is the file: "is a named pipe, ...".
    """

    def __init__(self, what: str, path: str | os.PathLike[str] | None = None) -> None:
        super().__init__(what if path is None else f"{os.fspath(path)} {what}")
        self.what = what


def open_regular(path: str | os.PathLike[str], *, follow: bool = True) -> int:
    """Opens a regular file for reading; raises for any other kind of file.

    Opening a pipe would wait for a writer, and opening a device may have side effects. So the type
    is checked before opening, and again for the opened file, in case another file took the name in
    between.

    Args:
      path: path of the file.
      follow: whether the file itself may be a symbolic link, as in caches of Hugging Face. Parent
        folders may always be links.

    Returns:
      A file descriptor, which the caller must close.

    Raises:
      UnreadableError: the path is not a regular file.
      OSError: the operating system refuses to open the file.
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
    """Opens a short text file, which may also be `<(command)` of a shell or /dev/stdin.

    The caller must limit how much it reads, because a device may be endless.

    Raises:
      UnreadableError: the path is a named pipe in a folder, a socket or a folder.
      OSError: the operating system refuses to open the file.
    """
    kind = os.stat(path).st_mode
    is_open_already = os.path.realpath(path).startswith(_OF_PROCESSES)
    if stat.S_ISCHR(kind) or (stat.S_ISFIFO(kind) and is_open_already):
        return open(path, encoding=encoding)
    return open(open_regular(path), encoding=encoding)


def check_regular(status: os.stat_result, path: str | os.PathLike[str]) -> None:
    """Raises if a file's status does not belong to a regular file.

    Raises:
      UnreadableError: the message states the path and the type of the file.
    """
    if not stat.S_ISREG(status.st_mode):
        raise UnreadableError(f"is {kind_of(status)}, not a regular file", path)


def kind_of(status: os.stat_result) -> str:
    """Describes the type of a file that is not a regular file, as in "a named pipe"."""
    return _KINDS.get(stat.S_IFMT(status.st_mode), "of an unknown kind")
