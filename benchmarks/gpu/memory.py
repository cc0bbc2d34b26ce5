"""Part "memory": what the compiler and the plan predict against what the device counted.

One process per case, since a device never forgets its peak.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.gpu.workloads import choose_workload
from benchmarks.machine import load_average
from benchmarks.recording import Goal, Record, add_arguments, write_record

ROOT = Path(__file__).resolve().parent.parent.parent
CASES = (1, 4)  # microbatches
LIMIT = 1.05
LEAST = 0.95
ANSWER = "answer "


def main(argv: list[str] | None = None) -> None:
    """Measures and records; with `--case`, is one of the processes that are measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--case", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.case:
        print(ANSWER + json.dumps(measure_case(arguments.case, arguments.smoke)))
        return
    load_before = load_average()
    rows = [_in_a_process(case, arguments.smoke) for case in CASES]
    counted = [row for row in rows if row["measured/compiled"] is not None]
    goals = []
    for row in counted:
        name = f"{row['microbatches']} microbatches, measured / compiled"
        value = row["measured/compiled"]
        goals.append(Goal(name=name, value=value, limit=LIMIT))
        goals.append(Goal(name=name, value=value, limit=LEAST, at_least=True))
    notes = [] if counted else ["this device does not count its memory: nothing to compare with"]
    write_record(Record(name="memory", rows=rows, goals=goals, notes=notes), arguments, load_before)


def _in_a_process(case: int, smoke: bool) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.gpu.memory", "--case", str(case)]
    # Memory taken as it is needed, so that other processes may use the GPU at the same time.
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    result = subprocess.run(
        command + ["--smoke"] * smoke, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    )
    for line in result.stdout.splitlines():
        if line.startswith(ANSWER):
            return json.loads(line.removeprefix(ANSWER))
    raise RuntimeError(f"{case} microbatches: status {result.returncode}, output above")


def measure_case(num_microbatches: int, smoke: bool) -> dict[str, Any]:
    """Plans, compiles, runs a few steps and reads the device's counters."""
    # Only in the process of a case: the parent must not start the GPU.
    import zerojax
    from benchmarks.gpu.subjects import (
        make_factory,
        make_optimizer,
        make_source,
        peak_device_bytes,
    )

    workload = choose_workload("memory", smoke)
    source = make_source(workload)
    plan = zerojax.make_plan(
        make_factory(workload),
        zerojax.make_mesh({"data": 1}),
        example_batch=source.batch(0),
        optimizer=make_optimizer(),
        precision="bf16",
        num_microbatches=num_microbatches,
    )
    state = zerojax.init_state(plan)
    batch = zerojax.shard_batch(plan, source.batch(0))
    compiled = zerojax.build_step(plan).lower(state, batch).compile()
    float(state["step"])
    peak_after_init = peak_device_bytes()
    for _ in range(workload.steps):
        state, metrics = compiled(state, batch)
    loss = float(metrics["loss"])
    analysis = compiled.memory_analysis()
    predicted = (
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes
        + analysis.temp_size_in_bytes
    )
    measured = peak_device_bytes()
    return {
        "microbatches": num_microbatches,
        "parameters": plan.as_dict()["num_parameters"],
        "plan_MB_without_activations": sum(plan.as_dict()["bytes_per_device"].values()) / 1e6,
        "compiled_MB": predicted / 1e6,
        "compiled_temp_MB": analysis.temp_size_in_bytes / 1e6,
        "peak_after_init_MB": None if peak_after_init is None else peak_after_init / 1e6,
        "measured_peak_MB": None if measured is None else measured / 1e6,
        "measured/compiled": None if measured is None else measured / predicted,
        "loss": loss,
    }


if __name__ == "__main__":
    main()
