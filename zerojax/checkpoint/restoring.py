"""Restore of one step, compared with what was saved; all processes agree on the result."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from zerojax.checkpoint import agreement, files
from zerojax.checkpoint.errors import (
    CheckpointError,
    Damage,
    DamagedError,
    MachineError,
    is_damage,
    reason,
)
from zerojax.checkpoint.fingerprint_math import as_text
from zerojax.checkpoint.fingerprints import Parts, PendingFingerprints, differing_copies, whole
from zerojax.checkpoint.metadata import FILE_NAME, Metadata, check_same_arrays, read_metadata
from zerojax.checkpoint.saving import ARRAYS, PIECES, is_first_process
from zerojax.checkpoint.stored_arrays import StoredArrays

_MOST = 3  # damaged files that one sentence names


def read_step(
    folder: Path, wanted: Mapping[str, Any], *, subset: bool, unread: Collection[str]
) -> tuple[Metadata, dict[str, Any]]:
    """What is stored beside the arrays, and the arrays. Collective over all processes.

    Small files are always compared with their checksums, and all files when some arrays are not
    read now; arrays that are read are compared with their fingerprints where they then lie.

    Args:
      folder: of the step.
      wanted: name -> `ShapeDtypeStruct` with a sharding.
      subset: the checkpoint may hold more.
      unread: names that are not read now.

    Raises:
      DamagedError: what is there is not what was saved; names files and arrays.
      MachineError: not readable now.
      CheckpointError: saved by another model, or of a newer format.
    """
    error, metadata, flat = None, None, {}
    try:
        metadata = read_metadata(folder)
        check_same_arrays(metadata.arrays, wanted, where=str(folder), subset=subset)
        _check_files(folder, metadata, all_files=bool(unread))
    except (CheckpointError, OSError) as failure:
        error = failure if isinstance(failure, CheckpointError) else _unreadable(folder, failure)
    agreement.raise_together(error)
    assert metadata is not None
    try:
        pieces = StoredArrays(folder / ARRAYS, folder / PIECES)
        flat = pieces.read(wanted, unread=unread, subset=subset)
    except Exception as failure:
        error = _failed_read(folder, metadata, failure)
    agreement.raise_together(error)
    read = {name: flat[name] for name in wanted if name not in unread}
    _check_fingerprints(folder, metadata, read)
    return metadata, flat


def check_quickly(folder: Path) -> Metadata:
    """Metadata, sizes and small files of a step; reads no arrays. For one process.

    Raises:
      DamagedError: something is wrong. MachineError: not readable now. CheckpointError: of a newer
        format.
    """
    metadata = read_metadata(folder)
    if folder.name != str(metadata.step):
        raise _damaged(folder, f"{FILE_NAME} is that of step {metadata.step}")
    try:
        _raise_first(folder, files.wrong_sizes(folder, metadata.files))
        _raise_first(folder, files.wrong_checksums(folder, _small(metadata)))
    except OSError as error:
        raise _unreadable(folder, error) from error
    return metadata


def _check_files(folder: Path, metadata: Metadata, *, all_files: bool) -> None:
    if is_first_process():
        check_quickly(folder)
    if all_files:
        names = sorted(metadata.checksums.keys() - _small(metadata).keys())
        mine = names[jax.process_index() :: jax.process_count()]
        checksums = {name: metadata.checksums[name] for name in mine}
        _raise_first(folder, files.wrong_checksums(folder, checksums))


def _small(metadata: Metadata) -> dict[str, str]:
    return {
        name: value
        for name, value in metadata.checksums.items()
        if metadata.files[name] <= files.SMALL
    }


def _check_fingerprints(folder: Path, metadata: Metadata, arrays: Mapping[str, jax.Array]) -> None:
    """Compares arrays on their devices with what was saved; the same on all processes."""
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
    if is_first_process():
        more = f" (nor are {len(wrong) - 1} more arrays)" if len(wrong) > 1 else ""
        at_fault = _damaged_files(folder, metadata)
        error = _damaged(folder, f"{wrong[0]!r} is not what was saved{more}; {at_fault}")
    agreement.raise_together(error)


def _of_all_processes(parts: Parts) -> Parts:
    """The sums of all devices, on every process."""
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
    """What a failed read means: damage, unless all files are those that were written."""
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
        f"checkpoint {folder} cannot be read, though all its files match their checksums:"
        f" {reason(failure)}"
    )


def _damaged_files(folder: Path, metadata: Metadata) -> str:
    """The rest of a sentence about arrays that are wrong."""
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
        f"checkpoint {folder} cannot be read now: {reason(error)}; mend that and try again"
    )
