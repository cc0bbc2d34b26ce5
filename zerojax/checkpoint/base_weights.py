"""Frozen weights that a checkpoint leaves in the folder of Hugging Face that they were read from.

They are read again, each process its own parts, and compared with the fingerprints that were taken
of them on the devices. So what comes back has the bits that were trained with, whatever has become
of the folder, and no file is read for the comparison alone.
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
from zerojax.models.hugging_face import StoredArray, arrays_in
from zerojax.models.hugging_face.folder import Folder
from zerojax.models.protocol import LazyArray
from zerojax.optim.weight_codes import CodedArray, WeightCodes, codes_of_plan

PREFIX = "frozen/"
"""Of the names that these arrays have in a checkpoint."""
_REMEDY = (
    "put back what was there, or give a folder that has it: --pretrained FOLDER, in Python "
    "pretrained=FOLDER; a run goes on with model.pretrained=FOLDER, or "
    "zerojax.from_hugging_face(FOLDER). With checkpoint.frozen=saved a run saves all weights"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BaseWeights:
    """The arrays that are left where they are.

    Attributes:
      folder: absolute.
      files: name relative to the folder -> (bytes, time of its last change in ns), when the folder
        was opened.
      arrays: their names in a checkpoint.
      fingerprints: name -> fingerprint of what the run has read there; empty before it has.
    """

    folder: Path
    files: Mapping[str, tuple[int, int]]
    arrays: tuple[str, ...]
    fingerprints: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """As `Metadata.base` has it."""
        sizes = {name: size for name, (size, _) in self.files.items()}
        return {"folder": str(self.folder), "files": sizes, "arrays": list(self.arrays)}

    def as_read(self, fingerprints: Mapping[str, str]) -> BaseWeights | None:
        """What is left of it where a state has these arrays from the folder, and no others."""
        both = tuple(sorted(set(self.arrays) & set(fingerprints)))
        known = {name: fingerprints[name] for name in both}
        return dataclasses.replace(self, arrays=both, fingerprints=known) if both else None

    def change(self) -> str | None:
        """What has become of the files since the folder was opened, a clause; None: nothing.

        Looks at sizes and times alone.
        """
        for name, before in self.files.items():
            try:
                now = _stamp(self.folder / name)
            except OSError as error:
                return f"{name} cannot be looked at ({reason(error)})"
            if now != before:
                return f"{name} was changed"
        return None


def base_weights(folder: Folder, params: Iterable[str]) -> BaseWeights:
    """What a run may leave where it is.

    Args:
      folder: open.
      params: names of parameters that are read from it and are not trained.

    Raises:
      OSError: what the system says.
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
    """The metadata of a step whose frozen weights are in another folder now.

    Args:
      metadata: of the step; one that holds all its arrays stays as it is.
      pretrained: the folder; None: where they were.
    """
    if pretrained is None or not metadata.base:
        return metadata
    folder = str(user_path(pretrained).absolute())
    if folder == metadata.base["folder"]:
        return metadata
    # There the same tensors may lie in files of other names and sizes.
    return dataclasses.replace(metadata, base={**metadata.base, "folder": folder, "files": {}})


class BaseReader:
    """The frozen weights of a step that are not in its folder; opened when one is asked for.

    Attributes:
      names: of the arrays, as the step has them; empty: all are in its folder.
    """

    def __init__(self, step: Path, metadata: Metadata) -> None:
        """Takes the folder of the step, and what it says. Reads nothing."""
        self._step, self._metadata = step, metadata
        self.names: frozenset[str] = frozenset(metadata.base.get("arrays", ()))

    @property
    def folder(self) -> Path:
        """Where the arrays lie."""
        return Path(self._metadata.base["folder"])

    def check(self) -> None:
        """Looks whether the files are there, and opens them; reads no weights.

        Raises:
          BaseWeightsError: they are not, or hold other tensors.
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
        """{parameter: how the step stores it}, of those that it does not store as numbers."""
        return codes_of_plan(self._metadata.plan)

    def _lazy(self, name: str) -> LazyArray:
        """The array as the step would have it."""
        array, codes = self._arrays[name], self._codes.get(name.removeprefix(PREFIX))
        return array if codes is None else CodedArray(array, codes)

    def read(self, name: str, box: Box) -> np.ndarray:
        """A part of an array, in memory of its own, in the dtype that the step has.

        Raises:
          BaseWeightsError: it is not there.
        """
        array, (start, size) = self._lazy(name), box
        values = np.empty(size, as_abstract(self._metadata.arrays[name]).dtype)
        ranges = [(low, low + n) for low, n in zip(start, size, strict=True)]
        try:
            with np.errstate(over="ignore"):  # as devices round: to infinity
                if not array.is_stacked:
                    values[...] = array.read(ranges)
                    return values
                for row in range(size[0]):  # of the files' dtype there is one layer at a time
                    layer = start[0] + row
                    values[row] = array.read([(layer, layer + 1), *ranges[1:]])[0]
        except (OSError, ValueError) as error:
            raise self._error(f"where {name!r} cannot be read: {reason(error)}") from error
        return values

    def layers(self, name: str) -> Callable[[int], np.ndarray] | None:
        """What reads one index of the first dimension of a stack; None: it is no stack."""
        array = self._lazy(name)
        if not array.is_stacked:
            return None
        start, rest = (0,) * (len(array.shape) - 1), array.shape[1:]
        return lambda index: self.read(name, ((index, *start), (1, *rest)))[0]

    def differs(self, name: str, others: int = 0) -> BaseWeightsError:
        """What is said of an array that has other values than the one that was saved.

        Args:
          others: how many more have.
        """
        more = f" (nor are {others} more arrays)" if others else ""
        files = self._arrays[name].files
        sizes = self._metadata.base["files"]
        # Another size says which of several files was changed; the same size says nothing.
        resized = [x for x in files if x in sizes and _stamp(self.folder / x)[0] != sizes[x]]
        where = " or ".join(resized or files)
        return self._error(f"where {name!r} (in {where}) is not what the run had{more}")

    def _error(self, what: str) -> BaseWeightsError:
        left = f"checkpoint {self._step} leaves {len(self.names)} frozen arrays in {self.folder}"
        return BaseWeightsError(f"{left}, {what}; {_REMEDY}")
