"""Result of a forecast: bytes, communication, an estimate of time, and a verdict."""

from __future__ import annotations

import dataclasses
from typing import Any

from zerojax.hardware.gpus import Gpu
from zerojax.plan.offload_costs import Hiding, Moved

COMPILED = "compiled"
FORMULA = "formula"

MEMORY_FRACTION = 0.75
"""Share of a GPU's memory that JAX takes unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoleBytes:
    """Bytes per device that one role takes at the moment of the peak.

    Attributes:
      role: "master weights", "optimizer state", "gathered weights", "gradients", "activations", ...
      bytes: as compiled; None where nothing was compiled.
      formula: what the ZeRO formula says; None where there is none (activations, workspace).
    """

    role: str
    bytes: int | None
    formula: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes per device. None where nothing was compiled.

    Attributes:
      state: of the training state between steps, exact; batch: of this device's rows.
      arguments, outputs, aliased, temporary: as the compiler counts them; donated arguments are
        aliased with outputs.
      peak: the most that lives at once on the device: arguments + outputs - aliased + temporary.
      host: peak in host memory (offload); by formula where nothing was compiled.
      formula_peak: state, gathered weights and gradients by formula, without activations.
      roles: at the moment of the peak; their bytes add up to `peak`.
    """

    state: int
    batch: int
    arguments: int | None
    outputs: int | None
    aliased: int | None
    temporary: int | None
    peak: int | None
    host: int
    formula_peak: int
    roles: tuple[RoleBytes, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrafficRow:
    """All collectives of one kind, dtype, group and loop depth in one step of one device.

    Attributes:
      kind: "all-gather", "reduce-scatter", "all-reduce", "all-to-all" or "collective-permute".
      axis: the mesh axes it runs over, as in "data" or "data+model".
      dtype: on the wire.
      count: executions per step.
      payload_bytes: of all executions, the whole arrays.
      wire_bytes: sent by one device, all executions, as a ring does it.
      loop_depth: 0 outside of loops.
      crosses_nodes: whether a group reaches beyond one node's fast fabric.
      group: (devices of a group, how many of them are in the node of the first); None: what the
        axes and the devices of a node say.
      network_bytes: of wire_bytes, what one device sends between nodes (`roofline.network_share`).
      of_attention: whether attention over a split sequence sends it; of_matrices: an optimizer of
        whole matrices.
      hidden: share of the wire time that matrix products scheduled between start and end take, all
        at published peaks; 0 where a collective blocks.
    """

    kind: str
    axis: str
    dtype: str
    count: int
    payload_bytes: int
    wire_bytes: int
    loop_depth: int
    crosses_nodes: bool
    hidden: float
    network_bytes: int = 0
    of_attention: bool = False
    of_matrices: bool = False
    group: tuple[int, int] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traffic:
    """What one device sends per step.

    Attributes:
      rows: from the compiled program, largest first; empty where nothing was compiled.
      wire_bytes: their sum; None where nothing was compiled.
      network_bytes: of these between nodes.
      data_wire_bytes: of these ZeRO's own, over the data axes, and over `stage` for what all stages
        read; message_wire_bytes: between neighbours of a pipeline; attention_wire_bytes: of
        attention over sequences that are split over `context`.
      formula_bytes: ZeRO's by formula (see `plan.wire`); message_formula_bytes: the messages';
        attention_traced_bytes: attention's, counted in the traced step.
      exchange_wire_bytes: between devices that experts are split over; exchange_formula_bytes: by
        formula, of one round (see `plan.expert_costs`).
      matrix_wire_bytes: for the update by an optimizer of whole matrices; matrix_formula_bytes: by
        formula (see `plan.whole_matrices`).
      unit: 2 bytes x parameters x (N-1)/N.
    """

    rows: tuple[TrafficRow, ...]
    wire_bytes: int | None
    data_wire_bytes: int | None
    formula_bytes: int
    unit: float
    message_wire_bytes: int | None = None
    message_formula_bytes: int = 0
    attention_wire_bytes: int | None = None
    attention_traced_bytes: int = 0
    network_bytes: int | None = None
    exchange_wire_bytes: int | None = None
    exchange_formula_bytes: int = 0
    matrix_wire_bytes: int | None = None
    matrix_formula_bytes: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Offload:
    """What lies outside device memory, and what moves for it; bytes of one device, per step.

    Attributes:
      tiers: {role: {"device", "host" or "nvme": bytes}}, by formula.
      moved: by purpose, by formula.
      hiding: time at best, and with how many tokens products last as long; None where the batch has
        no tokens, or the card no peak.
      compiled_to_device, compiled_to_host: what the compiled program copies; None where nothing was
        compiled. Files are read and written behind it, and are not in it.
      by_kernels: of these bytes, what kernels copy with the processors that products need.
      machine_host, machine_disk: what a machine with `Gpu.node_devices` of the devices must have;
        two generations of files if they are durable.
    """

    tiers: dict[str, dict[str, int]]
    moved: tuple[Moved, ...]
    hiding: Hiding | None
    compiled_to_device: int | None
    compiled_to_host: int | None
    by_kernels: int | None
    machine_host: int
    machine_disk: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """The roofline: what published peaks allow at best. Not a measurement, and never reached.

    Attributes:
      flops: matrix products of one device per step, with what is computed again.
      model_flops: the same without; the numerator of MFU.
      hbm_bytes: read and written by the compiled program; None where nothing was compiled.
      compute_seconds, memory_seconds, wire_seconds: each alone, at the published peak.
      exposed_wire_seconds: of the wire, what no matrix product hides in the schedule.
      offload_seconds: of what goes to the host and to disk and comes back, what nothing hides: the
        update's, and what of the rest lasts longer than max(compute, memory). 0 without offload.
      step_seconds: max(compute, memory) + exposed wire + offload.
      bound_by: "compute", "memory", "wire", or of offload "link", that of the host, or "disk".
      mfu: model FLOPs over step_seconds and the published peak, of 8-bit floats for products of
        these; None without a peak.
      tokens_per_second: of the whole mesh; None where the batch has no tokens.
      eight_bits: share of `flops` that are products of 8-bit floats, from 0 to 1.
    """

    flops: float
    model_flops: float
    hbm_bytes: int | None
    compute_seconds: float | None
    memory_seconds: float | None
    wire_seconds: float
    exposed_wire_seconds: float
    step_seconds: float | None
    bound_by: str | None
    mfu: float | None
    tokens_per_second: float | None
    offload_seconds: float = 0.0
    eight_bits: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether the step fits on the card.

    Attributes:
      fits: None when only formulas are known and they do not decide it.
      needed: bytes: the compiled peak, or the formula's.
      limit: bytes JAX may take: memory x `MEMORY_FRACTION` or what the environment says.
      headroom: limit - needed.
      reasons: one line each, remedies last.
    """

    fits: bool | None
    needed: int
    limit: int
    headroom: int
    reasons: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForecastNumbers:
    """One step of one plan on N GPUs of one kind.

    Attributes:
      gpu: the card; num_devices: how many; mesh: axis -> size.
      plan: the plan's own dictionary (`Plan.as_dict`).
      source: `COMPILED`, or `FORMULA` where the compile-only client is missing (`why_formula` says
        why, and how to install it).
      compiler: versions and options that the program was compiled with.
      options_dropped: compiler option -> why it was left out.
      seconds: spent compiling; 0 from the cache.
      remarks: what makes a number a lower bound, such as a loop whose length the program does not
        say.
      offload: what lies outside device memory; None where nothing does.
    """

    gpu: Gpu
    num_devices: int
    mesh: dict[str, int]
    plan: dict[str, Any]
    source: str
    why_formula: str | None
    compiler: str
    options_dropped: dict[str, str]
    seconds: float
    memory: Memory
    traffic: Traffic
    estimate: Estimate
    verdict: Verdict
    remarks: tuple[str, ...] = ()
    offload: Offload | None = None
