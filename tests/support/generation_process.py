"""One of several processes that generate together: what `test_generation_processes` starts.

    python -m tests.support.generation_process FOLDER

Writes the tokens that this process gets to FOLDER/NUMBER.json. Prompts or formats that differ
between the processes are refused in each.
"""

import json
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from tests.support.process_groups import join

PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6, 5], [35]]
OPTIONS: dict[str, Any] = {"temperature": 1.2, "top_p": 0.9, "seed": 5, "end_tokens": (7, 11)}


def trainer_on(devices: list[Any], zero: int) -> Any:
    """A trainer of a new Llama on these devices."""
    from tests.support.small_models import reference_model
    from tests.support.trajectories import optimizer, text_batch
    from zerojax import make_mesh, make_plan
    from zerojax.training import Trainer

    plan = make_plan(
        reference_model("llama"),
        make_mesh({"data": len(devices)}, devices),
        example_batch=text_batch(0),
        optimizer=optimizer(),
        precision="fp32",
        zero=zero,
        persistence_threshold=0,
    )
    return Trainer(plan)


def rows_of(devices: list[Any], zero: int) -> list[list[int]]:
    """Sampled tokens of a new Llama on these devices."""
    found = trainer_on(devices, zero).generate(PROMPTS, 8, **OPTIONS)
    return [row.tolist() for row in found]


def main(folder: str) -> None:
    join(2)
    rows = rows_of(jax.devices(), 3)
    trainer, number = trainer_on(jax.devices(), 3), jax.process_index()
    with pytest.raises(ValueError, match="prompts differs"):
        trainer.generate([[1 + number]], 8)
    with pytest.raises(ValueError, match="quantize differs"):
        trainer.generate(PROMPTS, 8, quantize=(None, "int8")[number])
    # An argument that only one process has, and that no model takes, is an error of each.
    for options in ({"temperature": (1.0, -1.0)[number]}, {"top_k": (None, 2.5)[number]}):
        with pytest.raises(ValueError, match="differs"):
            trainer.generate(PROMPTS, 8, **options)
    (Path(folder) / f"{jax.process_index()}.json").write_text(json.dumps(rows), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
