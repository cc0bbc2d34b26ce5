"""Folders of steps: each becomes visible, and disappears, by one rename.

path/20            a complete checkpoint: the name is nothing but the step
path/30.partial-1  (some number) being written or given up: invisible, removed by the next save
path/10.expired    being deleted: invisible, removed by the next save
path/40.damaged    was not what had been saved: invisible, kept for people to look at
path/writer.lock   says which process writes here, as long as it does
(`zerojax.runtime.folder_lock`)
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from pathlib import Path

from zerojax.checkpoint.errors import CheckpointError, reason
from zerojax.checkpoint.files import to_disk
from zerojax.models.trees import format_bytes

_INVISIBLE = re.compile(r"\d+\.(partial-\d+|expired)")


def list_steps(path: Path) -> tuple[int, ...]:
    """The complete checkpoints in a folder, oldest first; none when the folder does not exist."""
    try:
        names = os.listdir(path)
    except (FileNotFoundError, NotADirectoryError):
        return ()
    return tuple(sorted(int(name) for name in names if name.isascii() and name.isdigit()))


def step_folder(path: Path, step: int) -> Path:
    """Where a complete checkpoint lies."""
    return path / str(step)


def partial_folder(path: Path, step: int, writer: int, attempt: int) -> Path:
    """Where a checkpoint is written before it is complete.

    Threads of a failed attempt may still be writing when the next attempt begins, and so may a
    writer that was stopped for so long that another one took its place: each has a folder of its
    own.
    """
    return path / f"{step}.partial-{writer:06d}{attempt:03d}"


def make_partial(partial: Path) -> None:
    """Creates a partial folder, empty; removes what interrupted saves have left beside it."""
    partial.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(partial.parent)
    partial.mkdir()


def check_free(folder: Path, num_bytes: int) -> None:
    """Refuses what the disk of a folder has no space for.

    Raises:
      OSError: ENOSPC.
    """
    if shutil.disk_usage(folder).free < num_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def remove_leftovers(path: Path) -> None:
    """Deletes the invisible folders; only for the one who saves here, with no save in flight."""
    for name in os.listdir(path):
        if _INVISIBLE.fullmatch(name):
            shutil.rmtree(path / name, ignore_errors=True)


def commit(partial: Path, step: int) -> None:
    """Gives a partial folder the name of a complete one, after all its bytes are on disk."""
    for folder, _, names in os.walk(partial):
        for name in names:
            to_disk(os.path.join(folder, name))
        to_disk(folder)
    os.rename(partial, step_folder(partial.parent, step))
    to_disk(partial.parent)


def remove(path: Path, step: int) -> None:
    """Deletes a complete checkpoint; an interruption never leaves a visible half."""
    expired = path / f"{step}.expired"
    os.rename(step_folder(path, step), expired)
    shutil.rmtree(expired)


def set_aside(path: Path, step: int) -> Path:
    """Gives a damaged checkpoint a name under which no run finds it; returns its new place."""
    number = 1
    while (aside := path / f"{step}.damaged{f'-{number}' if number > 1 else ''}").exists():
        number += 1
    os.rename(step_folder(path, step), aside)
    to_disk(path)
    return aside


def writable_error(path: Path, state_bytes: int) -> CheckpointError | None:
    """What keeps a state of this many bytes from being saved in a folder, if anything.

    Creates the folder, and writes, syncs and deletes a small file in it.
    """
    file = path / f".probe-{os.getpid()}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        try:
            file.write_bytes(b"\0" * 4096)
            to_disk(file)
        finally:
            file.unlink(missing_ok=True)
        free = shutil.disk_usage(path).free
    except OSError as error:
        return unwritable(error)
    if free < state_bytes:
        return CheckpointError(
            f"checkpoints cannot be written to {path}: one needs {format_bytes(state_bytes)},"
            f" {free_text(path)}; free some space or use another folder"
        )
    return None


def unwritable(error: OSError) -> CheckpointError:
    """What is said where nothing can be written into a folder."""
    return CheckpointError(
        f"checkpoints cannot be written: {reason(error)}; use a folder that you may write"
    )


def free_text(path: Path) -> str:
    """Free space for an error text: `"1.5 GiB free"`."""
    try:
        return f"{format_bytes(shutil.disk_usage(path).free)} free"
    except OSError:
        return "free space unknown"
