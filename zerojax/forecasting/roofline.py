"""Estimates time by the roofline: counted work divided by published peaks."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence

from zerojax.forecasting.forecast_numbers import (
    MEMORY_FRACTION,
    Estimate,
    Memory,
    TrafficRow,
    Verdict,
)
from zerojax.forecasting.remedies import find_remedies, largest_role
from zerojax.hardware.gpus import Gpu
from zerojax.plan.device_mesh import CONTEXT, DATA, EXPERT, MODEL, PASS_AXES, STAGE
from zerojax.plan.make import Plan
from zerojax.plan.offload_costs import Hiding
from zerojax.tracing.trees import format_bytes

FRACTION_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
"""Variables with JAX's share of the card; the second is the older name."""
RINGS = ("all-gather", "reduce-scatter", "all-reduce")
DIRECT = ("all-to-all", "ragged-all-to-all")
"""Each member of a group sends each other member its part directly, whatever link is between."""
TIGHT = 0.03
"""Headroom below this share of the limit is reported as tight: the allocator leaves gaps."""


def members_per_node(mesh: Mapping[str, int], axis: str, node_devices: int) -> int:
    """Returns how many devices of one group of a collective are in the group's first node.

    Args:
      mesh: axis -> size, outermost first, as devices are numbered.
      axis: the axes of the group, such as "data+model"; the result is 1 if the mesh lacks one of
        them.
      node_devices: devices of a node; they have consecutive numbers.
    """
    names = axis.split("+")
    if any(name not in mesh for name in names):
        return 1
    ids, stride = [0], 1
    for name, size in reversed([*mesh.items()]):
        if name in names:
            ids = [first + stride * index for first in ids for index in range(size)]
        stride *= size
    return sum(number < node_devices for number in ids)


def network_share(gpu: Gpu, mesh: Mapping[str, int], row: TrafficRow) -> float:
    """Returns the share of `row.wire_bytes` that a device sends between nodes, by a network card.

    A ring enters each node once: of m members of a node one sends to the next node, and NCCL runs m
    rings, each through the card of another member, so that every card has 1/m (nccl-tests,
    doc/PERFORMANCE.md, "bus bandwidth"). An all-to-all sends to each of the g - 1 others directly,
    g - m of them in other nodes. A permute or broadcast uses only the card of its sender.
    """
    if not row.crosses_nodes:
        return 0.0
    if row.group is None:
        members = members_per_node(mesh, row.axis, gpu.node_devices)
        size = math.prod(mesh.get(name, 1) for name in row.axis.split("+"))
    else:
        size, members = row.group
    if row.kind in RINGS:
        return 1.0 / members
    return (size - members) / (size - 1) if row.kind in DIRECT and size > members else 1.0


def link_bandwidth(gpu: Gpu, mesh: Mapping[str, int], row: TrafficRow) -> float:
    """Returns the bytes per second at which one device of a group sends, at best.

    Inside a node: its fabric. Across nodes the slower of two links: the network card, for bytes
    between nodes, and the fabric, for the rest of what is sent directly or, in a ring, for all
    bytes.
    """
    between = network_share(gpu, mesh, row)
    inside = 1.0 if row.kind in RINGS or not between else 1.0 - between
    return 1.0 / max(inside / gpu.node_bandwidth, between / gpu.network_bandwidth)


def with_network_bytes(gpu: Gpu, mesh: Mapping[str, int], row: TrafficRow) -> TrafficRow:
    """Returns the row with the number of bytes that are sent between nodes filled in."""
    sent = round(row.wire_bytes * network_share(gpu, mesh, row))
    return dataclasses.replace(row, network_bytes=sent)


