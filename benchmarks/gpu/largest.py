"""Part "largest": the largest Llama that takes three steps on one GPU, for each kind of offload.

Each attempt is a separate process with a time limit, since running out of memory may end the
process. Starting at the expected size, sizes go up until one fails, or down until one fits.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

import zerojax
from benchmarks import plain_jax
from benchmarks.gpu.subjects import (
    make_factory,
    make_optimizer,
    make_source,
    peak_device_bytes,
)
from benchmarks.gpu.workloads import Workload, choose_workload
from benchmarks.machine import load_average
from benchmarks.recipe import ADAMW
from benchmarks.recording import Goal, Record, add_arguments, write_record

GIB = 2**30
STEPS = 3
STATE_BYTES = 12
"""Bytes per parameter: float32 master and two moments."""
HOST_SHARE, DISK_SHARE = 0.80, 0.85
"""Share of host memory and of free disk space that may be used."""
WORKING_BYTES = 12 * GIB
"""Share of device memory for activations, logits and the compiler's temporaries."""
PER_PARAMETER = {"device": 4, "update_in_backward": 0}
"""Bytes per parameter on the device in addition to the state: bfloat16 weights and gradients."""


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to train.

    Attributes:
      tiers: memory tiers that hold state, nearest first.
      expected: number of parameters of the first attempt on a GPU with 141 GB.
      in_backward: whether layers are updated in the backward pass, with weights on the host.
    """

    tiers: tuple[str, ...]
    expected: float
    in_backward: bool = False


WAYS: Mapping[str, Way] = {
    "device, host and disk": Way(("device", "host", "nvme"), 18e9),
    "device and host": Way(("device", "host"), 15e9),
    "device only": Way(("device",), 7.5e9),
    "plain JAX": Way((), 6.5e9),
    "host, updated in the backward pass": Way(("host",), 6.5e9, in_backward=True),
}
CARD_BYTES = 141e9
STRIDE = 1.12
FAILED = "failed"
NO_MEMORY = ("RESOURCE_EXHAUSTED", "Out of memory", "out of memory", "MemoryError", "ENOMEM")


def main(argv: list[str] | None = None) -> None:
    """Searches the largest model for each way, or runs the attempt that `--attempt` describes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--seconds", type=float, default=500.0, help="of all attempts together")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds of one attempt")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS), metavar="WAY")
    parser.add_argument("--attempt", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.attempt:
        print(json.dumps(attempt(**json.loads(arguments.attempt), smoke=arguments.smoke)))
        return
    load_before = load_average()
    ends = time.monotonic() + arguments.seconds
    rows: list[dict[str, Any]] = []
    for way in arguments.ways:
        search(way, arguments, ends, rows.append)
        largest = {row["way"]: row["parameters_B"] for row in rows if row["outcome"] == "ok"}
        goals = []
        if "device only" in largest and "device and host" in largest:
            ratio = largest["device and host"] / largest["device only"]
            goals = [Goal(name="host over device only", value=ratio, limit=1.0, at_least=True)]
        write_record(Record(name="largest", rows=rows, goals=goals), arguments, load_before)


def search(
    way: str, arguments: argparse.Namespace, ends: float, keep: Callable[[dict[str, Any]], None]
) -> None:
    """Increases the expected size until an attempt fails, or decreases it until one succeeds."""
    layers = _expected_layers(WAYS[way], arguments.smoke)
    went_well: bool | None = None
    while layers >= 1:
        left = ends - time.monotonic()
        if left < 20:
            keep({"way": way, "layers": layers, "outcome": "not tried: time is over"})
            return
        row = _try(way, layers, arguments, min(arguments.limit, left))
        keep(row)
        print(f"  {way}, {layers} layers: {row['outcome']}", flush=True)
        is_ok = row["outcome"] == "ok"
        if row["outcome"] == FAILED:
            return  # a defect, which fewer layers would not fix
        if (went_well is not None and is_ok != went_well) or arguments.smoke:
            return  # the limit is between the last two sizes
        went_well = is_ok
        layers = (
            max(layers + 1, round(layers * STRIDE))
            if is_ok
            else min(layers - 1, round(layers / STRIDE))
        )


def _expected_layers(way: Way, smoke: bool) -> int:
    """Returns the number of layers of the first attempt, for the memory of this card."""
    if smoke:
        return 2
    workload = choose_workload("largest", smoke=False)
    scale = _device_bytes() / CARD_BYTES
    return max(1, round((way.expected * scale - _outer(workload)) / _per_layer(workload)))


def _device_bytes() -> float:
    """Returns the memory of the first GPU in bytes, by its driver, without opening the GPU."""
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    if shutil.which(query[0]) is None:
        return CARD_BYTES
    found = subprocess.run(query, capture_output=True, text=True)
    return float(found.stdout.split()[0]) * 2**20 if found.returncode == 0 else CARD_BYTES


def _try(way: str, layers: int, arguments: argparse.Namespace, limit: float) -> dict[str, Any]:
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        what = json.dumps({"way": way, "layers": layers, "folder": folder})
        command = [sys.executable, "-m", "benchmarks.gpu.largest", "--attempt", what]
        command += ["--smoke"] if arguments.smoke else []
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
        except subprocess.TimeoutExpired:
            outcome: dict[str, Any] = {"outcome": f"out of time: {limit:.0f} s"}
        else:
            outcome = _outcome_of(done)
    return {"way": way, "layers": layers, **outcome, "seconds": time.monotonic() - began}


def _outcome_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    if done.returncode == 0:
        return json.loads(done.stdout.strip().splitlines()[-1]) | {"outcome": "ok"}
    text = (done.stdout + done.stderr).strip()
    short = [line for line in text.splitlines() if "Error" in line or "RESOURCE" in line]
    reason = (short or text.splitlines() or [f"exit status {done.returncode}"])[-1]
    # The system ends a process that uses all host memory with SIGKILL.
    of_memory = done.returncode == -signal.SIGKILL or any(word in text for word in NO_MEMORY)
    outcome = "out of memory" if of_memory else FAILED
    return {"outcome": outcome, "note": reason.strip()[:200]}


# --- one attempt, in its own process --------------------------------------------------------------


def attempt(way: str, layers: int, folder: str, smoke: bool) -> dict[str, Any]:
    """Trains three steps; returns sizes and seconds; any error ends the process."""
    os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = "0.95"
    host = int(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * HOST_SHARE)
    os.environ["XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"] = str(max(1, host // GIB))
    workload = choose_workload("largest", smoke)
    workload = dataclasses.replace(workload, num_layers=layers)
    chosen = WAYS[way]
    if not chosen.tiers:
        return _plain(workload)
    total = _outer(workload) + layers * _per_layer(workload)
    disk = shutil.disk_usage(folder).free * DISK_SHARE
    if chosen.in_backward:
        offload: dict[str, Any] = {
            "opt_state": "host",
            "params": "host",
            "update_in_backward": True,
        }
    else:
        offload = {"opt_state": shares_for(chosen.tiers, total, host, disk)}
    if smoke:
        offload |= {"slice_elements": 2**10, "min_elements": 2**8}
        if not chosen.in_backward:
            offload["opt_state"] = dict.fromkeys(chosen.tiers, 1 / len(chosen.tiers))
    if "nvme" in chosen.tiers:
        offload["folder"] = folder
    optimizer = make_optimizer()
    if chosen.in_backward:
        optimizer = zerojax.adamw(3e-4, **{**ADAMW, "clip_norm": None})
    source = make_source(workload, STEPS)
    plan = zerojax.make_plan(
        make_factory(workload),
        zerojax.make_mesh({"data": 1}, devices=jax.devices()[:1]),
        example_batch=source.batch(0),
        optimizer=optimizer,
        precision="bf16",
        reduce_dtype="bf16",
        offload=offload,
    )
    state, step = zerojax.init_state(plan), zerojax.build_step(plan)
    seconds, losses = [], []
    for index in range(STEPS):
        began = time.perf_counter()
        state, metrics = step(state, zerojax.shard_batch(plan, source.batch(index)))
        losses.append(float(metrics["loss"]))
        jax.block_until_ready(state)
        seconds.append(time.perf_counter() - began)
    return _row(total, seconds, losses) | {"shares": str(offload["opt_state"])}


def shares_for(
    tiers: tuple[str, ...], parameters: float, host: float, disk: float
) -> dict[str, float]:
    """Returns the shares of tiers: as much state on the device as fits, then host, then files.

    Args:
      tiers: memory tiers that may hold state, nearest first.
      parameters: number of parameters of the model.
      host, disk: bytes of host memory and of disk space that may be used.
    """
    state = STATE_BYTES * parameters
    beside = PER_PARAMETER["device"] * parameters + WORKING_BYTES
    room = {"device": max(0.0, _device_bytes() * 0.95 - beside), "host": host, "nvme": disk}
    left, shares = state, {}
    for tier in tiers:
        taken = min(left, room[tier])
        if taken:
            shares[tier] = taken / state
            left -= taken
    if left > 0:
        # State that does not fit goes to the last tier, which then raises an error.
        shares[tiers[-1]] = shares.get(tiers[-1], 0.0) + left / state
    return shares


def _plain(workload: Workload) -> dict[str, Any]:
    """Runs the hand-written step in plain JAX."""
    factory, optimizer = make_factory(workload), make_optimizer()
    params = plain_jax.init_params(factory)
    total = sum(leaf.size for leaf in params.values())
    opt_state = jax.jit(optimizer.init)(params)
    step = plain_jax.build_step(factory, optimizer, compute_dtype=jnp.bfloat16)
    source = make_source(workload, STEPS)
    seconds, losses = [], []
    for index in range(STEPS):
        began = time.perf_counter()
        params, opt_state, loss = step(params, opt_state, jax.device_put(source.batch(index)))
        losses.append(float(loss))
        seconds.append(time.perf_counter() - began)
    return _row(total, seconds, losses)


def _row(parameters: float, seconds: list[float], losses: list[float]) -> dict[str, Any]:
    if not all(loss == loss for loss in losses):
        raise RuntimeError(f"losses {losses}: not a number")
    peak = peak_device_bytes()
    return {
        "parameters_B": parameters / 1e9,
        "first_step_s": seconds[0],
        "step_s": seconds[-1],
        "last_loss": losses[-1],
        "peak_GB": None if peak is None else peak / 1e9,
    }


def _per_layer(workload: Workload) -> int:
    width, kv_width = workload.embed_dim, workload.num_kv_heads * workload.head_dim
    return 2 * width * width + 2 * width * kv_width + 3 * width * workload.mlp_dim + 2 * width


def _outer(workload: Workload) -> int:
    return 2 * workload.vocab_size * workload.embed_dim + workload.embed_dim


if __name__ == "__main__":
    main()
