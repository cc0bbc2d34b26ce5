"""Two processes over the loopback interface are one run: same losses, same checkpoints."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.trajectories import TOLERANCE

pytestmark = pytest.mark.multihost

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


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def train(folder: Path, run: str, *words: str, processes: int = 1) -> list[float]:
    """Losses of `zerojax train` in as many processes, 4 virtual devices in all."""
    (folder / "tiny.yaml").write_text(CONFIG, encoding="utf-8")
    port = free_port()
    devices = f"cpu_devices={4 // processes}"
    command = [sys.executable, "-m", "zerojax", "train", "tiny.yaml", devices, f"run_dir={run}"]
    started = []
    for index in range(processes):
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
        if processes > 1:
            environment |= {
                "ZEROJAX_COORDINATOR": f"127.0.0.1:{port}",
                "ZEROJAX_NUM_PROCESSES": str(processes),
                "ZEROJAX_PROCESS_ID": str(index),
            }
        started.append(
            subprocess.Popen(
                [*command, *words],
                cwd=folder,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        outputs = [process.communicate(timeout=240)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    for process, output in zip(started, outputs, strict=True):
        assert process.returncode == 0, output
    assert all("step" not in output for output in outputs[1:]), "only process 0 reports"
    lines = (folder / run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [row["loss"] for row in rows if row["kind"] == "train"]


def test_two_processes_train_save_and_hand_over_to_one(tmp_path):
    one = train(tmp_path, "one", "steps=8")
    two = train(tmp_path, "two", "steps=4", processes=2)
    np.testing.assert_allclose(two, one[:4], rtol=0, atol=TOLERANCE)
    resumed = train(tmp_path, "two", "steps=8", "zero=3")
    assert resumed[:4] == two
    np.testing.assert_allclose(resumed[4:], one[4:], rtol=0, atol=TOLERANCE)
