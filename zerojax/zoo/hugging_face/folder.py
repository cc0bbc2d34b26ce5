"""Hugging Face folders: config.json and tensors in one or several safetensors files."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zerojax.config.display import cut, printable, quoted
from zerojax.config.loader import user_path
from zerojax.runtime.bounded_json import inside, load
from zerojax.zoo.hugging_face.config_reading import UnsupportedError
from zerojax.zoo.hugging_face.layouts import Range
from zerojax.zoo.hugging_face.safetensors import INDEX, SINGLE, Tensor, read_block, read_table

CONFIG = "config.json"


@dataclasses.dataclass(kw_only=True)
class Folder:
    """An open folder; no tensor is in memory.

    Attributes:
      path: where.
      config: config.json.
      tensors: name -> (file, entry of its table).
      bytes_read: of tensors, by this process so far.
    """

    path: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, tuple[Path, Tensor]]
    bytes_read: int = 0

    def file_of(self, tensor: str) -> str:
        """The name of the file that a tensor is in, relative to the folder."""
        return str(self.tensors[tensor][0].absolute().relative_to(self.path))

    @property
    def files(self) -> list[str]:
        """The names of the files with tensors, relative to the folder, sorted."""
        return sorted({self.file_of(tensor) for tensor in self.tensors})

    def read(self, name: str, runs: Sequence[Sequence[Range]]) -> np.ndarray:
        """A block of a tensor; no other byte of it is read.

        Args:
          name: of the tensor.
          runs: for each dimension ranges, in order; the block is their product.
        """
        file, tensor = self.tensors[name]
        block, count = read_block(file, tensor, runs)
        self.bytes_read += count
        return block


def open_folder(path: str | Path) -> Folder:
    """Reads config.json and the tables of all files.

    Raises:
      FileNotFoundError: no such folder, or it lacks what is needed, with the remedy.
      ValueError: a file is damaged.
    """
    folder = user_path(path)
    if not folder.is_dir():
        remedy = "give a folder with config.json and *.safetensors"
        if not folder.is_absolute() and len(folder.parts) == 2:
            remedy += (
                "; nothing is downloaded here: fetch a model of the Hub first, with "
                f"`hf download {path} --local-dir {folder.name}`"
            )
        raise FileNotFoundError(f"{path} is not a folder; {remedy}")
    config = read_json(folder / CONFIG)
    places = _places(folder)
    tensors: dict[str, tuple[Path, Tensor]] = {}
    for file in _files(folder, places):
        for name, tensor in read_table(file).items():
            if name in tensors:
                raise ValueError(
                    f"{folder}: {quoted(name)} is in {tensors[name][0].name} and in {file.name}; "
                    "fetch both again"
                )
            tensors[name] = file, tensor
    for name, file in (places or {}).items():
        if name not in tensors or tensors[name][0] != folder / file:
            raise ValueError(
                f"{folder / INDEX} says that {quoted(name)} is in {file}; it is not: fetch "
                "both again"
            )
    return Folder(path=folder.absolute(), config=config, tensors=tensors)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
      FileNotFoundError: it is not there. ValueError: it holds something else.
    """
    try:
        found = load(path)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{path.parent} has no {path.name}; give a folder that `save_pretrained` or the Hub "
            "has filled"
        ) from None
    if not isinstance(found, dict):
        raise ValueError(
            f"{path} holds a {type(found).__name__} in place of an object; fetch it again"
        )
    return found


def _places(folder: Path) -> dict[str, str] | None:
    """{tensor: file} of the index; None where there is no index."""
    path = folder / INDEX
    if not path.is_file():
        return None
    places = read_json(path).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ValueError(f"{path} has no weight_map; fetch it again")
    for name, file in places.items():
        if not inside(file):
            raise ValueError(
                f"{path} says that {quoted(name)} is in {quoted(file)}, which is not the name of "
                "a file in its folder"
            )
    return places


def _files(folder: Path, places: Mapping[str, str] | None) -> list[Path]:
    """The files with tensors: those of the index, or the only one."""
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
    found = ", ".join(file.name for file in others) or "none"
    remedy = f"name the right one {SINGLE}" if others else "give a folder that has them"
    if not others and any(folder.glob("*.bin")):
        remedy = (
            "its weights are pickled (*.bin), which may run code; convert them with transformers: "
            "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(OTHER)"
        )
    raise FileNotFoundError(
        f"{folder} has no {SINGLE} or {INDEX} (*.safetensors: {found}); {remedy}"
    )


def check_unquantized(config: Mapping[str, Any]) -> None:
    """Refuses weights that are codes, not numbers.

    Raises:
      UnsupportedError: config.json has a `quantization_config`.
    """
    found = config.get("quantization_config")
    if found:
        method = found.get("quant_method", "unknown") if isinstance(found, dict) else found
        method = cut(str(method), 100)
        raise UnsupportedError(
            f"config.json: quantization_config ({method}): the weights are codes; take the "
            "unquantized model"
        )
