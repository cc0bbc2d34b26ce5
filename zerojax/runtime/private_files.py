"""Permissions of a run's files (umask): nothing is writable by everybody."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

_OTHERS_WRITE = stat.S_IWOTH


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
