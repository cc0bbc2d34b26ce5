"""Reads and writes safetensors files: validated tables, partial reads, one array at a time.

The package safetensors writes a whole dict from memory, and reads through memory maps, whose pages
count as memory of the process until the system reclaims them. This module writes one array at a
time and reads exactly the bytes of a block.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from zerojax.config.display import quoted
from zerojax.config.late_dataclasses import dataclass
from zerojax.config.regular_files import UnreadableError, open_regular
from zerojax.runtime.bounded_json import JsonError, loads

SHARD_BYTES = 5 * 10**9
"""Maximum size of a file; larger models have several files and an index, as on the Hub."""

MAX_ARRAYS = 250_000
"""Maximum number of arrays of a model, in all its files. The largest published models have about
150,000. So many take about 7 s and 0.5 GiB to read, without their values."""
MAX_TABLE_BYTES = 160 * MAX_ARRAYS
"""Maximum size of a table in bytes: `MAX_ARRAYS` entries with long names. The package safetensors
reads up to 100,000,000 bytes."""
MAX_VALUES = 16 * MAX_ARRAYS
"""Maximum number of values of a table: offsets, sizes, dtypes and notes."""
MAX_DIMENSIONS = 64
"""Maximum number of dimensions of a NumPy array."""
MAX_ARRAY_BYTES = 2**63 - 1

FEWER = "fetch it again, or save the model in fewer and larger arrays"

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_KINDS = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
_UNREAD = (*("C64", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0", "F6_E2M3", "F6_E3M2", "F4"),)
"""Kinds of the format that NumPy lacks or that no model is trained in."""
_DTYPES = {kind: np.dtype(jnp.dtype(name)) for name, kind in _KINDS.items()}
_METADATA = "__metadata__"


class SafetensorsError(ValueError):
    """Raised for a file that violates the format, or an array whose dtype it does not support."""


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """Entry of an array in the table of a safetensors file.

    Attributes:
      name, shape, dtype: name, shape and dtype of the array.
      start: offset of the array's first byte from the beginning of the file.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    start: int = 0

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


# --- reading --------------------------------------------------------------------------------------


def read_table(path: Path) -> dict[str, Tensor]:
    """Reads the table {name: entry} of a file; no array is read.

    As in the package safetensors, arrays must not overlap and must fill the file without gaps, so
    that no other data can be hidden in it.

    Raises:
      SafetensorsError: the file is truncated, not a regular file, or its table is damaged.
      OSError: the file cannot be read.
    """
    try:
        descriptor = open_regular(path)
    except UnreadableError as error:
        raise SafetensorsError(str(error)) from None
    with open(descriptor, "rb") as file:
        size = os.fstat(descriptor).st_size
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else size
        if 8 + length > size:
            raise SafetensorsError(
                f"{path} is truncated or not a safetensors file: its table should have {length} "
                f"bytes, but the whole file has {size}; fetch it again"
            )
        if length > MAX_TABLE_BYTES:
            raise SafetensorsError(
                f"{path}: its table has {length} bytes, above the maximum of {MAX_TABLE_BYTES}; "
                f"{FEWER}"
            )
        text = file.read(length)
    # Counted before anything is created per array.
    if text.count(b"{") - 1 > MAX_ARRAYS or text.count(b",") > MAX_VALUES:
        raise SafetensorsError(
            f"{path}: its table lists more than {MAX_ARRAYS} arrays, the maximum; {FEWER}"
        )
    try:
        return _arrays_of(loads(text, max_bytes=MAX_TABLE_BYTES), 8 + length, size)
    except JsonError as error:
        raise SafetensorsError(f"{path}: its table {error.what}; fetch it again") from None
    except _Damage as damage:
        raise SafetensorsError(f"{path}{damage}") from None


class _Damage(Exception):
    """Error whose text is appended to the path of the file, with a remedy."""

    def __init__(self, problem: str, remedy: str = "fetch it again") -> None:
        super().__init__(f"{problem}; {remedy}")


