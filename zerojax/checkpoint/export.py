"""Exports the parameters of a saved step to safetensors files, one array at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from zerojax.checkpoint import fingerprint_math
from zerojax.checkpoint.base_weights import BaseReader
from zerojax.checkpoint.errors import BaseWeightsError, CheckpointError, DamagedError, reason
from zerojax.checkpoint.files import new_folder
from zerojax.checkpoint.inspection import SavedStep, open_arrays
from zerojax.checkpoint.metadata import as_abstract
from zerojax.checkpoint.stored_arrays import Unread
from zerojax.config.late_dataclasses import dataclass
from zerojax.optim.weight_codes import WeightCodes, codes_of_plan
from zerojax.zoo.hugging_face.safetensors import (
    SHARD_BYTES,
    SafetensorsError,
    Tensor,
    check_dtype,
    write_files,
)

AVERAGE = "opt_state/ema/"
PREFIXES = {
    "params/": "",
    AVERAGE: "",
    "frozen/": "",
    "weights/": "",
    "extras/": "extras.",
}
"""{prefix of array names in a checkpoint: prefix in the exported files}, for the arrays of a model.
An export contains either the parameters (`params/`) or their average (`opt_state/ema/`); several
objectives share one set of `weights/`."""


@dataclass(frozen=True, kw_only=True)
class Exported:
    """Result of an export.

    Attributes:
      folder: folder of the exported files.
      files: names of the safetensors files.
      num_arrays: number of exported arrays.
      num_bytes: size in bytes of the exported arrays.
    """

    folder: Path
    files: tuple[str, ...]
    num_arrays: int
    num_bytes: int


def export(
    saved: SavedStep,
    out: Path,
    *,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    config: Mapping[str, Any] | None = None,
    tokenizer: Path | None = None,
    weights: Literal["trained", "ema"] = "trained",
) -> Exported:
    """Writes parameters, config.json and the tokenizer into a new folder.

    Needs host memory for the largest array. Compares every array with its fingerprint.

    Args:
      saved: the saved step.
      out: new folder, which must either not exist or be empty. It gets this name when all files
        are complete.
      dtype: dtype of all exported floating-point arrays, such as "bfloat16"; None: the saved
        dtypes, and float32 for weights that were saved as quantization codes.
      shard_bytes: maximum bytes of one file, unless a single array is larger.
      config: content of config.json besides the step; None: the settings in the checkpoint.
      tokenizer: tokenizer file that is copied unchanged.
      weights: "trained" exports the parameters, "ema" their exponential moving average.

    Raises:
      DamagedError: the step is damaged.
      MachineError: the step cannot be read now.
      CheckpointError: the step has a newer format, has no parameters or no average, or has an array
        of a dtype that safetensors does not support.
      FileExistsError: `out` exists and is not an empty folder.
      OSError: the disk reports an error.
    """
    metadata = saved.whole_metadata()
    saved_names: dict[str, str] = {}
    tensors = []
    wanted, codes = model_arrays(saved, weights), saved_codes(saved)
    for name, text in metadata.arrays.items():
        if name in wanted:
            leaf = as_decoded(as_abstract(text), codes.get(name))
            tensors.append(Tensor(name=_name(name), shape=leaf.shape, dtype=_as(dtype, leaf.dtype)))
            saved_names[tensors[-1].name] = name
    if not tensors:
        raise CheckpointError(
            f"{saved.folder} holds no parameters to export, only {list(metadata.arrays)}; pass a "
            "checkpoint of a training run"
        )
    total = sum(tensor.num_bytes for tensor in tensors)
    opened = open_arrays(saved.folder, metadata)

    def values(tensor: Tensor) -> np.ndarray:
        name = saved_names[tensor.name]
        shape = as_abstract(metadata.arrays[name]).shape
        read = read_whole(saved, name, opened[name], shape)
        if name in codes:
            read = codes[name].decode_on_host(read)
        return read.astype(tensor.dtype, copy=False)

    is_wide = any(tensor.dtype in (np.float32, np.float64) for tensor in tensors)
    remedy = "or export fewer bytes with --dtype bf16" if is_wide else None
    with new_folder(out, total, remedy=remedy) as draft:
        names = _write(draft, tensors, values, saved.step, shard_bytes)
        about = dict(metadata.config if config is None else config)
        about["checkpoint"] = {"step": metadata.step, "versions": metadata.versions}
        (draft / "config.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        if tokenizer is not None:
            shutil.copyfile(tokenizer, draft / tokenizer.name)
    return Exported(folder=out, files=tuple(names), num_arrays=len(tensors), num_bytes=total)


def model_arrays(saved: SavedStep, weights: Literal["trained", "ema"]) -> dict[str, str]:
    """Returns the arrays that are exported: {name in the checkpoint: name in the model}, such as
    {"params/blocks/kernel": "blocks/kernel"}.

    Args:
      saved: the saved step.
      weights: "trained" for the parameters, "ema" for their exponential moving average.

    Raises:
      CheckpointError: "ema" is requested, but the step has no average.
    """
    left_out = AVERAGE if weights == "trained" else "params/"
    prefixes = tuple(prefix for prefix in PREFIXES if prefix != left_out)
    names = [name for name in saved.whole_metadata().arrays if name.startswith(prefixes)]
    if weights == "ema" and not any(name.startswith(AVERAGE) for name in names):
        raise CheckpointError(without_average(f"step {saved.step} in {saved.folder.parent}"))
    return {name: name.removeprefix(_prefix(name)) for name in names}


def saved_codes(saved: SavedStep) -> dict[str, WeightCodes]:
    """Returns {name of an array in a step: its quantization codes}, read from the step's plan."""
    found = codes_of_plan(saved.whole_metadata().plan)
    return {f"frozen/{name}": codes for name, codes in found.items()}


