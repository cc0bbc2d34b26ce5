"""How a plan's step is compiled for GPUs that are not here, and read.

Knows the step, the compiler and the readers of its text; never arrays, and never how a forecast is
shown.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from zerojax import compiler, profile
from zerojax.forecast import cache, formulas
from zerojax.forecast.page import forecast_dict, forecast_page
from zerojax.forecast.result import (
    COMPILED,
    FORMULA,
    ForecastNumbers,
    Memory,
    RoleBytes,
    Traffic,
    TrafficRow,
)
from zerojax.forecast.roles import bytes_by_role
from zerojax.forecast.roofline import estimate, link_bandwidth, peak_flops, verdict
from zerojax.gpus import Gpu, target_text
from zerojax.hlo.collectives import PERMUTE, Collective, find_collectives
from zerojax.hlo.host_copies import HostCopy, find_host_copies
from zerojax.hlo.live import read_live
from zerojax.hlo.overlap import find_overlap
from zerojax.hlo.program import read_program
from zerojax.hlo.traffic import hbm_bytes
from zerojax.mesh import DATA_AXES, STAGE
from zerojax.pipeline_costs import message_bytes
from zerojax.plan_counts import (
    PIPELINE_BUFFERS,
    model_flops,
    role_bytes,
    shard_bytes,
    tokens_per_step,
)
from zerojax.planned import Planned
from zerojax.step import build_step

FACTS_VERSION = 4
"""Raised when the readers find something else in the same program: what is cached is not reused."""

Facts = dict[str, Any]
"""What was read from a compiled step: plain values, as JSON takes them."""

STATE_ROLES = ("master weights", "optimizer state", "frozen", "extras")


class Forecast(ForecastNumbers):
    """What one step needs; `print(forecast.page())`."""

    def page(self) -> str:
        """One page of text, at most 100 columns."""
        return forecast_page(self)

    def as_dict(self) -> dict[str, Any]:
        """Every number, unrounded, as JSON takes it."""
        return forecast_dict(self)


def make_forecast(
    plan: Planned,
    gpu: Gpu,
    *,
    devices: Sequence[Any] | None = None,
    why_formula: str | None = None,
    fast: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Forecast:
    """What one step of a plan needs.

    Args:
      plan: on a mesh of `compiler.gpu_devices(gpu, ...)`, or on an abstract mesh.
      gpu: the card.
      devices: of `gpu_devices`, in the order of an abstract mesh: what a plan with arrays in host
        memory, which a mesh of such devices would lose, is compiled for.
      why_formula: why nothing can be compiled; None compiles.
      fast: see `compiler.FAST_OPTIONS`.
      progress: told what is being done, a few words each time.

    Raises:
      CompileError: the compiler refused the step.
    """
    say = progress or (lambda _: None)
    facts: Facts | None = None
    seconds = 0.0
    say("tracing the step")
    traced = build_step(plan).trace(plan.abstract_state, plan.abstract_batch)
    flops = profile.count_program_flops(traced.jaxpr) / plan.mesh.size
    if why_formula is None:
        say("lowering")
        lowered = traced.lower() if devices is None else compiler.lower_for_gpus(traced)
        key = cache_key(plan, gpu, fast, program=lowered.as_text())
        facts = cache.load(key)
        if facts is None:
            say(f"compiling for {plan.mesh.size} {gpu.title}" + " (fast options)" * fast)
            began = time.perf_counter()
            facts = _compile(lowered, plan, devices, fast)
            seconds = time.perf_counter() - began
            cache.store(key, facts)
    return _assemble(plan, gpu, flops, facts, why_formula, seconds)


# --- what the compiled step says ------------------------------------------------------------------


def cache_key(plan: Planned, gpu: Gpu, fast: bool, *, program: str) -> str:
    """Everything that the facts depend on. The program's text names neither options nor nodes."""
    options = {**plan.compiler_options, **(compiler.FAST_OPTIONS if fast else {})}
    mesh = {str(name): size for name, size in plan.mesh.shape.items()}
    return cache.key_of(
        FACTS_VERSION,
        program,
        [target_text(gpu), gpu.node_devices, mesh],
        [compiler.compiler_version(), options],
    )


