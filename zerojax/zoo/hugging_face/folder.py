"""Hugging Face folders: config.json and tensors in one or several safetensors files."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zerojax.config.display import cut, printable, quoted
from zerojax.config.loader import user_path
from zerojax.runtime.bounded_json import inside, load
from zerojax.zoo.hugging_face.config_reading import UnsupportedError
from zerojax.zoo.hugging_face.layouts import Range
from zerojax.zoo.hugging_face.mxfp4 import METHOD, CodedTensor, find_coded
from zerojax.zoo.hugging_face.safetensors import (
    FEWER,
    INDEX,
    MAX_ARRAYS,
    SINGLE,
    Tensor,
    read_block,
    read_table,
)

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
ADAPTER_CONFIG = "adapter_config.json"


@dataclasses.dataclass(kw_only=True)
class Folder:
    """Opened Hugging Face folder; no tensor is in memory.

    Attributes:
      path: absolute path of the folder.
      config: content of config.json.
      tensors: {tensor name: (file, entry of the file's table)}; of a weight in codes, its decoded
        entry with the file of its codes.
      coded: {tensor name: codes of a weight in MXFP4}.
      absent: {tensor that the index lists, but no file contains: its file in the index}.
      bytes_read: number of tensor bytes that this process has read.
    """

    path: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, tuple[Path, Tensor]]
    coded: Mapping[str, CodedTensor] = dataclasses.field(default_factory=dict)
    absent: Mapping[str, str] = dataclasses.field(default_factory=dict)
    bytes_read: int = 0

    def file_of(self, tensor: str) -> str:
        """Returns the file name of a tensor, relative to the folder."""
        return str(self.tensors[tensor][0].absolute().relative_to(self.path))

    @property
    def files(self) -> list[str]:
        """Returns the sorted names of the files with tensors, relative to the folder."""
        return sorted({self.file_of(tensor) for tensor in self.tensors})

    def read(self, name: str, runs: Sequence[Sequence[Range]]) -> np.ndarray:
        """Reads a block of a tensor, and no other bytes; a weight in codes is decoded.

        Args:
          name: name of the tensor.
          runs: ordered ranges for each dimension; the block is their Cartesian product.
        """
        if name in self.coded:
            return self.coded[name].read(self._read_stored, runs)
        return self._read_stored(self.tensors[name], runs)

    def _read_stored(
        self, stored: tuple[Path, Tensor], runs: Sequence[Sequence[Range]]
    ) -> np.ndarray:
        block, count = read_block(*stored, runs)
        self.bytes_read += count
        return block


def open_folder(path: str | Path) -> Folder:
    """Reads config.json and the tables of all files.

    Raises:
      FileNotFoundError: the folder or a required file does not exist.
      ValueError: a file is damaged.
    """
    folder = user_path(path)
    if not folder.is_dir():
        remedy = "pass a folder with config.json and *.safetensors"
        if not folder.is_absolute() and len(folder.parts) == 2:
            remedy += (
                "; zerojax downloads nothing: fetch a model of the Hub first, with "
                f"`hf download {path} --local-dir {folder.name}`"
            )
        raise FileNotFoundError(f"{path} is not a folder; {remedy}")
    check_kind(folder)
    config = read_json(folder / CONFIG)
    places = _places(folder)
    tensors: dict[str, tuple[Path, Tensor]] = {}
    for file in _files(folder, places):
        table = read_table(file)
        if len(tensors) + len(table) > MAX_ARRAYS:
            raise ValueError(
                f"{folder}: its files have more than {MAX_ARRAYS} arrays, the maximum; {FEWER}"
            )
        for name, tensor in table.items():
            if name in tensors:
                raise ValueError(
                    f"{folder}: tensor {quoted(name)} is in both {tensors[name][0].name} and "
                    f"{file.name}; fetch both again"
                )
            tensors[name] = file, tensor
    absent = {name: file for name, file in (places or {}).items() if name not in tensors}
    for name, file in (places or {}).items():
        if name not in absent and tensors[name][0] != folder / file:
            raise ValueError(
                f"{folder / INDEX} lists {quoted(name)} in {file}, which does not contain it; "
                "fetch both again"
            )
    opened = Folder(path=folder.absolute(), config=config, tensors=tensors, absent=absent)
    if _method(config) != METHOD:
        return opened
    coded = find_coded(tensors)
    # The decoded weight replaces its two stored tensors.
    codes = {part[1].name for one in coded.values() for part in (one.blocks, one.scales)}
    tensors = {name: place for name, place in tensors.items() if name not in codes}
    tensors |= {name: (one.blocks[0], one.decoded) for name, one in coded.items()}
    return dataclasses.replace(opened, tensors=tensors, coded=coded)


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object from a file.

    Raises:
      FileNotFoundError: the file does not exist.
      ValueError: the file does not hold an object.
    """
    try:
        content = load(path)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{path.parent} has no {path.name}; pass a folder written by `save_pretrained` or "
            "downloaded from the Hub"
        ) from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, not an object; fetch it again")
    return content


NOT_A_RUN = (
    "has a Hugging Face model or adapters of PEFT, not a run of zerojax; read either with "
    "zerojax.from_hugging_face(FOLDER), or in a run file with model.pretrained"
)
"""Rest of a message whose subject is a folder that was given as a run."""
_EXPORT = "`zerojax checkpoint export RUN FOLDER --format hugging_face`"
_OTHER_KINDS = {
    "run.json": (
        "is the folder of a run of zerojax",
        f"write its model as a folder with {_EXPORT}, or load the run with zerojax.load_run",
    ),
    "writer.lock": (
        "has the checkpoints of a run of zerojax",
        f"write the model as a folder with {_EXPORT}, where RUN is the folder of the run",
    ),
    "manifest.ocdbt _CHECKPOINT_METADATA */_CHECKPOINT_METADATA": (
        "is a checkpoint of Orbax",
        f"write the model of a run of zerojax with {_EXPORT}; the weights of another program have "
        "to be saved by that program as safetensors with a config.json",
    ),
    "*.gguf": (
        "has weights of llama.cpp (*.gguf)",
        "convert them with examples/conversion/gguf_to_hugging_face.py FILE.gguf FOLDER",
    ),
}
"""{files, any of which a folder of another kind has: (what the folder is, what to do)}."""


def check_kind(folder: Path) -> None:
    """Checks that a folder is not of another kind, such as that of adapters or of a run.

    Raises:
      UnsupportedError: the folder has adapters of PEFT. transformers would read their base model,
        even if the folder has weights of its own.
      FileNotFoundError: the folder has no config.json of a model, but files of another kind, or a
        folder with a config.json.
    """
    if (folder / ADAPTER_CONFIG).is_file():
        remedy = "pass the folder of their base model here"
        if has_adapters(folder):
            remedy = (
                "read them with their base model: zerojax.from_hugging_face("
                f"{str(folder)!r}, base=FOLDER); or {remedy}"
            )
        elif (folder / CONFIG).is_file():
            remedy = (
                f"move {ADAPTER_CONFIG} to another folder to read the weights without them, or "
                "both files of the adapters, to read those"
            )
        raise UnsupportedError(f"{folder} has adapters of PEFT ({ADAPTER_CONFIG}); {remedy}")
    if is_model_folder(folder):
        return
    for patterns, (kind, remedy) in _OTHER_KINDS.items():
        if any(True for pattern in patterns.split() for _ in folder.glob(pattern)):
            raise FileNotFoundError(f"{folder} {kind}, not a Hugging Face folder; {remedy}")
    inner = next(
        itertools.chain(*(folder.glob(f"{x}*/{CONFIG}") for x in ("", "snapshots/"))), None
    )
    if inner is not None and not (folder / CONFIG).is_file():
        raise FileNotFoundError(f"{folder} has no {CONFIG}; pass its folder {inner.parent}")


def has_adapters(folder: Path) -> bool:
    """Returns whether a folder has adapters of PEFT, and no weights of a whole model."""
    weights = any((folder / name).is_file() for name in (SINGLE, INDEX))
    return (folder / ADAPTER_CONFIG).is_file() and not weights


def is_model_folder(folder: Path) -> bool:
    """Returns whether a folder has a Hugging Face model, or adapters of PEFT for one."""
    if (folder / ADAPTER_CONFIG).is_file():
        return True
    return (folder / CONFIG).is_file() and "model_type" in read_json(folder / CONFIG)


def _places(folder: Path) -> dict[str, str] | None:
    """Returns {tensor: file} of the index, or None if there is no index or it is not used.

    As in transformers, model.safetensors is read even if there is an index: transformers leaves the
    index of the earlier files when it saves a folder again with a single file.
    """
    path = folder / INDEX
    if (folder / SINGLE).is_file() or not path.is_file():
        return None
    places = read_json(path).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ValueError(f"{path} has no weight_map; fetch it again")
    for name, file in places.items():
        if not inside(file):
            raise ValueError(
                f"{path} lists {quoted(name)} in {quoted(file)}, which is not the name of a file "
                "in its folder; fetch it again"
            )
    return places


def _files(folder: Path, places: Mapping[str, str] | None) -> list[Path]:
    """Returns the files with tensors: the files of the index, or the only safetensors file."""
    if places is not None:
        files = [folder / name for name in sorted(set(places.values()))]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise FileNotFoundError(
                f"{folder} lacks {len(missing)} of {len(files)} files of its index, such as "
                f"{printable(missing[0])}; fetch them"
            )
        return files
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    others = sorted(folder.glob("*.safetensors"))
    if len(others) == 1:
        return others
    names = ", ".join(file.name for file in others) or "none"
    remedy = f"rename the right one to {SINGLE}" if others else "pass a folder that has them"
    if not others and any(folder.glob("*.bin")):
        remedy = (
            "its weights are pickled (*.bin), and unpickling may run code; convert them with "
            "transformers: AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(OTHER)"
        )
    raise FileNotFoundError(
        f"{folder} has no {SINGLE} or {INDEX} (*.safetensors: {names}); {remedy}"
    )


def check_unquantized(config: Mapping[str, Any]) -> None:
    """Checks that the weights are not quantized, or are codes of MXFP4, which are decoded.

    Raises:
      UnsupportedError: config.json has a `quantization_config` of another kind.
    """
    method = _method(config)
    if method is not None and method != METHOD:
        raise UnsupportedError(
            f"config.json: quantization_config ({cut(str(method), 100)}): quantized weights are "
            f"not supported, except {METHOD}; use the unquantized model"
        )


def _method(config: Mapping[str, Any]) -> Any:
    """Returns `quant_method` of config.json; None if weights are not quantized."""
    quantization = config.get("quantization_config")
    if not quantization:
        return None
    is_dict = isinstance(quantization, dict)
    return quantization.get("quant_method", "unknown") if is_dict else quantization


def end_tokens_in(folder: Path, config: Mapping[str, Any] | None = None) -> tuple[int, ...]:
    """Returns the ids that end a text, from generation_config.json, or else from config.json.

    Args:
      folder: a Hugging Face folder, which may be missing.
      config: content of its config.json; None reads it from the folder, if it exists.

    Returns:
      The ids; () if no file states any.

    Raises:
      ValueError: a file is damaged.
    """
    for name, content in ((GENERATION_CONFIG, None), (CONFIG, config)):
        if content is None:
            content = read_json(folder / name) if (folder / name).is_file() else {}
        found = content.get("eos_token_id")
        found = found if isinstance(found, list) else [found]
        if ids := tuple(x for x in found if isinstance(x, int) and not isinstance(x, bool)):
            return ids
    return ()
