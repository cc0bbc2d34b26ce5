"""Packs: small arrays stacked into a few large ones, because each stored array has a fixed cost.

Saving 232 arrays of 2.25 MB took 1.1 to 1.5 s of processor time and 0.7 to 1 s of waiting; the same
bytes in 8 arrays took 0.4 to 0.5 s and 0.1 s (two cores that other programs also used).

Every device stacks its own shards, so nothing is sent between devices. If several devices hold
copies of a shard, each of them writes a part. A table stores where each part of each array is, so
that any mesh can read it. A pack has one dtype, because XLA on CPU copies arrays that it stacks,
but converts dtypes, even bits, with a loop over elements (44 against 87 ms of processor time for
65 MB).
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  (teaches NumPy the name "bfloat16")
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax.checkpoint.store.boxes import Box, Shape, box_of, overlap, parts_of_run, slices_of
from zerojax.config.display import quoted
from zerojax.config.late_dataclasses import dataclass
from zerojax.models.given_arrays import aligned_empty
from zerojax.runtime.bounded_json import load

FILE_NAME = "packs.json"
PREFIX = "pack/"

LARGEST = 1 << 20
"""Shards of at least this many bytes are written separately, because the cost is per shard: 232
arrays of 2.25 MB on one device are saved in 0.94 s separately and in 1.1 s in packs; on eight
devices in 1.8 s and 1.1 s. Stacking makes a save block for 0.2 to 0.3 s (522 MB, two cores)."""

PACK_BYTES = 64 << 20
"""Largest size of one pack in bytes, summed over all devices; a reader holds one pack in host
memory. A larger array is written separately, even if its shards are small."""

DEVICE_BYTES = 256 << 20
"""Maximum bytes that packs occupy on each device until they are copied to the host. Arrays beyond
this limit are not packed."""

_PLAIN = frozenset(
    ("float32", "int32", "uint32", "bfloat16", "float16", "int16", "uint16", "int8", "uint8")
)
_FORMAT = 1
_COMPARED = 8
"""Maximum number of parts of which all pairs are compared."""
_MOST_BYTES = 256 << 20
"""Maximum size of the table's file in bytes. The table needs about 40 bytes for each device that
holds a part of an array."""


@dataclass(frozen=True)
class _Run:
    """Consecutive elements of a block (rectangular part) of an array, and their place in a pack.

    Attributes:
      start: index of the block's first element in the array.
      shape: shape of the block.
      first: index, in C order, of the first of these elements in the block.
      count: number of elements.
      offset: index of the first of these elements in the pack.
    """

    start: Shape
    shape: Shape
    first: int
    count: int
    offset: int


@dataclass(frozen=True)
class _Place:
    """Place of a small array: its pack, the pack's number of elements, dtype, and its runs."""

    pack: str
    elements: int
    dtype: str
    runs: Sequence[_Run]


class Table:
    """Table of packs: for each small array, its pack and its positions in the pack."""

    def __init__(self, places: Mapping[str, _Place]) -> None:
        self._places = places

    @property
    def names(self) -> frozenset[str]:
        """Names of the arrays that are in packs."""
        return frozenset(self._places)

    def pack_of(self, name: str) -> tuple[str, jax.ShapeDtypeStruct]:
        """Returns the pack that contains an array: its name, and its shape and dtype."""
        place = self._places[name]
        return place.pack, jax.ShapeDtypeStruct((place.elements,), np.dtype(place.dtype))

    def part(self, name: str, pack: np.ndarray, box: Box) -> np.ndarray:
        """Copies a part of an array out of its pack, into new memory.

        Args:
          name: name of the array.
          pack: values of the pack.
          box: the part of the array.

        Raises:
          ValueError: the table lacks some elements of the part.
        """
        place = self._places[name]
        result = aligned_empty(box[1], pack.dtype)
        found: list[Box] = []
        for run in place.runs:
            parts = parts_of_run((run.start, run.shape), (run.first, run.count), None, box)
            for before, size, inside, common in parts:
                at = run.offset + before
                whole = pack[at : at + math.prod(size)].reshape(size)
                result[(*slices_of(common, box[0]), ...)] = whole[inside]
                found.append(common)
        if (count := _num_elements(found, box)) != result.size:
            raise ValueError(
                f"{quoted(name)}: {count} of {result.size} elements were found in {place.pack}"
            )
        return result

    def save(self, folder: Path) -> None:
        """Writes the table into the folder of the step."""
        body = {
            name: {
                **vars(place),
                "runs": [(x.start, x.shape, x.first, x.count, x.offset) for x in place.runs],
            }
            for name, place in self._places.items()
        }
        text = json.dumps({"format": _FORMAT, "arrays": body})
        (folder / FILE_NAME).write_text(text, encoding="utf-8")


