"""Differences of two saved steps: settings, plan, versions, and the values of each array.

One process suffices; no model and no mesh is needed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from zerojax.checkpoint.errors import CheckpointError, DamagedError, reason
from zerojax.checkpoint.inspection import SavedStep, open_arrays
from zerojax.checkpoint.metadata import Metadata
from zerojax.checkpoint.pieces import Unread
from zerojax.checkpoint.store.boxes import Box
from zerojax.checkpoint.verification import parts_of

_ABSENT = "not there"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """An array of both steps whose values differ.

    Attributes:
      name: of the array.
      norm: of the difference, second step minus first; None where the shapes differ.
      relative: `norm` over the norm of the first; infinite where that is 0.
      elements: how many differ, bit for bit; None where shapes or dtypes differ.
      what: dtype and shape in both steps, where they differ.
    """

    name: str
    norm: float | None
    relative: float | None
    elements: int | None
    what: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """The second step against the first.

    Attributes:
      settings, plan, versions: {key: (value in the first, in the second)} of what differs.
      added, removed: arrays that only the second, only the first has.
      changed: arrays of both that differ.
      num_same: arrays of both that have the same bits.
    """

    settings: Mapping[str, tuple[Any, Any]]
    plan: Mapping[str, tuple[Any, Any]]
    versions: Mapping[str, tuple[Any, Any]]
    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[Change, ...]
    num_same: int

    @property
    def is_empty(self) -> bool:
        """Whether nothing differs."""
        parts = self.settings, self.plan, self.versions, self.added, self.removed, self.changed
        return not any(parts)


def compare(first: SavedStep, second: SavedStep) -> Difference:
    """Compares two steps; reads only arrays whose fingerprints differ or are missing.

    Raises:
      DamagedError: what has to be read cannot be. MachineError: not now. CheckpointError: a step is
        of a newer format.
    """
    one, other = _metadata(first), _metadata(second)
    names = one.arrays.keys() & other.arrays.keys()
    both = [name for name in one.arrays if name in names]
    kept = [name for name in both if not _same_fingerprint(name, one, other)]
    changes: list[Change] = []
    if kept:
        opened = open_arrays(first.folder, one), open_arrays(second.folder, other)
        for name in kept:
            try:
                change = _change(name, opened[0][name], opened[1][name], one, other)
            except CheckpointError:
                raise
            except Exception as error:
                raise DamagedError(
                    f"{name!r} of {first.folder} or {second.folder} cannot be read: "
                    f"{reason(error)}; `zerojax checkpoint verify` tells which"
                ) from error
            if change is not None:
                changes.append(change)
    return Difference(
        settings=_different(one.config, other.config),
        plan=_different(one.plan, other.plan),
        versions=_different(one.versions, other.versions),
        added=tuple(name for name in other.arrays if name not in names),
        removed=tuple(name for name in one.arrays if name not in names),
        changed=tuple(changes),
        num_same=len(names) - len(changes),
    )


def _metadata(saved: SavedStep) -> Metadata:
    if saved.metadata is None:
        assert saved.error is not None
        raise saved.error
    return saved.metadata


def _same_fingerprint(name: str, one: Metadata, other: Metadata) -> bool:
    """Whether the fingerprints alone say that an array is the same."""
    if one.arrays[name] != other.arrays[name]:
        return False
    found = one.fingerprints.get(name)
    return found is not None and found == other.fingerprints.get(name)


def _different(one: Any, other: Any, at: str = "") -> dict[str, tuple[Any, Any]]:
    """{dotted key: both values} of two JSON values; a list is one value."""
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return {} if one == other else {at: (one, other)}
    result = {}
    for key in [*one, *(key for key in other if key not in one)]:
        place = f"{at}.{key}" if at else key
        result |= _different(one.get(key, _ABSENT), other.get(key, _ABSENT), place)
    return result


def _change(
    name: str, one: Unread, other: Unread, first: Metadata, second: Metadata
) -> Change | None:
    """How an array differs; None where its bits are the same."""
    texts = first.arrays[name], second.arrays[name]
    what = None if texts[0] == texts[1] else f"{texts[0]} and {texts[1]}"
    if one.shape != other.shape:
        return Change(name=name, norm=None, relative=None, elements=None, what=what)
    reads = one.open(), other.open()
    before = total = 0.0
    elements = 0
    for box in parts_of(one.shape, max(one.dtype.itemsize, other.dtype.itemsize)):
        values = _read(reads[0], box), _read(reads[1], box)
        wide = values[0].astype(np.float64), values[1].astype(np.float64)
        before += float(np.sum(np.square(wide[0])))
        total += float(np.sum(np.square(wide[1] - wide[0])))
        if what is None:
            size = one.dtype.itemsize
            bits = [np.ascontiguousarray(x).reshape(-1).view(f"V{size}") for x in values]
            elements += int(np.sum(bits[0] != bits[1]))
    if what is None and not elements:
        return None
    norm, base = math.sqrt(total), math.sqrt(before)
    relative = norm / base if base else math.inf if norm else 0.0
    return Change(
        name=name,
        norm=norm,
        relative=relative,
        elements=None if what else elements,
        what=what,
    )


def _read(read: Callable[[Box], np.ndarray], box: Box) -> np.ndarray:
    return np.asarray(read(box))
