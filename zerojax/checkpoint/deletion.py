"""Deletes checkpoints on a user's request.

The newest complete step is never deleted. If no step is complete, nothing is deleted that might
still be recovered.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from zerojax.checkpoint import folders
from zerojax.checkpoint.errors import CheckpointError, FolderInUseError, MachineError, reason
from zerojax.checkpoint.inspection import leftovers, saved_steps
from zerojax.checkpoint.retention import Retention, kept_steps
from zerojax.config.late_dataclasses import dataclass
from zerojax.runtime.folder_lock import FolderTakenError, hold

STALE_SECONDS = 3600.0
"""Number of seconds without writes after which a partial folder is not a save in progress."""


@dataclass(frozen=True, kw_only=True)
class Removal:
    """A folder that will be deleted.

    Attributes:
      folder: path of the folder.
      step: step number of a complete checkpoint; None for any other folder.
      num_bytes: size in bytes of its files.
      why: clause with the reason for the deletion.
    """

    folder: Path
    step: int | None
    num_bytes: int
    why: str


def removals(
    path: Path,
    *,
    keep: int | None = None,
    every: int | None = None,
    damaged: bool = False,
    now: float | None = None,
) -> list[Removal]:
    """Lists the folders that would be deleted from a folder of checkpoints; deletes nothing.

    Args:
      path: folder of the checkpoints.
      keep: number of newest intact steps to keep, in addition to the steps that `every` keeps and
        to the steps that the run protects under a name, such as "best".
      every: keep steps divisible by this number. Without `keep` the newest step also remains.
      damaged: True: also delete damaged steps and the remains of interrupted saves. Steps that
        cannot be read now, or only by a newer version, are not deleted.
      now: present time in seconds since the epoch; None: the clock's time.

    Raises:
      ValueError: `keep` or `every` is below 1, or no option was given.
      CheckpointError: damaged steps would be deleted, but no intact step would remain.
    """
    if keep is None and every is None and not damaged:
        raise ValueError("nothing to do: pass what to keep (--keep N, --every K) or --damaged")
    saved, rests = saved_steps(path), leftovers(path) if damaged else []
    rests = [rest for rest in rests if folders.holds_checkpoint(rest.folder, or_nothing=True)]
    if damaged and all(one.error is not None for one in saved):
        lost = [one.folder for one in saved if one.is_damaged]
        lost += [rest.folder for rest in rests if rest.kind == "damaged"]
        if lost:
            raise CheckpointError(
                f"no step in {path} is complete and undamaged, so nothing is deleted: "
                f"{lost[0].name} may be the run's only checkpoint; fix the reason why "
                "the steps cannot be read, or delete the folders yourself"
            )
    whole = [one.step for one in saved if one.error is None]
    expired: tuple[int, ...] = ()
    if keep is not None or every is not None:
        kept = {about["step"] for about in kept_steps(path).values()}
        found = Retention(last=1 if keep is None else keep, every=every).expired(whole)
        expired = tuple(step for step in found if step not in kept)
    result = []
    for one in saved:
        if one.step in expired:
            why = "older than the steps to keep"
        elif damaged and one.is_damaged:
            why = f"damaged: {one.problem}"
        else:
            continue
        result.append(Removal(folder=one.folder, step=one.step, num_bytes=one.num_bytes, why=why))
    for rest in rests:
        age = (time.time() if now is None else now) - rest.changed
        if rest.kind == "partial" and age < STALE_SECONDS:
            continue  # a run may be writing it
        result.append(
            Removal(folder=rest.folder, step=None, num_bytes=rest.num_bytes, why=rest.kind)
        )
    return result


@contextlib.contextmanager
def alone_in(path: Path) -> Iterator[None]:
    """Locks a folder of checkpoints inside a `with` block, so that no run can write into it.

    Raises:
      FolderInUseError: a run is writing into the folder.
      MachineError: the folder cannot be written.
    """
    try:
        held = hold(path)
    except FolderTakenError as error:
        raise FolderInUseError(
            f"nothing is deleted: {error}; the run itself deletes steps that its checkpoint.keep "
            "does not keep"
        ) from None
    except OSError as error:
        raise MachineError(
            f"nothing is deleted in {path}: {reason(error)}; fix the cause and try again"
        ) from error
    try:
        yield
    finally:
        held.release()


def remove(path: Path, removal: Removal) -> None:
    """Deletes one folder. An interruption leaves no partial checkpoint that looks complete.

    Raises:
      OSError: the operating system reports an error.
    """
    if removal.step is not None and os.path.exists(removal.folder):
        folders.remove(path, removal.step)
    else:
        shutil.rmtree(removal.folder)