def _compile(lowered: Any, plan: Planned, devices: Sequence[Any] | None, fast: bool) -> Facts:
    with tempfile.TemporaryDirectory(prefix="zerojax-plan-") as folder:
        compiled = compiler.compile_for_gpus(
            lowered,
            devices=devices,
            options=None if devices is None else plan.compiler_options,
            dump=Path(folder),
            fast=fast,
        )
        live = read_live(Path(folder))
        roles = None if live is None else bytes_by_role(live, plan)
    program = read_program(compiled.text)
    collectives = find_collectives(program, plan.mesh.size)
    overlap = find_overlap(program, collectives)
    nodes = _nodes(plan.mesh if devices is None else devices)
    rows = [
        _collective_facts(one, overlap.get(one.name), _axes_of(one.group, plan.mesh), nodes)
        for one in collectives
    ]
    return {
        "memory": dataclasses.asdict(compiled.memory),
        "roles": roles,
        "collectives": rows,
        "host_copies": [_copy_facts(copy) for copy in find_host_copies(program)],
        "hbm_bytes": hbm_bytes(program),
        "unknown_loops": list(program.unknown_loops),
    }


def _collective_facts(one: Collective, overlap: Any, axes: str, nodes: Sequence[int]) -> Facts:
    return {
        "kind": one.kind,
        "dtype": one.dtype,
        "axis": axes,
        "crosses_nodes": len({nodes[index] for index in one.group}) > 1,
        "times": one.times,
        "payload_bytes": one.payload_bytes,
        "wire_bytes": one.wire_bytes,
        "loop_depth": one.loop_depth,
        "hidden_flops": 0 if overlap is None else overlap.matmul_flops,
    }


def _copy_facts(copy: HostCopy) -> Facts:
    return {
        "direction": copy.direction,
        "bytes": copy.bytes,
        "times": copy.times,
        "loop_depth": copy.loop_depth,
        "is_linear": copy.is_linear,
        "is_async": copy.is_async,
        "hidden_flops": copy.overlap.matmul_flops,
        "opposite_bytes": copy.opposite_bytes,
    }


def _axes_of(group: Sequence[int], mesh: Mesh | AbstractMesh) -> str:
    """The mesh axes along which the devices of a group differ, as in "data+model".

    A program numbers its devices as the mesh lists them.
    """
    places = np.array(np.unravel_index(list(group), tuple(mesh.shape.values())))
    differ = [name for name, row in zip(mesh.axis_names, places, strict=True) if len(set(row)) > 1]
    return "+".join(map(str, differ)) or "none"


def _nodes(devices: Mesh | AbstractMesh | Sequence[Any]) -> list[int]:
    """The node of each device, in the order of the mesh."""
    if isinstance(devices, AbstractMesh):
        raise TypeError("an abstract mesh is compiled for devices=; pass compiler.gpu_devices(...)")
    every = devices.devices.flat if isinstance(devices, Mesh) else devices
    return [device.process_index for device in every]


# --- one forecast ---------------------------------------------------------------------------------


def _assemble(
    plan: Planned,
    gpu: Gpu,
    flops: float,
    facts: Facts | None,
    why_formula: str | None,
    seconds: float,
) -> Forecast:
    mesh = {str(name): size for name, size in plan.mesh.shape.items()}
    dtype = np.dtype(plan.precision.compute_dtype).name
    memory = _memory(plan, facts)
    traffic = _traffic(plan, gpu, mesh, dtype, facts)
    return Forecast(
        gpu=gpu,
        num_devices=plan.mesh.size,
        mesh=mesh,
        plan=plan.as_dict(),
        source=FORMULA if facts is None else COMPILED,
        why_formula=why_formula,
        compiler=compiler.compiler_version(),
        options_dropped=dict(plan.dropped_options),
        seconds=seconds,
        memory=memory,
        traffic=traffic,
        estimate=estimate(
            gpu,
            mesh=mesh,
            dtype=dtype,
            flops=flops,
            model_flops=model_flops(plan) / plan.mesh.size,
            hbm_bytes=None if facts is None else facts["hbm_bytes"],
            rows=traffic.rows,
            formula_bytes=traffic.formula_bytes,
            message_bytes=traffic.message_formula_bytes,
            tokens=tokens_per_step(plan),
        ),
        verdict=verdict(plan, gpu, memory),
        remarks=() if facts is None else _remarks(facts),
    )


def _remarks(facts: Facts) -> tuple[str, ...]:
    """What the compiled program does not tell."""
    loops = facts["unknown_loops"]
    if not loops:
        return ()
    return (
        f"{len(loops)} loops run as long as the data say ({', '.join(loops[:3])}): traffic and "
        "memory traffic count one iteration of each, so they are lower bounds",
    )


