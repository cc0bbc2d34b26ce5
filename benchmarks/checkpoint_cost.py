"""Cost of a checkpoint: how long training waits for it, and how long until it is on the disk.

Compared with `write` and `fsync` of the same bytes into one file, with Orbax's checkpointer, and
with `torch.save`, which DeepSpeed's default checkpoint engine calls. 522 MB of float32 in 52 and in
232 arrays, on 1 and on 8 CPU devices; all ways alternate in one process, and the disk is idle
before each.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.machine import load_average
from benchmarks.recording import Goal, Record, add_arguments, write_record
from zerojax.runtime.memory import keep_freed_memory

CASES = ((52, 1), (232, 1), (52, 8), (232, 8))  # arrays, devices
NUM_BYTES = 522 * 10**6
ROUNDS = 9
CITED = 0.28
"""Seconds that DeepSpeed 0.19.8 blocked for a state of this size on such a machine (0.28 to 0.39
with two processes, its total; measured for zerojax on 2026-11-21, the engine without fsync)."""

Numbers = dict[str, float]


def main(argv: list[str] | None = None) -> None:
    """Runs the benchmark and writes its record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"default {ROUNDS}")
    arguments = parser.parse_args(argv)
    jax.config.update("jax_num_cpu_devices", 8)
    keep_freed_memory()  # as `zerojax train` does on CPU devices
    load_before = load_average()
    write_record(measure(arguments.smoke, arguments.rounds), arguments, load_before)


def measure(smoke: bool, rounds: int) -> Record:
    """Returns a row for each case, with medians over the rounds."""
    num_bytes, rounds = (2 * 10**6, 1) if smoke else (NUM_BYTES, rounds)
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-cost-"))
    try:
        states = {case: make_state(*case, num_bytes) for case in CASES}
        taken: dict[tuple[int, int], list[Numbers]] = {case: [] for case in CASES}
        for number in range(rounds + 1):
            for case in CASES if number % 2 else reversed(CASES):
                found = one_round(states[case], folder)
                told = ", ".join(f"{name} {value:.3f}" for name, value in found.items())
                print(f"round {number}, {case[0]} arrays on {case[1]}: {told}", flush=True)
                if number or smoke:  # the first compiles, imports and makes files
                    taken[case].append(found)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    rows = [_row(case, taken[case]) for case in CASES]
    return Record(name="checkpoint_cost", rows=rows, goals=_goals(rows), notes=_notes(rows))


def make_state(num_arrays: int, num_devices: int, num_bytes: int) -> dict[str, jax.Array]:
    """Returns arrays of random normals, each sharded over the devices by its columns."""
    axis = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((num_devices,), ("data",), axis, devices=jax.devices()[:num_devices])
    rows = num_bytes // num_arrays // 4096
    make = jax.jit(
        lambda key: jax.random.normal(key, (rows, 1024)),
        out_shardings=NamedSharding(mesh, P(None, "data")),
    )
    keys = jax.random.split(jax.random.key(0), num_arrays)
    return {f"layer_{index}/kernel": make(keys[index]) for index in range(num_arrays)}


def one_round(state: Mapping[str, jax.Array], folder: Path) -> Numbers:
    """Times every way once, after waiting until the disk has nothing else to write."""
    host = [np.array(array) for array in state.values()]
    found = {"raw_s": _timed(lambda: _write_raw(folder / "raw", host), folder)}
    if importlib.util.find_spec("torch") is not None:
        found["torch_save_s"] = _timed(lambda: _save_with_torch(folder / "torch", host), folder)
    return found | _orbax(state, folder) | _ours(state, folder)


def _timed(run: Callable[[], Any], folder: Path) -> float:
    os.sync()
    began = time.perf_counter()
    run()
    seconds = time.perf_counter() - began
    for path in folder.iterdir():
        path.unlink()
    return seconds


def _write_raw(path: Path, host: list[np.ndarray]) -> None:
    with path.open("wb", buffering=0) as file:
        for array in host:
            left = array.reshape(-1).view(np.uint8).data
            while left:
                left = left[file.write(left) :]
        os.fsync(file.fileno())


