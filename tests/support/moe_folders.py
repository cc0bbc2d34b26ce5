"""Folders of mixtures of experts as transformers leaves them, one tensor for each expert.

`python -m tests.support.moe_folders FILE` writes the config.json that zerojax makes of each, for
tests/oracles/moe_families.py.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.support.hugging_face_weights import weights
from zerojax.zoo.hugging_face import ARCHITECTURES
from zerojax.zoo.hugging_face.writing import Description

MIXTURES = json.loads((Path(__file__).parents[1] / "data" / "moe_families.json").read_text())[
    "cases"
]


def tensors_of(case: str) -> dict[str, np.ndarray]:
    """{name: values} of a model."""
    shapes = MIXTURES[case]["tensors"]
    return {name: weights(name, shape) for name, shape in shapes.items()}


def write_mixture(folder: Path, case: str) -> Path:
    """config.json and the tensors, in one file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MIXTURES[case]["config"]))
    save_file(tensors_of(case), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def written_config(case: str) -> dict[str, Any]:
    """config.json as zerojax writes it of a model that it read."""
    config = MIXTURES[case]["config"]
    row = ARCHITECTURES[config["model_type"]]
    sizes = row.config_class(**row.read_config(config))
    return Description(row=row, config=sizes, kept=config).config_json()


if __name__ == "__main__":
    configs = {case: written_config(case) for case in MIXTURES}
    Path(sys.argv[1]).write_text(json.dumps(configs))
