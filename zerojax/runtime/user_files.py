"""Files of a run and of the user's cache: permissions, place, and replacement as a whole."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, BinaryIO

from zerojax.config.loader import user_path
from zerojax.config.regular_files import check_regular

_OTHERS_WRITE = stat.S_IWOTH
CACHE_VARIABLE = "ZEROJAX_CACHE"


@contextlib.contextmanager
def not_for_everybody() -> Iterator[None]:
    """Files and folders that are made meanwhile cannot be written by every user of the machine.

    The umask decides the rest: with the usual 022 they are 0755 and 0644, with 077 nobody else may
    even read them. It holds for the whole process, so also for what other libraries write.
    """
    before = os.umask(0o077)  # there is no other way to read it
    os.umask(before | _OTHERS_WRITE)
    try:
        yield
    finally:
        os.umask(before)


def open_to_everybody(folder: str | Path) -> str | None:
    """A warning, where a folder that was there before may be written by every user."""
    try:
        mode = Path(folder).stat().st_mode
    except OSError:
        return None
    if not mode & _OTHERS_WRITE or mode & stat.S_ISVTX:
        return None
    return (
        f"warning: every user of this machine may write into '{folder}' "
        f"({stat.S_IMODE(mode):04o}), where checkpoints and settings are read back; "
        f"chmod o-w '{folder}'"
    )


def user_cache() -> Path | None:
    """The folder of this user's cache, which need not be there yet; None where it is switched off.

    ZEROJAX_CACHE names a folder, or "off"; without it the folder is `zerojax` in XDG_CACHE_HOME, or
    in ~/.cache.
    """
    told = os.environ.get(CACHE_VARIABLE, "").strip()
    if told.lower() == "off":
        return None
    if told:
        return user_path(told)
    # An empty or relative XDG_CACHE_HOME is to be ignored (XDG Base Directory Specification 0.8).
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if os.path.isabs(base) else user_path("~/.cache")
    return root / "zerojax"


@contextlib.contextmanager
def replacing(
    path: str | os.PathLike[str], *, mode: int = 0o666, durable: bool = False
) -> Iterator[IO[bytes]]:
    """Gives a stream whose bytes become the content of a file: a reader sees the old or the new.

    The bytes go into a new file of a name that nobody can foresee, which then takes the place of
    the old one. Where the name is a symbolic link the link goes, and the file behind it stays.

    Args:
      path: of the file, in a folder that is there.
      mode: permissions, of which the umask takes some away.
      durable: whether it is on the disk when this returns, however the machine stops.

    Raises:
      UnreadableError: the name is that of a pipe, a device, a socket or a folder.
      OSError: what the system says, about `path`.
    """
    path = Path(path)
    with contextlib.suppress(OSError):  # there is nothing, or a link that leads nowhere
        check_regular(path.stat(), path)
    partial = path.with_name(f".{secrets.token_hex(8)}.partial")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        handle = os.open(partial, flags, mode)
        try:
            with os.fdopen(handle, "wb") as stream:
                yield stream
                if durable:
                    stream.flush()
                    os.fsync(stream.fileno())
            os.replace(partial, path)
            if durable:
                to_disk(path.parent)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    except OSError as error:
        if error.filename == str(partial):
            error.filename, error.filename2 = str(path), None
        raise


def replace_text(
    path: str | os.PathLike[str], text: str, *, mode: int = 0o666, durable: bool = False
) -> None:
    """Makes a text, in UTF-8, the content of a file; arguments as those of `replacing`."""
    with replacing(path, mode=mode, durable=durable) as stream:
        stream.write(text.encode("utf-8"))


def to_disk(path: str | os.PathLike[str]) -> None:
    """Waits until a file or a folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_appending(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens a file for reading and for writing at its end; makes it where it is missing.

    Raises:
      UnreadableError: it is a symbolic link, a pipe, a device, a socket or a folder.
      OSError: what the system says.
    """
    with contextlib.suppress(FileNotFoundError):
        check_regular(os.lstat(path), path)
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    stream = os.fdopen(os.open(path, flags, 0o666), "ab+")
    try:
        check_regular(os.fstat(stream.fileno()), path)
    except BaseException:
        stream.close()
        raise
    return stream
