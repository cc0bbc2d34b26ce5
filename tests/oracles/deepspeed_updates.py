"""Writes tests/data/deepspeed_updates.json: what DeepSpeed's engine makes of parameters.

Needs `deepspeed` and `torch` (0.19.8 and 2.13 for CPUs were run); they are not among what the tests
need:

    DS_ACCELERATOR=cpu python tests/oracles/deepspeed_updates.py

The gradients are given: the loss is the sum of each parameter times its gradient. `torch_adam` and
SGD run torch's own optimizers, since DeepSpeed's need a compiler; the rest (name of the optimizer,
decay, clipping, schedule) is DeepSpeed's engine.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np

for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
    os.environ.setdefault(name, value)
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29517")

import deepspeed  # noqa: E402
import torch  # noqa: E402

TARGET = Path(__file__).parents[1] / "data" / "deepspeed_updates.json"
NUM_UPDATES = 5
PARAMS = {
    "kernel": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4),
    "bias": np.asarray([0.5, -0.25, 2.0, 0.0], np.float32),
}
ADAM = {"lr": 1e-2, "betas": [0.9, 0.99], "weight_decay": 0.1, "torch_adam": True}
LINEAR = {"warmup_num_steps": 3, "warmup_type": "linear", "warmup_max_lr": 1e-2}
FILES = [
    {"optimizer": {"type": "Adam", "params": ADAM}, "gradient_clipping": 0.0},
    {"optimizer": {"type": "Adam", "params": {**ADAM, "adam_w_mode": False}}},
    {"optimizer": {"type": "AdamW", "params": ADAM}, "gradient_clipping": 0.5},
    {
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "nesterov": True}},
        "gradient_clipping": 1.5,
    },
    {
        "optimizer": {"type": "AdamW", "params": ADAM},
        "scheduler": {"type": "WarmupLR", "params": LINEAR},
    },
]


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        for name, value in PARAMS.items():
            self.register_parameter(name, torch.nn.Parameter(torch.tensor(value)))

    def forward(self, step: int) -> torch.Tensor:
        grads = {name: np.cos(x * (step + 1)) * (1 + step) for name, x in PARAMS.items()}
        return sum((p * torch.tensor(grads[name])).sum() for name, p in self.named_parameters())


def run(file: dict) -> dict:
    model = Model()
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config={"train_batch_size": 1, **file}
    )
    for step in range(NUM_UPDATES):
        engine.backward(engine(step))
        engine.step()
    return {name: p.detach().numpy().tolist() for name, p in model.named_parameters()}


cases = [{"file": file, "params": run(file)} for file in FILES]
TARGET.write_text(json.dumps({"deepspeed": deepspeed.__version__, "cases": cases}) + "\n")
print(f"wrote {TARGET}")