def _memory(plan: Planned, facts: Facts | None) -> Memory:
    formula = role_bytes(plan)
    state = shard_bytes(plan.abstract_state)
    batch = shard_bytes(plan.abstract_batch)
    if facts is None:
        roles = tuple(RoleBytes(role=r, bytes=None, formula=b) for r, b in formula.items())
        return Memory(
            state=state,
            batch=batch,
            arguments=None,
            outputs=None,
            aliased=None,
            temporary=None,
            peak=None,
            host=0,
            formula_peak=sum(formula.values()),
            roles=roles,
        )
    use = compiler.MemoryUse(**facts["memory"])
    return Memory(
        state=state,
        batch=batch,
        arguments=use.arguments,
        outputs=use.outputs,
        aliased=use.aliased,
        temporary=use.temporary,
        peak=use.peak,
        host=use.host_peak,
        formula_peak=sum(formula.values()),
        roles=_roles(use, facts["roles"], formula, batch),
    )


def _roles(
    use: compiler.MemoryUse,
    found: Mapping[str, int] | None,
    formula: Mapping[str, int],
    batch: int,
) -> tuple[RoleBytes, ...]:
    """Rows that add up to the peak, with the formula beside them where there is one.

    Without the compiler's account of what lives when, temporaries are one row. A pipeline's buffers
    are activations to the compiler.
    """
    if found is None:
        found = {role: formula[role] for role in STATE_ROLES}
        found |= {"batch": batch, "temporary": use.temporary}
        found["other"] = use.peak - sum(found.values())  # counters, outputs of their own
    names = list(dict.fromkeys([*formula, *found]))
    return tuple(
        RoleBytes(
            role=name,
            bytes=None if name == PIPELINE_BUFFERS else found.get(name, 0),
            formula=formula.get(name),
        )
        for name in names
        if found.get(name) or formula.get(name)
    )


def _traffic(
    plan: Planned, gpu: Gpu, mesh: Mapping[str, int], dtype: str, facts: Facts | None
) -> Traffic:
    unit = formulas.wire_unit(plan)
    by_formula = Traffic(
        rows=(),
        wire_bytes=None,
        data_wire_bytes=None,
        formula_bytes=formulas.wire_bytes(plan),
        unit=unit,
        message_formula_bytes=message_bytes(plan.pipeline) if plan.pipeline else 0,
    )
    if facts is None:
        return by_formula
    rows = _rows(facts["collectives"], gpu, mesh, dtype)
    messages = [row for row in rows if (row.kind, row.axis) == (PERMUTE, STAGE)]
    shards = {*DATA_AXES, STAGE}
    ours = [row for row in rows if set(row.axis.split("+")) <= shards and row not in messages]
    return dataclasses.replace(
        by_formula,
        rows=rows,
        wire_bytes=sum(row.wire_bytes for row in rows),
        data_wire_bytes=sum(row.wire_bytes for row in ours),
        message_wire_bytes=sum(row.wire_bytes for row in messages),
    )


_ROW_KEYS = ("kind", "axis", "dtype", "loop_depth", "crosses_nodes")


def _rows(
    collectives: Sequence[Facts], gpu: Gpu, mesh: Mapping[str, int], dtype: str
) -> tuple[TrafficRow, ...]:
    """One row per kind, axis, dtype and loop depth; the largest first."""
    grouped: dict[tuple[Any, ...], list[Facts]] = defaultdict(list)
    for one in collectives:
        grouped[tuple(one[key] for key in _ROW_KEYS)].append(one)
    rows = []
    for key, members in grouped.items():
        row = TrafficRow(
            **dict(zip(_ROW_KEYS, key, strict=True)),
            count=sum(one["times"] for one in members),
            payload_bytes=sum(one["times"] * one["payload_bytes"] for one in members),
            wire_bytes=round(sum(one["times"] * one["wire_bytes"] for one in members)),
            hidden=0.0,
        )
        hidden = _hidden(members, peak_flops(gpu, dtype), link_bandwidth(gpu, mesh, row))
        rows.append(dataclasses.replace(row, hidden=hidden))
    return tuple(sorted(rows, key=lambda row: (-row.wire_bytes, row.kind, row.axis)))


def _hidden(members: Sequence[Facts], peak: float | None, bandwidth: float) -> float:
    """Share of the wire time that products between start and end take, all at published peaks."""
    if not peak:
        return 0.0
    wire = hidden = 0.0
    for one in members:
        seconds = one["wire_bytes"] / bandwidth
        wire += one["times"] * seconds
        hidden += one["times"] * min(seconds, one["hidden_flops"] / peak)
    return hidden / wire if wire else 0.0
