"""Counts the bytes that one device transfers per step, by formula and as compiled: communication
and offload."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr

from zerojax.config.mesh import HOST
from zerojax.forecasting.forecast_numbers import Offload, Traffic, TrafficRow
from zerojax.forecasting.hlo.communication import PERMUTE
from zerojax.forecasting.hlo.host_copies import TO_DEVICE, TO_HOST
from zerojax.forecasting.roofline import link_bandwidth, with_network_bytes
from zerojax.hardware.gpus import Gpu
from zerojax.operators.equations import Equation
from zerojax.operators.marks import inner_programs
from zerojax.pipeline.pipeline_costs import message_bytes
from zerojax.placement.device_mesh import CONTEXT, EXPERT, MANUAL_AXES, STAGE
from zerojax.plan.counts import role_tiers
from zerojax.plan.expert_costs import exchange_bytes
from zerojax.plan.make import Plan
from zerojax.plan.muon_matrices import matrix_bytes
from zerojax.plan.offload_costs import all_file_bytes, buffer_bytes, hiding, moved_bytes
from zerojax.plan.wire import wire_unit
from zerojax.tracing.flops import without_waste

Facts = dict[str, Any]

_SENT: Mapping[str, Callable[[int], float]] = {
    "all_to_all": lambda devices: (devices - 1) / devices,
    "all_gather": lambda devices: devices - 1,
    "reduce_scatter": lambda devices: (devices - 1) / devices,
    "ppermute": lambda devices: 1,
}
"""Share of its data that a device sends to the others of an axis, by primitive."""

_ROW_KEYS = (
    *("kind", "axis", "dtype", "loop_depth", "crosses_nodes"),
    *("of_attention", "of_matrices", "group"),
)


def find_traffic(
    plan: Plan,
    gpu: Gpu,
    mesh: Mapping[str, int],
    facts: Facts | None,
    *,
    waited: Mapping[int, float],
    zero_bytes: int,
    attention_bytes: int = 0,
) -> Traffic:
    """Counts the bytes that one device sends per step, as compiled and by formula.

    Args:
      plan: plan of the step.
      gpu: specification of the GPU.
      mesh: {mesh axis: size}, outermost axis first.
      facts: facts read from the compiled step; None if nothing was compiled.
      waited: {number of a collective in the facts: seconds of a step in which the device waits for
        it at published rates}.
      zero_bytes: bytes that ZeRO sends, by formula.
      attention_bytes: bytes that attention sends in the traced step, from `attention_wire_bytes`.
    """
    unit = wire_unit(plan)
    by_formula = Traffic(
        rows=(),
        wire_bytes=None,
        data_wire_bytes=None,
        formula_bytes=zero_bytes,
        unit=unit,
        message_formula_bytes=message_bytes(plan.pipeline) if plan.pipeline else 0,
        attention_traced_bytes=attention_bytes,
        exchange_formula_bytes=exchange_bytes(plan),
        matrix_formula_bytes=sum(matrix_bytes(plan).values()),
    )
    if facts is None:
        return by_formula
    rows = _rows(facts["collectives"], gpu, mesh, waited)
    messages = [row for row in rows if (row.kind, row.axis) == (PERMUTE, STAGE)]
    # Rows that are sent to experts have an axis of their own in the mesh.
    exchanges = [row for row in rows if (row.kind, row.axis) == ("all-to-all", EXPERT)]
    matrices = [row for row in rows if row.of_matrices]
    apart = [*messages, *exchanges, *matrices, *(row for row in rows if row.of_attention)]
    shards = {*MANUAL_AXES}
    # What is left over the manual axes is ZeRO's.
    ours = [row for row in rows if set(row.axis.split("+")) <= shards and row not in apart]
    return dataclasses.replace(
        by_formula,
        rows=rows,
        wire_bytes=sum(row.wire_bytes for row in rows),
        network_bytes=sum(row.network_bytes for row in rows),
        data_wire_bytes=sum(row.wire_bytes for row in ours),
        message_wire_bytes=sum(row.wire_bytes for row in messages),
        attention_wire_bytes=sum(row.wire_bytes for row in rows if row.of_attention),
        exchange_wire_bytes=sum(row.wire_bytes for row in exchanges),
        matrix_wire_bytes=sum(row.wire_bytes for row in matrices),
    )


def attention_wire_bytes(program: ClosedJaxpr, mesh: Mapping[str, int]) -> int:
    """Counts the bytes that one device sends for attention over split sequences in a traced step.

    The collectives of attention are those over `context` alone; ZeRO's are over `data` and
    `context`.

    Args:
      program: jaxpr of one step; equations whose results are not used are left out.
      mesh: {mesh axis: size}.
    """
    devices = mesh.get(CONTEXT, 1)
    return 0 if devices == 1 else round(_sent_over_context(without_waste(program), devices))


def _sent_over_context(jaxpr: Jaxpr, devices: int) -> float:
    return math.fsum(_sent_by(equation, devices) for equation in jaxpr.eqns)


def _sent_by(equation: Equation, devices: int) -> float:
    name, params = equation.primitive.name, equation.params
    # An equation with an inner program sends nothing itself.
    inner = [_sent_over_context(program, devices) for program in inner_programs(params)]
    if inner:
        # As elsewhere, the dearest branch of a conditional counts.
        return max(inner) if name == "cond" else sum(inner) * params.get("length", 1)
    axes = params.get("axis_name")
    # Names of axes may be one name or a tuple of names.
    if name not in _SENT or axes not in (CONTEXT, (CONTEXT,)):
        return 0.0
    payload = sum(x.aval.size * x.aval.dtype.itemsize for x in equation.invars)
    return payload * _SENT[name](devices)


def _rows(
    collectives: Sequence[Facts], gpu: Gpu, mesh: Mapping[str, int], waited: Mapping[int, float]
) -> tuple[TrafficRow, ...]:
    """Sums collectives into rows, one per kind, axis, dtype, loop depth and kind of group; the row
    with the most bytes comes first."""
    grouped: dict[tuple[Any, ...], list[tuple[Facts, float]]] = defaultdict(list)
    for index, one in enumerate(collectives):
        one = {**one, "group": tuple(one["group"])}  # a list, if facts come from JSON
        grouped[tuple(one[key] for key in _ROW_KEYS)].append((one, waited.get(index, 0.0)))
    rows = []
    for key, members in grouped.items():
        row = TrafficRow(
            **dict(zip(_ROW_KEYS, key, strict=True)),
            count=sum(one["times"] for one, _ in members),
            payload_bytes=sum(one["times"] * one["payload_bytes"] for one, _ in members),
            wire_bytes=round(sum(one["times"] * one["wire_bytes"] for one, _ in members)),
            hidden=0.0,
        )
        seconds = row.wire_bytes / link_bandwidth(gpu, mesh, row)
        shown = sum(of_one for _, of_one in members)
        # Waiting may take longer than the transfer alone, because transfers share a link.
        hidden = max(1 - shown / seconds, 0.0) if seconds else 0.0
        rows.append(with_network_bytes(gpu, mesh, dataclasses.replace(row, hidden=hidden)))
    return tuple(sorted(rows, key=lambda row: (-row.wire_bytes, row.kind, row.axis)))


def offload_numbers(plan: Plan, gpu: Gpu, facts: dict[str, Any] | None) -> Offload | None:
    """Computes the numbers of offload for a forecast; returns None without offload.

    Args:
      plan: plan of the step.
      gpu: specification of the GPU.
      facts: facts read from the compiled step, including `host_copies`; None: nothing was compiled.
    """
    if plan.offload is None:
        return None
    copies = None if facts is None else facts["host_copies"]

    def total(**wanted: object) -> int | None:
        if copies is None:
            return None
        same = [one for one in copies if all(one[key] == value for key, value in wanted.items())]
        return sum(one["bytes"] * one["times"] for one in same)

    # A machine may have more devices than the run uses.
    number, tiers = min(plan.mesh.size, gpu.node_devices), role_tiers(plan)
    return Offload(
        tiers=tiers,
        moved=moved_bytes(plan),
        hiding=hiding(plan, gpu),
        compiled_to_device=total(direction=TO_DEVICE),
        compiled_to_host=total(direction=TO_HOST),
        by_kernels=total(is_linear=False),
        # Each device keeps its own part of the state, but buffers are counted for the machine.
        machine_host=number * sum(own.get(HOST, 0) for own in tiers.values())
        + buffer_bytes(plan, plan.offload, number),
        machine_disk=all_file_bytes(plan, number),
    )
