"""Deletes checkpoints on request.

The newest complete step is never deleted, nor, if none is complete, anything that could be
recovered.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from zerojax.checkpoint import folders
from zerojax.checkpoint.errors import CheckpointError, FolderInUseError, MachineError, reason
from zerojax.checkpoint.inspection import leftovers, saved_steps
from zerojax.checkpoint.retention import Retention, kept_steps
from zerojax.runtime.folder_lock import FolderTakenError, hold

STALE_SECONDS = 3600.0
"""A partial folder without writes for this long is not a save in progress."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Removal:
    """Folder to be deleted.

    Attributes:
      folder: its path.
      step: of a complete checkpoint; None for anything else.
      num_bytes: size of its files.
      why: the reason, a clause.
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
      path: the folder.
      keep: number of newest intact steps to keep, besides those that `every` keeps and those that
        the run keeps by name, such as the best.
      every: keep steps divisible by it; without `keep` the newest step also stays.
      damaged: also delete what no run resumes from: damaged steps, and remains of interrupted
        saves; not steps that cannot be read now, or only by a newer version.
      now: seconds since the epoch; None: the present time.

    Raises:
      ValueError: a number below 1, or no option was given.
      CheckpointError: damaged steps would be deleted, but no intact step would remain.
    """
    if keep is None and every is None and not damaged:
        raise ValueError("nothing to do: pass what to keep (--keep N, --every K) or --damaged")
    saved, rests = saved_steps(path), leftovers(path) if damaged else []
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
    """Context manager that locks a folder of checkpoints against runs that write into it.

    Raises:
      FolderInUseError: a run writes into it.
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
    """Deletes one folder; an interruption leaves no visible partial checkpoint.

    Raises:
      OSError: from the operating system.
    """
    if removal.step is not None and os.path.exists(removal.folder):
        folders.remove(path, removal.step)
    else:
        shutil.rmtree(removal.folder)
