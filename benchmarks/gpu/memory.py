"""Part "memory": predicted memory of a step compared with the memory that the device counted.

There are two predictions: the compiler's on this device, and a forecast by a process without one. A
device cannot reset its peak, so the cases run in the order of their predictions: each new peak is
that of the last case. On one device all ZeRO stages are the same program, which is checked, too.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import jax

import zerojax
from benchmarks.gpu.subjects import make_factory, make_optimizer, make_source, peak_device_bytes
from benchmarks.gpu.workloads import Workload, choose_workload
from benchmarks.machine import load_average
from benchmarks.recording import Goal, Record, add_arguments, save_so_far, write_record
from zerojax.hardware import compile_client
from zerojax.hardware.gpus import gpu_of_device

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
        return f"zero={self.zero}, {self.program}"

    @property
    def program(self) -> str:
        """Returns the name of the program, which all ZeRO stages share on one device."""
        return f"{self.num_microbatches} microbatches, remat {self.remat}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Built:
    """A case's plan, its compiled step and the memory that the compiler reports."""

    plan: zerojax.Plan
    step: Any
    predicted: compile_client.MemoryUse


def main(argv: list[str] | None = None) -> None:
    """Writes the record; with `--forecast`, prints the forecasts for a card instead."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--forecast", metavar="CARD", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    workload = choose_workload("memory", arguments.smoke)
    if arguments.forecast:
        for name, peak in forecast_peaks(workload, arguments.forecast):
            print(json.dumps([name, peak]), flush=True)
        return
    load_before = load_average()
    stages = STAGES[1::2] if arguments.smoke else STAGES
    with tempfile.TemporaryDirectory() as folder, _Forecasting(arguments.smoke) as forecasting:
        # Equal programs, such as those of all stages on one device, are compiled once.
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        for record in measure(workload, stages, forecasting):
            save_so_far(record, arguments, load_before)
    write_record(record, arguments, load_before)


def measure(
    workload: Workload, stages: Sequence[int], forecasting: _Forecasting
) -> Iterator[Record]:
    """Compiles every case, then runs them from the smallest prediction to the largest."""
    cases = [
        Case(zero=zero, num_microbatches=count, remat=remat)
        for zero in stages
        for count in MICROBATCHES
        for remat in REMAT
    ]
    built = {case: _build(case, workload) for case in cases}
    rows: list[dict[str, Any]] = []
    for case in sorted(cases, key=lambda case: built[case].predicted.peak):
        rows.append(_run(case, workload, built.pop(case)))
        gc.collect()
        yield _record(rows)
    forecasts = forecasting.peaks()
    for row in rows:
        forecast = forecasts.get(row["program"])
        if forecast is not None:
            row["forecast_MB"] = forecast / 1e6
            row["predicted/forecast"] = 1e6 * row["predicted_MB"] / forecast
    yield _record(rows)


def _record(rows: Sequence[dict[str, Any]]) -> Record:
    goals = []
    for row in rows:
        ratio = row["measured/predicted"]
        if ratio is not None:
            name = f"{row['case']}: measured / predicted"
            goals.append(Goal(name=name, value=ratio, limit=LIMIT))
            goals.append(Goal(name=name, value=ratio, limit=LEAST, at_least=True))
    notes = [] if goals else ["this device does not count its memory: nothing to compare with"]
    return Record(name="memory", rows=rows, goals=goals, notes=notes)


def _plan(case: Case, workload: Workload) -> zerojax.Plan:
    return zerojax.make_plan(
        make_factory(dataclasses.replace(workload, remat=case.remat)),
        zerojax.make_mesh({"data": 1}, devices=jax.devices()[:1]),
        example_batch=make_source(workload, 2).batch(0),
        optimizer=make_optimizer(),
        zero=case.zero,
        precision="bf16",
        num_microbatches=case.num_microbatches,
    )


def _build(case: Case, workload: Workload) -> Built:
    plan = _plan(case, workload)
    step = zerojax.build_step(plan).lower(plan.abstract_state, plan.abstract_batch).compile()
    return Built(plan=plan, step=step, predicted=compile_client.memory_of(step))


def _run(case: Case, workload: Workload, built: Built) -> dict[str, Any]:
    before = peak_device_bytes()
    state = jax.block_until_ready(zerojax.init_state(built.plan))
    held = (jax.local_devices()[0].memory_stats() or {}).get("bytes_in_use")
    batch = zerojax.shard_batch(built.plan, make_source(workload, 2).batch(0))
    for _ in range(workload.steps):
        state, metrics = built.step(state, batch)
    loss = float(metrics["loss"])
    measured, predicted = peak_device_bytes(), built.predicted
    row = {
        "case": case.name,
        "program": case.program,
        "zero": case.zero,
        "microbatches": case.num_microbatches,
        "remat": case.remat,
        "state_MB": predicted.arguments / 1e6,
        "allocated_MB": None if held is None else held / 1e6,
        "temporary_MB": predicted.temporary / 1e6,
        "predicted_MB": predicted.peak / 1e6,
        "peak_before_MB": None if before is None else before / 1e6,
        "measured_MB": None if measured is None else measured / 1e6,
        "measured/predicted": None,
        "loss": loss,
    }
    if measured is not None:
        if measured == before and predicted.peak < LEAST * measured:
            row["note"] = "hidden by an earlier peak"  # such as when the compiler tried kernels
        else:
            row["measured/predicted"] = measured / predicted.peak
    return row


# --- the forecast, by a process that sees no device -----------------------------------------------


def forecast_peaks(workload: Workload, card: str) -> Iterator[tuple[str, int | None]]:
    """Yields (program, bytes of its peak as `zerojax plan` forecasts it for this card)."""
    for count in MICROBATCHES:
        for remat in REMAT:
            case = Case(zero=0, num_microbatches=count, remat=remat)
            yield (
                case.program,
                zerojax.forecast(_plan(case, workload), gpu=card, devices=1).memory.peak,
            )


class _Forecasting:
    """A process that forecasts while this process measures; ends with the `with` block."""

    def __init__(self, smoke: bool) -> None:
        card = gpu_of_device(jax.devices()[0].device_kind)
        self._process: subprocess.Popen[str] | None = None
        if card is not None and compile_client.missing() is None:
            command = [sys.executable, "-m", "benchmarks.gpu.memory", "--forecast", card.name]
            self._process = subprocess.Popen(
                command + ["--smoke"] * smoke,
                env={**os.environ, "JAX_PLATFORMS": "cpu"},
                stdout=subprocess.PIPE,
                text=True,
            )

    def __enter__(self) -> _Forecasting:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def peaks(self) -> dict[str, int]:
        """Returns {program: bytes}; if the process failed, the forecasts that it had made."""
        if self._process is None:
            return {}
        said, _ = self._process.communicate()
        found = dict(json.loads(line) for line in said.splitlines() if line.startswith("["))
        return {name: peak for name, peak in found.items() if peak is not None}


if __name__ == "__main__":
    main()
