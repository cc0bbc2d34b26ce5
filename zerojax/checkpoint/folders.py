"""Folders of saved steps: a step's folder appears and disappears by one atomic rename.

path/20            a complete checkpoint; the name is the step number
path/30.partial-1  (any number) a save in progress, or an abandoned one; the next save removes it
path/10.expired    a deletion in progress; the next save finishes it
path/40.damaged    a checkpoint that differed from its checksums; remains for inspection
path/writer.lock   exists while a process writes into `path`, and names it
                   (`zerojax.runtime.folder_lock`)

Runs ignore all entries except complete checkpoints. Folders with such names that hold none of the
files of a checkpoint are not ours (a user's folder 2024): they are no steps, and not deleted.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from pathlib import Path

from zerojax.checkpoint.errors import CheckpointError, DiskFullError, is_disk_full, reason
from zerojax.checkpoint.files import to_disk
from zerojax.checkpoint.retention import FILE_NAME
from zerojax.runtime.folder_lock import NAME
from zerojax.tracing.trees import format_bytes

_INVISIBLE = re.compile(r"\d+\.(partial-\d+|expired)")
_OF_STEP = re.compile(r"\d+(\.(partial|expired|damaged)(-\d+)?)?")
_OF_CHECKPOINTS = {"arrays", "pieces", "packs", "metadata", "written"}
"""How names of files and folders in a step's folder begin, up to a dot."""


def list_steps(path: Path) -> tuple[int, ...]:
    """Returns the numbers of the completely saved steps in `path`, oldest first; () if the folder
    does not exist."""
    try:
        names = os.listdir(path)
    except (FileNotFoundError, NotADirectoryError):
        return ()
    steps = [name for name in names if is_step(name)]
    return tuple(sorted(int(name) for name in steps if holds_checkpoint(path / name)))


def is_step(name: str) -> bool:
    """Returns True for the name of a step's folder, such as "24", not "024", which is no other
    step."""
    return name.isascii() and name.isdigit() and name == str(int(name))


def holds_checkpoint(folder: Path, *, or_nothing: bool = False) -> bool:
    """Returns whether a folder has a file of a checkpoint, complete or not; True if the folder may
    not be listed.

    Args:
      folder: any path; what is not a folder holds none.
      or_nothing: whether an empty folder counts too, as an interrupted save or deletion leaves it.
    """
    try:
        names = os.listdir(folder)
    except PermissionError:
        return True  # readers of the checkpoint tell the reason
    except OSError:
        return False
    is_known = any(name.partition(".")[0] in _OF_CHECKPOINTS for name in names)
    return is_known or (or_nothing and not names)


def is_of_checkpointer(path: Path) -> bool:
    """Returns whether a file or folder in a folder of checkpoints was made by a checkpointer."""
    name = path.name
    if path.is_symlink() or not path.is_dir():
        return name == FILE_NAME or name.startswith(NAME)
    return bool(_OF_STEP.fullmatch(name)) and holds_checkpoint(path, or_nothing=True)


def step_folder(path: Path, step: int) -> Path:
    """Returns the path of a step's complete checkpoint, which need not exist."""
    return path / str(step)


def partial_folder(path: Path, step: int, writer: int, attempt: int) -> Path:
    """Returns the folder in which a checkpoint is written until it is complete.

    Each attempt has a folder of its own, because threads of a failed attempt may still write when
    the next attempt begins. The same holds for a writer that was suspended for so long that another
    writer replaced it.
    """
    return path / f"{step}.partial-{writer:06d}{attempt:03d}"


def make_partial(partial: Path) -> None:
    """Creates the empty folder `partial`, after removing other partial folders next to it, which
    interrupted saves left."""
    partial.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(partial.parent)
    partial.mkdir()


def check_free(folder: Path, num_bytes: int) -> None:
    """Raises if the disk of a folder has fewer than `num_bytes` free.

    Raises:
      OSError: ENOSPC.
    """
    if shutil.disk_usage(folder).free < num_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def remove_leftovers(path: Path) -> None:
    """Deletes partial and expired folders. Only the saving process may call it, between saves."""
    for name in os.listdir(path):
        if _INVISIBLE.fullmatch(name) and holds_checkpoint(path / name, or_nothing=True):
            shutil.rmtree(path / name, ignore_errors=True)


def commit(partial: Path, step: int) -> None:
    """Makes a written checkpoint visible: syncs its partial folder to the disk and renames it to
    the step's number."""
    for folder, _, names in os.walk(partial):
        for name in names:
            to_disk(os.path.join(folder, name))
        to_disk(folder)
    # The name is the last thing to appear, so that it never names an incomplete step, even after a
    # power failure.
    os.rename(partial, step_folder(partial.parent, step))
    to_disk(partial.parent)


def remove(path: Path, step: int) -> None:
    """Deletes a complete checkpoint. An interruption leaves no partial checkpoint that looks
    complete."""
    expired = path / f"{step}.expired"
    os.rename(step_folder(path, step), expired)
    shutil.rmtree(expired)


def set_aside(path: Path, step: int) -> Path:
    """Renames a damaged checkpoint so that no run uses it; returns its new path."""
    number = 1
    while (aside := path / f"{step}.damaged{f'-{number}' if number > 1 else ''}").exists():
        number += 1
    os.rename(step_folder(path, step), aside)
    to_disk(path)
    return aside


def writable_error(path: Path, state_bytes: int) -> CheckpointError | None:
    """Tests whether a state of this size can be saved in a folder; returns the error, or None.

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
        return DiskFullError(
            f"checkpoints cannot be written to {path}: a checkpoint needs "
            f"{format_bytes(state_bytes)},"
            f" {free_text(path)}; free some space or use another folder"
        )
    return None


def unwritable(error: OSError) -> CheckpointError:
    """Returns the error for a folder in which no file can be written."""
    if is_disk_full(error):
        return DiskFullError(
            f"checkpoints cannot be written: {reason(error)}; free some space or use another folder"
        )
    return CheckpointError(
        f"checkpoints cannot be written: {reason(error)}; use a folder with write permission"
    )


def free_text(path: Path) -> str:
    """Returns the free space of a folder's disk for a message, such as "1.5 GiB free"."""
    try:
        return f"{format_bytes(shutil.disk_usage(path).free)} free"
    except OSError:
        return "free space unknown"