def _arrays_of(table: object, data: int, size: int) -> dict[str, Tensor]:
    """Checks and returns the entries of a table.

    Args:
      table: parsed JSON.
      data: offset of the first array from the beginning of the file, in bytes.
      size: size of the file in bytes.

    Raises:
      _Damage: an entry is invalid, or arrays overlap, leave gaps or exceed the file.
    """
    if not isinstance(table, dict):
        raise _Damage(f": its table is damaged (it is {quoted(table)}, not an object)")
    notes = table.get(_METADATA, {})
    if not (isinstance(notes, dict) and all(isinstance(note, str) for note in notes.values())):
        raise _Damage(f": its table is damaged ({_METADATA} is {quoted(notes)}, not texts by name)")
    tensors = [_tensor(name, row, data) for name, row in table.items() if name != _METADATA]
    end = data
    # Of arrays that begin at one byte, the empty ones come first.
    for tensor in sorted(tensors, key=lambda tensor: (tensor.start, tensor.num_bytes)):
        if tensor.start < end:
            raise _Damage(
                f": its table is damaged ({quoted(tensor.name)} begins at {tensor.start - data}, "
                f"but the array before it ends at {end - data})"
            )
        if tensor.start > end:
            raise _Damage(
                f": its table is damaged ({quoted(tensor.name)} begins at {tensor.start - data}, "
                f"{tensor.start - end} bytes after the end of the array before it)"
            )
        end += tensor.num_bytes
        if end > size:
            raise _Damage(
                f" is truncated: {quoted(tensor.name)} should end at byte {end}, but the file has "
                f"{size} bytes"
            )
    if end < size:
        raise _Damage(f" has {size - end} bytes more than its arrays, which end at byte {end}")
    return {tensor.name: tensor for tensor in tensors}


def _tensor(name: str, row: object, data: int) -> Tensor:
    def damage(problem: str) -> _Damage:
        return _Damage(f": its table is damaged ({quoted(name)} {problem})")

    if not isinstance(row, dict) or not {"dtype", "shape", "data_offsets"} <= set(row):
        raise damage(f"is {quoted(row)}, without a dtype, a shape or data_offsets")
    kind, shape, offsets = row["dtype"], row["shape"], row["data_offsets"]
    if isinstance(kind, str) and kind in _UNREAD:
        remedy = "save its values as F32, F16 or BF16, or use the unquantized model"
        raise _Damage(f": {quoted(name)} has dtype {kind}, which zerojax does not read", remedy)
    if not isinstance(kind, str) or kind not in _DTYPES:
        raise damage(f"has the unknown dtype {quoted(kind)}")
    if not _are_sizes(shape):
        raise damage(f"has the shape {quoted(shape)}, which is not a list of non-negative integers")
    if len(shape) > MAX_DIMENSIONS:
        raise damage(f"has {len(shape)} dimensions; the maximum is {MAX_DIMENSIONS}")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise damage(
            f"has the data_offsets {quoted(offsets)}, which are not two non-negative integers"
        )
    tensor = Tensor(name=name, shape=tuple(shape), dtype=_DTYPES[kind], start=data + offsets[0])
    # Checked for empty arrays as well, since NumPy multiplies the non-zero sizes.
    if math.prod(size for size in shape if size) * tensor.dtype.itemsize > MAX_ARRAY_BYTES:
        raise damage(f"has the shape {quoted(shape)}, which is too large for an array")
    if offsets[1] - offsets[0] != tensor.num_bytes:
        raise damage(f"is at {offsets[0]} to {offsets[1]}, but has {tensor.num_bytes} bytes")
    return tensor


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def read_block(
    path: Path, tensor: Tensor, runs: Sequence[Sequence[tuple[int, int]]]
) -> tuple[np.ndarray, int]:
    """Reads a block of an array, and no other bytes.

    Args:
      path: the file.
      tensor: entry of the array in the file's table.
      runs: ordered ranges (start, stop) for each dimension; their Cartesian product is read.

    Returns:
      (block, number of bytes read).

    Raises:
      SafetensorsError: the file has been truncated since its table was read.
    """
    shape = tuple(sum(stop - start for start, stop in dim) for dim in runs)
    block = np.empty(shape, tensor.dtype)
    into = block.reshape(-1).view(np.uint8).data
    at = 0
    with path.open("rb", buffering=0) as file:
        for start, length in _extents(tensor, runs):
            done = 0
            # A call may read fewer bytes than it was asked for.
            while done < length:
                piece = into[at + done : at + length]
                count = os.preadv(file.fileno(), [piece], tensor.start + start + done)
                if count == 0:
                    raise SafetensorsError(
                        f"{path} ends within {quoted(tensor.name)}; fetch it again"
                    )
                done += count
            at += length
    return block, at


