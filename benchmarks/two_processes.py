"""Two processes on two cores compared with one on one: cost of ZeRO's communication over loopback.

Starts worker processes, which are alive at the same time and take steps in turn. The best value of
T2 / (T1 / 2) is 1. T1 is measured with both cores busy, like T2: two processes each train the whole
batch without communication. Also measured: one process with the other core idle, and two processes
that train half a batch each without communication.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
from typing import Any

import zerojax
from benchmarks import small_gpt
from benchmarks.machine import load_average, pin_to_core
from benchmarks.recipe import ADAMW
from benchmarks.recording import Goal, Record, add_arguments, write_record
from benchmarks.small_gpt import BATCH_SIZE
from benchmarks.workers import HOST, Workers, free_port, slowest
from benchmarks.workers import serve as answer_requests
from zerojax.data import local_rows
from zerojax.runtime.distributed import ProcessGroup, join_processes
from zerojax.runtime.memory import keep_freed_memory

LIMITS = {0: None, 1: 1.05, 2: 1.05, 3: 1.10}
LOSS_TOLERANCE = 1e-5  # about ten units in the last place of a loss near 6
WARM_UP = 3
STEPS_PER_TURN = 4
TURNS = 6


def main(argv: list[str] | None = None) -> None:
    """Writes the record; with `--worker`, runs as one of the measured processes."""
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
    """Measures four groups of workers per ZeRO stage; only one group steps at a time."""
    rows: list[dict[str, Any]] = []
    goals = []
    for zero in stages:
        row = _measure_stage(zero, smoke)
        rows.append(row)
        limit = LIMITS[zero]
        if limit is not None:
            name = f"zero={zero}, T2 / (T1 / 2)"
            goals.append(Goal(name=f"{name}, CPU time", value=row["cpu"], limit=limit))
            goals.append(Goal(name=f"{name}, wall time", value=row["wall"], limit=limit))
    notes = [
        "T1: one process on one core, the whole batch, while another does the same on the other"
        " core; solo: the same with the other core idle; T2: two, one core each, half the batch"
        " each; alone: two that do so without talking to each other",
        "cpu: medians of process CPU time of the slower process, which leaves out waiting;"
        " wall: the least disturbed step on the wall clock, which does not",
    ]
    return Record(name="two_processes", rows=rows, goals=goals, notes=notes)


def _measure_stage(zero: int, smoke: bool) -> dict[str, Any]:
    groups = {
        "one": _start_group(zero, smoke, num_workers=2, talking=False, rows=BATCH_SIZE),
        "solo": _start_group(zero, smoke, num_workers=1, talking=False, rows=BATCH_SIZE),
        "two": _start_group(zero, smoke, num_workers=2, talking=True, rows=BATCH_SIZE),
        "alone": _start_group(zero, smoke, num_workers=2, talking=False, rows=BATCH_SIZE // 2),
    }
    try:
        for group in groups.values():
            _ask(group, WARM_UP)
        taken: dict[str, list[dict[str, Any]]] = {name: [] for name in groups}
        for turn in range(1 if smoke else TURNS):
            for name in list(groups) if turn % 2 == 0 else list(reversed(groups)):
                taken[name].append(_ask(groups[name], 1 if smoke else STEPS_PER_TURN))
    finally:
        for group in groups.values():
            group.end()
    one, solo, two, alone = (_combine(taken[name]) for name in ("one", "solo", "two", "alone"))
    if abs(one["loss"] - two["loss"]) > LOSS_TOLERANCE:
        raise RuntimeError(f"zero={zero}: one process has loss {one['loss']}, two {two['loss']}")
    return {
        "zero": zero,
        "T1_cpu_ms": 1e3 * one["cpu"],
        "solo_cpu_ms": 1e3 * solo["cpu"],
        "T2_cpu_ms": 1e3 * two["cpu"],
        "alone_cpu_ms": 1e3 * alone["cpu"],
        "T1_wall_ms": 1e3 * one["wall"],
        "solo_wall_ms": 1e3 * solo["wall"],
        "T2_wall_ms": 1e3 * two["wall"],
        "alone_wall_ms": 1e3 * alone["wall"],
        "peak_MB": two["peak_mb"],
        "cpu": 2 * two["cpu"] / one["cpu"],
        "wall": 2 * two["wall"] / one["wall"],
        "cpu/solo": 2 * two["cpu"] / solo["cpu"],
        "wall/solo": 2 * two["wall"] / solo["wall"],
        "cpu/alone": two["cpu"] / alone["cpu"],
        "wall/alone": two["wall"] / alone["wall"],
    }


def _combine(turns: list[dict[str, Any]]) -> dict[str, float]:
    """Combines all turns; each turn already has the slower process of each step."""
    return {
        "cpu": statistics.median(x for turn in turns for x in turn["cpu"]),
        "wall": min(x for turn in turns for x in turn["wall"]),
        "loss": turns[-1]["loss"],
        "peak_mb": max(turn["peak_mb"] for turn in turns),
    }


def _start_group(zero: int, smoke: bool, *, num_workers: int, talking: bool, rows: int) -> Workers:
    """Starts workers on cores 0, 1, ...; with `talking` they share one run of `rows` rows."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    environment.pop("XLA_FLAGS", None)
    port = free_port() if talking else None
    commands = []
    for index in range(num_workers):
        what = {"zero": zero, "index": index, "port": port, "rows": rows}
        command = [sys.executable, "-m", "benchmarks.two_processes", "--worker", json.dumps(what)]
        commands.append(command + ["--smoke"] * smoke)
    return Workers(commands, [environment] * num_workers)


def _ask(workers: Workers, steps: int) -> dict[str, Any]:
    """Lets all workers of a group take steps together; the slowest gives the time."""
    answers = workers.ask(steps)
    return {
        "wall": slowest(answers, "wall"),
        "cpu": slowest(answers, "cpu"),
        "loss": answers[0]["loss"][-1],
        "peak_mb": max(answer["peak_mb"] for answer in answers),
    }


# --- the worker -----------------------------------------------------------------------------------


def serve(*, zero: int, index: int, port: int | None, rows: int, smoke: bool) -> None:
    """Takes the number of steps in each line of standard input; answers with a line of JSON."""
    pin_to_core(index)
    keep_freed_memory()
    count = 1 if port is None else 2
    if port is not None:
        address = f"{HOST}:{port}"
        join_processes(ProcessGroup(coordinator=address, num_processes=count, process_id=index))
    config = small_gpt.choose_config(smoke)
    source = small_gpt.make_source(config, rows)
    plan = zerojax.make_plan(
        small_gpt.make_factory(config),
        zerojax.make_mesh({"data": count}),
        example_batch=source.batch(0),
        optimizer=zerojax.adamw(3e-4, **ADAMW),
        zero=zero,
        precision="fp32",
    )
    own_rows = local_rows(plan)
    state, step = zerojax.init_state(plan), zerojax.build_step(plan)
    done = 0

    def take_step() -> dict[str, float]:
        nonlocal state, done
        batch = source.batch(done, *own_rows)
        state, metrics = step(state, zerojax.shard_batch(plan, batch))
        done += 1
        return {"loss": float(metrics["loss"])}

    def peak() -> dict[str, int]:
        return {"peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)}

    answer_requests(take_step, peak)


if __name__ == "__main__":
    main()
