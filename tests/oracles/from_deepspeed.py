"""Writes tests/data/from_deepspeed.json: losses of the DeepSpeed script in docs/from_deepspeed.md.

Needs `deepspeed` and `torch` (run with deepspeed 0.19.8, torch 2.13.0 for CPU, Python 3.11):

    python tests/oracles/from_deepspeed.py

The script runs as it stands in the page, in two processes that talk by gloo. Its two processes
print the losses of their own rows, and the mean is kept.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import deepspeed
import numpy as np
import torch

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "from_deepspeed.md"
TARGET = TESTS / "data" / "from_deepspeed.json"
NUM_PROCESSES = 2


def block(first_line: str) -> str:
    """The page's block of code that begins with a line."""
    found = re.search(
        rf"^```\w+\n({re.escape(first_line)}\n.*?)^```", PAGE.read_text(), re.M | re.S
    )
    assert found is not None, first_line
    return found.group(1)


def run(folder: Path) -> list[list[float]]:
    """Losses that each process has printed."""
    (folder / "ds_config.json").write_text(block("{"))
    (folder / "train_deepspeed.py").write_text(block("# train_deepspeed.py"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    processes = [
        subprocess.Popen(
            [sys.executable, "train_deepspeed.py"],
            cwd=folder,
            env=os.environ
            | {"DS_ACCELERATOR": "cpu", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(NUM_PROCESSES)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(NUM_PROCESSES)
    ]
    try:
        outputs = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [[float(x) for x in re.findall(r"^\d+ ([\d.]+)$", text, re.M)] for text in outputs]


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        losses = np.mean(run(Path(name)), axis=0)
        weights = {n: x.tolist() for n, x in np.load(Path(name) / "weights.npz").items()}
    found = {
        "deepspeed": deepspeed.__version__,
        "torch": torch.__version__,
        "processes": NUM_PROCESSES,
        "losses": losses.tolist(),
        "weights": weights,
    }
    TARGET.write_text(json.dumps(found, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
