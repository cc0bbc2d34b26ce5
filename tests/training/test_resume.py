"""A run that goes on in a new process is the run that was never stopped."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.trajectories import TOLERANCE

CONFIG = """
model: {num_layers: 2, num_heads: 2, embed_dim: 32, max_seq_len: 32, dropout: 0.1}
data: {seq_len: 32}
mesh: {zero: 2, persistence_threshold: 100}
optimizer: {schedule: constant, warmup_steps: 5}
precision: fp32
global_batch_size: 16
eval_every: null
eval_batches: 1
checkpoint: {every: 100}
log: {every: 1, console: quiet, tensorboard: false}
"""


def train(folder: Path, run: str, *words: str) -> list[float]:
    """Losses of every step that the run has had, over all its processes."""
    return [row["loss"] for row in train_rows(folder, run, *words)]


def train_rows(folder: Path, run: str, *words: str) -> list[dict]:
    """What `metrics.jsonl` says of every step that the run has had, over all its processes."""
    (folder / "run.yaml").write_text(CONFIG, encoding="utf-8")
    words = ("cpu_devices=4", f"run_dir={run}", *words)
    finished = subprocess.run(
        [sys.executable, "-m", "zerojax", "train", "run.yaml", *words],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(Path(__file__).parents[2]),
            # The same programs again: compiled by the first process, read from there by the others.
            "JAX_COMPILATION_CACHE_DIR": str(folder / "programs"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    lines = (folder / run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [row for row in rows if row["kind"] == "train"]


ROUNDED_AT_RANDOM = ("precision=bf16", "param_dtype=bf16", "moments_dtype=bf16")


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ROUNDED_AT_RANDOM], ids=["float32", "no masters"])
def test_twenty_steps_are_ten_and_ten_in_a_new_process_bit_for_bit(tmp_path, words):
    whole = train(tmp_path, "whole", "steps=20", *words)
    assert len(whole) == 20
    assert train(tmp_path, "halves", "steps=10", *words) == whole[:10]
    assert train(tmp_path, "halves", "steps=20", *words) == whole


@pytest.mark.slow
def test_what_was_lost_comes_again_bit_for_bit_with_loss_scale_and_schedule(tmp_path):
    """float16 that overflows, a cosine that ends with the run, dropout, and the data's order.

    The second run has the first half of the first one and what is on disk of it, as after a crash.
    """
    words = ("steps=12", "checkpoint.every=6", "precision=fp16", "schedule=cosine")
    words += ("warmup_steps=2", "loss_scale={initial: 4194304, window: 3, hysteresis: 1}")
    whole = train_rows(tmp_path, "whole", *words)
    scales = [row["loss_scale"] for row in whole]
    assert min(scales) < scales[0], "nothing overflowed"
    assert len({row["learning_rate"] for row in whole}) > 4
    shutil.copytree(tmp_path / "whole", tmp_path / "crashed")
    newest = max((tmp_path / "crashed/checkpoints").iterdir(), key=lambda path: path.name.zfill(9))
    assert newest.name.endswith("12")
    shutil.rmtree(newest)
    again = train_rows(tmp_path, "crashed", *words)
    columns = ("step", "loss", "grad_norm", "learning_rate", "loss_scale", "skipped")
    assert [[row[name] for name in columns] for row in again[-6:]] == [
        [row[name] for name in columns] for row in whole[6:]
    ]


@pytest.mark.slow
def test_a_new_process_with_another_stage_and_device_count_follows(tmp_path):
    """Without dropout, whose masks belong to the shards."""
    whole = train(tmp_path, "whole", "steps=20", "dropout=0")
    train(tmp_path, "moved", "steps=7", "dropout=0", "zero=3")
    train(tmp_path, "moved", "steps=14", "dropout=0", "zero=1", "cpu_devices=2", "model.remat=full")
    moved = train(tmp_path, "moved", "steps=20", "dropout=0", "zero=0", "cpu_devices=1")
    np.testing.assert_allclose(moved, whole, rtol=0, atol=TOLERANCE)
