"""Folders as transformers leaves them, made from the shapes that it was seen to save.

Knows hugging_face.json, families.json and moe_families.json of tests/data; the bytes are written by
the package safetensors, not by ours. `python -m tests.support.hugging_face_folders FILE` writes the
config.json that zerojax makes of each family, for tests/oracles/families.py and moe_families.py.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.support.hugging_face_weights import norms_near, weights
from tests.support.sft_cases import write_tokenizer
from zerojax.zoo.hugging_face import ARCHITECTURES
from zerojax.zoo.hugging_face.writing import Description

DATA = json.loads((Path(__file__).parents[1] / "data" / "hugging_face.json").read_text())
CASES = DATA["cases"]
FAMILIES = json.loads((Path(__file__).parents[1] / "data" / "families.json").read_text())["cases"]
"""Decoders of other families than GPT-2 and Llama; tests/oracles/families.py."""
MIXTURES = json.loads((Path(__file__).parents[1] / "data" / "moe_families.json").read_text())[
    "cases"
]
"""Mixtures of experts, with one tensor for each expert; tests/oracles/moe_families.py."""
DECODERS = {**FAMILIES, **MIXTURES}


def case_of(case: str) -> dict[str, Any]:
    """What was seen of a model."""
    return CASES[case] if case in CASES else DECODERS[case]


def tensors_of(case: str, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """{name: values} of a model."""
    shapes = case_of(case)["tensors"]
    near = norms_near(case_of(case)["config"]["model_type"])
    values = {name: weights(name, shape, norms_near=near) for name, shape in shapes.items()}
    return {name: x.astype(dtype) for name, x in values.items()}


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
    config = {**case_of(case)["config"], **changes}
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


def write_chat_model(folder: Path, case: str = "accumulated") -> Path:
    """A tiny decoder with a tokenizer and a template: sft.json, tests/oracles/sft.py."""
    seen = json.loads((Path(__file__).parents[1] / "data" / "sft.json").read_text())["cases"][case]
    folder.mkdir(parents=True)
    tensors = {name: weights(name, shape) for name, shape in seen["tensors"].items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(seen["config"]))
    write_tokenizer(folder)
    return folder


def written_config(case: str) -> dict[str, Any]:
    """config.json as zerojax writes it of a model that it read."""
    config = case_of(case)["config"]
    row = ARCHITECTURES[config["model_type"]]
    sizes = row.config_class(**row.read_config(config))
    return Description(row=row, config=sizes, kept=config).config_json()


if __name__ == "__main__":
    configs = {case: written_config(case) for case in DECODERS}
    Path(sys.argv[1]).write_text(json.dumps(configs))
