"""Opens regular files for reading; raises for named pipes, devices, sockets and folders, because
reading a pipe or device could wait forever."""

from __future__ import annotations

import codecs
import io
import os
import shlex
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
_OTHER_MARKS = (
    ("UTF-32", codecs.BOM_UTF32_LE),
    ("UTF-32", codecs.BOM_UTF32_BE),
    ("UTF-16", codecs.BOM_UTF16_LE),
    ("UTF-16", codecs.BOM_UTF16_BE),
)
"""Byte order marks of encodings that are not read; that of UTF-32 begins with that of UTF-16."""
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
    # O_NONBLOCK: if a pipe has taken the name meanwhile, opening it does not wait for a writer.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    descriptor = os.open(path, flags)
    try:
        check_regular(os.fstat(descriptor), path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_text(path: str | os.PathLike[str], *, newline: str | None = None) -> TextIO:
    """Opens a text file in UTF-8, which may also be `<(command)` of a shell or /dev/stdin.

    A byte order mark at the start of the file is no part of the text. The caller must limit how
    much it reads, because a device may be endless.

    Args:
      path: path of the file.
      newline: as for `open`.

    Raises:
      UnreadableError: the path is a named pipe in a folder, a block device, a socket or a folder,
        or the file is in UTF-16 or UTF-32.
      OSError: the operating system refuses to open the file.
    """
    kind = os.stat(path).st_mode
    is_open_already = os.path.realpath(path).startswith(_OF_PROCESSES)
    is_stream = stat.S_ISCHR(kind) or (stat.S_ISFIFO(kind) and is_open_already)
    stream = open(path if is_stream else open_regular(path), "rb")  # noqa: SIM115
    try:
        check_encoding(stream.peek(4), path)
    except BaseException:
        stream.close()
        raise
    return io.TextIOWrapper(stream, encoding="utf-8-sig", newline=newline)


def decode_text(content: bytes, path: str | os.PathLike[str] | None = None) -> str:
    """Decodes the whole content of a text file in UTF-8, without its byte order mark.

    Raises:
      UnreadableError: the content is not UTF-8; states the byte, and the path if there is one.
    """
    check_encoding(content, path)
    try:
        return content.removeprefix(codecs.BOM_UTF8).decode("utf-8")
    except UnicodeDecodeError as error:
        at = error.start + len(codecs.BOM_UTF8) * content.startswith(codecs.BOM_UTF8)
        what = f"is not UTF-8 at byte {at}; convert it, for example with iconv"
        raise UnreadableError(what, path) from None


def check_encoding(start: bytes, path: str | os.PathLike[str] | None = None) -> None:
    """Raises an UnreadableError if the first bytes of a file are the byte order mark of UTF-16 or
    UTF-32."""
    found = next((name for name, mark in _OTHER_MARKS if start.startswith(mark)), None)
    if found is not None:
        old = "FILE" if path is None else shlex.quote(os.fspath(path))
        raise UnreadableError(
            f"is {found} text, but UTF-8 is read; convert it: iconv -f {found} -t UTF-8 {old} > "
            "NEW_FILE",
            path,
        )


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
