"""Folders as transformers leaves them, made from the shapes that it was seen to save.

Knows tests/data/hugging_face.json; the bytes are written by the package safetensors, not by ours.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.hugging_face_weights import weights

DATA = json.loads((Path(__file__).parent / "data" / "hugging_face.json").read_text())
CASES = DATA["cases"]


def tensors_of(case: str, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """{name: values} of a model."""
    shapes = CASES[case]["tensors"]
    return {name: weights(name, shape).astype(dtype) for name, shape in shapes.items()}


def write_folder(
    folder: Path,
    case: str,
    *,
    tensors: Mapping[str, np.ndarray] | None = None,
    shards: int = 1,
    **changes: Any,
) -> Path:
    """config.json (with changes) and the tensors, in one file or several with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**CASES[case]["config"], **changes}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = tensors_of(case) if tensors is None else tensors
    if shards == 1:
        save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names, places = sorted(tensors), {}
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in names[number::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(part, file)
    total = sum(x.nbytes for x in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
