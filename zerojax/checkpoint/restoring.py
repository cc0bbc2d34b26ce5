"""Restores one step and compares it with its checksums; uses an earlier step if it is damaged.

All processes agree on the result.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from zerojax.checkpoint import agreement, files, folders
from zerojax.checkpoint.base_weights import BaseReader, at_another_place
from zerojax.checkpoint.errors import (
    BaseWeightsError,
    CheckpointError,
    Damage,
    DamagedError,
    MachineError,
    is_damage,
    reason,
)
from zerojax.checkpoint.fingerprint_math import as_text
from zerojax.checkpoint.fingerprints import Parts, PendingFingerprints, differing_copies, whole
from zerojax.checkpoint.metadata import Metadata, check_same_arrays, read_metadata
from zerojax.checkpoint.saving import ARRAYS, PIECES, is_first_process
from zerojax.checkpoint.stored_arrays import StoredArrays
from zerojax.config.checks import warn_user

_MOST = 3  # maximum number of damaged files in one message


def read_step(
    folder: Path,
    wanted: Mapping[str, Any],
    *,
    subset: bool,
    unread: Collection[str],
    optional: Collection[str] = (),
    optional_groups: Sequence[Collection[str]] = (),
    passed_over: Collection[str] = (),
    pretrained: str | os.PathLike[str] | None = None,
) -> tuple[Metadata, dict[str, Any]]:
    """Reads metadata and arrays of a step. Every process must call it.

    Small files are always compared with their checksums. If some arrays are not read now, or the
    step has no fingerprints, all files are. Arrays that are read are compared with their
    fingerprints on the devices that hold them.

    Args:
      folder: folder of the step.
      wanted: {name: `ShapeDtypeStruct` with a sharding}.
      subset: True: the checkpoint may hold more arrays than `wanted`.
      unread: names of arrays that are not read now.
      optional: names of arrays that the checkpoint either has all or lacks all. For a missing array
        the entry of `wanted` is returned.
      optional_groups: more groups of names like `optional`. Each group may be missing independently
        of the others.
      passed_over: names of arrays that the checkpoint may have although `wanted` does not. A name
        that ends with a slash is a prefix.
      pretrained: folder of frozen weights that the checkpoint does not store; None: the folder
        recorded in the checkpoint.

    Returns:
      The metadata, and {name: array} for `wanted`, with an `Unread` for each name in `unread`.

    Raises:
      BaseWeightsError: frozen weights are missing.
      DamagedError: the contents differ from the saved ones; the message names files and arrays.
      MachineError: the step cannot be read now.
      CheckpointError: the step was saved by another model, or has a newer format.
    """
    error, metadata, base, flat, lacking = None, None, None, {}, {}
    try:
        metadata = at_another_place(read_metadata(folder), pretrained)
        for group in (optional, *optional_groups):
            if not metadata.arrays.keys() & set(group):
                lacking |= {name: wanted[name] for name in group}
        wanted = {name: leaf for name, leaf in wanted.items() if name not in lacking}
        unread = [name for name in unread if name not in lacking]
        # Without such names the tuple is empty, and `startswith` is False for it.
        folders = tuple(name for name in passed_over if name.endswith("/"))
        more = {n for n in metadata.arrays if n in passed_over or n.startswith(folders)}
        more -= wanted.keys()
        saved = {name: x for name, x in metadata.arrays.items() if name not in more}
        check_same_arrays(saved, wanted, where=str(folder), subset=subset)
        subset = subset or bool(more)
        # Without fingerprints, only the files tell whether they are those of this step.
        _check_files(folder, metadata, all_files=bool(unread) or not metadata.fingerprints)
        base = BaseReader(folder, metadata)
        if base.names & wanted.keys():
            base.check()
    except (CheckpointError, OSError) as failure:
        error = failure if isinstance(failure, CheckpointError) else _unreadable(folder, failure)
    # Reading is collective, so no process may begin it alone.
    agreement.raise_together(error)
    assert metadata is not None
    assert base is not None
    try:
        pieces = StoredArrays(folder / ARRAYS, folder / PIECES, base)
        flat = pieces.read(wanted, unread=unread, subset=subset)
    except Exception as failure:
        error = _failed_read(folder, metadata, failure)
    agreement.raise_together(error)
    read = {name: flat[name] for name in wanted if name not in unread}
    _check_fingerprints(folder, metadata, read, base)
    return metadata, flat | lacking


def check_quickly(folder: Path) -> Metadata:
    """Checks metadata, file sizes and small files of a step. Reads no arrays; one process calls it.

    Raises:
      DamagedError: a check failed.
      MachineError: the step cannot be read now.
      CheckpointError: the step has a newer format.
    """
    metadata = read_metadata(folder)
    check_files(folder, metadata, _small(metadata))
    return metadata


def check_files(folder: Path, metadata: Metadata, checksums: Mapping[str, str]) -> None:
    """Compares the sizes of all files of a step, and the bytes of some, with what was saved.

    Args:
      folder: folder of the step.
      metadata: metadata of the step.
      checksums: {file: checksum} of the files that are read.

    Raises:
      DamagedError: they differ.
      MachineError: the step cannot be read now.
    """
    try:
        _raise_first(folder, files.wrong_sizes(folder, metadata.files))
        _raise_first(folder, files.wrong_checksums(folder, checksums))
    except OSError as error:
        raise _unreadable(folder, error) from error


def _check_files(folder: Path, metadata: Metadata, *, all_files: bool) -> None:
    if is_first_process():
        check_quickly(folder)
    if all_files:
        names = sorted(metadata.checksums.keys() - _small(metadata).keys())
        # The processes share the work, and each file is read once.
        mine = names[jax.process_index() :: jax.process_count()]
        checksums = {name: metadata.checksums[name] for name in mine}
        _raise_first(folder, files.wrong_checksums(folder, checksums))


def _small(metadata: Metadata) -> dict[str, str]:
    return {
        name: value
        for name, value in metadata.checksums.items()
        if metadata.files[name] <= files.SMALL
    }


def _check_fingerprints(
    folder: Path, metadata: Metadata, arrays: Mapping[str, jax.Array], base: BaseReader
) -> None:
    """Compares arrays on their devices with the saved fingerprints. Raises the same error on all
    processes."""
    known = {name: x for name, x in arrays.items() if name in metadata.fingerprints}
    if not known:
        return
    parts = _of_all_processes(PendingFingerprints(known).result())
    wrong = [
        name
        for name, leaf in known.items()
        if as_text(whole(leaf, parts[name])) != metadata.fingerprints[name]
        or differing_copies(leaf, parts[name]) is not None
    ]
    if not wrong:
        return
    error = None
    # Damage of the step itself is reported first: another folder of weights would not repair it.
    own = [name for name in wrong if name not in base.names]
    if is_first_process() and not own:
        error = base.differs(wrong[0], len(wrong) - 1)
    elif is_first_process():
        wrong = own
        more = f" (likewise {len(wrong) - 1} more arrays)" if len(wrong) > 1 else ""
        at_fault = _damaged_files(folder, metadata)
        error = _damaged(folder, f"{wrong[0]!r} differs from what was saved{more}; {at_fault}")
    agreement.raise_together(error)


def fingerprints_of(arrays: Mapping[str, jax.Array]) -> dict[str, str]:
    """Returns {name: fingerprint} of `arrays`, equal on all processes. Every process must call it;
    it waits for the arrays."""
    parts = _of_all_processes(PendingFingerprints(arrays).result())
    return {name: as_text(whole(leaf, parts[name])) for name, leaf in arrays.items()}


def _of_all_processes(parts: Parts) -> Parts:
    """Returns, on every process, the shard fingerprints of the devices of all processes."""
    if jax.process_count() == 1:
        return parts
    devices = [device.id for device in jax.local_devices()]
    table = np.zeros((len(parts), len(devices), 3), np.uint32)  # is there; two sums
    for row, of_devices in zip(table, parts.values(), strict=True):
        for column, device in enumerate(devices):
            if device in of_devices:
                row[column] = (1, *of_devices[device])
    tables = agreement.gather(table)
    ids = agreement.gather(np.asarray(devices, np.uint32))
    return {
        name: {
            int(ids[process, column]): (int(first), int(second))
            for process in range(len(tables))
            for column, (there, first, second) in enumerate(tables[process, row])
            if there
        }
        for row, name in enumerate(parts)
    }


def _failed_read(folder: Path, metadata: Metadata, failure: Exception) -> CheckpointError:
    """Chooses the error for arrays that could not be read: damage if a file does not match its
    checksum, otherwise a general error."""
    if isinstance(failure, BaseWeightsError):
        return failure
    if not is_damage(failure):
        return _unreadable(folder, failure)
    if not metadata.checksums:
        return _damaged(folder, reason(failure))
    try:
        found = list(files.wrong_checksums(folder, metadata.checksums))
    except OSError as error:
        return _unreadable(folder, error)
    if found:
        return _damaged(folder, _listed(found))
    return CheckpointError(
        f"checkpoint {folder} cannot be read, although all its files match their checksums: "
        f"{reason(failure)}"
    )


def _damaged_files(folder: Path, metadata: Metadata) -> str:
    """Returns the end of a message about wrong arrays: the list of damaged files."""
    try:
        found = list(files.wrong_checksums(folder, metadata.checksums))
    except OSError as error:
        return f"its files cannot be checked ({reason(error)})"
    return _listed(found) if found else "all files match their checksums"


def _listed(found: list[Damage]) -> str:
    more = f", and {len(found) - _MOST} more files are damaged" if len(found) > _MOST else ""
    return "; ".join(map(str, found[:_MOST])) + more


def _raise_first(folder: Path, damages: Iterable[Damage]) -> None:
    found = list(damages)
    if found:
        raise _damaged(folder, _listed(found))


def _damaged(folder: Path, what: str) -> DamagedError:
    return DamagedError(f"checkpoint {folder} is damaged: {what}")


def _unreadable(folder: Path, error: Exception) -> MachineError:
    return MachineError(
        f"checkpoint {folder} cannot be read now: {reason(error)}; fix the cause and try again"
    )


class Candidates:
    """Saved steps that a run may resume from.

    All processes call every method whose docstring does not name another caller. Process 0 reads
    the folder; the others get its results.

    Attributes:
      notes: problems found, one sentence each; filled only in process 0.
    """

    def __init__(self, path: Path, steps: Callable[[], tuple[int, ...]]) -> None:
        """Initializes with the folder of the checkpoints and a function that lists its steps."""
        self.notes: list[str] = []
        self._path, self._steps = path, steps
        self._damaged: set[int] = set()

    def existing(self, step: int | None) -> int:
        """Returns `step` after checking that it is saved; for None, the newest saved step.

        A single process may call it.

        Raises:
          CheckpointError: the step is not saved, or nothing is.
        """
        steps = self._steps()
        if step is None and not steps:
            raise CheckpointError(
                f"{self._path} has no checkpoints; check the path, or train first"
            )
        if step is not None and step not in steps:
            there = ", ".join(map(str, steps)) or "none"
            raise CheckpointError(f"{self._path} has no step {step}; the saved steps are: {there}")
        return steps[-1] if step is None else step

    def first(self, step: int | None) -> int:
        """Returns the step to restore first: `step`; for None, the newest step that is not known to
        be damaged.

        Raises:
          CheckpointError: there is no such step.
        """
        error, chosen = None, -1
        if is_first_process():
            try:
                chosen = self.existing(step)
                if step is None:
                    chosen = max(self._not_passed_over(), default=chosen)
            except CheckpointError as failure:
                error = failure
        agreement.raise_together(error)
        return agreement.from_process_0(chosen)

    def below(self, lost: Mapping[int, str]) -> int:
        """Returns the newest saved step that is earlier than all damaged steps in `lost`.

        Args:
          lost: {damaged step: description of its damage}.

        Raises:
          DamagedError: there is no earlier step.
        """
        earlier = [step for step in self._steps() if step < min(lost)]
        chosen = agreement.from_process_0(max(earlier, default=-1))
        if chosen < 0:
            raise _none_left(lost)
        return chosen

    def usable(self) -> int | None:
        """Returns the newest saved step that looks intact; None if nothing is saved. Later steps
        are skipped from then on.

        Raises:
          CheckpointError: all steps are damaged, or the newest step has a newer format.
        """
        error, found, lost = None, -1, {}
        if is_first_process():
            try:
                for found in reversed(self._not_passed_over()):
                    try:
                        check_quickly(folders.step_folder(self._path, found))
                        break
                    except DamagedError as damage:
                        lost[found] = str(damage)
                # All steps are damaged. `found` is -1 if there are none.
                if found in lost:
                    raise _none_left(lost)
            except CheckpointError as failure:
                error = failure
        agreement.raise_together(error)
        self.pass_over(lost, f"step {found} is used in its place")
        found = agreement.from_process_0(found)
        return None if found < 0 else found

    def check(self, step: int | None) -> None:
        """Raises if a step is missing or looks damaged; for None, if no saved step is usable.

        Raises:
          CheckpointError: the message describes the problem.
        """
        if step is None and self.usable() is not None:
            return
        error = None
        if is_first_process():
            try:
                check_quickly(folders.step_folder(self._path, self.existing(step)))
            except DamagedError as failure:
                error = DamagedError(f"{failure}; {self.remedy(self.existing(step))}")
            except CheckpointError as failure:
                error = failure
        agreement.raise_together(error)

    def pass_over(self, lost: Mapping[int, str], instead: str) -> None:
        """Warns about the damaged steps in `lost`, and skips them from now on.

        Args:
          lost: {damaged step: description of its damage}.
          instead: clause of the warning that says which step is used.
        """
        for step, text in sorted(lost.items(), reverse=True):
            self.note(f"{text}; {instead}; the next save renames its folder {step}.damaged")
        self._damaged.update(lost)

    def note(self, text: str) -> None:
        """Adds a sentence to `notes` and issues it as a warning; only process 0 does either."""
        if is_first_process():
            self.notes.append(text)
            warn_user(text, RuntimeWarning)

    def set_aside(self) -> None:
        """Renames the folders of the damaged steps that were skipped. Called only in process 0.

        Raises:
          OSError: the operating system reports an error.
        """
        for step in sorted(self._damaged.intersection(self._steps())):
            folders.set_aside(self._path, step)
        self._damaged.clear()

    def remedy(self, damaged: int) -> str:
        """Returns a clause that recommends another step for a damaged one: the newest earlier step
        that looks intact, otherwise the newest later one. Any process may call it."""
        others = [step for step in self._steps() if step != damaged]
        for step in sorted(others, key=lambda step: (step > damaged, -step)):
            with contextlib.suppress(CheckpointError):
                check_quickly(folders.step_folder(self._path, step))
                return f"restore step {step}"
        return "no other step is intact" if others else "no other step is saved"

    def _not_passed_over(self) -> list[int]:
        return [step for step in self._steps() if step not in self._damaged]


def _none_left(lost: Mapping[int, str]) -> DamagedError:
    others = ", ".join(str(step) for step in sorted(lost)[:-1])
    also = f"so are the earlier steps ({others})" if others else "no earlier step is saved"
    return DamagedError(
        f"{lost[max(lost)]}; {also}; nothing was changed; restore a step from a"
        " copy, or start again in another, empty folder"
    )
