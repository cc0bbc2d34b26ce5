"""Compares zerojax on two devices with the run of DeepSpeed in tests/data/deepspeed_compare.npz.

    python -m tests.support.recorded_deepspeed FOLDER CHANGES

CHANGES is JSON: parameters of zerojax's optimizer that replace those of the recorded configuration.
Prints the comparison as JSON.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

DATA = Path(__file__).parents[1] / "data"
RECORDED = json.loads((DATA / "deepspeed_compare.json").read_text())
CONFIG = RECORDED["config"]


def run(config: Any, model: str, batches: Any, *_: Any) -> Any:
    """What DeepSpeed gave: losses, first gradients, tensors after the last step."""
    with np.load(DATA / "deepspeed_compare.npz") as found:
        arrays = dict(found)
    np.testing.assert_array_equal(batches["tokens"], arrays.pop("tokens"))
    losses = arrays.pop("losses").tolist()
    parts: dict[str, dict[str, np.ndarray]] = {"gradient": {}, "after": {}}
    for key, value in arrays.items():
        part, _, name = key.partition("/")
        parts[part][name] = value
    return losses, parts["gradient"], parts["after"]


def main(folder: Path, changes: dict[str, float]) -> None:
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    from tests.support.hugging_face_folders import write_folder
    from zerojax.equality import deepspeed_compare

    deepspeed_compare._run_deepspeed = run
    deepspeed_compare._versions = lambda python: RECORDED["versions"]
    path = folder / "ds_config.json"
    config = json.loads(json.dumps(CONFIG))
    config["optimizer"]["params"] |= changes
    path.write_text(json.dumps(config))
    model = write_folder(folder / "gpt2", "gpt2")
    found = deepspeed_compare.compare_with_deepspeed(path, model, length=8, steps=2)
    print(json.dumps(found.as_dict()))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
