"""Lists the contents of a checkpoint folder without changing it: complete steps and leftovers.

Reads no array, so it does not disturb a running training.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerojax.checkpoint import files, folders
from zerojax.checkpoint.base_weights import BaseReader, at_another_place
from zerojax.checkpoint.errors import CheckpointError, DamagedError, MachineError, reason
from zerojax.checkpoint.metadata import FILE_NAME, Metadata, as_abstract, read_metadata
from zerojax.checkpoint.restoring import check_files
from zerojax.checkpoint.retention import kept_steps, named_step
from zerojax.checkpoint.saving import ARRAYS, PIECES
from zerojax.checkpoint.stored_arrays import StoredArrays, Unread
from zerojax.config.late_dataclasses import dataclass
from zerojax.config.loader import user_path
from zerojax.runtime.bounded_json import load
from zerojax.zoo.hugging_face.folder import NOT_A_RUN, is_model_folder

_REST = re.compile(r"\d+\.(partial|expired|damaged)(-\d+)?")
_WHY = {
    "partial": "a save in progress, or an interrupted save; the run's next save removes it",
    "expired": "expired, but its deletion was interrupted; the run's next save removes it",
    "damaged": "damaged files; the run continued from an earlier step",
}


@dataclass(frozen=True, kw_only=True)
class SavedStep:
    """A completely saved step, as found in its folder. It may have been damaged after its save.

    Attributes:
      step: number of the step.
      folder: folder of the step.
      num_bytes: present size in bytes of all its files.
      metadata: metadata of the step; None if it cannot be read.
      error: problem found in metadata, file names and sizes; None if there is none.
    """

    step: int
    folder: Path
    num_bytes: int
    metadata: Metadata | None
    error: CheckpointError | None

    @property
    def is_damaged(self) -> bool:
        """True if the step's files were read and differ from the saved ones.

        False for checkpoints of a newer zerojax, and for files that the operating system could not
        read: their contents are unknown.
        """
        return isinstance(self.error, DamagedError) and not isinstance(
            self.error.__cause__, OSError
        )

    @property
    def problem(self) -> str | None:
        """Problem with the step, without the path of the checkpoint; None if there is none."""
        if self.error is None:
            return None
        return re.sub(rf"^checkpoint {re.escape(str(self.folder))} [^:]*: ", "", str(self.error))

    def whole_metadata(self) -> Metadata:
        """Returns the metadata of this step after checking that the step has no problem.

        Raises:
          CheckpointError: the step is damaged or cannot be read.
        """
        if self.error is not None:
            raise self.error
        assert self.metadata is not None
        return self.metadata


@dataclass(frozen=True, kw_only=True)
class Leftover:
    """Folder of an unfinished, expired or damaged checkpoint, from which no run resumes.

    Attributes:
      folder: path of the folder.
      kind: "partial", "expired" or "damaged".
      num_bytes: size in bytes of all files in the folder.
      why: clause that explains why the folder exists.
      changed: time of the last write to one of its files, in seconds since the epoch.
    """

    folder: Path
    kind: str
    num_bytes: int
    why: str
    changed: float


def find_checkpoints(run: str | os.PathLike[str]) -> tuple[Path, int | None]:
    """Finds the checkpoints that a user's path refers to.

    Args:
      run: folder of a run, folder of its checkpoints, or folder of one step.

    Returns:
      The folder of the checkpoints, and the step if `run` is the folder of one step, else None.

    Raises:
      CheckpointError: the path has no checkpoints.
    """
    path = user_path(run).absolute()
    if not path.is_dir():
        raise CheckpointError(
            f"{run} is not a folder; name the folder of a run, such as runs/tiny_shakespeare"
        )
    if folders.is_step(path.name) and (path / FILE_NAME).exists():
        return path.parent, int(path.name)
    for candidate in (path, *_named_by_run(path), path / "checkpoints"):
        if candidate.is_dir() and (folders.list_steps(candidate) or leftovers(candidate)):
            return candidate, None
    if is_model_folder(path):
        raise CheckpointError(f"{run} {NOT_A_RUN}")
    raise CheckpointError(
        f"{run} holds no checkpoints; name the folder of a run that has saved one, or the folder "
        "of its checkpoints"
    )


def find_step(
    run: str | os.PathLike[str],
    step: int | str | None = None,
    *,
    pretrained: str | os.PathLike[str] | None = None,
) -> SavedStep:
    """Finds one saved step of a run.

    Args:
      run: folder of a run, folder of its checkpoints, or folder of one step.
      step: number of a saved step, or the name of a protected step, such as "best". None: the step
        whose folder `run` is, otherwise the newest step.
      pretrained: folder of frozen weights that the checkpoint does not store; None: the folder
        recorded in the checkpoint.

    Raises:
      CheckpointError: the step does not exist; the message lists the saved steps.
    """
    path, named = find_checkpoints(run)
    steps = saved_steps(path)
    wanted = named_step(kept_steps(path), step) if isinstance(step, str) else step
    wanted = named if wanted is None else wanted
    found = steps[-1:] if wanted is None else [one for one in steps if one.step == wanted]
    if not found:
        there = ", ".join(str(one.step) for one in steps) or "none"
        what = "saved step" if wanted is None else f"step {wanted}"
        raise CheckpointError(f"{path} has no {what}; the saved steps are: {there}")
    saved = found[0]
    if saved.metadata is None:
        return saved
    return dataclasses.replace(saved, metadata=at_another_place(saved.metadata, pretrained))


def _named_by_run(path: Path) -> list[Path]:
    """Returns the folder of checkpoints that a run's settings name; empty if they name none."""
    named = run_settings(path).get("checkpoint")
    place = named.get("path") if isinstance(named, dict) else None
    return [user_path(place)] if isinstance(place, str) else []


