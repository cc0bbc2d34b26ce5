"""Bytes of state per device against the formula of the ZeRO paper, on 8 virtual CPU devices.

Bytes are counted twice: for the compiled step (`memory_analysis`) and for the live arrays.
"""

from __future__ import annotations

import math
from typing import Any

import jax

import zerojax
from benchmarks import small_gpt
from benchmarks.machine import load_average
from benchmarks.recipe import ADAMW
from benchmarks.recording import Goal, Record, parse_arguments, write_record

LIMIT = 1.02
NUM_DEVICES = 8
MASTER_AND_MOMENTS = 12  # bytes per parameter: float32 master weight and Adam's two moments


def main(argv: list[str] | None = None) -> None:
    """Runs the benchmark and writes its record."""
    arguments = parse_arguments(__doc__ or "", argv)
    load_before = load_average()
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    write_record(measure(arguments.smoke), arguments, load_before)


def measure(smoke: bool) -> Record:
    """Returns one row per ZeRO stage."""
    rows: list[dict[str, Any]] = []
    goals: list[Goal] = []
    for zero in range(4):
        row = _measure_stage(zero, smoke)
        rows.append(row)
        for key in ("compiled/formula", "live/formula"):
            goals.append(Goal(name=f"zero={zero}, {key}", value=row[key], limit=LIMIT))
        goals.append(
            Goal(
                name=f"zero={zero}, donated state / state",
                value=row["donated/state"],
                limit=0.999,
                at_least=True,
            )
        )
    notes = [
        f"formula: {MASTER_AND_MOMENTS} bytes per parameter, from stage 1 over {NUM_DEVICES}"
        " devices"
    ]
    return Record(name="state_bytes", rows=rows, goals=goals, notes=notes)


def _measure_stage(zero: int, smoke: bool) -> dict[str, Any]:
    config = small_gpt.choose_config(smoke)
    source = small_gpt.make_source(config)
    plan = zerojax.make_plan(
        small_gpt.make_factory(config),
        zerojax.make_mesh({"data": NUM_DEVICES}),
        example_batch=source.batch(0),
        optimizer=zerojax.adamw(3e-4, **ADAMW),
        zero=zero,
        precision="fp32",
    )
    state = zerojax.init_state(plan)
    batch = zerojax.shard_batch(plan, source.batch(0))
    analysis = zerojax.build_step(plan).lower(state, batch).compile().memory_analysis()
    formula = MASTER_AND_MOMENTS * config.num_parameters / (NUM_DEVICES if zero else 1)
    compiled = analysis.argument_size_in_bytes - bytes_on_device(batch)
    live = bytes_on_device(state)
    return {
        "zero": zero,
        "formula_bytes": round(formula),
        "compiled_bytes": compiled,
        "live_bytes": live,
        "temp_bytes": analysis.temp_size_in_bytes,
        "compiled/formula": compiled / formula,
        "live/formula": live / formula,
        "donated/state": analysis.alias_size_in_bytes / compiled,
    }


def bytes_on_device(tree: Any) -> int:
    """Returns the largest number of bytes that a device holds of a tree of arrays."""
    held: dict[jax.Device, int] = {}
    for array in jax.tree.leaves(tree):
        for shard in array.addressable_shards:
            size = math.prod(shard.data.shape) * array.dtype.itemsize
            held[shard.device] = held.get(shard.device, 0) + size
    return max(held.values())


if __name__ == "__main__":
    main()
