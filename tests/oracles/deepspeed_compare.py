"""Writes tests/data/deepspeed_compare.npz and .json: DeepSpeed's side of a comparison.

Needs zerojax's own packages and `deepspeed`, `torch`, `transformers` (run with deepspeed 0.19.8,
torch 2.13.0 for CPU, transformers 5.24.0, Python 3.13):

    PYTHONPATH=. python tests/oracles/deepspeed_compare.py

DeepSpeed trains two steps in two processes at ZeRO 2. Prints zerojax's comparison as well.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

jax.config.update("jax_num_cpu_devices", 2)

from tests.support.hugging_face_folders import write_folder  # noqa: E402
from zerojax.equality import deepspeed_compare  # noqa: E402

TARGET = Path(__file__).parents[1] / "data" / "deepspeed_compare"
CONFIG = {
    "train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 1e-3, "weight_decay": 0.01, "torch_adam": True},
    },
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 2},
}


def main() -> None:
    kept: dict[str, Any] = {}
    run = deepspeed_compare._run_deepspeed

    def recorded(config: Any, model: str, batches: Any, *rest: Any) -> Any:
        losses, gradients, after = run(config, model, batches, *rest)
        kept["tokens"], kept["losses"] = batches["tokens"], np.array(losses)
        kept.update({f"gradient/{name}": value for name, value in gradients.items()})
        kept.update({f"after/{name}": value for name, value in after.items()})
        return losses, gradients, after

    deepspeed_compare._run_deepspeed = recorded
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "ds_config.json")
        config.write_text(json.dumps(CONFIG))
        model = write_folder(Path(folder, "gpt2"), "gpt2")
        found = deepspeed_compare.compare_with_deepspeed(config, model, length=8, steps=2)
    print(found.page())
    np.savez_compressed(TARGET.with_suffix(".npz"), **kept)
    text = json.dumps({"versions": dict(found.versions), "config": CONFIG}, indent=1)
    TARGET.with_suffix(".json").write_text(text + "\n")


if __name__ == "__main__":
    main()
