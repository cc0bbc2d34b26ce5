"""Part "command": `zerojax train`, `eval` and `generate` as a user types them, on this device.

Reads their output and files only.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.machine import load_average
from benchmarks.recording import Record, parse_arguments, save_so_far, write_record

ROOT = Path(__file__).resolve().parent.parent.parent
TINY = ("steps=4", "embed_dim=32", "num_layers=2", "global_batch_size=8")
GPU = ("steps=60", "precision=bf16", "zero=3")


def main(argv: list[str] | None = None) -> None:
    """Runs the three commands and records the time of each."""
    arguments = parse_arguments(__doc__ or "", argv)
    load_before = load_average()
    with tempfile.TemporaryDirectory() as folder:
        options = [f"run_dir={folder}", "cpu_devices=null", *(TINY if arguments.smoke else GPU)]
        rows: list[dict[str, Any]] = []
        record = Record(name="command", rows=rows)
        for words in (
            ("train", "configs/tiny_shakespeare.yaml", *options),
            ("eval", folder),
            ("generate", folder, "To be"),
        ):
            rows.append(_run(*words))
            save_so_far(record, arguments, load_before)
    write_record(record, arguments, load_before)


def _run(*words: str) -> dict[str, Any]:
    began = time.perf_counter()
    result = subprocess.run(
        [sys.executable, "-m", "zerojax", *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if result.returncode:
        raise SystemExit(f"zerojax {words[0]} ended with {result.returncode}:\n{result.stdout}")
    lines = [line.strip() for line in result.stdout.splitlines() if line.strip()]
    return {
        "command": words[0],
        "seconds": time.perf_counter() - began,
        "last_line": lines[-1] if lines else "",
    }


if __name__ == "__main__":
    main()
