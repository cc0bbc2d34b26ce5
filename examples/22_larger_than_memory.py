"""A model whose state is larger than the memory of its process trains from files.

`offload.params: nvme` keeps weights, gradients and optimizer state of layers in files, and
`activations: nvme` the inputs of layers. The script starts two processes whose memory the operating
system limits (RLIMIT_DATA). The run with files ends with a lower loss. The same run without files
reaches the limit before its first step. Needs Linux and 1.1 GiB of disk. Two cores take a minute.
"""

import importlib.resources
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import zerojax
from zerojax.config import ModelConfig

LIMIT = 7 * 2**27
"""Limit of the bytes that a process may allocate: 0.88 GiB, of which JAX and compiler take 0.6."""
LAYERS, WIDTH, ROWS, LENGTH, STEPS = 20, 512, 16, 32, 6
TEXT = importlib.resources.files("zerojax") / "data" / "shakespeare.txt"


def make_batch(step: int) -> dict[str, np.ndarray]:
    """Returns rows of the text, one token per byte."""
    text = np.frombuffer(TEXT.read_bytes(), np.uint8)
    starts = np.random.default_rng(step).integers(0, len(text) - LENGTH - 1, ROWS)
    rows = np.stack([text[start : start + LENGTH + 1] for start in starts]).astype(np.int32)
    return {"tokens": rows[:, :-1], "targets": rows[:, 1:]}


def train(offload: dict) -> None:
    """Trains in this process, which has at most `LIMIT` bytes of memory."""
    resource.setrlimit(resource.RLIMIT_DATA, (LIMIT, LIMIT))
    config = ModelConfig(num_layers=LAYERS, embed_dim=WIDTH, num_heads=8, max_seq_len=LENGTH)
    trainer = zerojax.train(
        zerojax.zoo.build_model(config, 256),
        {"data": 1, "offload": offload},
        make_batch,
        optimizer=zerojax.adamw(3e-4, clip_norm=1.0),
        precision="fp32",
        steps=STEPS,
        run_dir=None,
        log=zerojax.config.LogConfig(every=1),
    )
    state = 16 * trainer.plan.as_dict()["num_parameters"]
    first, last = trainer.history[0]["loss"], trainer.history[-1]["loss"]
    print(f"state {state / 2**30:.2f} GiB, limit {LIMIT / 2**30:.2f} GiB")
    print(f"loss {first:.2f} -> {last:.2f}")
    assert state > LIMIT
    assert last < first - 1


def start(*words: str) -> subprocess.Popen:
    """Starts this script as a separate process, with one memory arena for all threads."""
    return subprocess.Popen(
        [sys.executable, __file__, *words],
        env={**os.environ, "MALLOC_ARENA_MAX": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def allocated(process: subprocess.Popen) -> int:
    """Returns the bytes that a process has allocated; 0 if it has ended."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return 2**10 * next((int(x.split()[1]) for x in lines if x.startswith("VmData")), 0)


def run_without_files() -> tuple[int, str]:
    """Returns (most bytes that were allocated, output) of a run without files.

    If memory is refused, XLA ends with an error or waits without end; a waiting process is ended.
    """
    process, most = start("memory"), 0
    while process.poll() is None and most < 0.98 * LIMIT:
        most = max(most, allocated(process))
        time.sleep(0.2)
    time.sleep(5)
    process.kill()
    return most, process.communicate()[0]


if sys.argv[1:2] == ["files"]:
    train({"params": "nvme", "activations": "nvme", "folder": sys.argv[2]})
elif sys.argv[1:2] == ["memory"]:
    train({})
else:
    with tempfile.TemporaryDirectory(dir=".") as folder:
        files = start("files", folder)
        print(files.communicate()[0])
    most, output = run_without_files()
    print(f"without files: {most / 2**30:.2f} GiB allocated, and no step")
    assert files.returncode == 0
    assert "step 1/" not in output
    assert most > 0.9 * LIMIT, "it ended for another reason"
