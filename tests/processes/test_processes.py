"""Two processes over the loopback interface are one run: same losses, same checkpoints."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.trajectories import TOLERANCE
from zerojax.cli import main

pytestmark = pytest.mark.multihost

LIMIT = 300.0
"""Seconds after which a run, which needs 5 to 10, is ended."""

CONFIG = """
model: {num_layers: 1, num_heads: 2, embed_dim: 32, max_seq_len: 32}
data: {seq_len: 32}
mesh: {zero: 2, persistence_threshold: 100}
optimizer: {schedule: constant, warmup_steps: 2}
precision: fp32
global_batch_size: 16
eval_every: null
eval_batches: 1
checkpoint: {every: 4}
log: {every: 1, console: lines, tensorboard: false}
"""


def train(folder: Path, run: str, *words: str, processes: int = 1) -> list[float]:
    """Losses of `zerojax train` on 4 virtual devices; several processes by `zerojax launch`."""
    (folder / "tiny.yaml").write_text(CONFIG, encoding="utf-8")
    zerojax = [sys.executable, "-m", "zerojax"]
    devices = f"cpu_devices={4 // processes}"
    command = ["train", "tiny.yaml", devices, f"run_dir={run}", *words]
    launch = ["launch", "--nprocs", str(processes), "--", "zerojax"] if processes > 1 else []
    process = subprocess.Popen(
        [*zerojax, *launch, *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        output, error = process.communicate(timeout=LIMIT)
    finally:
        process.kill()
    assert process.returncode == 0, output + error
    if processes > 1:
        others = [line for line in output.splitlines() if not line.startswith("[0] ")]
        assert not others, "only process 0 reports"
        assert "Gloo" not in error
    return losses_of(folder / run)


def train_here(run_dir: Path, steps: int, *words: str) -> list[float]:
    """Losses of `zerojax train` of a tiny Llama on all devices of this process, at stage 3."""
    sizes = ("num_layers=1", "embed_dim=32", "num_heads=4", "max_seq_len=16", "name=llama")
    options = [
        *(f"model.{each}" for each in sizes),
        *("data.seq_len=16", "global_batch_size=8", f"steps={steps}", "checkpoint.every=2"),
        *("mesh.zero=3", "mesh.persistence_threshold=1", "precision=fp32", "log.every=1"),
        *("optimizer.schedule=constant", "optimizer.warmup_steps=0", f"run_dir={run_dir}"),
    ]
    assert main(["train", *options, *words]) == 0
    return losses_of(run_dir)


def losses_of(run_dir: Path) -> list[float]:
    """Training losses by step; a step that was taken again counts as it was taken last."""
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    by_step = {row["step"]: row["loss"] for row in rows if row["kind"] == "train"}
    return [by_step[step] for step in sorted(by_step)]


@pytest.mark.thorough
def test_two_processes_train_save_and_hand_over_to_one(tmp_path):
    one = train(tmp_path, "one", "steps=8")
    two = train(tmp_path, "two", "steps=4", processes=2)
    np.testing.assert_allclose(two, one[:4], rtol=0, atol=TOLERANCE)
    resumed = train(tmp_path, "two", "steps=8", "zero=3")
    assert resumed[:4] == two
    np.testing.assert_allclose(resumed[4:], one[4:], rtol=0, atol=TOLERANCE)
