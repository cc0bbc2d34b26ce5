"""Frozen weights that a checkpoint does not store, because they are in a Hugging Face folder.

A restore reads them again, each process its own parts, and compares them with fingerprints that
were computed on the devices. So restored weights have the bits that were trained with, even if the
folder has changed, and no file is read only for the comparison.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from zerojax.checkpoint.errors import BaseWeightsError, reason
from zerojax.checkpoint.metadata import Metadata, as_abstract
from zerojax.checkpoint.store.boxes import Box
from zerojax.config.loader import user_path
from zerojax.optim.weight_codes import CodedArray, WeightCodes, codes_of_plan
from zerojax.tracing.protocol import LazyArray
from zerojax.zoo.hugging_face import StoredArray, arrays_in
from zerojax.zoo.hugging_face.folder import Folder

PREFIX = "frozen/"
"""Prefix of the names of frozen weights in a checkpoint."""
_REMEDY = (
    "put the original files back, or name a folder that has them: --pretrained FOLDER, in Python "
    "pretrained=FOLDER; to continue a run, set model.pretrained=FOLDER, or "
    "zerojax.from_hugging_face(FOLDER). With checkpoint.frozen=saved a run saves all weights"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BaseWeights:
    """Frozen weights that stay in the folder they were read from, and are not written to
    checkpoints.

    Attributes:
      folder: absolute.
      files: name relative to the folder -> (bytes, modification time in ns), when the folder was
        opened.
      arrays: their names in a checkpoint.
      fingerprints: name -> fingerprint of the values that the run read; empty before the first
        read.
    """

    folder: Path
    files: Mapping[str, tuple[int, int]]
    arrays: tuple[str, ...]
    fingerprints: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Returns the dict for `Metadata.base`."""
        sizes = {name: size for name, (size, _) in self.files.items()}
        return {"folder": str(self.folder), "files": sizes, "arrays": list(self.arrays)}

    def as_read(self, fingerprints: Mapping[str, str]) -> BaseWeights | None:
        """Returns a copy with only the arrays named in `fingerprints`, and these fingerprints; None
        if no array is left."""
        both = tuple(sorted(set(self.arrays) & set(fingerprints)))
        known = {name: fingerprints[name] for name in both}
        return dataclasses.replace(self, arrays=both, fingerprints=known) if both else None

    def change(self) -> str | None:
        """Returns how the files have changed since the folder was opened, as a clause; None if
        unchanged.

        Compares only sizes and times.
        """
        for name, before in self.files.items():
            try:
                now = _stamp(self.folder / name)
            except OSError as error:
                return f"{name} cannot be read ({reason(error)})"
            if now != before:
                return f"{name} was changed"
        return None


def base_weights(folder: Folder, params: Iterable[str]) -> BaseWeights:
    """Describes the frozen weights that checkpoints may leave in `folder` instead of storing them.

    Args:
      folder: open.
      params: names of parameters that are read from it and are not trained.

    Raises:
      OSError: from the operating system.
    """
    return BaseWeights(
        folder=folder.path,
        files={name: _stamp(folder.path / name) for name in folder.files},
        arrays=tuple(sorted(PREFIX + name for name in params)),
    )


def _stamp(path: Path) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns


def at_another_place(metadata: Metadata, pretrained: str | os.PathLike[str] | None) -> Metadata:
    """Returns the metadata of a step with another folder for its frozen weights.

    Args:
      metadata: of the step; unchanged if the step stores all its arrays.
      pretrained: the folder; None: the original one.
    """
    if pretrained is None or not metadata.base:
        return metadata
    folder = str(user_path(pretrained).absolute())
    if folder == metadata.base["folder"]:
        return metadata
    # The other folder may have the same tensors in files with other names and sizes.
    return dataclasses.replace(metadata, base={**metadata.base, "folder": folder, "files": {}})


