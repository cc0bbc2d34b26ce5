"""Whole runs of rolled layers: twenty steps, dropout, statistics, validation, resuming, loading."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest

import zerojax
from tests.support.listed_decoders import build_decoder
from tests.support.recipe import RECIPE
from tests.support.trajectories import TOLERANCE, Trajectory, train_for
from zerojax.config import LogConfig

pytestmark = pytest.mark.thorough

VOCAB, LENGTH, ROWS = 32, 8, 32
RULES = (("up/kernel", (None, "model")), ("down/kernel", ("model", None)))
ZERO_3: dict[str, Any] = {"zero": 3, "persistence_threshold": 0}


def text(step: int) -> dict[str, np.ndarray]:
    """Random tokens and what follows them, int32 [rows, length]; four batches in turn."""
    tokens = np.random.default_rng(step % 4).integers(0, VOCAB, (ROWS, LENGTH + 1), np.int32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def trained(style: str, *, layers: int = 6, **options: Any) -> Trajectory:
    return train_for(build_decoder(style, layers=layers), batch=text, **options)


@functools.cache
def on_one_device(style: str, layers: int = 6, optimizer: Any = None) -> np.ndarray:
    """Losses of the model as it is written."""
    options = {} if optimizer is None else {"optimizer": optimizer}
    run = trained(style, layers=layers, devices=1, roll="off", **options)
    assert run.plan.stacks == {}
    return run.losses


ADAMW = zerojax.adamw(1e-3, eps=1e-5, **RECIPE)
"""Element by element, as deterministic sums and slices on the host want it."""
WAYS: dict[str, dict[str, Any]] = {
    "zero 0": {"zero": 0, "roll_remat": "full"},
    "zero 1": {"zero": 1, "roll_remat": "dots"},
    "zero 2": {"zero": 2, "roll_remat": "full"},
    "zero 3": ZERO_3,
    "zero 3, accumulated": {**ZERO_3, "num_microbatches": 2},
    "zero 2, accumulated": {"zero": 2, "num_microbatches": 2, "roll_remat": "full"},
    "tensor parallel": {**ZERO_3, "mesh": {"model": 2}, "rules": RULES},
    "pipeline": {"zero": 1, "mesh": {"stage": 2}, "num_microbatches": 4},
    "pipeline, zero 3": {**ZERO_3, "mesh": {"stage": 2}, "num_microbatches": 4},
    "pipeline, interleaved": {
        "zero": 2,
        "mesh": {"stage": 2},
        "num_microbatches": 4,
        "pipeline_schedule": "interleaved(3)",
    },
    "deterministic": {**ZERO_3, "deterministic": "mesh", "optimizer": ADAMW},
    "weights and activations on the host": {
        **ZERO_3,
        "optimizer": ADAMW,
        "offload": {"params": "host", "activations": "host", "min_elements": 1},
    },
}


@pytest.mark.parametrize("way", WAYS)
def test_twenty_steps_are_those_of_one_device(way: str) -> None:
    run = trained("plain", **WAYS[way])
    assert run.plan.stacks
    expected = on_one_device("plain", optimizer=WAYS[way].get("optimizer"))
    np.testing.assert_allclose(run.losses, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("style", ["checkpoint_period", "gate_sum", "windows"])
def test_layers_of_several_kinds_train_as_on_one_device(style: str) -> None:
    """Two kinds in turn, a second value that is carried, masks that differ."""
    run = trained(style, layers=8, **ZERO_3)
    assert run.plan.stacks
    np.testing.assert_allclose(run.losses, on_one_device(style, 8), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("style", ["nnx_dropout", "split_keys", "batchnorm"])
def test_keys_and_statistics_are_those_of_the_layers_by_themselves(style: str) -> None:
    """On one mesh: masks of dropout and statistics of a batch are those of a device's own rows."""
    rolled, plain = (trained(style, roll=roll, **ZERO_3) for roll in ("auto", "off"))
    assert rolled.plan.stacks
    assert plain.plan.stacks == {}
    np.testing.assert_allclose(rolled.losses, plain.losses, atol=TOLERANCE, rtol=0)
    assert rolled.state["extras"].keys() == plain.state["extras"].keys()
    for name, x in rolled.state["extras"].items():
        np.testing.assert_allclose(x, plain.state["extras"][name], atol=TOLERANCE, rtol=TOLERANCE)


def run_of(mesh: dict[str, Any], steps: int, folder: Path | None = None, **options: Any) -> Any:
    """(the trainer, the loss of every step)."""
    losses: list[float] = []
    trainer = zerojax.train(
        build_decoder("checkpoint"),
        mesh,
        [text(step) for step in range(4)],
        optimizer=optax.adamw(1e-3, eps=1e-5),
        precision="fp32",
        steps=steps,
        log=LogConfig(every=1),
        callbacks=[lambda trainer, values: losses.append(values["loss"])],
        run_dir=None,
        checkpoint=folder,
        **options,
    )
    return trainer, losses


def test_a_run_goes_on_rolled_unrolled_and_in_a_pipeline(tmp_path: Path) -> None:
    whole = run_of({"zero": 0, "roll": "off"}, 8)[1]
    rolled, plain = ZERO_3, {"model": 2, "zero": 1, "roll": "off"}
    pipeline = {"stage": 2, "zero": 1}
    found, is_rolled = [], []
    for steps, mesh in ((2, rolled), (4, plain), (6, pipeline), (8, rolled)):
        trainer, losses = run_of(mesh, steps, tmp_path / "run")
        found += losses
        is_rolled.append(bool(trainer.plan.stacks))
        trainer.close()
    assert is_rolled == [True, False, True, True]
    np.testing.assert_allclose(found, whole, atol=TOLERANCE, rtol=0)


def test_validation_and_the_trained_model_are_those_of_the_users_object() -> None:
    held = [text(9)]
    trainer, _ = run_of(ZERO_3, 2, validation=held)
    with trainer:
        assert trainer.plan.stacks
        mean = float(trainer.evaluate(held)["loss"])
        model = trainer.to_model()
    total, weight = model.loss(text(9))
    np.testing.assert_allclose(mean, total / weight, rtol=TOLERANCE)


def test_a_check_of_a_model_with_a_list_passes() -> None:
    """It compares the rolled step with the model's own program in plain JAX."""
    zerojax.check(build_decoder("checkpoint"), text(0)).require()
