"""Estimates the time of a step by the roofline model: counted work divided by published peak
rates."""

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
from zerojax.placement.device_mesh import CONTEXT, DATA, EXPERT, MODEL, PASS_AXES, STAGE
from zerojax.plan.make import Plan
from zerojax.plan.offload_costs import Hiding
from zerojax.tracing.trees import format_bytes

FRACTION_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
"""Variables with JAX's share of the card; the second is the older name."""
RINGS = ("all-gather", "reduce-scatter", "all-reduce")
DIRECT = ("all-to-all", "ragged-all-to-all")
"""Kinds of collectives in which each member of a group sends each other member its part directly,
over whatever link is between them."""
TIGHT = 0.03
"""Share of the memory limit: a smaller headroom is reported as tight, because the allocator leaves
gaps."""


def members_per_node(mesh: Mapping[str, int], axis: str, node_devices: int) -> int:
    """Returns how many devices of a collective's group are in the node of the group's first device.

    Args:
      mesh: {mesh axis: size}, outermost axis first, in the order in which devices are numbered.
      axis: mesh axes of the group, such as "data+model"; if the mesh lacks one of them, the result
        is 1.
      node_devices: number of devices in a node; the devices of a node have consecutive numbers.
    """
    names = axis.split("+")
    if any(name not in mesh for name in names):
        return 1
    # The last axis of the mesh has neighbouring devices, so strides are counted from the back.
    ids, stride = [0], 1
    for name, size in reversed([*mesh.items()]):
        if name in names:
            ids = [first + stride * index for first in ids for index in range(size)]
        stride *= size
    return sum(number < node_devices for number in ids)


