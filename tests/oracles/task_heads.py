"""What transformers makes of small models with heads for tasks, for tests/zoo/test_task_heads.py.

Needs torch and transformers, which no test imports; run with transformers 5.23.0, torch 2.13.0:

    PYTHONPATH=. python tests/oracles/task_heads.py tests/data/task_heads.json
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open

from tests.support.hugging_face_weights import probes
from tests.support.task_cases import CASES, batch_of, keys_of, tensor_of

CLASSES = {
    "sequence_classification": transformers.AutoModelForSequenceClassification,
    "token_classification": transformers.AutoModelForTokenClassification,
    "question_answering": transformers.AutoModelForQuestionAnswering,
}
CONFIGS = transformers.models.auto.configuration_auto.CONFIG_MAPPING
NAMES = {"tokens": "input_ids", "token_types": "token_type_ids"}


def run(name: str) -> dict[str, Any]:
    """A model with weights by formula, as it is saved; its logits, loss and gradients."""
    model_type, kind, _ = CASES[name]
    config = CONFIGS[model_type](**keys_of(name))
    model = CLASSES[kind].from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            values = tensor_of(model_type, key, tuple(parameter.shape))
            parameter.copy_(torch.from_numpy(values))
    batch = {NAMES.get(key, key): torch.from_numpy(x) for key, x in batch_of(name).items()}
    batch = {key: x.long() if x.dtype == torch.int32 else x for key, x in batch.items()}
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        saved = json.loads((Path(folder) / "config.json").read_text())
        with safe_open(Path(folder) / "model.safetensors", "pt") as file:
            shapes = {key: list(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    found = model(**batch)
    found.loss.backward()
    logits = getattr(found, "logits", None)
    if logits is None:
        logits = torch.stack([found.start_logits, found.end_logits], dim=-1)
    return {
        "config": saved,
        "tensors": shapes,
        "logits": short(logits.detach()),
        "loss": found.loss.item(),
        "gradients": {
            key: short(torch.tensor(probes(key, parameter.grad.numpy())))
            for key, parameter in model.named_parameters()
            if parameter.grad is not None
        },
    }


def short(values: torch.Tensor) -> Any:
    """The values as nested lists of 7 significant digits."""
    if values.ndim == 0:
        return float(f"{values.item():.7g}")
    return [short(x) for x in values]


if __name__ == "__main__":
    about = {"transformers": transformers.__version__, "torch": torch.__version__}
    found = {name: run(name) for name in CASES}
    Path(sys.argv[1]).write_text(json.dumps({"versions": about, "cases": found}) + "\n")
