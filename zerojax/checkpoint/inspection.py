"""Lists a checkpoint folder without changing it: complete steps and everything else.

Reads no array, so a running training is not disturbed.
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
from zerojax.checkpoint.retention import kept_steps, named_step
from zerojax.checkpoint.saving import ARRAYS, PIECES
from zerojax.checkpoint.stored_arrays import StoredArrays, Unread
from zerojax.config.loader import user_path
from zerojax.runtime.bounded_json import load

_REST = re.compile(r"\d+\.(partial|expired|damaged)(-\d+)?")
_WHY = {
    "partial": "a save in progress, or an interrupted save; the run's next save removes it",
    "expired": "expired, but its deletion was interrupted; the run's next save removes it",
    "damaged": "damaged files; the run continued from an earlier step",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedStep:
    """Saved step as found in its folder; its save was finished, but it may have been damaged since.

    Attributes:
      step, folder: its number and folder.
      num_bytes: of all its files, with their present sizes.
      metadata: None if it cannot be read.
      error: the problem shown by metadata, file names and sizes; None if there is none.
    """

    step: int
    folder: Path
    num_bytes: int
    metadata: Metadata | None
    error: CheckpointError | None

    @property
    def is_damaged(self) -> bool:
        """Whether the step's files could be read and differ from those that were saved.

        False for checkpoints of a newer zerojax, and if the operating system could not read them:
        that says nothing about the files.
        """
        return isinstance(self.error, DamagedError) and not isinstance(
            self.error.__cause__, OSError
        )

    @property
    def problem(self) -> str | None:
        """The problem with the step, without the path of the checkpoint; None if there is none."""
        if self.error is None:
            return None
        return re.sub(rf"^checkpoint {re.escape(str(self.folder))} [^:]*: ", "", str(self.error))

    def whole_metadata(self) -> Metadata:
        """Returns the metadata of this step.

        Raises:
          CheckpointError: the step has a problem.
        """
        if self.error is not None:
            raise self.error
        assert self.metadata is not None
        return self.metadata


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leftover:
    """Folder of an unfinished, expired or damaged checkpoint, from which no run resumes.

    Attributes:
      folder: its path.
      kind: "partial", "expired" or "damaged".
      num_bytes: of all its files.
      why: the reason why it exists, a clause.
      changed: time of the last write to one of its files; seconds since the epoch.
    """

    folder: Path
    kind: str
    num_bytes: int
    why: str
    changed: float


def find_checkpoints(run: str | os.PathLike[str]) -> tuple[Path, int | None]:
    """Finds (folder of checkpoints, step or None) for the path that a user gave for a run.

    Args:
      run: a run's folder, its folder of checkpoints, or the folder of one step.

    Raises:
      CheckpointError: there are no checkpoints.
    """
    path = user_path(run).absolute()
    if not path.is_dir():
        raise CheckpointError(
            f"{run} is not a folder; name the folder of a run, such as runs/tiny_shakespeare"
        )
    if path.name.isdigit() and (path / FILE_NAME).exists():
        return path.parent, int(path.name)
    for candidate in (path, *_named_by_run(path), path / "checkpoints"):
        if candidate.is_dir() and (folders.list_steps(candidate) or leftovers(candidate)):
            return candidate, None
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
      run: as in `find_checkpoints`.
      step: a saved step, or the name of a kept one, such as "best"; None: the step whose folder
        `run` is, else the newest.
      pretrained: folder of frozen weights that the checkpoint does not store; None: the original
        one.

    Raises:
      CheckpointError: there is none; lists the saved steps.
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
    """Returns the folder of checkpoints that a run's settings name, if any."""
    named = run_settings(path).get("checkpoint")
    place = named.get("path") if isinstance(named, dict) else None
    return [user_path(place)] if isinstance(place, str) else []


def run_settings(path: Path) -> dict[str, Any]:
    """Returns the settings in a run's folder, or {} if they cannot be read."""
    try:
        settings = load(path / "config.json")
    except (OSError, ValueError):
        return {}
    return settings if isinstance(settings, dict) else {}


def saved_steps(path: Path) -> list[SavedStep]:
    """Returns the saved steps in a folder of checkpoints, damaged ones too, oldest first."""
    found = (_saved_step(path, step) for step in folders.list_steps(path))
    return [one for one in found if one is not None]


def _saved_step(path: Path, step: int) -> SavedStep | None:
    """Describes a saved step; None if a run has deleted or renamed it after listing."""
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
    """Returns the partial, expired and damaged folders next to the checkpoints, sorted by name."""
    found = []
    for name in sorted(os.listdir(path)):
        match = _REST.fullmatch(name)
        if match is None or not (path / name).is_dir():
            continue
        kind, folder = match[1], path / name
        changed, sizes = files.last_change(folder), files.sizes_of(folder)
        if changed is None:
            continue
        num_bytes = sum(sizes.values())
        found.append(
            Leftover(folder=folder, kind=kind, num_bytes=num_bytes, why=_WHY[kind], changed=changed)
        )
    return found


def open_arrays(folder: Path, metadata: Metadata) -> Mapping[str, Unread]:
    """Returns every array of a step as `Unread`, to be read on the host later, in any parts.

    Raises:
      DamagedError: the tables cannot be read.
    """
    wanted = {name: as_abstract(text) for name, text in metadata.arrays.items()}
    try:
        base = BaseReader(folder, metadata)
        return StoredArrays(folder / ARRAYS, folder / PIECES, base).read(
            wanted, unread=wanted, subset=True
        )
    except Exception as error:
        raise DamagedError(f"checkpoint {folder} is damaged: {reason(error)}") from error
