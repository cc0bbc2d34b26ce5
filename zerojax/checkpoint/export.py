"""The parameters of a saved step as safetensors files, read and written one array at a time.

Knows a step's arrays and the format; never a model. The format is a table in front of plain bytes
(github.com/huggingface/safetensors, "Format"); the package of that name writes it only from a whole
dict in memory, so it is written here, and read by the package in a test.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from zerojax import fingerprints
from zerojax.checkpoint import files
from zerojax.checkpoint.errors import CheckpointError, DamagedError, reason
from zerojax.checkpoint.inspection import SavedStep, open_arrays
from zerojax.checkpoint.metadata import as_abstract
from zerojax.store.files import check_space

PREFIXES = {"params/": "", "frozen/": "", "extras/": "extras."}
"""What of a state a model is made of, and what its names begin with in the files."""

SHARD_BYTES = 5 * 10**9
"""From there on there are several files and an index, as Hugging Face has them."""

_INDEX = "model.safetensors.index.json"
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written.

    Attributes:
      folder: where.
      files: names of the safetensors files.
      num_arrays, num_bytes: in them.
    """

    folder: Path
    files: tuple[str, ...]
    num_arrays: int
    num_bytes: int


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """An array on its way: its name in the checkpoint, in the file, and what is written of it."""

    saved: str
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


def export(
    saved: SavedStep,
    out: Path,
    *,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    config: Mapping[str, Any] | None = None,
    tokenizer: Path | None = None,
) -> Exported:
    """Writes parameters, config.json and the tokenizer into a new folder.

    Memory is that of the largest array. Every array is compared with its fingerprint on the way.

    Args:
      saved: the step.
      out: must not be there, or be empty; it gets its name when everything is in it.
      dtype: of all floating-point arrays, such as "bfloat16"; None: as they were saved.
      shard_bytes: of one file at most, unless a single array is larger.
      config: what becomes config.json besides the step; None: the settings in the checkpoint.
      tokenizer: a file to be copied as it is.

    Raises:
      DamagedError: the step is not what was saved.
      CheckpointError: it has no parameters, or one of a dtype that the format does not have.
      FileExistsError: something is at `out`.
      OSError: what the disk says.
    """
    metadata = saved.metadata
    if metadata is None or saved.problem is not None:
        raise DamagedError(f"checkpoint {saved.folder} is damaged: {saved.problem}")
    tensors = [
        _Tensor(saved=name, name=_name(name), shape=leaf.shape, dtype=_as(dtype, leaf.dtype))
        for name, text in metadata.arrays.items()
        if name.startswith(tuple(PREFIXES))
        for leaf in [as_abstract(text)]
    ]
    if not tensors:
        raise CheckpointError(f"{saved.folder} holds no parameters, only {list(metadata.arrays)}")
    if out.exists() and (not out.is_dir() or os.listdir(out)):
        raise FileExistsError(f"{out} is there already; name a folder that is not")
    out.parent.mkdir(parents=True, exist_ok=True)
    total = sum(tensor.num_bytes for tensor in tensors)
    check_space(out.parent, total, remedy="or export fewer bytes with --dtype bf16")
    draft = out.with_name(f"{out.name}.partial")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    try:
        names = _write_files(saved, draft, _shards(tensors, shard_bytes), total)
        about = dict(metadata.config if config is None else config)
        about["checkpoint"] = {"step": metadata.step, "versions": metadata.versions}
        (draft / "config.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        if tokenizer is not None:
            shutil.copyfile(tokenizer, draft / tokenizer.name)
        for name in os.listdir(draft):
            files.to_disk(draft / name)
        files.to_disk(draft)
        if out.exists():
            out.rmdir()
        os.rename(draft, out)
        files.to_disk(out.parent)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return Exported(folder=out, files=tuple(names), num_arrays=len(tensors), num_bytes=total)


def _name(saved: str) -> str:
    """`params/blocks/kernel` -> `blocks.kernel`."""
    prefix = next(prefix for prefix in PREFIXES if saved.startswith(prefix))
    return PREFIXES[prefix] + saved.removeprefix(prefix).replace("/", ".")


def _as(dtype: str | None, own: Any) -> np.dtype:
    floating = jnp.issubdtype(own, jnp.floating)
    return np.dtype(jnp.dtype(dtype) if dtype is not None and floating else own)


def _shards(tensors: Sequence[_Tensor], shard_bytes: int) -> list[list[_Tensor]]:
    """The arrays of each file, in order."""
    result: list[list[_Tensor]] = [[]]
    size = 0
    for tensor in tensors:
        if result[-1] and size + tensor.num_bytes > shard_bytes:
            result.append([])
            size = 0
        result[-1].append(tensor)
        size += tensor.num_bytes
    return result


def _write_files(
    saved: SavedStep, folder: Path, shards: Sequence[Sequence[_Tensor]], total: int
) -> list[str]:
    count = len(shards)
    names = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
    if count == 1:
        names = ["model.safetensors"]
    for name, tensors in zip(names, shards, strict=True):
        _write_file(saved, folder / name, tensors)
    if count > 1:
        places = {
            tensor.name: name
            for name, tensors in zip(names, shards, strict=True)
            for tensor in tensors
        }
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / _INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    return names


def _write_file(saved: SavedStep, path: Path, tensors: Sequence[_Tensor]) -> None:
    """8 bytes: the length of the table; the table as JSON; the bytes of all arrays."""
    assert saved.metadata is not None
    table: dict[str, Any] = {"__metadata__": {"format": "flax", "step": str(saved.step)}}
    at = 0
    for tensor in tensors:
        if tensor.dtype.name not in _KINDS:
            raise CheckpointError(
                f"{tensor.saved!r} is {tensor.dtype.name}, which safetensors does not have; pass "
                "--dtype fp32 or bf16"
            )
        table[tensor.name] = {
            "dtype": _KINDS[tensor.dtype.name],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.num_bytes],
        }
        at += tensor.num_bytes
    head = json.dumps(table).encode()
    head += b" " * (-len(head) % 8)  # arrays begin at a multiple of 8
    opened = open_arrays(saved.folder, saved.metadata)
    with path.open("xb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        for tensor in tensors:
            values = _values(saved, tensor, opened[tensor.saved])
            file.write(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)


def _values(saved: SavedStep, tensor: _Tensor, unread: Any) -> np.ndarray:
    """An array as it is written; refuses one that is not what was saved."""
    assert saved.metadata is not None
    try:
        values = np.asarray(unread.open()(((0,) * len(tensor.shape), tensor.shape)))
    except Exception as error:
        raise DamagedError(
            f"checkpoint {saved.folder} is damaged: {tensor.saved!r} cannot be read "
            f"({reason(error)})"
        ) from error
    expected = saved.metadata.fingerprints.get(tensor.saved)
    if expected is not None and fingerprints.as_text(fingerprints.of_array(values)) != expected:
        raise DamagedError(
            f"checkpoint {saved.folder} is damaged: {tensor.saved!r} is not what was saved; export "
            "an earlier step"
        )
    return values.astype(tensor.dtype, copy=False)