def as_decoded(leaf: jax.ShapeDtypeStruct, codes: WeightCodes | None) -> Any:
    """Returns the decoded shape and dtype of a quantized array; `leaf` itself without `codes`."""
    if codes is None:
        return leaf
    return jax.ShapeDtypeStruct(codes.true_shape(leaf.shape), np.float32)


def without_average(step: str) -> str:
    """Returns the error message for a step that has no average (EMA) of its weights."""
    return (
        f"{step} has no ema: weights='ema' (--weights ema) needs a run with an average of "
        "its weights (optimizer.ema_decay, zerojax.with_ema); use weights='trained' (the default)"
    )


def _prefix(saved: str) -> str:
    return next(prefix for prefix in PREFIXES if saved.startswith(prefix))


def _name(saved: str) -> str:
    """Converts a checkpoint's name to a model's name: `params/blocks/kernel` -> `blocks.kernel`."""
    prefix = _prefix(saved)
    return PREFIXES[prefix] + saved.removeprefix(prefix).replace("/", ".")


def _as(dtype: str | None, own: DTypeLike) -> np.dtype:
    floating = jnp.issubdtype(own, jnp.floating)
    return np.dtype(jnp.dtype(dtype) if dtype is not None and floating else own)


def _write(
    folder: Path,
    tensors: Sequence[Tensor],
    values: Callable[[Tensor], np.ndarray],
    step: int,
    shard_bytes: int,
) -> list[str]:
    # All dtypes are checked before the first file is written.
    try:
        for tensor in tensors:
            check_dtype(tensor, "pass --dtype fp32 or bf16")
    except SafetensorsError as error:
        raise CheckpointError(str(error)) from None
    metadata = {"format": "flax", "step": str(step)}
    return write_files(folder, tensors, values, shard_bytes=shard_bytes, metadata=metadata)


def read_whole(saved: SavedStep, name: str, unread: Unread, shape: Sequence[int]) -> np.ndarray:
    """Reads an array of a step, and raises if its values differ from its saved fingerprint.

    Args:
      saved: the saved step.
      name: name of the array.
      unread: entry of the array in the result of `open_arrays`.
      shape: shape of the whole array.

    Raises:
      DamagedError: the array differs from its fingerprint, or cannot be read.
      BaseWeightsError: the same, for an array of the folder of frozen weights.
    """
    assert saved.metadata is not None
    try:
        values = np.asarray(unread.open()(((0,) * len(shape), tuple(shape))))
    except BaseWeightsError:
        raise
    except Exception as error:
        raise DamagedError(
            f"checkpoint {saved.folder} is damaged: {name!r} cannot be read ({reason(error)}); "
            "export an earlier step"
        ) from error
    _check(saved, name, fingerprint_math.of_array(values))
    return values


def _check(saved: SavedStep, name: str, sums: fingerprint_math.Sums) -> None:
    assert saved.metadata is not None
    expected = saved.metadata.fingerprints.get(name)
    if expected is not None and fingerprint_math.as_text(sums) != expected:
        base = BaseReader(saved.folder, saved.metadata)
        if name in base.names:
            raise base.differs(name)
        raise DamagedError(
            f"checkpoint {saved.folder} is damaged: {name!r} differs from what was saved; export "
            "an earlier step"
        )


class Layers:
    """Reader of a stacked array in a saved step that holds only one layer in memory.

    Files written before 2026-11-22, and files with small layers, do not store layers separately.
    The whole stack then stays in memory.

    Args:
      saved: the saved step.
      name: name of the array.
      unread: entry of the array in the result of `open_arrays`.
      shape: shape of the whole array.
    """

    def __init__(self, saved: SavedStep, name: str, unread: Unread, shape: Sequence[int]) -> None:
        self._saved, self._name, self._shape = saved, name, tuple(shape)
        self._read, self._whole = unread.open_layers(), None
        if self._read is None:
            self._whole = read_whole(saved, name, unread, shape)
        self._sums: dict[int, fingerprint_math.Sums] = {}

    def layer(self, index: int) -> np.ndarray:
        """Reads one layer. Once all layers are read, raises DamagedError if the stack differs from
        its saved fingerprint."""
        if self._read is None:
            assert self._whole is not None
            return self._whole[index]
        try:
            values = np.ascontiguousarray(self._read(index))
        except BaseWeightsError:
            raise
        except Exception as error:
            raise DamagedError(
                f"checkpoint {self._saved.folder} is damaged: {self._name!r} cannot be read "
                f"({reason(error)}); export an earlier step"
            ) from error
        start = (index, *(0 for _ in self._shape[1:]))
        # By index, so that a layer that is read twice counts once.
        self._sums[index] = fingerprint_math.of_part(values[None], start, self._shape)
        if len(self._sums) == self._shape[0]:
            _check(self._saved, self._name, fingerprint_math.add(*self._sums.values()))
        return values
