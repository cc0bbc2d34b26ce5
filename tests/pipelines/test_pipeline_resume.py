"""A run goes on with another pipeline, or none, as if nothing had happened."""

import functools
import json

import chex
import jax
import numpy as np
import pytest

import zerojax
from tests.support.small_models import Layers, reference_model, regression_loss
from tests.support.trajectories import TOLERANCE, optimizer, regression_batch, text_batch
from zerojax.cli import main
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


@pytest.mark.slow
def test_three_runs_with_three_layouts_are_one_run(tmp_path):
    losses = []
    for steps, mesh in ((3, NO_PIPELINE), (6, TWO_STAGES), (9, DEALT)):
        trainer, more = train(mesh, steps, checkpoint=tmp_path / "run")
        assert len(more) == 3
        losses += more
    whole, weights = uninterrupted()
    np.testing.assert_allclose(losses, whole, rtol=0, atol=TOLERANCE)
    found = jax.tree.leaves(trainer.to_model())
    chex.assert_trees_all_close(found, list(weights), rtol=0, atol=2e-5)


@pytest.mark.thorough
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


RUN_FILE = """
model: {num_layers: 4, num_heads: 2, embed_dim: 32, max_seq_len: 32}
data: {seq_len: 32}
mesh: {stage: 2, zero: 2, pipeline_schedule: interleaved(2), stash: input}
optimizer: {warmup_steps: 1}
precision: fp32
global_batch_size: 16
steps: 2
eval_every: null
eval_batches: 1
log: {console: quiet, tensorboard: false}
"""


@pytest.mark.slow
def test_a_run_file_trains_a_pipeline_which_is_evaluated_and_writes_text(tmp_path, capsys):
    """The second command goes on with another pipeline."""
    path, folder = tmp_path / "run.yaml", tmp_path / "run"
    path.write_text(RUN_FILE, encoding="utf-8")
    words = ["train", str(path), f"run_dir={folder}"]
    assert main([*words, "num_microbatches=2"]) == 0
    assert "interleaved" in (folder / "plan.txt").read_text(encoding="utf-8")
    changes = ["pipeline_schedule=1f1b", "partition=[3, 1]", "num_microbatches=4", "steps=3"]
    assert main([*words, *changes]) == 0
    assert "1f1b" in (folder / "plan.txt").read_text(encoding="utf-8")
    capsys.readouterr()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (*_, validation) = (row["loss"] for row in rows if row["kind"] == "eval")
    config = json.loads((folder / "config.json").read_text())
    assert config["mesh"]["partition"] == [3, 1]
    assert main(["eval", str(folder)]) == 0
    assert f"step 3: loss {validation:.4f}" in capsys.readouterr().out
    assert main(["generate", str(folder), "To be", "--tokens", "4"]) == 0
    assert capsys.readouterr().out.startswith("To be")


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
