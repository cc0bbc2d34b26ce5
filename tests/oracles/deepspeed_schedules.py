"""Writes tests/data/deepspeed_schedules.json: what DeepSpeed's own schedules say.

Needs `deepspeed` and `torch` (run with deepspeed 0.19.8, torch 2.13.0 for CPU, Python 3.11):

    python tests/oracles/deepspeed_schedules.py

Each schedule is driven as DeepSpeed's engine does it: made, and asked to step after every update.
The rates of `updates` are those with which the optimizer's step is called.
"""

from __future__ import annotations

import json
from pathlib import Path

import deepspeed
import torch
from deepspeed.runtime import lr_schedules

TARGET = Path(__file__).parents[1] / "data" / "deepspeed_schedules.json"
NUM_UPDATES = 24
LEARNING_RATE = 3e-3
CYCLE = {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2, "cycle_first_step_size": 8}

CASES = [
    ("LRRangeTest", {}),
    ("LRRangeTest", {"lr_range_test_min_lr": 1e-4, "lr_range_test_step_size": 5}),
    ("LRRangeTest", {"lr_range_test_step_size": 5, "lr_range_test_staircase": True}),
    ("LRRangeTest", {"lr_range_test_step_size": 4, "lr_range_test_step_rate": 2.5}),
    ("OneCycle", CYCLE),
    ("OneCycle", CYCLE | {"cycle_second_step_size": 5, "cycle_momentum": False}),
    ("OneCycle", CYCLE | {"decay_lr_rate": 0.3, "decay_step_size": 2, "decay_mom_rate": 0.002}),
    ("OneCycle", CYCLE | {"cycle_first_stair_count": 3, "cycle_second_stair_count": 2}),
    ("OneCycle", CYCLE | {"cycle_second_step_size": 7, "cycle_first_stair_count": 4}),
    ("OneCycle", CYCLE | {"cycle_second_step_size": 0, "decay_step_size": 3, "decay_lr_rate": 1.0}),
    ("OneCycle", CYCLE | {"cycle_min_mom": 0.85, "cycle_max_mom": 0.99, "decay_lr_rate": 0.5}),
    ("WarmupLR", {}),
    ("WarmupLR", {"warmup_num_steps": 10}),
    ("WarmupLR", {"warmup_num_steps": 10, "warmup_type": "linear"}),
    ("WarmupLR", {"warmup_num_steps": 1, "warmup_min_lr": 1e-4, "warmup_max_lr": 5e-3}),
    ("WarmupLR", {"warmup_min_lr": 1e-3, "warmup_max_lr": 1e-4, "warmup_num_steps": 6}),
    ("WarmupDecayLR", {"total_num_steps": 20, "warmup_num_steps": 6}),
    (
        "WarmupDecayLR",
        {
            "total_num_steps": 18,
            "warmup_num_steps": 4,
            "warmup_type": "linear",
            "warmup_min_lr": 1e-4,
            "warmup_max_lr": 2e-3,
        },
    ),
    ("WarmupDecayLR", {"total_num_steps": 4, "warmup_num_steps": 8}),
    ("WarmupCosineLR", {"total_num_steps": 20, "warmup_num_steps": 6}),
    (
        "WarmupCosineLR",
        {
            "total_num_steps": 18,
            "warmup_num_steps": 4,
            "warmup_type": "linear",
            "warmup_min_ratio": 0.1,
            "cos_min_ratio": 0.05,
        },
    ),
    ("WarmupCosineLR", {"total_num_steps": 4, "warmup_num_steps": 8}),
]


def drive(kind: str, params: dict) -> dict:
    """Rates, and betas where the schedule changes them, of the first updates."""
    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=LEARNING_RATE)
    (group,) = optimizer.param_groups
    scheduler = getattr(lr_schedules, kind)(optimizer, **params)
    rates, betas = [], []
    for _ in range(NUM_UPDATES):
        rates.append(group["lr"])
        betas.append(list(group["betas"]))
        scheduler.step()
    case = {"type": kind, "params": params, "rates": rates}
    changes = any(pair != [0.9, 0.999] for pair in betas)
    return case | ({"betas": betas} if changes else {})


def train_with_cycled_betas() -> dict:
    """One parameter under torch's AdamW and OneCycle: betas that change have their own pitfalls."""
    parameter = torch.tensor([0.5, -1.0, 2.0], requires_grad=True)
    optimizer = torch.optim.AdamW([parameter], lr=LEARNING_RATE, weight_decay=0.1)
    params = CYCLE | {"cycle_first_step_size": 4, "decay_step_size": 2, "decay_lr_rate": 0.3}
    scheduler = lr_schedules.OneCycle(optimizer, **params)
    gradients, values = [], []
    generator = torch.Generator().manual_seed(0)
    for _ in range(12):
        parameter.grad = torch.randn(3, generator=generator)
        gradients.append(parameter.grad.tolist())
        optimizer.step()
        scheduler.step()
        values.append(parameter.tolist())
    return {"params": params, "weight_decay": 0.1, "gradients": gradients, "values": values}


def main() -> None:
    found = {
        "deepspeed": deepspeed.__version__,
        "torch": torch.__version__,
        "learning_rate": LEARNING_RATE,
        "start": [0.5, -1.0, 2.0],
        "cases": [drive(kind, params) for kind, params in CASES],
        "adamw_with_one_cycle": train_with_cycled_betas(),
    }
    TARGET.write_text(json.dumps(found, indent=None, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