def run_settings(path: Path) -> dict[str, Any]:
    """Returns the settings stored in a run's folder, or {} if they cannot be read."""
    try:
        settings = load(path / "config.json")
    except (OSError, ValueError):
        return {}
    return settings if isinstance(settings, dict) else {}


def saved_steps(path: Path) -> list[SavedStep]:
    """Returns the saved steps in a folder of checkpoints, including damaged ones, oldest first."""
    found = (_saved_step(path, step) for step in folders.list_steps(path))
    return [one for one in found if one is not None]


def _saved_step(path: Path, step: int) -> SavedStep | None:
    """Describes a saved step; None if a run deleted or renamed its folder after it was listed."""
    folder = folders.step_folder(path, step)
    metadata, error = None, None
    try:
        metadata = read_metadata(folder)
        damage = next(files.wrong_sizes(folder, metadata.files), None)
        if damage is not None:
            error = DamagedError(f"checkpoint {folder} is damaged: {damage}")
    except CheckpointError as failure:
        error = failure
    except OSError as failure:
        error = MachineError(
            f"checkpoint {folder} cannot be read now: {reason(failure)}; fix the cause and try "
            "again"
        )
    num_bytes = sum(files.sizes_of(folder).values())
    if error is not None and not folder.exists():
        return None
    return SavedStep(step=step, folder=folder, num_bytes=num_bytes, metadata=metadata, error=error)


def leftovers(path: Path) -> list[Leftover]:
    """Returns the partial, expired and damaged folders in a folder of checkpoints, by name."""
    found = []
    for name in sorted(os.listdir(path)):
        match = _REST.fullmatch(name)
        if match is None or not (path / name).is_dir():
            continue
        kind, folder = match[1], path / name
        changed, sizes = files.last_change(folder), files.sizes_of(folder)
        # A run has removed the folder since it was listed.
        if changed is None:
            continue
        num_bytes = sum(sizes.values())
        found.append(
            Leftover(folder=folder, kind=kind, num_bytes=num_bytes, why=_WHY[kind], changed=changed)
        )
    return found


def open_arrays(folder: Path, metadata: Metadata) -> Mapping[str, Unread]:
    """Returns {name: `Unread`} of every array of a step, so that the host can read parts later.

    Readers compare the parts with the fingerprints. A step without them has its files compared with
    their checksums here.

    Raises:
      DamagedError: the tables of the arrays cannot be read, or a file differs from what was saved.
      MachineError: the step cannot be read now.
    """
    if not metadata.fingerprints:
        check_files(folder, metadata, metadata.checksums)
    wanted = {name: as_abstract(text) for name, text in metadata.arrays.items()}
    try:
        base = BaseReader(folder, metadata)
        return StoredArrays(folder / ARRAYS, folder / PIECES, base).read(
            wanted, unread=wanted, subset=True
        )
    except Exception as error:
        raise DamagedError(f"checkpoint {folder} is damaged: {reason(error)}") from error
