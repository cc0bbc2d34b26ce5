"""Verifies a whole saved step, file by file and array by array.

Reports all damage, not only the first. A single process is enough.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import jax
import numpy as np

from zerojax.checkpoint import files, fingerprint_math
from zerojax.checkpoint.base_weights import BaseReader, at_another_place
from zerojax.checkpoint.errors import (
    BaseWeightsError,
    Damage,
    DamagedError,
    MachineError,
    is_damage,
    reason,
)
from zerojax.checkpoint.fingerprint_math import Sums
from zerojax.checkpoint.metadata import FILE_NAME, Metadata, as_abstract, read_metadata
from zerojax.checkpoint.saving import ARRAYS, PIECES
from zerojax.checkpoint.store.boxes import Box, Shape
from zerojax.checkpoint.stored_arrays import StoredArrays
from zerojax.config.late_dataclasses import dataclass

_PART_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class Verification:
    """Result of verifying a saved step.

    Attributes:
      step: number of the step.
      folder: folder of the step.
      num_leaves: number of arrays with a fingerprint, all of which were compared if they can be
        read.
      num_files: number of files that were compared: those with a checksum and the right size.
      num_bytes: size in bytes of these files.
      has_fingerprints: False if the step has no fingerprints, so that only files were compared.
      damages: all problems found, those of files first.
    """

    step: int
    folder: Path
    num_leaves: int
    num_files: int
    num_bytes: int
    has_fingerprints: bool
    damages: tuple[Damage, ...]

    @property
    def is_good(self) -> bool:
        """True if all compared files and arrays equal the saved ones."""
        return not self.damages


def verify_step(
    folder: Path, step: int, *, pretrained: str | os.PathLike[str] | None = None
) -> Verification:
    """Reads a whole step and its frozen weights, one array at a time, and compares all with what
    was saved.

    Args:
      folder: folder of the step.
      step: number of the step.
      pretrained: folder of the frozen weights that the step does not store; None: the folder
        recorded in the checkpoint.

    Raises:
      MachineError: the step cannot be read now, for a reason other than damage.
      CheckpointError: the step has a newer format.
    """
    try:
        metadata = at_another_place(read_metadata(folder), pretrained)
    except DamagedError as error:
        what = str(error).partition(f"{FILE_NAME} ")[2]
        return _verification(step, folder, None, [Damage(file=FILE_NAME, what=what)], ())
    try:
        found = list(files.wrong_sizes(folder, metadata.files))
        same_size = metadata.checksums.keys() - {damage.file for damage in found}
        sums = {name: metadata.checksums[name] for name in sorted(same_size)}
        found += files.wrong_checksums(folder, sums)
    except OSError as error:
        raise MachineError(
            f"{folder} cannot be read now: {reason(error)}; fix the cause and try again"
        ) from error
    of_leaves = list(_wrong_leaves(folder, metadata)) if metadata.fingerprints else []
    return _verification(step, folder, metadata, [*found, *of_leaves], sums)


def _verification(
    step: int,
    folder: Path,
    metadata: Metadata | None,
    damages: list[Damage],
    compared: Collection[str],
) -> Verification:
    sizes = {} if metadata is None else metadata.files
    num_leaves = 0 if metadata is None else len(metadata.fingerprints)
    return Verification(
        step=step,
        folder=folder,
        num_leaves=num_leaves,
        num_files=len(compared),
        num_bytes=sum(sizes[name] for name in compared),
        has_fingerprints=num_leaves > 0,
        damages=tuple(damages),
    )


def _wrong_leaves(folder: Path, metadata: Metadata) -> Iterator[Damage]:
    wanted = {name: as_abstract(metadata.arrays[name]) for name in metadata.fingerprints}
    try:
        base = BaseReader(folder, metadata)
        pieces = StoredArrays(folder / ARRAYS, folder / PIECES, base)
        unread = pieces.read(wanted, unread=wanted, subset=True)
    except Exception as error:  # the tables themselves
        yield from (_unreadable(name, error) for name in wanted)
        return
    if (away := _without_base(base)) is not None:
        yield away
        wanted = {name: leaf for name, leaf in wanted.items() if name not in base.names}
    for name, leaf in wanted.items():
        try:
            sums = _fingerprint(unread[name].open(), leaf)
        except Exception as error:
            yield _unreadable(name, error)
            continue
        if fingerprint_math.as_text(sums) != metadata.fingerprints[name]:
            where = f" ({base.folder} has other values)" if name in base.names else ""
            yield Damage(leaf=name, what=f"differs from what was saved{where}")


def _without_base(base: BaseReader) -> Damage | None:
    """Returns the problem that makes the folder of frozen weights unusable, or None."""
    try:
        base.check()
    except BaseWeightsError as error:
        return Damage(file=str(base.folder), what=f"does not have the frozen weights ({error})")
    return None


def _unreadable(name: str, error: Exception) -> Damage:
    if not is_damage(error):
        raise MachineError(
            f"{name!r} cannot be read now: {reason(error)}; fix the cause and try again"
        ) from error
    return Damage(leaf=name, what=f"cannot be read ({reason(error)})")


def _fingerprint(read: Callable[[Box], np.ndarray], leaf: jax.ShapeDtypeStruct) -> Sums:
    total = fingerprint_math.ZERO
    for start, size in parts_of(leaf.shape, leaf.dtype.itemsize):
        part = fingerprint_math.of_part(read((start, size)), start, leaf.shape)
        total = fingerprint_math.add(total, part)
    return total


def parts_of(shape: Shape, itemsize: int) -> Iterator[Box]:
    """Yields boxes of whole rows that cover an array, each of about 64 MiB."""
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:]) * itemsize
    rows = max(1, _PART_BYTES // max(1, row))
    for first in range(0, shape[0], rows):
        count = min(rows, shape[0] - first)
        yield (first, *(0 for _ in shape[1:])), (count, *shape[1:])
