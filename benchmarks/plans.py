"""Memory, traffic and time of the run files in configs/ on the GPUs in their names, without a GPU.

One row per file: the compiled peak, the peak with every matrix product by cuBLAS (a GPU times each
product with Triton and cuBLAS; the compile-only client cannot), the bytes sent in ZeRO's units and
between experts, the expected time of a step and the roofline. Needs the extra `plan`; nothing here
is a measurement of a GPU.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import zerojax
from benchmarks.machine import load_average
from benchmarks.recording import Goal, Record, parse_arguments, write_record
from zerojax.config import RunConfig, load
from zerojax.forecasting.forecast_numbers import Expected
from zerojax.hardware import compile_client, gpus
from zerojax.plan.make import Plan
from zerojax.training.run_file import plan_from_config

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
RUN_FILES = Path(__file__).resolve().parent / "run_files"
CASES = (
    ("gpt2_124m_zero1_1xh200", "h200", 1),
    ("llama_1b_zero1_8xh100", "h100", 8),
    ("llama_7b_zero2_8xh100", "h100", 8),
    ("llama_8b_zero3_8xh100", "h100", 8),
    ("llama_70b_zero3_64xh200", "h200", 64),
    ("llama_405b_zero3_512xh200", "h200", 512),
    ("olmoe_7b_expert_8xh100", "h100", 8),
    ("mixtral_8x22b_expert_64xh200", "h200", 64),
    ("llama_7b_qlora_1xrtx4090", "rtx-4090", 1),
    ("llama_70b_qlora_8xh100", "h100", 8),
)
SEARCHED = (("llama_8b_zero2_8xh100", "h100", 8),)
OFFLOADED = (
    ("llama_13b_host_offload_1xrtx4090", "rtx-4090", 1),
    ("llama_13b_host_offload_1xa100_40gb", "a100-40gb", 1),
    ("gpt_20b_host_offload_1xh200", "h200", 1),
    ("gpt_175b_files_8xh200", "h200", 8),
    ("gpt_1t_files_8xh200", "h200", 8),
)
"""Run files of `SEARCHED` and `OFFLOADED` are compiled only with their own attention setting."""
STORED_SCORES = {
    "gpt2_124m_zero1_1xh200": ("num_microbatches=16",),
    "llama_7b_qlora_1xrtx4090": ("model.remat=full",),
    "llama_70b_qlora_8xh100": ("num_microbatches=2",),
    "llama_7b_zero2_8xh100": ("model.remat=full", "mesh.unroll=false"),
    "llama_1b_zero1_8xh100": ("model.remat=full", "mesh.unroll=false"),
    "llama_70b_zero3_64xh200": ("model.remat=full", "num_microbatches=16"),
    "olmoe_7b_expert_8xh100": ("model.remat=full", "num_microbatches=64"),
    "llama_405b_zero3_512xh200": ("model.remat=full", "mesh.model=8", "num_microbatches=16"),
}
"""Settings with which stored scores fit, for run files whose settings need attention without
them."""
WIRE_LIMIT, EXPERT_WIRE_LIMIT = 1.03, 1.01
EXPOSED_LIMIT, EXPOSED_LIMIT_OF_NODES = 0.03, 0.08
"""Largest shares of a step in which only collectives run, on one node and on several."""
GIB = 2**30


def run_file(name: str) -> Path:
    """Returns the path of a run file of the project or of the benchmarks."""
    path = CONFIGS / f"{name}.yaml"
    return path if path.exists() else RUN_FILES / path.name


def main(argv: list[str] | None = None) -> None:
    """Compiles the cases and writes the record."""
    arguments = parse_arguments(__doc__ or "", argv)
    load_before = load_average()
    write_record(measure(arguments.smoke), arguments, load_before, compiler=_compiler())


def measure(smoke: bool) -> Record:
    """Returns one row per run file; a smoke run only uses the formulas, for the smallest file."""
    cases = CASES[:1] if smoke else CASES
    rows = [_row(*case, attention) for case in cases for attention in ("xla", "auto")]
    rows += [] if smoke else [_row(*case, "auto") for case in (*SEARCHED, *OFFLOADED)]
    return Record(
        name="plans", rows=rows, goals=_goals(rows), notes=[f"compiled with {_compiler()}"]
    )


def _goals(rows: Sequence[Mapping[str, Any]]) -> list[Goal]:
    goals = []
    for row in rows:
        if row["data wire/formula"] is not None:
            name = f"{row['config']}, {row['attention']}: wire bytes over data / formula"
            goals.append(Goal(name=name, value=row["data wire/formula"], limit=WIRE_LIMIT))
        if row["expert wire/formula"] is not None:
            name = f"{row['config']}, {row['attention']}: wire bytes over expert / formula"
            value = row["expert wire/formula"]
            goals.append(Goal(name=name, value=value, limit=EXPERT_WIRE_LIMIT))
        if row["peak_GiB"] is not None:
            name = f"{row['config']}, {row['attention']}: compiled peak / what JAX may take"
            peak = max(row["peak_GiB"], row["cublas_peak_GiB"])
            goals.append(Goal(name=name, value=peak / row["limit_GiB"], limit=1.0))
        if row["expected_wire_s"]:
            one_node = row["devices"] <= gpus.find_gpu(row["gpu"]).node_devices
            name = f"{row['config']}, {row['attention']}: exposed collectives / expected step"
            value = row["expected_wire_s"] / row["expected_s"]
            limit = EXPOSED_LIMIT if one_node else EXPOSED_LIMIT_OF_NODES
            goals.append(Goal(name=name, value=value, limit=limit))
    return goals


def _row(name: str, gpu: str, devices: int, attention: str) -> dict[str, Any]:
    words = STORED_SCORES.get(name, ()) if attention == "xla" else ()
    config = load(RunConfig, CONFIGS / f"{name}.yaml", [f"model.attention={attention}", *words])
    plan = plan_from_config(config, devices)
    began = time.process_time()
    forecast = zerojax.forecast(plan, gpu=gpu, devices=devices, fast=True)
    seconds = time.process_time() - began
    cublas = zerojax.forecast(
        _with_options(plan, compile_client.CUBLAS_OPTIONS), gpu=gpu, devices=devices, fast=True
    )
    memory, traffic, estimate = forecast.memory, forecast.traffic, forecast.estimate
    offload = forecast.offload
    hiding = None if offload is None else offload.hiding
    wire, exchanged = traffic.data_wire_bytes, traffic.exchange_wire_bytes
    by_formula = traffic.exchange_formula_bytes
    return {
        "config": name,
        "attention": attention,
        "gpu": gpu,
        "devices": devices,
        "parameters": plan.as_dict()["num_parameters"],
        "zero": plan.zero,
        "state_GiB": memory.state / GIB,
        "peak_GiB": _gib(memory.peak),
        "cublas_peak_GiB": _gib(cublas.memory.peak),
        "limit_GiB": forecast.verdict.limit / GIB,
        "machine_host_GiB": None if offload is None else offload.machine_host / GIB,
        "machine_files_GiB": None if offload is None else offload.machine_disk / GIB,
        "data_wire_units": None if wire is None or not traffic.unit else wire / traffic.unit,
        "data wire/formula": None if not wire else wire / traffic.formula_bytes,
        "expert_wire_GiB": _gib(exchanged or None),
        "expert wire/formula": exchanged / by_formula if exchanged and by_formula else None,
        **expected_columns(estimate.expected),
        "roofline_s": estimate.step_seconds,
        "compute_s": estimate.compute_seconds,
        "memory_s": estimate.memory_seconds,
        "exposed_wire_s": estimate.exposed_wire_seconds,
        "offload_s": estimate.offload_seconds,
        "hiding_tokens": None if hiding is None else hiding.tokens,
        "bound_by": estimate.bound_by,
        # Model FLOPs are three times the forward pass, and frozen weights have no gradient.
        "roofline_mfu": None if plan.placement.num_parameters(frozen=True) else estimate.mfu,
        "tokens_per_s": estimate.tokens_per_second,
        "cpu_s": seconds,
    }


def expected_columns(time: Expected | None) -> dict[str, Any]:
    """Returns the expected time of a step, its parts and what follows from it; None where nothing
    was compiled."""
    return {
        "expected_s": time and time.seconds,
        "expected_product_s": time and time.product_seconds,
        "expected_attention_s": time and time.attention_seconds,
        "expected_memory_s": time and time.memory_seconds,
        "expected_wire_s": time and time.wire_seconds,
        "expected_host_s": time and time.host_seconds,
        "expected_disk_s": time and time.disk_seconds,
        "expected_mfu": time and time.mfu,
        "expected_tokens_per_s": time and time.tokens_per_second,
    }


def _with_options(plan: Plan, options: Mapping[str, Any]) -> Plan:
    """Returns the plan with further compiler options, also if it is made for another mesh."""

    def remake(mesh: Any) -> Plan:
        made = plan.remake(mesh)
        program = made.program
        program = dataclasses.replace(program, options={**program.options, **options})
        return dataclasses.replace(made, program=program)

    return dataclasses.replace(plan, remake=remake)


def _gib(size: int | None) -> float | None:
    return None if size is None else size / GIB


def _compiler() -> str:
    return compile_client.missing() or compile_client.compiler_version(fast=True)


if __name__ == "__main__":
    main()