def _num_elements(parts: Sequence[Box], box: Box) -> int:
    """Returns how many elements of `box` the parts cover together.

    Elements are counted one by one only if parts overlap, as in no table of a save, or if they are
    too many to compare all pairs.
    """
    few = len(parts) <= _COMPARED
    if few and not any(overlap(a, b) for a, b in itertools.combinations(parts, 2)):
        return sum(math.prod(shape) for _, shape in parts)
    is_there = np.zeros(box[1], bool)
    for part in parts:
        is_there[(*slices_of(part, box[0]), ...)] = True
    return int(np.sum(is_there))


def load_table(folder: Path) -> Table:
    """Reads the table of a step; the table is empty for a step without packs.

    Raises:
      ValueError: the file is not a table of this version with positions inside blocks and packs.
      OSError: the operating system reports an error.
    """
    try:
        body = load(folder / FILE_NAME, max_bytes=_MOST_BYTES, follow=False)
    except FileNotFoundError:
        return Table({})
    if not isinstance(body, dict) or not isinstance(body.get("arrays"), dict):
        raise ValueError(f"{FILE_NAME} has no table of arrays")
    if body.get("format") != _FORMAT:
        raise ValueError(
            f"{FILE_NAME} has format {quoted(body.get('format'))}, this version reads {_FORMAT}"
        )
    return Table({name: _as_place(name, entry) for name, entry in body["arrays"].items()})


def _as_place(name: str, entry: Mapping[str, Any]) -> _Place:
    """Converts an entry of the table to a `_Place`.

    Raises:
      ValueError: the entry is invalid, or its elements are out of range.
    """
    try:
        pack, elements, dtype = entry["pack"], entry["elements"], entry["dtype"]
        runs = [_Run(tuple(a), tuple(b), *rest) for a, b, *rest in entry["runs"]]
    except (TypeError, KeyError, ValueError):
        raise ValueError(f"{FILE_NAME} has no entry for {quoted(name)}") from None
    numbers = [elements]
    for run in runs:
        numbers += [*run.start, *run.shape, run.first, run.count, run.offset]
    if not (isinstance(pack, str) and pack.startswith(PREFIX) and dtype in _PLAIN):
        raise ValueError(f"{FILE_NAME} has {quoted(pack)} of {quoted(dtype)} for {quoted(name)}")
    if not all(type(number) is int and 0 <= number <= 2**31 for number in numbers):
        raise ValueError(f"{FILE_NAME} has invalid positions for {quoted(name)}")
    for run in runs:
        fits = run.first + run.count <= math.prod(run.shape) and run.offset + run.count <= elements
        if len(run.start) != len(run.shape) or not fits:
            raise ValueError(
                f"{FILE_NAME} has positions for {quoted(name)} beyond the end of a block or pack"
            )
    return _Place(pack, elements, dtype, runs)


def stack(arrays: Mapping[str, jax.Array]) -> tuple[dict[str, jax.Array], Table]:
    """Stacks small arrays into packs, which are fewer and larger arrays.

    The packs are copied immediately, so the arrays may be donated afterwards. Every process must
    call it.

    Returns:
      {name: array to write}, which contains the packs and the arrays that are in no pack; and the
      table of the packs.
    """
    result, places = dict(arrays), {}
    for number, names in enumerate(_groups(arrays)):
        group = [arrays[name] for name in names]
        mesh = _mesh_of(group[0])
        assert mesh is not None
        pack = f"{PREFIX}{number}"
        specs = tuple(_spec(array) for array in group)
        result[pack] = _stacker(mesh, specs)(group)
        places |= _places(pack, names, group, result[pack])
        for name in names:
            del result[name]
    return result, Table(places)


