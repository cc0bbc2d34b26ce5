"""Deletion of checkpoints on request.

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
"""A partial folder in which nothing was written for so long is not a save in progress."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Removal:
    """A folder to be deleted.

    Attributes:
      folder: which.
      step: of a complete checkpoint; None for anything else.
      num_bytes: that its files take.
      why: a clause.
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
    """What is to be deleted from a folder of checkpoints; deletes nothing.

    Args:
      path: the folder.
      keep: the newest so many whole steps stay, those that `every` keeps, and those that the run
        keeps by name, such as the best.
      every: steps divisible by it stay; without `keep` the newest one also does.
      damaged: also what no run resumes from: damaged steps, and what stopped saves have left; not
        what cannot be read now, or only by a newer version.
      now: seconds since the epoch; None: this moment.

    Raises:
      ValueError: a number below 1, or nothing was asked for.
      CheckpointError: damaged steps are to go, but none that is whole would stay.
    """
    if keep is None and every is None and not damaged:
        raise ValueError("nothing to do: say which to keep (--keep N, --every K) or --damaged")
    saved, rests = saved_steps(path), leftovers(path) if damaged else []
    if damaged and all(one.error is not None for one in saved):
        lost = [one.folder for one in saved if one.is_damaged]
        lost += [rest.folder for rest in rests if rest.kind == "damaged"]
        if lost:
            raise CheckpointError(
                f"no step in {path} is whole, so nothing is deleted: {lost[0].name} may be all that"
                " is left of the run; bring back what keeps its steps from being read, or delete"
                " the folders by hand"
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
            why = "older than what is to be kept"
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
    """A block in which no run writes into a folder of checkpoints: what it keeps is its own choice.

    Raises:
      FolderInUseError: one does.
      MachineError: the folder cannot be written.
    """
    try:
        held = hold(path)
    except FolderTakenError as error:
        raise FolderInUseError(
            f"nothing is deleted: {error}; a run that goes on deletes by itself what its "
            "checkpoint.keep does not keep"
        ) from None
    except OSError as error:
        raise MachineError(f"nothing is deleted in {path}: {reason(error)}") from error
    try:
        yield
    finally:
        held.release()


def remove(path: Path, removal: Removal) -> None:
    """Deletes one; an interruption never leaves a half of a complete checkpoint visible.

    Raises:
      OSError: what the system says.
    """
    if removal.step is not None and os.path.exists(removal.folder):
        folders.remove(path, removal.step)
    else:
        shutil.rmtree(removal.folder)
