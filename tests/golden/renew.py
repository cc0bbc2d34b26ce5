"""The plans whose text is kept in this folder, and the command that writes it anew.

    python -m tests.golden.renew

Look at the difference before it is committed: every line of it is a deliberate change.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import numpy as np

import zerojax
from zerojax.config import RunConfig, load

FOLDER = Path(__file__).resolve().parent
CONFIGS = FOLDER.parent.parent / "configs"
# Model -> the run file with its sizes, optimizer, precision and microbatches.
MODELS = {
    "gpt2_124m": "gpt2_124m_zero1_1xh200",
    "llama_1b": "llama_1b_zero1_8xh100",
    "llama_8b": "llama_8b_zero3_8xh100",
}
DEVICES = (1, 8, 512)
STAGES = range(4)


def file_name(model: str, devices: int) -> str:
    return f"{model}_on_{devices}.txt"


def plan_text(model: str, devices: int, zero: int) -> str:
    """`Plan.table()` for devices, one sequence per device and microbatch."""
    config = load(RunConfig, CONFIGS / f"{MODELS[model]}.yaml")
    rows = devices * (config.num_microbatches or 1)
    tokens = jax.ShapeDtypeStruct((rows, config.data.seq_len), np.int32)
    plan = zerojax.make_plan(
        zerojax.zoo.build_model(config.model, config.model.vocab_size or 0),
        zerojax.make_abstract_mesh(dataclasses.replace(config.mesh, data=-1), devices),
        example_batch={"tokens": tokens, "targets": tokens},
        optimizer=config.optimizer,
        precision=config.precision,
        num_microbatches=config.num_microbatches,
        steps=config.steps,
        zero=zero,
    )
    return plan.table()


def file_text(model: str, devices: int) -> str:
    """The four stages of one model on one number of devices."""
    parts = [f"==== zero={zero} ====\n\n{plan_text(model, devices, zero)}\n" for zero in STAGES]
    return "\n\n".join(parts)


def main() -> None:
    for model in MODELS:
        for devices in DEVICES:
            path = FOLDER / file_name(model, devices)
            path.write_text(file_text(model, devices), encoding="utf-8")
            print(path.relative_to(FOLDER.parent.parent))


if __name__ == "__main__":
    main()