def _groups(arrays: Mapping[str, jax.Array]) -> list[list[str]]:
    """Groups arrays into packs; returns the names of the arrays of each pack. All arrays of a pack
    have one mesh and one dtype, and a pack has at least two arrays."""
    full: list[list[str]] = []
    waiting: dict[tuple[Mesh, np.dtype], list[str]] = {}
    sizes: dict[tuple[Mesh, np.dtype], int] = {}
    of_device = 0
    for name, array in arrays.items():
        mesh = _mesh_of(array)
        if mesh is None or _shard_bytes(array) >= LARGEST or array.nbytes > PACK_BYTES:
            continue
        # Whatever the sharding: of a replicated array each device stacks only a part.
        of_device += array.nbytes // mesh.size
        if of_device > DEVICE_BYTES:
            break
        key = mesh, array.dtype
        if sizes.get(key, 0) + array.nbytes > PACK_BYTES:
            # There is one, because no array alone is larger than `PACK_BYTES`.
            full.append(waiting.pop(key))
            sizes[key] = 0
        waiting.setdefault(key, []).append(name)
        sizes[key] = sizes.get(key, 0) + array.nbytes
    return [names for names in (*full, *waiting.values()) if len(names) > 1]


def _mesh_of(array: jax.Array) -> Mesh | None:
    """Returns the mesh of an array; None if the array cannot be stacked into a pack."""
    sharding = array.sharding
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return None
    usual = sharding.mesh.devices.flat[0].default_memory().kind
    if array.dtype.name not in _PLAIN or not array.size:
        return None
    return sharding.mesh if sharding.memory_kind in (None, usual) else None


def _shard_bytes(array: jax.Array) -> int:
    return math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize


def _spec(array: jax.Array) -> P:
    assert isinstance(array.sharding, NamedSharding)
    return array.sharding.spec


def _unused(mesh: Mesh, spec: P) -> tuple[str, ...]:
    """Returns the axes of a mesh over which an array is replicated."""
    used: set[str] = set()
    for entry in spec:
        used |= {entry} if isinstance(entry, str) else set(entry or ())
    return tuple(axis for axis in mesh.axis_names if axis not in used)


@functools.lru_cache(maxsize=64)
def _stacker(mesh: Mesh, specs: tuple[P, ...]) -> Any:
    """Builds a jitted function that stacks arrays with these specs into a pack."""

    def local(shards: list[jax.Array]) -> jax.Array:
        parts = []
        for shard, spec in zip(shards, specs, strict=True):
            flat = shard.reshape(-1)
            axes = _unused(mesh, spec)
            copies = int(np.prod([mesh.shape[axis] for axis in axes], dtype=np.int64))
            if copies > 1:
                # Padded, because a slice beyond the end is moved back by JAX and would repeat
                # elements of the part before.
                size = -(-flat.size // copies)
                flat = jnp.pad(flat, (0, copies * size - flat.size))
                flat = jax.lax.dynamic_slice_in_dim(flat, jax.lax.axis_index(axes) * size, size)
            parts.append(flat)
        return jnp.concatenate(parts)

    everywhere = P(mesh.axis_names)
    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(list(specs),), out_specs=everywhere, check_vma=False
    )
    return jax.jit(mapped, out_shardings=NamedSharding(mesh, everywhere))


def _places(
    pack: str, names: Sequence[str], group: Sequence[jax.Array], packed: jax.Array
) -> dict[str, _Place]:
    """Returns {name: place in the pack} of the arrays that `_stacker` has stacked into `packed`."""
    mesh = _mesh_of(group[0])
    assert mesh is not None
    result, before = {}, 0
    own = packed.size // mesh.size
    positions = list(np.ndindex(*mesh.devices.shape))
    for name, array in zip(names, group, strict=True):
        axes = _unused(mesh, _spec(array))
        dims = [mesh.axis_names.index(axis) for axis in axes]
        sizes = [mesh.devices.shape[dim] for dim in dims]
        copies = int(np.prod(sizes, dtype=np.int64))
        boxes = array.sharding.devices_indices_map(array.shape)
        count = int(np.prod(array.sharding.shard_shape(array.shape), dtype=np.int64))
        size = -(-count // copies)
        runs = []
        for number, at in enumerate(positions):
            # As `axis_index` counts in `_stacker`: the first axis varies slowest.
            turn = 0
            for dim, length in zip(dims, sizes, strict=True):
                turn = turn * length + at[dim]
            first, end = min(turn * size, count), min((turn + 1) * size, count)
            if first < end:
                start, shape = box_of(boxes[mesh.devices[at]], array.shape)
                runs.append(_Run(start, shape, first, end - first, number * own + before))
        result[name] = _Place(pack, packed.size, array.dtype.name, runs)
        before += size
    return result