class BaseReader:
    """Reader of a step's frozen weights that are in another folder; opens files on first use.

    Attributes:
      names: of the arrays, as in the step; empty if the step stores all arrays.
    """

    def __init__(self, step: Path, metadata: Metadata) -> None:
        """Takes the folder of the step and its metadata. Reads nothing."""
        self._step, self._metadata = step, metadata
        self.names: frozenset[str] = frozenset(metadata.base.get("arrays", ()))

    @property
    def folder(self) -> Path:
        """Folder that holds the frozen weights."""
        return Path(self._metadata.base["folder"])

    def check(self) -> None:
        """Opens the files of the frozen weights to check that they exist; reads no values.

        Raises:
          BaseWeightsError: files are missing, or hold other tensors.
        """
        if self.names:
            self._arrays  # noqa: B018

    @functools.cached_property
    def _arrays(self) -> dict[str, StoredArray]:
        if not self.folder.is_dir():
            raise self._error("which is not there")
        missing = [x for x in self._metadata.base["files"] if not (self.folder / x).is_file()]
        if missing:
            raise self._error(f"where {missing[0]} is missing")
        saved = {n.removeprefix(PREFIX): as_abstract(self._metadata.arrays[n]) for n in self.names}
        coded = {n: x for n, x in self._codes.items() if n in saved}
        shapes = {name: leaf.shape for name, leaf in saved.items()}
        shapes |= {name: codes.true_shape(shapes[name]) for name, codes in coded.items()}
        try:
            found = arrays_in(self.folder, shapes)
        except (OSError, ValueError) as error:
            raise self._error(f"which cannot be read: {error}") from error
        return {name: found[name.removeprefix(PREFIX)] for name in self.names}

    @functools.cached_property
    def _codes(self) -> dict[str, WeightCodes]:
        """{parameter: its codes} of the parameters that the step stores as codes."""
        return codes_of_plan(self._metadata.plan)

    def _lazy(self, name: str) -> LazyArray:
        """Returns a frozen array in the form in which the step would store it, such as codes; reads
        no values."""
        array, codes = self._arrays[name], self._codes.get(name.removeprefix(PREFIX))
        return array if codes is None else CodedArray(array, codes)

    def read(self, name: str, box: Box) -> np.ndarray:
        """Reads a part of an array into new memory, in the dtype that the step has.

        Raises:
          BaseWeightsError: it cannot be read.
        """
        array, (start, size) = self._lazy(name), box
        values = np.empty(size, as_abstract(self._metadata.arrays[name]).dtype)
        ranges = [(low, low + n) for low, n in zip(start, size, strict=True)]
        try:
            with np.errstate(over="ignore"):  # round to infinity, as devices do
                if not array.is_stacked:
                    values[...] = array.read(ranges)
                    return values
                for row in range(size[0]):  # holds only one layer at a time in the files' dtype
                    layer = start[0] + row
                    values[row] = array.read([(layer, layer + 1), *ranges[1:]])[0]
        except (OSError, ValueError) as error:
            raise self._error(f"where {name!r} cannot be read: {reason(error)}") from error
        return values

    def layers(self, name: str) -> Callable[[int], np.ndarray] | None:
        """Returns a function that reads one index of a stack's first dimension, or None for no
        stack."""
        array = self._lazy(name)
        if not array.is_stacked:
            return None
        start, rest = (0,) * (len(array.shape) - 1), array.shape[1:]
        return lambda index: self.read(name, ((index, *start), (1, *rest)))[0]

    def differs(self, name: str, others: int = 0) -> BaseWeightsError:
        """Returns the error for an array whose values differ from the saved ones.

        Args:
          others: number of further arrays that differ.
        """
        more = f" (so do {others} more arrays)" if others else ""
        files = self._arrays[name].files
        sizes = self._metadata.base["files"]
        # A changed size shows which of several files was changed; an equal size shows nothing.
        resized = [x for x in files if x in sizes and _stamp(self.folder / x)[0] != sizes[x]]
        where = " or ".join(resized or files)
        return self._error(f"where {name!r} (in {where}) differs from what the run had{more}")

    def _error(self, what: str) -> BaseWeightsError:
        left = f"checkpoint {self._step} leaves {len(self.names)} frozen arrays in {self.folder}"
        return BaseWeightsError(f"{left}, {what}; {_REMEDY}")