def estimate(
    gpu: Gpu,
    *,
    mesh: Mapping[str, int],
    dtype: str,
    flops: float,
    model_flops: float,
    hbm_bytes: int | None,
    rows: Sequence[TrafficRow],
    formula_bytes: int = 0,
    message_bytes: int = 0,
    attention_bytes: int = 0,
    exchange_bytes: int = 0,
    matrix_bytes: Mapping[str, int] | None = None,
    level_bytes: tuple[int, int] = (0, 0),
    tokens: int | None = None,
    hiding: Hiding | None = None,
    eight_bits: float = 0.0,
    model_eight_bits: float = 0.0,
) -> Estimate:
    """Computes the roofline, with the wire as a third roof.

    Source: Williams et al. 2009, doi:10.1145/1498765.1498785.

    Every term is counted work over a published peak, so the result is a bound that no run reaches:
    latencies, launches, and the share of a peak that kernels attain are left out.

      compute = flops / peak; memory = hbm_bytes / bandwidth; wire = sum of wire_bytes / link
      exposed = wire time that the schedule does not hide behind matrix products, and the part of
                the rest that exceeds max(compute, memory), behind which it would have to hide
      offload = the update's link or disk, and the part of the other transfers that exceeds
                max(compute, memory)
      step    = max(compute, memory) + exposed + offload

    Args:
      gpu: the card.
      mesh: axis -> size, outermost first.
      dtype: dtype of the matrix products, such as "bfloat16".
      flops: of one device per step, recomputation included.
      model_flops: the same without recomputation.
      hbm_bytes: read and written by one device per step; None if nothing was compiled.
      rows: traffic of one device; empty if nothing was compiled.
      formula_bytes: replaces rows if nothing was compiled; it is assumed to be hidden as far as
        possible.
      message_bytes: likewise for a pipeline's messages.
      attention_bytes: likewise for attention along `context`.
      exchange_bytes: likewise for rows to experts along `expert` and back.
      matrix_bytes: likewise {mesh axes: bytes that an optimizer of whole matrices sends over them}.
      level_bytes: parts of formula_bytes that stay in nodes, and that only go between nodes.
      tokens: tokens of one global batch.
      hiding: for a plan with offload.
      eight_bits: share of `flops` that are products of 8-bit floats, which have their own peak.
      model_eight_bits: the same share of `model_flops`.
    """
    if hbm_bytes is None:
        rows = _formula_rows(
            gpu,
            mesh,
            formula_bytes,
            level_bytes,
            message_bytes,
            attention_bytes,
            exchange_bytes,
            matrix_bytes or {},
        )
    peak = gpu.peak_flops(dtype, eight_bits)
    model_peak = gpu.peak_flops(dtype, model_eight_bits)
    compute = flops / peak if peak else None
    memory = None if hbm_bytes is None else hbm_bytes / gpu.memory_bandwidth
    seconds = [row.wire_bytes / link_bandwidth(gpu, mesh, row) for row in rows]
    wire = math.fsum(seconds)
    hidden = math.fsum(s * row.hidden for s, row in zip(seconds, rows, strict=True))
    busy = max(compute or 0.0, memory or 0.0)
    exposed = max(wire - min(hidden, busy), 0.0)
    offload = 0.0
    if hiding is not None:
        offload = hiding.update_seconds + max(hiding.stream_seconds - busy, 0.0)
    step = None if compute is None else busy + exposed + offload
    return Estimate(
        flops=flops,
        model_flops=model_flops,
        hbm_bytes=hbm_bytes,
        compute_seconds=compute,
        memory_seconds=memory,
        wire_seconds=wire,
        exposed_wire_seconds=exposed,
        step_seconds=step,
        bound_by=None if compute is None else _bound(compute, memory, exposed, offload, hiding),
        mfu=model_flops / (step * model_peak) if step and model_peak else None,
        tokens_per_second=tokens / step if step and tokens else None,
        offload_seconds=offload,
        eight_bits=eight_bits,
    )


