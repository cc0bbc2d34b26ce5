"""Live arrays, limits and free memory at the time of an out-of-memory error."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import jax

from zerojax.hardware import devices
from zerojax.runtime import system_memory

PROFILE = "memory.prof"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Living:
    """One array, or several that are called the same.

    Attributes:
      name: of the state's leaf; else dtype and shape.
      size: bytes on the first local device that has some of it.
      count: arrays.
    """

    name: str
    size: int
    count: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """Bytes of the fullest local device, or of the process where devices have no memory of theirs.

    Attributes:
      name: as the device calls itself; in_use; limit and free: None where they are not known.
      source: who sets the limit.
    """

    name: str
    in_use: int
    limit: int | None
    free: int | None
    source: str


def device_now() -> Device:
    """What the fullest local device holds."""
    memory = devices.device_memory()
    if memory["source"] == "device":
        limit = memory["limit"] or None
        free = None if limit is None else max(limit - memory["in_use"], 0)
        name = devices.device_kind()
        return Device(name=name, in_use=memory["in_use"], limit=limit, free=free, source="JAX")
    room = system_memory.least_room()
    return Device(
        name=f"{devices.device_kind()}, in the memory of this process",
        in_use=memory["in_use"],
        limit=None if room is None else room.limit,
        free=None if room is None else room.free,
        source="" if room is None else room.source,
    )


def largest_arrays(state: Any, count: int = 5) -> list[Living]:
    """The arrays that take most of a device now, largest first.

    Args:
      state: a tree whose leaves have names; None: nothing has.
    """
    names: dict[Any, str] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        names[id(leaf)] = name = jax.tree_util.keystr(path, simple=True, separator="/")
        # A step that failed leaves arrays without names: those that it was given.
        names.setdefault((leaf.dtype, leaf.shape), f"{leaf.dtype}{list(leaf.shape)}, like {name}")
    found: dict[str, Living] = {}
    for array in jax.live_arrays():
        if array.is_deleted():
            continue
        like = names.get((array.dtype, array.shape), f"{array.dtype}{list(array.shape)}")
        name = names.get(id(array), like)
        before = found.get(name, Living(name=name, size=0, count=0))
        size = before.size + _shard_size(array)
        found[name] = Living(name=name, size=size, count=before.count + 1)
    return sorted(found.values(), key=lambda one: one.size, reverse=True)[:count]


def _shard_size(array: jax.Array) -> int:
    shape: tuple[int, ...] = array.sharding.shard_shape(array.shape)
    return math.prod(shape) * array.dtype.itemsize


def save_profile(folder: Path | None) -> Path | None:
    """Writes what every array was made by, for `pprof`; None where that cannot be done now."""
    if folder is None:
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        jax.profiler.save_device_memory_profile(str(folder / PROFILE))
    except Exception:  # it is an extra, and whatever fails here must not hide the first error
        return None
    return folder / PROFILE
