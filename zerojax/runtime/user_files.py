"""Files of a run and of the user's cache: permissions, place, and replacement as a whole."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from zerojax.config.loader import user_path

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


def replace_text(path: Path, text: str) -> None:
    """Makes `text` the content of a file: a reader sees the old or the new, whole.

    Raises:
      OSError: the folder cannot be made or written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".partial")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.replace(partial, path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise
