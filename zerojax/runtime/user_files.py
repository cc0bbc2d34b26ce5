"""Handles files of a run and of the user's cache: permissions, paths, atomic replacement."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, BinaryIO, NoReturn

from zerojax.config.display import MAX_MESSAGE, quoted
from zerojax.config.loader import user_path
from zerojax.config.regular_files import check_regular, kind_of

_OTHERS_WRITE = stat.S_IWOTH
CACHE_VARIABLE = "ZEROJAX_CACHE"


@contextlib.contextmanager
def not_for_everybody() -> Iterator[None]:
    """Makes files and folders that are created inside a `with` block not writable by every user of
    the machine.

    The umask decides further permissions: with the usual 022 they are 0755 and 0644, with 077 no
    other user can read them. The change applies to the whole process, so also to files that other
    libraries write.
    """
    before = os.umask(0o077)  # there is no other way to read the umask
    os.umask(before | _OTHERS_WRITE)
    try:
        yield
    finally:
        os.umask(before)


def open_to_everybody(folder: str | Path) -> str | None:
    """Returns a warning if every user of the machine may write into an existing folder; else
    None."""
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
    """Returns this user's cache folder, which may not exist yet; None if caching is switched off.

    ZEROJAX_CACHE names the folder, or is "off". If it is not set, the folder is `zerojax` in
    XDG_CACHE_HOME, or in ~/.cache.
    """
    told = os.environ.get(CACHE_VARIABLE, "").strip()
    if told.lower() == "off":
        return None
    if told:
        return user_path(told)
    # An empty or relative XDG_CACHE_HOME must be ignored (XDG Base Directory Specification 0.8).
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if os.path.isabs(base) else user_path("~/.cache")
    return root / "zerojax"


def make_private(folder: Path) -> None:
    """Makes a folder of the user's cache, and the cache itself, with mode 0700 where they are
    missing.

    Raises:
      OSError: a folder cannot be made, or `check_private` refuses an existing one.
    """
    for place in reversed([folder, *_cache_folders_above(folder)]):
        place.parent.mkdir(parents=True, exist_ok=True)
        place.mkdir(mode=0o700, exist_ok=True)
    check_private(folder)


def check_private(path: Path) -> None:
    """Raises if another user can have written, or can replace, a file or folder of the user's
    cache.

    The path must belong to this user, and only this user may write it. A file must be a regular
    file, not a link to one. The cache's own folder and the folders in it that contain the path
    may also be such as /tmp: with the sticky bit, other users cannot replace files there.

    Raises:
      PermissionError: the path is refused; the message has it, the reason and the remedy.
      OSError: the path does not exist, or cannot be looked up.
    """
    for place in (path, *_cache_folders_above(path)):
        found = os.lstat(place)
        if stat.S_ISLNK(found.st_mode) and os.path.isdir(place):
            _check_owner(found, place)
            found = os.stat(place)
        if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
            _refuse(place, f"is {kind_of(found)}; remove it")
        is_above = place != path or place == user_cache()
        if is_above and found.st_mode & stat.S_ISVTX and found.st_uid in (0, os.geteuid()):
            continue
        _check_owner(found, place)
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            mode = f"{stat.S_IMODE(found.st_mode):04o}"
            _refuse(place, f"can be written by other users ({mode}); chmod go-w, or remove it")


def _check_owner(found: os.stat_result, path: Path) -> None:
    if found.st_uid != os.geteuid():
        _refuse(path, f"belongs to user {found.st_uid}, not to user {os.geteuid()}; remove it")


def _refuse(path: Path, why: str) -> NoReturn:
    remedy = f"or set {CACHE_VARIABLE} to another folder"
    raise PermissionError(f"{quoted(str(path), MAX_MESSAGE)} {why}, {remedy}")


def _cache_folders_above(path: Path) -> list[Path]:
    """Returns the folders of the user's cache that contain `path`, the innermost first."""
    root = user_cache()
    return [place for place in path.parents if root is not None and place.is_relative_to(root)]


def seal_of(name: str, *parts: bytes | memoryview) -> bytes:
    """Returns the SHA-256 digest, 32 bytes, of a file's name and content, by which a file of the
    cache that was damaged or renamed is noticed."""
    digest = hashlib.sha256(f"{len(name)} {name}".encode())
    for part in parts:
        digest.update(part)
    return digest.digest()


@contextlib.contextmanager
def replacing(
    path: str | os.PathLike[str], *, mode: int = 0o666, durable: bool = False
) -> Iterator[IO[bytes]]:
    """Yields a stream whose bytes replace the file `path` atomically: readers see either the old
    or the new content.

    The bytes are written to a new file with an unpredictable name, which is then renamed to `path`.
    If the path is a symbolic link, the link is replaced, and the file it points to is unchanged.

    Args:
      path: path of the file, in an existing folder.
      mode: permissions of the new file, reduced by the umask.
      durable: True: the new content survives a crash of the machine after the block.

    Raises:
      UnreadableError: the path is a pipe, a device, a socket or a folder.
      OSError: the operating system reports an error; it names `path`.
    """
    path = Path(path)
    with contextlib.suppress(OSError):  # the path does not exist, or is a broken link
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
        # Users know this path and not the name of the new file.
        if error.filename in (None, str(partial)):
            error.filename, error.filename2 = str(path), None
        raise


def replace_text(
    path: str | os.PathLike[str], text: str, *, mode: int = 0o666, durable: bool = False
) -> None:
    """Replaces the content of a file atomically by a text, encoded in UTF-8.

    Args:
      path: path of the file, in an existing folder.
      text: the new content.
      mode: permissions of the new file, reduced by the umask.
      durable: True: the new content survives a crash of the machine afterwards.
    """
    with replacing(path, mode=mode, durable=durable) as stream:
        stream.write(text.encode("utf-8"))


def to_disk(path: str | os.PathLike[str]) -> None:
    """Syncs a file or a folder to the disk, and waits until that is done."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_appending(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens a file for reading and appending; creates it if it is missing.

    Raises:
      UnreadableError: the path is a symbolic link, a pipe, a device, a socket or a folder.
      OSError: the operating system reports an error.
    """
    with contextlib.suppress(FileNotFoundError):
        check_regular(os.lstat(path), path)
    # Without blocking, in case a pipe takes this name after the check.
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    stream = os.fdopen(os.open(path, flags, 0o666), "ab+")
    try:
        check_regular(os.fstat(stream.fileno()), path)
    except BaseException:
        stream.close()
        raise
    return stream
