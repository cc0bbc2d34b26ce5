"""What peft saves of models with adapters, and their logits, for tests/zoo/test_peft_reading.py.

Needs torch, transformers and peft, which no test imports; run with peft 0.21.2, transformers
5.23.0, torch 2.13.0:

    PYTHONPATH=. python tests/oracles/peft_reading.py tests/data/peft_reading.json
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from safetensors import safe_open

from tests.support.peft_cases import CASES, tensor_of, tokens_of

CLASSES = {
    "CAUSAL_LM": transformers.AutoModelForCausalLM,
    "SEQ_CLS": transformers.AutoModelForSequenceClassification,
}
CONFIGS = transformers.models.auto.configuration_auto.CONFIG_MAPPING


def shapes_in(file: Path) -> dict[str, list[int]]:
    with safe_open(file, "pt") as tensors:
        return {key: list(tensors.get_slice(key).get_shape()) for key in tensors.keys()}  # noqa: SIM118


def run(name: str) -> dict[str, Any]:
    """The files of base and adapters, all tensors by formula; logits of the adapted model."""
    model_type, keys, task_type, settings = CASES[name]
    config = CONFIGS[model_type](**keys)
    model = CLASSES[task_type].from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(tensor_of(key, tuple(parameter.shape))))
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        model.save_pretrained(base)
        saved = json.loads((base / "config.json").read_text())
        shapes = shapes_in(base / "model.safetensors")
        lora = peft.LoraConfig(task_type=task_type, **settings)
        adapted = peft.get_peft_model(model, lora)
        adapted.save_pretrained(Path(folder) / "adapters")
        file = Path(folder) / "adapters" / "adapter_model.safetensors"
        values = {
            key: torch.from_numpy(tensor_of(key, tuple(shape)))
            for key, shape in shapes_in(file).items()
        }
        peft.set_peft_model_state_dict(adapted, values)
        adapted.save_pretrained(Path(folder) / "trained")
        file = Path(folder) / "trained" / "adapter_model.safetensors"
        with safe_open(file, "pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118
                assert torch.equal(tensors.get_tensor(key), values[key]), key
        adapter_config = json.loads((file.parent / "adapter_config.json").read_text())
        found = shapes_in(file)
    adapted.eval()
    with torch.no_grad():
        logits = adapted(input_ids=torch.from_numpy(tokens_of(name)).long()).logits
    return {
        "config": saved,
        "base_tensors": shapes,
        "adapter_config": adapter_config,
        "adapter_tensors": found,
        "logits": [[short(x) for x in row] for row in logits],
    }


def short(values: torch.Tensor) -> Any:
    """The values as nested lists of 7 significant digits."""
    return float(f"{values.item():.7g}") if values.ndim == 0 else [short(x) for x in values]


if __name__ == "__main__":
    about = {
        "peft": peft.__version__,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
    }
    found = {case: run(case) for case in CASES}
    Path(sys.argv[1]).write_text(json.dumps({"versions": about, "cases": found}) + "\n")
