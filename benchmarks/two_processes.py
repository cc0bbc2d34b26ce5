"""Two processes on two cores against one on one: what ZeRO's communication costs over loopback.

Starts its own workers, all alive at once and asked for steps in turn; T2 / (T1 / 2) is 1 at best.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import time
from typing import Any

import jax

import zerojax
from benchmarks import small_gpt
from benchmarks.machine import load_average, pin_to_core
from benchmarks.recording import Goal, Record, add_arguments, write_record

LIMITS = {0: None, 1: 1.05, 2: 1.05, 3: 1.10}
HOST = "127.0.0.1"
ANSWER = "answer "
WARM_UP = 3
STEPS_PER_TURN = 4
TURNS = 6


def main(argv: list[str] | None = None) -> None:
    """Measures and records; with `--worker`, is one of the processes that are measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--stages", type=int, nargs="+", default=list(LIMITS))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.worker:
        serve(**json.loads(arguments.worker), smoke=arguments.smoke)
        return
    load_before = load_average()
    write_record(measure(arguments.stages, arguments.smoke), arguments, load_before)


def measure(stages: list[int], smoke: bool) -> Record:
    """One single process and one pair per stage, never stepping at the same time."""
    rows: list[dict[str, Any]] = []
    goals = []
    for zero in stages:
        row = _measure_stage(zero, smoke)
        rows.append(row)
        limit = LIMITS[zero]
        if limit is not None:
            goals.append(Goal(name=f"zero={zero}, T2 / (T1 / 2)", value=row["cpu"], limit=limit))
            name = f"zero={zero}, T2 / (T1 / 2) of the least wall time"
            goals.append(Goal(name=name, value=row["least_wall"], limit=limit))
    notes = [
        "T1: one process, one core, the whole batch; T2: two, one core each, half the batch each,"
        " the slower one counts",
        "cpu: medians of process CPU time, which leaves out waiting for the other; least_wall: the"
        " least disturbed step on the wall clock, which does not",
    ]
    return Record(name="two_processes", rows=rows, goals=goals, notes=notes)


def _measure_stage(zero: int, smoke: bool) -> dict[str, Any]:
    single = _start_workers(zero, 1, smoke)
    pair = _start_workers(zero, 2, smoke)
    try:
        for group in (single, pair):
            _ask(group, WARM_UP)
        taken: dict[int, list[dict[str, Any]]] = {1: [], 2: []}
        for turn in range(1 if smoke else TURNS):
            order = (single, pair) if turn % 2 == 0 else (pair, single)
            for group in order:
                taken[len(group)].append(_ask(group, 1 if smoke else STEPS_PER_TURN))
    finally:
        for worker in (*single, *pair):
            worker.kill()
            worker.wait()
    one, two = (_combine(taken[count]) for count in (1, 2))
    if abs(one["loss"] - two["loss"]) > 1e-4:
        raise RuntimeError(f"zero={zero}: one process has loss {one['loss']}, two {two['loss']}")
    return {
        "zero": zero,
        "T1_cpu_ms": 1e3 * one["cpu"],
        "T2_cpu_ms": 1e3 * two["cpu"],
        "T1_least_ms": 1e3 * one["least_wall"],
        "T2_least_ms": 1e3 * two["least_wall"],
        "T2_wall_ms": 1e3 * two["wall"],
        "peak_MB": two["peak_mb"],
        "cpu": 2 * two["cpu"] / one["cpu"],
        "least_wall": 2 * two["least_wall"] / one["least_wall"],
    }


def _combine(turns: list[dict[str, Any]]) -> dict[str, float]:
    """Over all turns; each turn already holds, per step, the slower process."""
    wall = [x for turn in turns for x in turn["wall"]]
    cpu = [x for turn in turns for x in turn["cpu"]]
    return {
        "cpu": statistics.median(cpu),
        "wall": statistics.median(wall),
        "least_wall": min(wall),
        "loss": turns[-1]["loss"],
        "peak_mb": max(turn["peak_mb"] for turn in turns),
    }


def _start_workers(zero: int, count: int, smoke: bool) -> list[subprocess.Popen[str]]:
    port = _free_port()
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_COORDINATOR_BIND_ADDRESS": f"{HOST}:{port}",
    }
    environment.pop("XLA_FLAGS", None)
    workers = []
    for index in range(count):
        what = {"zero": zero, "count": count, "index": index, "port": port}
        command = [sys.executable, "-m", "benchmarks.two_processes", "--worker", json.dumps(what)]
        workers.append(
            subprocess.Popen(
                command + ["--smoke"] * smoke,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    return workers


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def _ask(workers: list[subprocess.Popen[str]], steps: int) -> dict[str, Any]:
    """Lets all workers of a group take steps together; the slowest one decides each step."""
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write(f"{steps}\n")
        worker.stdin.flush()
    answers = []
    for worker in workers:
        answers.append(_read_answer(worker))
    return {
        "wall": [max(times) for times in zip(*(a["wall"] for a in answers), strict=True)],
        "cpu": [max(times) for times in zip(*(a["cpu"] for a in answers), strict=True)],
        "loss": answers[0]["loss"],
        "peak_mb": max(a["peak_mb"] for a in answers),
    }


def _read_answer(worker: subprocess.Popen[str]) -> dict[str, Any]:
    assert worker.stdout is not None
    for line in worker.stdout:
        if line.startswith(ANSWER):  # gloo writes to standard output as well
            return json.loads(line.removeprefix(ANSWER))
    raise RuntimeError(f"a worker ended with status {worker.wait()}; see its output above")


# --- the worker -----------------------------------------------------------------------------------


def serve(*, zero: int, count: int, index: int, port: int, smoke: bool) -> None:
    """Takes as many steps as each line of standard input says; answers with a line of JSON."""
    pin_to_core(index)
    if count > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"{HOST}:{port}", num_processes=count, process_id=index)
    config = small_gpt.choose_config(smoke)
    source = small_gpt.make_source(config)
    plan = zerojax.make_plan(
        small_gpt.make_factory(config),
        zerojax.make_mesh({"data": count}),
        example_batch=source.batch(0),
        optimizer=zerojax.adamw(3e-4),
        zero=zero,
        precision="fp32",
    )
    state, step = zerojax.init_state(plan), zerojax.build_step(plan)
    rows = source.global_batch_size // count
    done = 0
    for line in sys.stdin:
        wall, cpu, loss = [], [], float("nan")
        for _ in range(int(line)):
            batch = source.batch(done, index * rows, (index + 1) * rows)
            wall_before, cpu_before = time.perf_counter(), time.process_time()
            state, metrics = step(state, zerojax.shard_batch(plan, batch))
            loss = float(metrics["loss"])
            wall.append(time.perf_counter() - wall_before)
            cpu.append(time.process_time() - cpu_before)
            done += 1
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        answer = {"wall": wall, "cpu": cpu, "loss": loss, "peak_mb": round(peak)}
        print(ANSWER + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
