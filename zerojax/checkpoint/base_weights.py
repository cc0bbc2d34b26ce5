"""Frozen weights that a checkpoint does not store, because a Hugging Face folder holds them.

A restore reads them from that folder again: each process reads the parts of its own devices. Their
fingerprints, computed on the devices, are compared with the saved fingerprints. So restored weights
have the bits that the run trained with, or the restore fails. No file is read only to be compared.
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
from zerojax.config.late_dataclasses import dataclass
from zerojax.config.loader import user_path
from zerojax.optim.weight_codes import CodedArray, WeightCodes, codes_of_plan
from zerojax.tracing.protocol import LazyArray
from zerojax.zoo.hugging_face import StoredArray, arrays_in
from zerojax.zoo.hugging_face.folder import Folder

PREFIX = "frozen/"
"""Prefix of the names of frozen arrays in a checkpoint."""
_REMEDY = (
    "put the original files back, or name a folder that has them: --pretrained FOLDER, in Python "
    "pretrained=FOLDER; to continue a run, set model.pretrained=FOLDER, or "
    "zerojax.from_hugging_face(FOLDER). With checkpoint.frozen=saved a run saves all weights"
)


@dataclass(frozen=True, kw_only=True)
class BaseWeights:
    """Frozen weights that stay in the folder they were read from, and are not written to
    checkpoints.

    Attributes:
      folder: absolute path of the folder that holds the weights.
      files: {file name relative to `folder`: (bytes, modification time in ns)}, recorded when the
        folder was opened.
      arrays: names of the frozen arrays in a checkpoint.
      fingerprints: {array name: fingerprint of the values that the run read}; empty before the
        first read.
    """

    folder: Path
    files: Mapping[str, tuple[int, int]]
    arrays: tuple[str, ...]
    fingerprints: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON form of this object, which a checkpoint stores as `Metadata.base`."""
        sizes = {name: size for name, (size, _) in self.files.items()}
        return {"folder": str(self.folder), "files": sizes, "arrays": list(self.arrays)}

    def as_read(self, fingerprints: Mapping[str, str]) -> BaseWeights | None:
        """Returns a copy that has these fingerprints and only the arrays they name; None if no
        array is left."""
        both = tuple(sorted(set(self.arrays) & set(fingerprints)))
        known = {name: fingerprints[name] for name in both}
        return dataclasses.replace(self, arrays=both, fingerprints=known) if both else None

    def change(self) -> str | None:
        """Describes the first file that changed since the folder was opened, or returns None.

        Compares only sizes and modification times.

        Returns:
          A clause such as "config.json was changed".
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
      folder: the open Hugging Face folder.
      params: names of the parameters that are read from the folder and are not trained.

    Raises:
      OSError: the operating system reports an error.
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
    """Returns a step's metadata with `pretrained` as the folder of its frozen weights.

    Args:
      metadata: metadata of the step. Returned unchanged if the step stores all its arrays.
      pretrained: folder that now holds the frozen weights; None: the recorded folder.
    """
    if pretrained is None or not metadata.base:
        return metadata
    folder = str(user_path(pretrained).absolute())
    if folder == metadata.base["folder"]:
        return metadata
    # The new folder may hold the same tensors in files with other names and sizes.
    return dataclasses.replace(metadata, base={**metadata.base, "folder": folder, "files": {}})


class BaseReader:
    """Reader of the frozen weights that a step does not store; opens their files on first use.

    Attributes:
      names: names of the frozen arrays in the step's metadata; empty if the step stores all arrays.
    """

    def __init__(self, step: Path, metadata: Metadata) -> None:
        """Initializes a reader for the step in folder `step`; reads nothing yet."""
        self._step, self._metadata = step, metadata
        self.names: frozenset[str] = frozenset(metadata.base.get("arrays", ()))

    @property
    def folder(self) -> Path:
        """Folder that holds the frozen weights."""
        return Path(self._metadata.base["folder"])

    def check(self) -> None:
        """Opens the files of the frozen weights to check that they exist; reads no values.

        Raises:
          BaseWeightsError: files are missing, or hold tensors of other names or shapes.
        """
        if self.names:
            self._arrays  # noqa: B018

    @functools.cached_property
    def _arrays(self) -> dict[str, StoredArray]:
        if not self.folder.is_dir():
            raise self._error("which does not exist")
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
        """{parameter name: its quantization codes}, for parameters that the step keeps as codes."""
        return codes_of_plan(self._metadata.plan)

    def _lazy(self, name: str) -> LazyArray:
        """Returns a frozen array in the form that the step would store, such as quantization codes;
        reads no values."""
        array, codes = self._arrays[name], self._codes.get(name.removeprefix(PREFIX))
        return array if codes is None else CodedArray(array, codes)

    def read(self, name: str, box: Box) -> np.ndarray:
        """Reads a part of an array into new memory, in the dtype of the step.

        Raises:
          BaseWeightsError: the array cannot be read.
        """
        array, (start, size) = self._lazy(name), box
        values = np.empty(size, as_abstract(self._metadata.arrays[name]).dtype)
        ranges = [(low, low + n) for low, n in zip(start, size, strict=True)]
        try:
            with np.errstate(over="ignore"):  # round to infinity, as devices do
                if not array.is_stacked:
                    values[...] = array.read(ranges)
                    return values
                for row in range(size[0]):  # so that only one layer is held in the files' dtype
                    layer = start[0] + row
                    values[row] = array.read([(layer, layer + 1), *ranges[1:]])[0]
        except (OSError, ValueError) as error:
            raise self._error(f"where {name!r} cannot be read: {reason(error)}") from error
        return values

    def layers(self, name: str) -> Callable[[int], np.ndarray] | None:
        """Returns a function that reads one layer (index of the first dimension) of a stacked
        array; None if the array is not a stack of layers."""
        array = self._lazy(name)
        if not array.is_stacked:
            return None
        start, rest = (0,) * (len(array.shape) - 1), array.shape[1:]
        return lambda index: self.read(name, ((index, *start), (1, *rest)))[0]

    def differs(self, name: str, others: int = 0) -> BaseWeightsError:
        """Returns the error for an array whose values differ from those that the run trained with.

        Args:
          name: name of the array.
          others: number of further arrays that differ.
        """
        more = f" ({others} more arrays differ too)" if others else ""
        files = self._arrays[name].files
        sizes = self._metadata.base["files"]
        # A changed size shows which of several files was changed; equal sizes show nothing.
        resized = [x for x in files if x in sizes and _stamp(self.folder / x)[0] != sizes[x]]
        where = " or ".join(resized or files)
        return self._error(f"where {name!r} (in {where}) differs from the run's values{more}")

    def _error(self, what: str) -> BaseWeightsError:
        left = f"checkpoint {self._step} reads {len(self.names)} frozen arrays from {self.folder}"
        return BaseWeightsError(f"{left}, {what}; {_REMEDY}")
