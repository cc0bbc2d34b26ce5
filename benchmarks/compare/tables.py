"""Computes the table, its goals and its findings from the measured times.

Measures nothing itself.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.compare.catalogue import BARE_JAX, BARE_TORCH, WINDOWS, Way
from benchmarks.compare.probing import Found
from benchmarks.compare.subject import choose_workload
from benchmarks.compare.turns import CORES, Taken
from benchmarks.recording import Goal, Record

COMPARED_STEPS = 10
LOSS_LIMIT = 1e-5
WIRE_LIMIT = 0.68
FLOAT32 = 4


@dataclasses.dataclass(kw_only=True)
class Measured:
    """Measurements of all windows.

    Attributes:
      found: {"jax" | "torch" | "deepspeed": versions, or the reason why it is missing}.
      windows: {name of the window: {name of the program: its measurements}}.
    """

    found: Mapping[str, Found]
    windows: dict[str, dict[str, Taken]]

    @property
    def failed(self) -> bool:
        return any(one.failure for taken in self.windows.values() for one in taken.values())


def make_record(measured: Measured, *, smoke: bool) -> Record:
    """Returns the record: a row per program (missing ones, too), goals, and findings as notes."""
    unit = wire_unit(num_parameters(smoke))
    reference = _reference(measured)
    rows = [
        _row(way, measured, window, reference, unit)
        for window in measured.windows
        for way in WINDOWS[window]
    ]
    by_name = {row["way"]: row for row in rows}
    differences = [row["max_loss_diff"] for row in rows if row.get("max_loss_diff") is not None]
    worst = max(differences, default=float("nan"))
    name = f"largest difference of losses over {COMPARED_STEPS} steps, any way to {BARE_JAX}"
    goals = [Goal(name=name, value=worst, limit=LOSS_LIMIT), *_goals_beside(by_name)]
    return Record(
        name="compare", rows=rows, goals=goals, notes=[*_legend(unit), *findings(by_name)]
    )


def num_parameters(smoke: bool) -> int:
    """Returns the number of parameters, whose gradients a step sums over processes."""
    w = choose_workload(smoke)
    attention = 4 * (w.embed_dim * w.embed_dim + w.embed_dim)
    mlp = 2 * w.embed_dim * w.mlp_dim + w.mlp_dim + w.embed_dim
    layer = attention + mlp + 4 * w.embed_dim
    tables = (2 * w.vocab_size + w.seq_len) * w.embed_dim
    return w.num_layers * layer + tables + 2 * w.embed_dim


def wire_unit(parameters: int) -> float:
    """Returns the bytes that each of two processes sends for one gather of all float32 parameters.

    ZeRO's Psi (arXiv:1910.02054, section 7) in the dtype that is sent, times (N - 1) / N.
    """
    return FLOAT32 * parameters * (CORES - 1) / CORES


def _reference(measured: Measured) -> list[float]:
    for taken in measured.windows.values():
        if BARE_JAX in taken and len(taken[BARE_JAX].losses) >= COMPARED_STEPS:
            return taken[BARE_JAX].losses[:COMPARED_STEPS]
    return []


def _row(
    way: Way, measured: Measured, window: str, reference: list[float], unit: float
) -> dict[str, Any]:
    row: dict[str, Any] = {"way": way.name, "processes": way.processes}
    found = measured.found[way.needs]
    if not found.versions:
        return row | {"lines": way.lines, "note": found.reason}
    taken = measured.windows[window]
    one = taken[way.name]
    if one.failure:
        return row | {"lines": way.lines, "note": one.failure.strip().splitlines()[0]}
    row |= {
        "steps/s": 1 / statistics.median(one.wall),
        "wall_ms": 1e3 * min(one.wall),
        "cpu_ms": 1e3 * statistics.median(one.cpu),
    }
    bare = taken[way.bare]
    if bare.wall:
        row["wall/bare"] = way.processes * min(one.wall) / min(bare.wall)
        row["cpu/bare"] = way.processes * statistics.median(one.cpu) / statistics.median(bare.cpu)
    row["peak_MB"] = one.peak_mb
    if way.processes > 1 and None not in one.sent:
        row["sent_MB"] = statistics.median(one.sent) / 1e6
        row["sent/unit"] = statistics.median(one.sent) / unit
    losses = one.losses[:COMPARED_STEPS]
    if reference and len(losses) == len(reference):
        row["loss_1"], row["loss_10"] = losses[0], losses[-1]
        pairs = zip(losses, reference, strict=True)
        row["max_loss_diff"] = max(abs(mine - theirs) for mine, theirs in pairs)
    return row | {"lines": way.lines}


def _goals_beside(rows: Mapping[str, Mapping[str, Any]]) -> list[Goal]:
    """Returns goals of zerojax relative to DeepSpeed, each divided by its own bare step."""
    goals = []
    for zero in range(4):
        ours = rows.get(f"zerojax ZeRO {zero}", {})
        theirs = rows.get(f"DeepSpeed ZeRO {zero}", {})
        for clock in ("cpu", "wall"):
            key = f"{clock}/bare"
            if key in ours and key in theirs:
                name = f"ZeRO {zero}, T2/(T1/2) of zerojax / that of DeepSpeed, {clock}"
                goals.append(Goal(name=name, value=ours[key] / theirs[key], limit=1.0))
        if zero in (1, 2) and "sent_MB" in ours and "sent_MB" in theirs:
            name = f"ZeRO {zero}, bytes sent by zerojax / by DeepSpeed"
            value = ours["sent_MB"] / theirs["sent_MB"]
            goals.append(Goal(name=name, value=value, limit=WIRE_LIMIT))
    return goals


def findings(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns sentences about the figures of this run, losses first."""
    said = []
    pairs = [(BARE_JAX, BARE_TORCH), ("zerojax", BARE_TORCH), ("zerojax", BARE_JAX)]
    pairs += [(f"zerojax ZeRO {zero}", f"DeepSpeed ZeRO {zero}") for zero in range(4)]
    pairs += [("zerojax ZeRO 3", "torch FSDP2"), ("zerojax ZeRO 0", "torch DDP")]
    for ours, theirs in pairs:
        if "wall_ms" in rows.get(ours, {}) and "wall_ms" in rows.get(theirs, {}):
            wall, cpu, peak = (
                rows[ours][key] / rows[theirs][key] for key in ("wall_ms", "cpu_ms", "peak_MB")
            )
            said.append(
                f"{ours} takes {wall:.2f} times the wall time, {cpu:.2f} times the processor time "
                f"and {peak:.2f} times the memory of {theirs}"
            )
    return said


def _legend(unit: float) -> list[str]:
    return [
        "steps/s: from the median on the wall clock; wall_ms: the least disturbed step; cpu_ms: "
        "median of process CPU time, both of the slower process",
        "wall/bare, cpu/bare: time of one process over that of its own framework's bare step; of "
        "two processes T2/(T1/2), T1 being the bare step on the whole batch in the same minutes, "
        "with both cores busy. Bare: optax + nnx under jax.jit, torch eager",
        f"sent/unit: TCP bytes per process and step as the kernel counts them, in {unit / 1e6:.3f} "
        "MB (float32 parameters x (N-1)/N); ZeRO's formula is 2 at stages 0 to 2, 3 at stage 3",
        "peak_MB: VmHWM of the larger process, imports and compilation included; freed memory is "
        "kept by the C library in all of them (zerojax/runtime/memory.py)",
        "lines: of code beside model and batches, in benchmarks/compare/ways/",
    ]
