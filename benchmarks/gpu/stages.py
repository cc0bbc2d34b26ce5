"""Part "stages": ZeRO 0-3, accumulation and two precisions on this machine, compared with stage 0.

On one GPU a stage shards nothing; the part checks that its program compiles and gives the same
losses. With several GPUs all of them are used.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

import zerojax
from benchmarks.gpu.subjects import make_factory, make_optimizer, make_source
from benchmarks.gpu.workloads import Workload, choose_workload
from benchmarks.machine import load_average
from benchmarks.recording import Goal, Record, parse_arguments, save_so_far, write_record

# fp32 with exact products: only the order of sums differs. bf16 has 8 bits.
TOLERANCES = {"fp32": 1e-5, "bf16": 2e-2}
# (ZeRO stage, microbatches); the others are compared with the first.
CASES = {"fp32": ((0, 1), (1, 1), (2, 1), (3, 1), (3, 4)), "bf16": ((0, 1), (2, 1), (3, 4))}


def main(argv: list[str] | None = None) -> None:
    """Runs the benchmark and writes its record."""
    arguments = parse_arguments(__doc__ or "", argv)
    load_before = load_average()
    # TF32 products would hide errors of the size to detect.
    jax.config.update("jax_default_matmul_precision", "highest")
    for record in measure(choose_workload("stages", arguments.smoke)):
        save_so_far(record, arguments, load_before)
    write_record(record, arguments, load_before)
    if not all(goal.is_met for goal in record.goals):
        raise SystemExit("stages differ by more than the tolerance")


def measure(workload: Workload) -> Iterator[Record]:
    """Yields the record after each case; cases of a precision are compared with its first."""
    rows: list[dict[str, Any]] = []
    for precision in TOLERANCES:
        reference = None
        for zero, num_microbatches in CASES[precision]:
            began = time.perf_counter()
            losses = _losses(workload, zero, num_microbatches, precision)
            reference = losses if reference is None else reference
            difference = float(np.max(np.abs(losses - reference)))
            rows.append(
                {
                    "precision": precision,
                    "zero": zero,
                    "microbatches": num_microbatches,
                    "first_loss": float(losses[0]),
                    "last_loss": float(losses[-1]),
                    "max_difference": difference,
                    "seconds": time.perf_counter() - began,
                }
            )
            yield Record(name="stages", rows=rows, goals=_goals(rows))


def _goals(rows: list[dict[str, Any]]) -> list[Goal]:
    goals = []
    for precision, tolerance in TOLERANCES.items():
        found = [row["max_difference"] for row in rows if row["precision"] == precision]
        if len(found) > 1:
            name = f"{precision}, largest loss difference to zero=0"
            goals.append(Goal(name=name, value=max(found), limit=tolerance))
    return goals


def _losses(workload: Workload, zero: int, num_microbatches: int, precision: str) -> np.ndarray:
    source = make_source(workload)
    plan = zerojax.make_plan(
        make_factory(workload),
        zerojax.make_mesh({"data": -1}),
        example_batch=source.batch(0),
        optimizer=make_optimizer(),
        zero=zero,
        precision=precision,
        num_microbatches=num_microbatches,
    )
    state, step = zerojax.init_state(plan), zerojax.build_step(plan)
    losses = []
    for index in range(workload.steps):
        state, metrics = step(state, zerojax.shard_batch(plan, source.batch(index)))
        losses.append(metrics["loss"])
    return np.array([float(loss) for loss in losses])


if __name__ == "__main__":
    main()