def _extents(
    tensor: Tensor, runs: Sequence[Sequence[tuple[int, int]]]
) -> Iterable[tuple[int, int]]:
    """Yields (offset in the array, number of bytes) of each contiguous part of a block."""
    if math.prod(sum(stop - start for start, stop in dim) for dim in runs) == 0:
        return
    inner = len(tensor.shape)
    while inner > 0 and list(runs[inner - 1]) == [(0, tensor.shape[inner - 1])]:
        inner -= 1  # dimensions from `inner` on are read completely, so they are contiguous
    unit = math.prod(tensor.shape[inner:]) * tensor.dtype.itemsize
    if inner == 0:
        yield 0, unit
        return
    outer = [[i for run in dim for i in range(*run)] for dim in runs[: inner - 1]]
    for position in itertools.product(*outer):
        row = 0
        for index, size in zip(position, tensor.shape, strict=False):
            row = row * size + index
        for start, stop in runs[inner - 1]:
            yield (row * tensor.shape[inner - 1] + start) * unit, (stop - start) * unit


# --- writing --------------------------------------------------------------------------------------


def check_dtype(tensor: Tensor, remedy: str) -> None:
    """Raises a SafetensorsError for an array whose dtype the format does not support."""
    if tensor.dtype.name not in _KINDS:
        raise SafetensorsError(
            f"{quoted(tensor.name)} is {tensor.dtype.name}, which safetensors does not support; "
            f"{remedy}"
        )


def write_files(
    folder: Path,
    tensors: Sequence[Tensor],
    values: Callable[[Tensor], np.ndarray],
    *,
    shard_bytes: int = SHARD_BYTES,
    metadata: Mapping[str, str],
) -> list[str]:
    """Writes arrays one after the other, to one file, or to several with an index.

    Args:
      folder: an existing folder, without files of these names.
      tensors: entries of the arrays, in the order of writing.
      values: function from an entry to the array; called once per entry, in order.
      shard_bytes: maximum size of a file in bytes, unless a single array is larger.
      metadata: strings for each file's table.

    Returns:
      Names of the files.

    Raises:
      SafetensorsError: an array has a dtype that the format does not support.
      OSError: a file cannot be written.
    """
    shards = _shards(tensors, shard_bytes)
    count = len(shards)
    names = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
    if count == 1:
        names = [SINGLE]
    for name, shard in zip(names, shards, strict=True):
        write_file(folder / name, shard, values, metadata=metadata)
    if count > 1:
        places = {
            tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard
        }
        total = sum(tensor.num_bytes for tensor in tensors)
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    return names


def _shards(tensors: Sequence[Tensor], shard_bytes: int) -> list[list[Tensor]]:
    """Divides the arrays, in order, into files of at most `shard_bytes`, unless a single array is
    larger."""
    result: list[list[Tensor]] = [[]]
    size = 0
    for tensor in tensors:
        if result[-1] and size + tensor.num_bytes > shard_bytes:
            result.append([])
            size = 0
        result[-1].append(tensor)
        size += tensor.num_bytes
    return result


def write_file(
    path: Path,
    tensors: Sequence[Tensor],
    values: Callable[[Tensor], np.ndarray],
    *,
    metadata: Mapping[str, str],
) -> None:
    """Writes one file, one array at a time; the arguments are those of `write_files`."""
    table: dict[str, Any] = {_METADATA: dict(metadata)}
    at = 0
    for tensor in tensors:
        check_dtype(tensor, "use another dtype")
        table[tensor.name] = {
            "dtype": _KINDS[tensor.dtype.name],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.num_bytes],
        }
        at += tensor.num_bytes
    head = json.dumps(table).encode()
    head += b" " * (-len(head) % 8)  # arrays begin at a multiple of 8 bytes
    with path.open("xb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        for tensor in tensors:
            array = np.asarray(values(tensor), order="C")
            assert (array.shape, array.dtype) == (tensor.shape, tensor.dtype), tensor.name
            file.write(array.reshape(-1).view(np.uint8).data)