def _formula_rows(
    gpu: Gpu,
    mesh: Mapping[str, int],
    data_bytes: int,
    level_bytes: tuple[int, int],
    message_bytes: int,
    attention_bytes: int,
    exchange_bytes: int,
    matrix_bytes: Mapping[str, int],
) -> list[TrafficRow]:
    """Returns the rows of communication by formula.

    ZeRO's rings over the data axes, a pipeline's messages to neighbours, attention along a split
    sequence, rows to experts and back, and matrices to their owners.
    """
    data_axes = [name for name in PASS_AXES if mesh.get(name, 1) > 1]
    span = mesh.get(STAGE, 1) * mesh.get(MODEL, 1)  # devices from the first to the last stage
    sequence = span * mesh.get(CONTEXT, 1)
    axis, everyone = "+".join(data_axes) or DATA, math.prod(mesh.values())
    inside, between = level_bytes
    rows = (
        ("all-gather", axis, data_bytes - inside - between, everyone, None),
        ("all-gather", axis, inside, 1, None),
        ("all-gather", axis, between, everyone, (max(everyone // gpu.node_devices, 2), 1)),
        ("collective-permute", STAGE, message_bytes, span, None),
        ("all-to-all", CONTEXT, attention_bytes, sequence, None),
        ("all-to-all", EXPERT, exchange_bytes, sequence * mesh.get(EXPERT, 1), None),
        *(
            ("all-to-all", axes, sent, _span(mesh, axes), None)
            for axes, sent in matrix_bytes.items()
        ),
    )
    formula = [
        TrafficRow(
            kind=kind,
            axis=axis,
            dtype="",
            count=1,
            payload_bytes=sent,
            wire_bytes=sent,
            loop_depth=0,
            crosses_nodes=devices > gpu.node_devices,
            hidden=1.0,
            group=group,
        )
        for kind, axis, sent, devices, group in rows
        if sent
    ]
    return [with_network_bytes(gpu, mesh, row) for row in formula]


def _span(mesh: Mapping[str, int], axis: str) -> int:
    """Returns the number of devices from the first to the last of a group over axes such as
    "data+context".
    """
    names = [*mesh]
    return math.prod(mesh[name] for name in names[min(map(names.index, axis.split("+"))) :])


def _bound(
    compute: float, memory: float | None, exposed: float, offload: float, hiding: Hiding | None
) -> str:
    if hiding is not None and offload > max(compute, memory or 0.0, exposed):
        # The update takes as long as the slower of both, and here this is the disk.
        by_disk = (hiding.disk_seconds or 0.0) >= max(hiding.update_seconds, hiding.stream_seconds)
        return "disk" if by_disk and hiding.disk_seconds else "link"
    if exposed > max(compute, memory or 0.0):
        return "wire"
    return "memory" if memory is not None and memory > compute else "compute"


def memory_fraction(environ: Mapping[str, str] | None = None) -> tuple[float, str]:
    """Returns the share of a card's memory that JAX uses, and where it is set.

    Args:
      environ: None uses the process's; the training run's environment is what counts in the end.

    Raises:
      ValueError: not a number above 0.
    """
    environ = os.environ if environ is None else environ
    if environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "").lower() == "platform":
        return 1.0, "XLA_PYTHON_CLIENT_ALLOCATOR=platform"
    for name in FRACTION_VARIABLES:
        text = environ.get(name, "")
        if not text:
            continue
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not value > 0:
            raise ValueError(f"{name}={text!r} is not a number above 0; use 0.9, or unset it")
        return min(value, 1.0), f"{name}={text}"
    return MEMORY_FRACTION, "JAX's default"


def memory_limit(gpu: Gpu) -> tuple[int, str]:
    """Returns the bytes of a card that JAX may use, and a line with the reason."""
    fraction, source = memory_fraction()
    limit = int(gpu.memory_bytes * fraction)
    return limit, (
        f"JAX may use {format_bytes(limit)}: {fraction:g} of the card's "
        f"{format_bytes(gpu.memory_bytes)} ({source})"
    )


def verdict(plan: Plan, gpu: Gpu, memory: Memory) -> Verdict:
    """Decides whether the step fits, with reasons and remedies.

    The formulas leave out activations: they can show that a step does not fit, never that it does.

    Args:
      plan: the plan of `memory`; its settings decide which remedies are named.
    """
    limit, share = memory_limit(gpu)
    needed = memory.formula_peak if memory.peak is None else memory.peak
    headroom = limit - needed
    if headroom < 0:
        fits: bool | None = False
        reasons = [
            f"{format_bytes(-headroom)} too much",
            largest_role(memory, needed),
            share,
            *find_remedies(plan, gpu, memory, excess=-headroom, fraction=memory_fraction()[0]),
        ]
    elif memory.peak is None:
        fits = None
        reasons = [
            f"{format_bytes(headroom)} are left for activations, which formulas exclude: "
            "compile to decide",
            share,
        ]
    else:
        fits = True
        reasons = [f"{format_bytes(headroom)} free", share]
        if headroom < TIGHT * limit:
            reasons.insert(
                1,
                f"tight: less than {TIGHT:.0%} of the limit, and the allocator leaves gaps",
            )
    return Verdict(fits=fits, needed=needed, limit=limit, headroom=headroom, reasons=tuple(reasons))
