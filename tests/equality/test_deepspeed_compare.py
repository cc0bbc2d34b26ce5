"""The comparison of DeepSpeed with zerojax; DeepSpeed's side was recorded (tests/oracles)."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.hugging_face_folders import write_folder
from tests.support.process_groups import run_group
from tests.support.recorded_deepspeed import CONFIG
from zerojax.cli import main
from zerojax.equality import deepspeed_compare
from zerojax.equality.deepspeed_compare import (
    DeepSpeedComparison,
    TensorDifference,
    compare_with_deepspeed,
)

EQUAL = DeepSpeedComparison(
    config="ds_config.json",
    model="gpt2",
    versions={"deepspeed": "0.19.8"},
    dtype="float32",
    processes=2,
    losses=((5.0, 5.00001), (4.0, 4.00001)),
    tensors=(
        TensorDifference(name="wte.weight", gradient=1e-6, update=1e-4),
        TensorDifference(name="h.0.weight", gradient=1e-6, update=1e-4),
    ),
)


def with_tensor(**changes: float) -> DeepSpeedComparison:
    last = dataclasses.replace(EQUAL.tensors[1], **changes)
    return dataclasses.replace(EQUAL, tensors=(EQUAL.tensors[0], last))


@pytest.mark.parametrize(
    ("found", "word"),
    [
        (EQUAL, None),
        (dataclasses.replace(EQUAL, losses=((5.0, 5.1), (4.0, 4.0))), "loss of step 1"),
        (dataclasses.replace(EQUAL, losses=((5.0, 5.0), (4.0, float("nan")))), "loss of step 2"),
        (with_tensor(gradient=0.1, update=0.5), "gradient of h.0.weight"),
        (with_tensor(gradient=float("nan")), "gradient of h.0.weight"),
        (with_tensor(update=0.5), "update of h.0.weight"),
        (dataclasses.replace(with_tensor(gradient=0.01), dtype="bfloat16"), None),
    ],
)
def test_what_differs_first_is_named(found: DeepSpeedComparison, word: str | None) -> None:
    assert (found.first is None) == (word is None)
    assert (word or "equal up to rounding") in found.page().splitlines()[-1]


def compared(folder: Path, **changes: float) -> dict[str, Any]:
    """The comparison with the recorded run; zerojax's AdamW has other `changes`."""
    words = ["-m", "tests.support.recorded_deepspeed", str(folder), json.dumps(changes)]
    [output] = run_group([words])
    return json.loads(output.splitlines()[-1])


@pytest.mark.slow
def test_a_run_of_deepspeed_has_the_losses_gradients_and_updates_of_zerojax(tmp_path) -> None:
    found = compared(tmp_path)
    assert found["first"] is None
    assert len(found["tensors"]) > 10
    assert max(one["gradient"] for one in found["tensors"]) < 1e-5
    assert max(one["update"] for one in found["tensors"]) < 2e-3


@pytest.mark.slow
def test_another_weight_decay_is_noticed_in_an_update(tmp_path) -> None:
    found = compared(tmp_path, weight_decay=3.0)
    assert found["first"].startswith("the update of ")
    assert found["first"].split()[3] in {"transformer.wte.weight,", "transformer.wpe.weight,"}


def test_a_python_without_deepspeed_is_named_with_the_remedy(tmp_path, capsys) -> None:
    config = tmp_path / "ds_config.json"
    config.write_text(json.dumps(CONFIG))
    model = write_folder(tmp_path / "gpt2", "gpt2")
    with pytest.raises(ValueError, match="8 devices.*processes"):
        compare_with_deepspeed(config, model)
    config.write_text(json.dumps({**CONFIG, "train_batch_size": 16}))
    with pytest.raises(RuntimeError, match="pip install torch deepspeed"):
        compare_with_deepspeed(config, model, processes=8, python=sys.executable)
    assert main(["deepspeed", "compare", str(config), "--model", str(model), "--steps", "0"]) == 2
    assert "--steps" in capsys.readouterr().err


def test_a_run_without_an_end_is_ended_with_a_remedy(tmp_path, monkeypatch) -> None:
    config = tmp_path / "ds_config.json"
    config.write_text(json.dumps({**CONFIG, "train_batch_size": 16}))
    model = write_folder(tmp_path / "gpt2", "gpt2")
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 600\n")
    python.chmod(0o755)
    monkeypatch.setattr(deepspeed_compare, "_SECONDS", 0.0)
    with pytest.raises(RuntimeError, match="within 0 seconds in process 0; compare fewer steps"):
        compare_with_deepspeed(config, model, processes=8, python=str(python))
