"""The run that `make train` starts: tokens per second, peak memory and loss.

Runs the command in a separate process and reads the files that it writes.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.machine import load_average
from benchmarks.recording import Record, parse_arguments, write_record

ROOT = Path(__file__).resolve().parent.parent
CONFIG = "configs/tiny_shakespeare.yaml"
TINY = ("steps=4", "eval_every=2", "embed_dim=32", "num_layers=2", "global_batch_size=8")


def main(argv: list[str] | None = None) -> None:
    """Runs the benchmark and writes its record."""
    arguments = parse_arguments(__doc__ or "", argv)
    load_before = load_average()
    write_record(measure(arguments.smoke), arguments, load_before)


def measure(smoke: bool) -> Record:
    """Returns one row, of the whole command."""
    with tempfile.TemporaryDirectory() as folder:
        usage, wall = run_command(["train", CONFIG, f"run_dir={folder}", *(TINY if smoke else ())])
        reports = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").open()]
    train = [report for report in reports if report["kind"] == "train"]
    evaluations = [report for report in reports if report["kind"] == "eval"]
    rates = [r["tokens_per_second_per_device"] for r in train[1:]]
    row: dict[str, Any] = {
        "command": f"zerojax train {CONFIG}",
        "wall_s": wall,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "steps": train[-1]["step"],
        "tokens_per_s_per_device": statistics.median(rates) if rates else None,
        "peak_MB": usage.ru_maxrss / 1024,
        "first_loss": train[0]["loss"],
        "last_loss": train[-1]["loss"],
        "validation_loss": evaluations[-1]["loss"] if evaluations else None,
    }
    return Record(name="default_run", rows=[row])


def run_command(words: list[str]) -> tuple[Any, float]:
    """Returns (resource usage by the kernel, wall seconds) of `python -m zerojax WORDS`."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    began = time.perf_counter()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "zerojax", *words],
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            output.seek(0)
            raise RuntimeError(f"zerojax ended with {process.returncode}:\n{output.read()}")
    return usage, time.perf_counter() - began


if __name__ == "__main__":
    main()
