"""Exports a step's parameters to safetensors files, one array at a time."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from zerojax.checkpoint import fingerprint_math
from zerojax.checkpoint.base_weights import BaseReader
from zerojax.checkpoint.errors import BaseWeightsError, CheckpointError, DamagedError, reason
from zerojax.checkpoint.files import new_folder
from zerojax.checkpoint.inspection import SavedStep, open_arrays
from zerojax.checkpoint.metadata import as_abstract
from zerojax.optim.weight_codes import WeightCodes, codes_of_plan
from zerojax.zoo.hugging_face.safetensors import (
    SHARD_BYTES,
    SafetensorsError,
    Tensor,
    check_dtype,
    write_files,
)

AVERAGE = "opt_state/ema/"
PREFIXES = {"params/": "", AVERAGE: "", "frozen/": "", "extras/": "extras."}
"""{prefix in a state: prefix in the files} of the arrays that make up a model. Either the
parameters or their average are exported."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exported:
    """Result of an export.

    Attributes:
      folder: its folder.
      files: names of the safetensors files.
      num_arrays, num_bytes: of the exported arrays.
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

    Needs host memory for the largest array. Every array is compared with its fingerprint.

    Args:
      saved: the step.
      out: must not exist, or be empty; the folder gets this name when it is complete.
      dtype: of all floating-point arrays, such as "bfloat16"; None: the saved dtypes, and float32
        for weights that were saved as codes.
      shard_bytes: limit for one file, unless a single array is larger.
      config: content of config.json besides the step; None: the settings in the checkpoint.
      tokenizer: a file to copy unchanged.
      weights: "ema": the average of the weights instead of the parameters.

    Raises:
      DamagedError: the step differs from what was saved. MachineError: it is not readable now.
      CheckpointError: it is of a newer format, has no parameters or no average, or has an array of
        a dtype that the format does not support.
      FileExistsError: `out` exists.
      OSError: from the disk.
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
    """Returns {name of an array in a step: its name in the model} for the arrays that are exported.

    Args:
      saved: the step; weights: as in `export`.

    Raises:
      CheckpointError: the average is requested, but the step has none.
    """
    left_out = AVERAGE if weights == "trained" else "params/"
    prefixes = tuple(prefix for prefix in PREFIXES if prefix != left_out)
    names = [name for name in saved.whole_metadata().arrays if name.startswith(prefixes)]
    if weights == "ema" and not any(name.startswith(AVERAGE) for name in names):
        raise CheckpointError(without_average(f"step {saved.step} in {saved.folder.parent}"))
    return {name: name.removeprefix(_prefix(name)) for name in names}


def saved_codes(saved: SavedStep) -> dict[str, WeightCodes]:
    """Returns {name of an array in a step: its `WeightCodes`} from the plan of the step."""
    found = codes_of_plan(saved.whole_metadata().plan)
    return {f"frozen/{name}": codes for name, codes in found.items()}


def as_decoded(leaf: Any, codes: WeightCodes | None) -> Any:
    """Returns the decoded shape and dtype of an array of codes; `leaf` itself without `codes`."""
    if codes is None:
        return leaf
    return jax.ShapeDtypeStruct(codes.true_shape(leaf.shape), np.float32)


def without_average(step: str) -> str:
    """Returns the error message for a step without an average of its weights (EMA)."""
    return (
        f"{step} has no ema: weights='ema' (--weights ema) needs a run with an average of "
        "its weights (optimizer.ema_decay, zerojax.with_ema); use weights='trained' (the default)"
    )


def _prefix(saved: str) -> str:
    return next(prefix for prefix in PREFIXES if saved.startswith(prefix))


def _name(saved: str) -> str:
    """Converts a saved name: `params/blocks/kernel` -> `blocks.kernel`."""
    prefix = _prefix(saved)
    return PREFIXES[prefix] + saved.removeprefix(prefix).replace("/", ".")


def _as(dtype: str | None, own: Any) -> np.dtype:
    floating = jnp.issubdtype(own, jnp.floating)
    return np.dtype(jnp.dtype(dtype) if dtype is not None and floating else own)


def _write(
    folder: Path,
    tensors: Sequence[Tensor],
    values: Callable[[Tensor], np.ndarray],
    step: int,
    shard_bytes: int,
) -> list[str]:
    try:
        for tensor in tensors:
            check_dtype(tensor, "pass --dtype fp32 or bf16")
    except SafetensorsError as error:
        raise CheckpointError(str(error)) from None
    metadata = {"format": "flax", "step": str(step)}
    return write_files(folder, tensors, values, shard_bytes=shard_bytes, metadata=metadata)


def read_whole(saved: SavedStep, name: str, unread: Any, shape: Sequence[int]) -> np.ndarray:
    """Reads an array of a step, and raises if it differs from what was saved.

    Args:
      saved: the step.
      name: of the array.
      unread: the array's entry of `open_arrays`.
      shape: of the whole array.

    Raises:
      DamagedError: it differs, or cannot be read.
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
    """Reader of a stacked array in a step that holds one layer in memory at a time.

    If the files do not store layers separately (those written before 2026-11-22, or with small
    layers), the whole stack stays in memory.

    Args:
      saved: the step.
      name: of the array.
      unread: the array's entry of `open_arrays`.
      shape: of the whole array.
    """

    def __init__(self, saved: SavedStep, name: str, unread: Any, shape: Sequence[int]) -> None:
        self._saved, self._name, self._shape = saved, name, tuple(shape)
        self._read, self._whole = unread.open_layers(), None
        if self._read is None:
            self._whole = read_whole(saved, name, unread, shape)
        self._sums: dict[int, fingerprint_math.Sums] = {}

    def layer(self, index: int) -> np.ndarray:
        """Reads one layer. After all were read, raises DamagedError if the stack was changed."""
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
        self._sums[index] = fingerprint_math.of_part(values[None], start, self._shape)
        if len(self._sums) == self._shape[0]:
            _check(self._saved, self._name, fingerprint_math.add(*self._sums.values()))
        return values
