"""Optimizer state in files: rate of the update relative to the disk's rate, and memory.

The disk's rate is measured in the same run, by sweeps that compute nothing. One case trains a model
whose optimizer state is larger than the memory limit of the process.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.machine import load_average
from benchmarks.offload_disk_run import plan_of
from benchmarks.recording import Goal, Record, parse_arguments, write_record
from zerojax.offload.disk_step import SliceUpdates
from zerojax.step.initialization import init_state
from zerojax.training.checkpointing import end_state

ROOT = Path(__file__).resolve().parent.parent
MIB = 2**20
ROUNDS = 5
OF_THE_DISK, FLAT = 0.85, 1.05
LAYERS, LIMIT_MIB = 96, 2200
"""Number of layers for 201M parameters: 2304 MiB of optimizer state under a limit of 2200 MiB, of
which float32 weights and gradients take 1536."""


def main(argv: list[str] | None = None) -> None:
    """Runs the benchmark and writes its record."""
    arguments = parse_arguments(__doc__ or "", argv)
    load_before = load_average()
    jax.config.update("jax_num_cpu_devices", 1)
    write_record(measure(arguments.smoke), arguments, load_before)


def measure(smoke: bool) -> Record:
    """Measures rates of sweeps, memory for two sizes, and runs under a memory limit."""
    with tempfile.TemporaryDirectory(prefix="zerojax-offload-", dir=".") as folder:
        rows, goals = _measure_rates(Path(folder), 2 if smoke else 32)
        more_rows, more_goals = _measure_memory(Path(folder), 4 if smoke else 16)
        if not smoke:
            last_rows, last_goals = _measure_limit(Path(folder))
            more_rows, more_goals = more_rows + last_rows, more_goals + last_goals
    notes = [
        "rates: bytes read and written, best of five sweeps taken in turns; buckets of three arrays"
        " of 2^20 float32 elements",
        "AdamW on the CPU: where it is slower than the disk, the processor is the bound and not the"
        " pipeline, whose own rate is that of the update in place",
        f"limit: RLIMIT_DATA of {LIMIT_MIB} MiB on a process; peak RSS also holds files and shared"
        " pages",
    ]
    return Record(name="offload_disk", rows=rows + more_rows, goals=goals + more_goals, notes=notes)


def _measure_rates(folder: Path, layers: int) -> tuple[list[dict[str, Any]], list[Goal]]:
    plan = plan_of("nvme", layers, folder / "rates")
    state = init_state(plan)
    disk, update = state["disk"], SliceUpdates(plan)
    numbers = np.float32(1), np.bool_(False), jax.random.key_data(jax.random.key(0))
    grads = {name: x + 0 for name, x in state["params"].items()}
    counts = jax.tree.map(
        lambda node: {} if isinstance(node, dict) else node,
        state["opt_state"],
        is_leaf=lambda node: isinstance(node, dict),
    )
    pending = {"grads": grads, "opt_state": counts, "numbers": numbers}

    def nothing(piece: Any) -> None:
        del piece

    def in_place(piece: Any) -> None:
        for values in piece.arrays.values():
            values *= np.float32(0.999)

    def adamw(piece: Any) -> None:
        name = piece.place.leaf.name
        state["params"][name] = update(piece, state["params"][name], pending)

    ways: dict[str, Callable[[Any], None]] = {
        "disk alone": nothing,
        "update in place": in_place,
        "AdamW on the CPU": adamw,
    }
    moved = 2 * sum(disk.store.bucket_sizes)
    best = dict.fromkeys(ways, 0.0)
    for number in range(ROUNDS + 1):
        for name, way in ways.items():
            began = time.perf_counter()
            for piece in disk.slices():
                way(piece)
                piece.write()
            if number:  # the first round compiles
                best[name] = max(best[name], moved / (time.perf_counter() - began))
    end_state(state)
    alone = best["disk alone"]
    rows = [
        {"what": name, "GB/s": rate / 1e9, "of the disk's": rate / alone}
        for name, rate in best.items()
    ]
    ratio = best["update in place"] / alone
    return rows, [
        Goal(name="pipeline's rate / disk's", value=ratio, limit=OF_THE_DISK, at_least=True)
    ]


def _measure_memory(folder: Path, buckets: int) -> tuple[list[dict[str, Any]], list[Goal]]:
    """Measures the peak memory of sweeps over stores of one size and of twice that size."""
    rows = []
    for count in (buckets, 2 * buckets):
        found = run_child("sweep", count, 0, folder / f"sweep{count}", steps=2)
        assert found is not None
        rows.append(
            {
                "what": "sweeps",
                "state MiB": found["state_bytes"] / MIB,
                "peak RSS MiB": found["peak_rss_bytes"] / MIB,
            }
        )
    ratio = rows[1]["peak RSS MiB"] / rows[0]["peak RSS MiB"]
    return rows, [Goal(name="peak RSS of twice the state / of the state", value=ratio, limit=FLAT)]


def _measure_limit(folder: Path) -> tuple[list[dict[str, Any]], list[Goal]]:
    """Runs the same training under the same memory limit, with its state in each tier."""
    rows = []
    for tier in ("device", "host", "nvme"):
        found = run_child(tier, LAYERS, LIMIT_MIB, folder / tier, steps=2)
        row: dict[str, Any] = {"what": f"training, state: {tier}", "limit MiB": LIMIT_MIB}
        if found is None:
            rows.append(row | {"outcome": "out of memory"})
            continue
        state, peak = found["state_bytes"] / MIB, found["peak_rss_bytes"] / MIB
        seconds = {"s/step": found["seconds"][-1]}
        rows.append(
            row | {"state MiB": state, "peak RSS MiB": peak, "outcome": "trained"} | seconds
        )
    trained = [row["what"] for row in rows if row["outcome"] == "trained"]
    only_from_disk = float(trained == ["training, state: nvme"])
    return rows, [
        Goal(name="only from disk it trains", value=only_from_disk, limit=1, at_least=True)
    ]


NO_MEMORY = ("Out of memory", "MemoryError", "bad_alloc", "Cannot allocate memory")
"""Messages of XLA, Python, C++ and LLVM at a memory limit; any of them may come first."""


def run_child(
    tier: str, size: int, limit_mib: int, folder: Path, *, steps: int
) -> dict[str, Any] | None:
    """Returns the output of a `benchmarks.offload_disk_run`; None if memory did not suffice."""
    words = [tier, str(size), str(limit_mib), str(folder.absolute()), str(steps)]
    process = subprocess.run(
        [sys.executable, "-m", "benchmarks.offload_disk_run", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    if process.returncode == 0:
        return json.loads(process.stdout.splitlines()[-1])
    if any(words in process.stderr for words in NO_MEMORY):
        return None
    raise RuntimeError(process.stderr)


if __name__ == "__main__":
    main()
