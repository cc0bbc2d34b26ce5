"""A run that was saved before the modules of zerojax moved into packages goes on.

`tests/data/saved_before.tar.gz` is a run's folder at step 2, written by the commit before the move,
and `saved_before.json` what that commit had: a digest of every array, and the losses of four steps.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
from pathlib import Path

import jax
import numpy as np
import pytest

import zerojax
from tests.support.recipe import RECIPE
from zerojax.config import CheckpointConfig, LogConfig, ModelConfig

DATA = Path(__file__).resolve().parents[1] / "data"
MODEL = ModelConfig(num_layers=2, num_heads=2, embed_dim=8, max_seq_len=8)
ANSWERS = json.loads((DATA / "saved_before.json").read_text())


def rows(seed: int) -> dict[str, np.ndarray]:
    tokens = np.random.default_rng(seed).integers(0, 32, (8, 9), dtype=np.int32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


@pytest.fixture
def run(tmp_path) -> Path:
    with tarfile.open(DATA / "saved_before.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "run"


def go_on(run: Path, steps: int) -> zerojax.Trainer:
    return zerojax.train(
        zerojax.zoo.build_model(MODEL, 32),
        {"zero": 3},
        [rows(seed) for seed in range(4)],
        steps=steps,
        seed=1,
        optimizer=zerojax.adamw(1e-2, b1=0.8, **RECIPE),
        precision="fp32",
        run_dir=run,
        checkpoint=CheckpointConfig(path=str(run / "checkpoints"), asynchronous=False),
        log=LogConfig(every=1, console="lines", tensorboard=False),
    )


def digests(trainer: zerojax.Trainer) -> dict[str, str]:
    state = zerojax.to_portable_state(trainer.plan, trainer.state)
    return {
        jax.tree_util.keystr(path): hashlib.sha256(np.asarray(leaf).tobytes()).hexdigest()[:16]
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }


@pytest.mark.thorough
def test_a_run_saved_before_the_move_goes_on_from_the_same_bits(run):
    with go_on(run, 2) as trainer:  # restores, and has nothing to do
        assert trainer.num_steps == 2
        assert digests(trainer) == ANSWERS["arrays"]
    with go_on(run, 4) as trainer:
        losses = [report["loss"] for report in trainer.history if report["step"] > 2]
    # Other processors add up in another order: bits are those of the machine that wrote the run.
    np.testing.assert_allclose(losses, ANSWERS["losses"][2:], rtol=1e-5)


def test_its_record_is_read_without_the_model(run):
    loaded = zerojax.load_run(run)
    assert loaded.step == 2
    assert loaded.plan.zero == 3
