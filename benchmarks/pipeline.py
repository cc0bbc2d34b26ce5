"""A pipeline's memory, traffic and idle time: `python -m benchmarks.pipeline [memory|wire|bubble]`.

`memory` and `wire` are compiled for H100s (extra `plan`) and are no measurements of a GPU. `bubble`
is timed on this machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks import pipeline_bubble
from benchmarks.machine import load_average
from benchmarks.pipeline_programs import (
    BF16,
    GPT_1B,
    SMALL,
    Built,
    Case,
    compile_case,
    make_case_plan,
    wire,
)
from benchmarks.recording import Goal, Record, add_arguments, write_record
from zerojax.forecasting import hlo
from zerojax.forecasting.roles import bytes_by_role
from zerojax.hardware import compile_client
from zerojax.pipeline.pipeline_costs import message_bytes, total_buffer_bytes

FLAT = 1.001
EXACT = 1.01
NUM_DEVICES = 8
MEMORY_CASES = (
    *(
        (2, 4, schedule, stash)
        for schedule in ("1f1b", "gpipe")
        for stash in ("residuals", "input")
    ),
    *((1, 8, schedule, "residuals") for schedule in ("1f1b", "gpipe")),
)
MICROBATCHES = (4, 8, 16, 32)
WIRE_CASES = (
    *(Case(zero=zero) for zero in range(4)),
    *(Case(zero=zero, stage=2, model=2) for zero in (1, 3)),
    *(Case(zero=zero, data=8, stage=8, microbatches=16) for zero in (1, 3)),
    *(Case(zero=zero, data=32, stage=8, model=2, microbatches=16) for zero in (1, 3)),
)
LINK = 50e9
"""Bytes per second of a 400 Gb/s link, with which the time of a message is compared."""
H100_FLOPS, H100_BYTES = 989e12, 3.35e12
"""bfloat16 FLOP/s and memory bytes/s of an H100, from NVIDIA's data sheet."""
MB = 1e6


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the named parts, or all, and writes one record for each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    add_arguments(parser)
    arguments = parser.parse_args(argv)
    unknown = [name for name in arguments.parts if name not in PARTS]
    if unknown:
        parser.error(f"there is no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    for name in arguments.parts or PARTS:
        if name != "bubble" and not arguments.smoke and compile_client.missing():
            print(f"pipeline {name}: {compile_client.missing()}", file=sys.stderr)
            return 1
        load_before = load_average()
        more = {} if name == "bubble" else {"compiler": _compiler()}
        write_record(PARTS[name](arguments.smoke), arguments, load_before, **more)
    return 0


def _compiler() -> str:
    return compile_client.missing() or compile_client.compiler_version()


def _small(case: Case) -> Case:
    return dataclasses.replace(case, config=dataclasses.replace(SMALL, embed_dim=64))


# --- memory -------------------------------------------------------------------------------------


def measure_memory(smoke: bool) -> Record:
    """Returns a row per schedule and number of microbatches; a smoke run only makes the plans."""
    if smoke:
        plan = make_case_plan(_small(Case()), jax.devices())
        assert plan.pipeline is not None
        row = {"schedule": "1f1b", "planned_buffers_MB": total_buffer_bytes(plan.pipeline) / MB}
        return Record(name="pipeline_memory", rows=[row])
    rows, goals = [], []
    for data, stage, schedule, stash in MEMORY_CASES:
        few: dict[int, dict[str, Any]] = {}
        for number in MICROBATCHES:
            few[number] = _memory_row(
                Case(data=data, stage=stage, microbatches=number, schedule=schedule, stash=stash)
            )
        rows += few.values()
        first, last = few[MICROBATCHES[-2]], few[MICROBATCHES[-1]]
        name = f"{stage} stages, {schedule}, {stash}"
        if schedule == "1f1b":
            value = last["temp_MB"] / first["temp_MB"]
            name += f": temporary memory of m={last['m']} / m={first['m']}"
        else:
            growth = last["temp_MB"] - first["temp_MB"]
            value = growth / (last["planned_buffers_MB"] - first["planned_buffers_MB"])
            name += f": growth from m={first['m']} to {last['m']} / what is planned"
        goals.append(Goal(name=name, value=value, limit=FLAT if schedule == "1f1b" else EXACT))
    notes = [
        f"GPT of {GPT_1B.num_parameters / 1e9:.2f} billion parameters, 8 H100, zero=1, remat full, "
        f"one row of {GPT_1B.max_seq_len} tokens per data shard and microbatch, {_compiler()}",
        "planned_buffers: zerojax.pipeline.pipeline_costs.total_buffer_bytes; it is part of temp",
        *_roles_notes(),
    ]
    return Record(name="pipeline_memory", rows=rows, goals=goals, notes=notes)


def _memory_row(case: Case) -> dict[str, Any]:
    built = compile_case(case)
    assert built.plan.pipeline is not None
    return {
        "schedule": case.schedule,
        "stash": case.stash,
        "data": case.data,
        "stages": case.stage,
        "m": case.microbatches,
        "state_MB": built.memory.arguments / MB,
        "temp_MB": built.memory.temporary / MB,
        "peak_MB": built.memory.peak / MB,
        "planned_buffers_MB": total_buffer_bytes(built.plan.pipeline) / MB,
    }


def _roles_notes() -> list[str]:
    """Returns notes on the arrays of a device at the peak, for every ZeRO stage."""
    notes = []
    for zero in range(4):
        with tempfile.TemporaryDirectory() as folder:
            built = compile_case(Case(zero=zero), Path(folder))
        if built.live is None:
            continue
        roles = bytes_by_role(built.live, built.plan)
        parts = [f"{name} {size / MB:.0f}" for name, size in roles.items() if size >= MB]
        notes.append(f"at the peak of m=8, zero={zero}, MB: {', '.join(parts)}")
    gradients = BF16 * Case().layer_parameters / MB
    notes.append(
        f"of these {gradients:.0f} MB at zero 0 and 1 (a half at 2 and 3) are the bfloat16 "
        "gradients of one tick, before they are added to the float32 sums; plain accumulation has "
        "them, too"
    )
    return notes


# --- traffic ------------------------------------------------------------------------------------


def measure_wire(smoke: bool) -> Record:
    """Returns one row per program; a smoke run only makes the plans."""
    if smoke:
        plan = make_case_plan(_small(Case()), jax.devices())
        assert plan.pipeline is not None
        row = {"case": Case().name, "planned_messages_MB": message_bytes(plan.pipeline) / MB}
        return Record(name="pipeline_wire", rows=[row])
    rows, goals = [], []
    for case in WIRE_CASES:
        row = _wire_row(compile_case(case))
        rows.append(row)
        for part in ("layers", "tables", "messages"):
            value = row[f"{part}/formula"]
            goals.append(Goal(name=f"{case.name}: {part} / formula", value=value, limit=EXACT))
    worst = max(row["in_branches"] for row in rows)
    goals.append(Goal(name="collectives inside conditionals, at most", value=worst, limit=0))
    notes = [
        f"GPT of {GPT_1B.num_parameters / 1e9:.2f} billion parameters, H100, remat full, one row "
        f"of {GPT_1B.max_seq_len} tokens per data shard and microbatch, 1f1b, {_compiler()}",
        "bytes that one device sends in a step; layer units: of 2 bytes x parameters of one "
        "stage's layers x (N-1)/N, N = data",
        "formula: 2, 2, 1 + t and 3 t units with t = m+p-1 ticks; tables (embedding and head) once "
        "over data x stage; messages 2 t activations",
        "beside: at least as long as this a message of the steady loop is under way, by products "
        f"at {H100_FLOPS / 1e12:.0f} TFLOP/s and memory at {H100_BYTES / 1e12:.2f} TB/s, over what "
        f"it takes at {LINK / 1e9:.0f} GB/s; the first and the second message",
    ]
    return Record(name="pipeline_wire", rows=rows, goals=goals, notes=notes)


def _wire_row(built: Built) -> dict[str, Any]:
    case = built.case
    layers, tables = wire(built.over("data")), wire(built.over("data", "stage"))
    messages = wire(built.permutes)
    unit = case.layer_bytes / case.layer_units
    first, second = (_beside(built, permute) for permute in built.steady_permutes)
    return {
        "case": case.name,
        "devices": case.devices,
        "layers_MB": layers / MB,
        "layer_units": layers / unit,
        "layers/formula": layers / case.layer_bytes,
        "tables_MB": tables / MB,
        "tables/formula": tables / case.common_bytes,
        "messages_MB": messages / MB,
        "messages/formula": messages / case.permute_bytes,
        "model_MB": wire(built.over("model")) / MB,
        "asynchronous": all(permute.is_async for permute in built.steady_permutes),
        "beside_1": first,
        "beside_2": second,
        "in_branches": len(hlo.find_in_branches(built.program, case.devices)),
        "peak_MB": built.memory.peak / MB,
    }


def _beside(built: Built, permute: hlo.Collective) -> float:
    """Returns how often a message could be sent during the computation beside it."""
    overlap = built.overlap[permute.name]
    seconds = max(overlap.matmul_flops / H100_FLOPS, overlap.hbm_bytes / H100_BYTES)
    return seconds / (permute.wire_bytes / LINK)


PARTS: dict[str, Callable[[bool], Record]] = {
    "memory": measure_memory,
    "wire": measure_wire,
    "bubble": pipeline_bubble.measure,
}


if __name__ == "__main__":
    sys.exit(main())
