"""A run goes on with another pipeline, or none, as if nothing had happened."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

import zerojax
from tests.small_models import Layers, reference_model, regression_loss
from tests.trajectories import TOLERANCE, optimizer, regression_batch, text_batch
from zerojax.config import LogConfig

BATCHES = [regression_batch(index) for index in range(4)]
NO_PIPELINE = {"data": 8, "zero": 3}
TWO_STAGES = {"stage": 2, "data": 4, "zero": 1}
DEALT = {"stage": 4, "data": 2, "zero": 2, "pipeline_schedule": "interleaved(2)"}
UNEVEN = {"stage": 2, "data": 2, "model": 2, "zero": 1, "partition": [5, 3]}
UNEVEN |= {"rules": [("blocks/kernel", ("model",)), ("blocks/bias", ("model",))]}


def train(mesh, steps, *, callbacks=(), **changes):
    """The trainer of a run, after so many steps, and the losses of those that it took."""
    losses = []

    def record(trainer, values):
        losses.append(values["loss"])

    options = {
        "model": Layers,
        "batches": BATCHES,
        "loss": regression_loss,
        "optimizer": optimizer(),
        "num_microbatches": 4 if mesh.get("stage", 1) > 1 else 1,
        **changes,
    }
    trainer = zerojax.train(
        mesh_config=mesh,
        precision="fp32",
        run_dir=None,
        steps=steps,
        log=LogConfig(every=1),
        callbacks=[record, *callbacks],
        **options,
    )
    with trainer:
        return trainer, losses


@functools.cache
def uninterrupted():
    trainer, losses = train({"data": 8, "zero": 0}, 9)
    return np.array(losses), jax.tree.map(np.asarray, jax.tree.leaves(trainer.to_model()))


def test_three_runs_with_three_layouts_are_one_run(tmp_path):
    losses = []
    for steps, mesh in ((3, NO_PIPELINE), (6, TWO_STAGES), (9, DEALT)):
        trainer, more = train(mesh, steps, checkpoint=tmp_path / "run")
        assert len(more) == 3
        losses += more
    whole, weights = uninterrupted()
    np.testing.assert_allclose(losses, whole, rtol=0, atol=TOLERANCE)
    for mine, expected in zip(jax.tree.leaves(trainer.to_model()), weights, strict=True):
        np.testing.assert_allclose(mine, expected, rtol=0, atol=2e-5)


def test_a_live_run_changes_its_pipeline():
    """From two stages to none, then to stages with unequal layers, which tensor parallelism
    splits as well."""
    changes = {3: {"data": 8, "zero": 3}, 6: UNEVEN}

    def reshard(trainer, values):
        if trainer.num_steps - 1 in changes:
            trainer.reshard(changes.pop(trainer.num_steps - 1))

    trainer, losses = train(TWO_STAGES, 9, callbacks=[reshard])
    assert not changes, "every reshard has to have happened"
    assert trainer.plan.pipeline.layers == (5, 3)
    np.testing.assert_allclose(losses, uninterrupted()[0], rtol=0, atol=TOLERANCE)


@pytest.mark.slow
def test_a_language_model_goes_on_and_comes_back_whole(tmp_path):
    """One whose head reuses the embedding, which then belongs to two stages."""
    changes = {
        "model": reference_model("gpt2", num_layers=8),
        "batches": [text_batch(index) for index in range(4)],
        "loss": None,
    }
    _, whole = train({"data": 8, "zero": 0}, 6, **changes)
    losses = []
    uneven = {key: value for key, value in UNEVEN.items() if key != "rules"}
    for steps, mesh in ((2, DEALT), (4, uneven), (6, NO_PIPELINE)):
        trainer, more = train(mesh, steps, checkpoint=tmp_path / "run", **changes)
        losses += more
        evaluated = trainer.evaluate([text_batch(0)])["loss"]
        batch = jax.tree.map(jax.numpy.asarray, text_batch(0))
        loss, weight = trainer.to_model().loss(batch)
        np.testing.assert_allclose(float(loss / weight), evaluated, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(losses, whole, rtol=0, atol=TOLERANCE)