def network_share(gpu: Gpu, mesh: Mapping[str, int], row: TrafficRow) -> float:
    """Returns the share of `row.wire_bytes` that a device sends between nodes, through a network
    card.

    A ring enters each node once: of m members in a node, one sends to the next node. NCCL runs m
    rings, each through the network card of another member, so that every card sends 1/m of the
    bytes (nccl-tests, doc/PERFORMANCE.md, "bus bandwidth"). In an all-to-all each device sends
    directly to the g - 1 others, g - m of which are in other nodes. A permute or broadcast uses
    only the network card of its sender.
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
    """Returns the highest rate in bytes per second at which one device of a group can send.

    Inside a node this is the rate of the node's fabric. Across nodes it is the rate of the slower
    of two links: the network card for bytes between nodes, and the fabric for the other bytes (all
    bytes in a ring, the bytes inside the node in a direct exchange).
    """
    between = network_share(gpu, mesh, row)
    inside = 1.0 if row.kind in RINGS or not between else 1.0 - between
    return 1.0 / max(inside / gpu.node_bandwidth, between / gpu.network_bandwidth)


def with_network_bytes(gpu: Gpu, mesh: Mapping[str, int], row: TrafficRow) -> TrafficRow:
    """Returns a copy of a traffic row with its number of bytes between nodes."""
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
    """Estimates the time of a step by the roofline model, with communication as a third limit
    besides products and device memory.

    Source: Williams et al. 2009, doi:10.1145/1498765.1498785.

    Every term is counted work divided by a published peak rate, so the result is a lower bound that
    no run reaches: latencies, kernel launches, and the share of the peak that kernels attain are
    left out.
      compute = flops / peak; memory = hbm_bytes / bandwidth; wire = sum of wire_bytes / link
      exposed = communication time that does not overlap with matrix products in the schedule, and
      the part of the remaining communication time above max(compute, memory)
      offload = time of the update's link or disk, and the part of the other transfers' time above
      max(compute, memory) + exposed
      step    = max(compute, memory) + exposed + offload

    Args:
      gpu: specification of the GPU.
      mesh: {mesh axis: size}, outermost axis first.
      dtype: dtype of the matrix products, such as "bfloat16".
      flops: FLOPs of one device per step, including recomputation.
      model_flops: FLOPs of one device per step without recomputation.
      hbm_bytes: bytes of device memory that one device reads and writes per step; None if nothing
        was compiled.
      rows: collectives of one device; empty if nothing was compiled.
      formula_bytes: bytes of ZeRO by formula, used if nothing was compiled. Their time is assumed
        to overlap with products as far as possible, as is the time of the following bytes.
      message_bytes: bytes of a pipeline's messages by formula, used if nothing was compiled.
      attention_bytes: bytes of attention along `context` by formula, used if nothing was compiled.
      exchange_bytes: bytes of rows sent to experts along `expert` and back, used if nothing was
        compiled.
      matrix_bytes: {mesh axes: bytes that an optimizer of whole matrices sends over them}, used if
        nothing was compiled.
      level_bytes: (part of formula_bytes that stays in nodes, part that is sent only between
        nodes).
      tokens: number of tokens in one global batch; None: the batch has no tokens.
      hiding: times of offload transfers; None without offload.
      eight_bits: share of `flops` that are products of 8-bit floats, which have their own peak
        rate.
      model_eight_bits: share of `model_flops` that are products of 8-bit floats.
    """
    # Without a compiled program there are no collectives either, so formulas stand in for them.
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
    # Transfers can hide only as long as the device is busy.
    exposed = max(wire - min(hidden, busy), 0.0)
    offload = 0.0
    if hiding is not None:
        # The update comes after the pass, so nothing hides its transfers.
        offload = hiding.update_seconds + max(hiding.stream_seconds - busy - exposed, 0.0)
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
    """Returns traffic rows for communication whose bytes are known by formula only.

    These are the collectives of ZeRO over the data axes, the messages of a pipeline to neighbouring
    stages, attention along a split sequence, rows sent to experts and back, and whole matrices sent
    to the devices that update them.
    """
    data_axes = [name for name in PASS_AXES if mesh.get(name, 1) > 1]
    span = mesh.get(STAGE, 1) * mesh.get(MODEL, 1)  # devices from the first to the last stage
    sequence = span * mesh.get(CONTEXT, 1)
    axis, everyone = "+".join(data_axes) or DATA, math.prod(mesh.values())
    inside, between = level_bytes
    rows = (
        ("all-gather", axis, data_bytes - inside - between, everyone, None),
        # A group of one device crosses no node.
        ("all-gather", axis, inside, 1, None),
        # One device of each node, so that the whole of these bytes crosses nodes.
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
    """Returns the number of devices between the first and the last device of a group over axes such
    as "data+context", both included."""
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
    """Returns the share of a GPU's memory that JAX uses, and a text that says where the share is
    set.

    Args:
      environ: environment variables; None: those of this process. The environment of the training
        run decides in the end.

    Raises:
      ValueError: a variable is not a number above 0.
    """
    environ = os.environ if environ is None else environ
    # This allocator asks CUDA for each array, so no share is set aside.
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
        # NaN is not above 0 either, so this also refuses text that is no number.
        if not value > 0:
            raise ValueError(f"{name}={text!r} is not a number above 0; use 0.9, or unset it")
        return min(value, 1.0), f"{name}={text}"
    return MEMORY_FRACTION, "JAX's default"


def memory_limit(gpu: Gpu) -> tuple[int, str]:
    """Returns the number of bytes of a GPU's memory that JAX may use, and a line of text that
    explains the number."""
    fraction, source = memory_fraction()
    # A limit of 0 bytes would divide by zero in the pages.
    limit = max(int(gpu.memory_bytes * fraction), 1)
    return limit, (
        f"JAX may use {format_bytes(limit)}: {fraction:g} of the card's "
        f"{format_bytes(gpu.memory_bytes)} ({source})"
    )


def verdict(plan: Plan, gpu: Gpu, memory: Memory) -> Verdict:
    """Decides whether a step fits on a GPU, with reasons and remedies.

    Formulas leave out activations, so they can show that a step does not fit, but never that it
    fits.

    Args:
      plan: plan of the step; its settings decide which remedies are listed.
      gpu: specification of the GPU.
      memory: forecast memory of the step.
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
