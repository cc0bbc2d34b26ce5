"""Part "memory": what a step was predicted to need against what the device counted.

A device never forgets its peak, so the cases run in the order of their prediction: each new peak is
the last case's own. Stages on one device are one program; that they are is shown here as well.
"""

from __future__ import annotations

import dataclasses
import gc
import tempfile
from collections.abc import Sequence
from typing import Any

import jax

import zerojax
from benchmarks.gpu.subjects import make_factory, make_optimizer, make_source, peak_device_bytes
from benchmarks.gpu.workloads import Workload, choose_workload
from benchmarks.machine import load_average
from benchmarks.recording import Goal, Record, parse_arguments, write_record
from zerojax import compiler

STAGES = (0, 1, 2, 3)
MICROBATCHES = (1, 4)
REMAT = ("none", "full")
LIMIT = 1.02
LEAST = 0.98


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One way to train the workload."""

    zero: int
    num_microbatches: int
    remat: str

    @property
    def name(self) -> str:
        return f"zero={self.zero}, {self.num_microbatches} microbatches, remat {self.remat}"


def main(argv: list[str] | None = None) -> None:
    """Measures and records."""
    arguments = parse_arguments(__doc__ or "", argv)
    load_before = load_average()
    with tempfile.TemporaryDirectory() as folder:
        # Equal programs are compiled once.
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        stages = STAGES[1::2] if arguments.smoke else STAGES
        record = measure(choose_workload("memory", arguments.smoke), stages)
    write_record(record, arguments, load_before)


def measure(workload: Workload, stages: Sequence[int]) -> Record:
    """Compiles every case, then runs them from the smallest prediction to the largest."""
    cases = [
        Case(zero=zero, num_microbatches=count, remat=remat)
        for zero in stages
        for count in MICROBATCHES
        for remat in REMAT
    ]
    predicted = {case: _predict(case, workload) for case in cases}
    rows = []
    for case in sorted(cases, key=lambda case: predicted[case].peak):
        rows.append(_run(case, workload, predicted[case]))
        gc.collect()
    goals = []
    for row in rows:
        if row["measured/predicted"] is not None:
            name = f"{row['case']}: measured / predicted"
            goals.append(Goal(name=name, value=row["measured/predicted"], limit=LIMIT))
            goals.append(
                Goal(name=name, value=row["measured/predicted"], limit=LEAST, at_least=True)
            )
    notes = [] if goals else ["this device does not count its memory: nothing to compare with"]
    return Record(name="memory", rows=rows, goals=goals, notes=notes)


def _plan(case: Case, workload: Workload) -> zerojax.Plan:
    return zerojax.make_plan(
        make_factory(dataclasses.replace(workload, remat=case.remat)),
        zerojax.make_mesh({"data": 1}),
        example_batch=make_source(workload, 2).batch(0),
        optimizer=make_optimizer(),
        zero=case.zero,
        precision="bf16",
        num_microbatches=case.num_microbatches,
    )


def _compile(plan: zerojax.Plan) -> Any:
    return zerojax.build_step(plan).lower(plan.abstract_state, plan.abstract_batch).compile()


def _predict(case: Case, workload: Workload) -> compiler.MemoryUse:
    return compiler.memory_of(_compile(_plan(case, workload)))


def _run(case: Case, workload: Workload, predicted: compiler.MemoryUse) -> dict[str, Any]:
    plan = _plan(case, workload)
    step = _compile(plan)
    before = peak_device_bytes()
    state = zerojax.init_state(plan)
    batch = zerojax.shard_batch(plan, make_source(workload, 2).batch(0))
    for _ in range(workload.steps):
        state, metrics = step(state, batch)
    loss = float(metrics["loss"])
    measured = peak_device_bytes()
    return {
        "case": case.name,
        "zero": case.zero,
        "microbatches": case.num_microbatches,
        "remat": case.remat,
        "state_MB": predicted.arguments / 1e6,
        "temporary_MB": predicted.temporary / 1e6,
        "predicted_MB": predicted.peak / 1e6,
        "peak_before_MB": None if before is None else before / 1e6,
        "measured_MB": None if measured is None else measured / 1e6,
        "measured/predicted": None if measured is None else measured / predicted.peak,
        "loss": loss,
    }


if __name__ == "__main__":
    main()