def _save_with_torch(path: Path, host: list[np.ndarray]) -> None:
    import torch  # heavy, and not needed for the rest

    torch.save({str(index): torch.from_numpy(x) for index, x in enumerate(host)}, path)


def _orbax(state: Mapping[str, jax.Array], folder: Path) -> Numbers:
    """Times Orbax's own checkpointer, which neither syncs files nor checks values."""
    import orbax.checkpoint as ocp  # after the number of devices is set

    os.sync()
    with ocp.StandardCheckpointer() as checkpointer:
        began = time.perf_counter()
        checkpointer.save(folder / "orbax", dict(state))
        checkpointer.wait_until_finished()
        total = time.perf_counter() - began
        began = time.perf_counter()
        jax.block_until_ready(checkpointer.restore(folder / "orbax", _abstract(state)))
        restore = time.perf_counter() - began
    shutil.rmtree(folder / "orbax")
    return {"orbax_total_s": total, "orbax_restore_s": restore}


def _abstract(state: Mapping[str, jax.Array]) -> dict[str, jax.ShapeDtypeStruct]:
    return {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
        for name, x in state.items()
    }


def _ours(state: Mapping[str, jax.Array], folder: Path) -> Numbers:
    from zerojax.checkpoint import Checkpointer  # after the number of devices is set

    os.sync()
    checkpointer = Checkpointer(folder / "ours")
    cpu, began = time.process_time(), time.perf_counter()
    checkpointer.save(1, dict(state), data_state={}, config={}, plan={})
    blocked = time.perf_counter() - began
    checkpointer.wait()
    total, cpu = time.perf_counter() - began, time.process_time() - cpu
    began = time.perf_counter()
    restored = jax.block_until_ready(checkpointer.restore(_abstract(state)).state)
    restore = time.perf_counter() - began
    checkpointer.close()
    for name, array in state.items():
        if np.asarray(restored[name]).tobytes() != np.asarray(array).tobytes():
            raise AssertionError(f"{name} did not come back bit for bit")
    shutil.rmtree(folder / "ours")
    return {"blocked_s": blocked, "total_s": total, "restore_s": restore, "cpu_s": cpu}


def _row(case: tuple[int, int], taken: list[Numbers]) -> dict[str, Any]:
    medians = {name: statistics.median(one[name] for one in taken) for name in taken[0]}
    row: dict[str, Any] = {"arrays": case[0], "devices": case[1], **medians}
    row["best_raw_s"] = min(one["raw_s"] for one in taken)
    row["best_total_s"] = min(one["total_s"] for one in taken)
    row["total/raw"] = statistics.median(one["total_s"] / one["raw_s"] for one in taken)
    ratios = [one["restore_s"] / one["orbax_restore_s"] for one in taken]
    row["restore/orbax"] = statistics.median(ratios)
    if "torch_save_s" in medians:
        ratios = [one["blocked_s"] / one["torch_save_s"] for one in taken]
        row["blocked/torch"] = statistics.median(ratios)
    return row


def _goals(rows: list[dict[str, Any]]) -> list[Goal]:
    goals = []
    for row in rows:
        case = f"{row['arrays']} arrays, {row['devices']} devices"
        goals.append(Goal(name=f"total / raw, {case}", value=row["total/raw"], limit=2.0))
        value = row["restore/orbax"]
        goals.append(Goal(name=f"restore / Orbax's, {case}", value=value, limit=1.0))
        if "blocked/torch" in row:
            value = row["blocked/torch"]
            goals.append(Goal(name=f"blocked / torch.save, {case}", value=value, limit=0.3))
        cited = row["blocked_s"] / CITED
        goals.append(Goal(name=f"blocked / DeepSpeed's {CITED} s, {case}", value=cited, limit=0.3))
    return goals


def _notes(rows: list[dict[str, Any]]) -> list[str]:
    notes = [
        "medians of the rounds; a ratio is the median of each round's own ratio; cpu_s is of all "
        "threads during a save, with the fingerprints of all arrays and the checksums of all files",
        "total: until every byte and the folder's name are on the disk; torch.save does not fsync",
    ]
    if "torch_save_s" not in rows[0]:
        notes.append("torch is not installed, so nothing stands beside the cited figure")
    return notes


if __name__ == "__main__":
    main()
