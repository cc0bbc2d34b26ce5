"""Writes tests/data/deepspeed_tutorial.npz: the DeepSpeed script of docs/deepspeed_tutorial.md.

Needs `deepspeed` and `torch` (run with deepspeed 0.19.8, torch 2.13.0 for CPU, Python 3.11):

    python tests/oracles/deepspeed_tutorial.py

The script runs as it stands in the page, in two processes that talk by gloo. The file has its
initial weights and the mean of the losses that the processes print.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "deepspeed_tutorial.md"
TARGET = TESTS / "data" / "deepspeed_tutorial.npz"
NUM_PROCESSES = 2


def write_files(folder: Path) -> None:
    """Writes each block of the page that is a file."""
    page = PAGE.read_text(encoding="utf-8")
    for text in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S):
        (folder / text.partition("\n")[0].removeprefix("# ")).write_text(text, encoding="utf-8")
    (content,) = re.findall(r"^```json\n(.*?)^```", page, re.M | re.S)
    (folder / "ds_config.json").write_text(content, encoding="utf-8")


def run(folder: Path) -> list[list[float]]:
    """Returns the losses that each process prints."""
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
        outputs = [process.communicate(timeout=600)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [[float(x) for x in re.findall(r"^\d+ ([\d.]+)$", text, re.M)] for text in outputs]


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        write_files(Path(name))
        losses = np.mean(run(Path(name)), axis=0)
        weights = dict(np.load(Path(name) / "weights.npz"))
    np.savez_compressed(TARGET, **{f"weights/{n}": x for n, x in weights.items()}, losses=losses)


if __name__ == "__main__":
    main()
