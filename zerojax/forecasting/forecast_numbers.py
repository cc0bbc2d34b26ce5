"""Defines the result of a forecast: bytes, communication, an estimate of time, and a verdict."""

from __future__ import annotations

import dataclasses
from typing import Any

from zerojax.hardware.gpus import Gpu
from zerojax.plan.offload_costs import Hiding, Moved

COMPILED = "compiled"
"""Origin of a number that was read from the compiled program."""
FORMULA = "formula"
"""Origin of a number that was computed from the plan, without a compiler."""

MEMORY_FRACTION = 0.75
"""Share of a GPU's memory that JAX uses unless XLA_PYTHON_CLIENT_MEM_FRACTION is set."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoleBytes:
    """Bytes per device of one role (such as activations) at the moment of peak memory.

    Attributes:
      role: "master weights", "optimizer state", "gathered weights", "gradients", "activations", ...
      bytes: as compiled; None if nothing was compiled.
      formula: by the ZeRO formula; None if there is none (activations, workspace).
    """

    role: str
    bytes: int | None
    formula: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Memory of one device in a step, in bytes; None where nothing was compiled.

    Attributes:
      state: bytes of the training state between steps, exact.
      batch: bytes of this device's rows.
      arguments, outputs, aliased, temporary: as the compiler counts them; donated arguments are
        aliased with outputs.
      peak: most bytes in use at once on the device: arguments + outputs - aliased + temporary.
      host: peak in host memory (offload); by formula if nothing was compiled.
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
      axis: the mesh axes it runs over, such as "data" or "data+model".
      dtype: dtype in which values are sent.
      count: executions per step.
      payload_bytes: size of the whole arrays, over all executions.
      wire_bytes: bytes that one device sends in all executions, by the ring algorithm.
      loop_depth: 0 outside of loops.
      crosses_nodes: whether a group extends beyond one node's fast fabric.
      group: (devices of a group, number of them in the first one's node); None: computed from the
        axes and the devices of a node.
      network_bytes: part of wire_bytes that one device sends between nodes
        (`roofline.network_share`).
      of_attention: whether attention over a split sequence sends it.
      of_matrices: whether an optimizer of whole matrices sends it.
      hidden: share of the wire time that is covered by matrix products scheduled between start and
        end, all at published peaks; 0 if a collective blocks.
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
    """Bytes that one device sends per step.

    Attributes:
      rows: from the compiled program, largest first; empty if nothing was compiled.
      wire_bytes: sum of the bytes of `rows`; None if nothing was compiled.
      network_bytes: part of it between nodes.
      data_wire_bytes: part of ZeRO, over the data axes, and over `stage` for parameters that all
        stages read.
      message_wire_bytes: part between neighbours of a pipeline.
      attention_wire_bytes: part of attention over sequences that are split over `context`.
      formula_bytes: ZeRO's part by formula (see `plan.wire`).
      message_formula_bytes: the messages by formula.
      attention_traced_bytes: attention's part, counted in the traced step.
      exchange_wire_bytes: part between devices that experts are split over.
      exchange_formula_bytes: the same by formula, for one round (see `plan.expert_costs`).
      matrix_wire_bytes: part of the update by an optimizer of whole matrices.
      matrix_formula_bytes: the same by formula (see `plan.whole_matrices`).
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
    """Offloaded state, and the bytes transferred for it; per device and step.

    Attributes:
      tiers: {role: {"device", "host" or "nvme": bytes}}, by formula.
      moved: by purpose, by formula.
      hiding: best time, and the number of tokens with which products take as long; None if the
        batch has no tokens, or the card no peak.
      compiled_to_device, compiled_to_host: bytes that the compiled program copies; None if nothing
        was compiled. Files are read and written outside of it, and are not included.
      by_kernels: part of these bytes that kernels copy with the processors that products need.
      machine_host, machine_disk: memory and disk space that a machine with `Gpu.node_devices` of
        the devices needs; two generations of files if they are durable.
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
    """Roofline estimate: the shortest time that published peak rates allow. Not measured; real
    steps take longer.

    Attributes:
      flops: matrix products of one device per step, recomputation included.
      model_flops: the same without recomputation; the numerator of MFU.
      hbm_bytes: read and written by the compiled program; None if nothing was compiled.
      compute_seconds, memory_seconds, wire_seconds: each alone, at the published peak.
      exposed_wire_seconds: wire time that no matrix product hides in the schedule.
      offload_seconds: time of transfers to and from host memory and disk that nothing hides: the
        update's, and the part of the others beyond max(compute, memory). 0 without offload.
      step_seconds: max(compute, memory) + exposed wire + offload.
      bound_by: "compute", "memory", "wire", or for offload "link" (to host memory) or "disk".
      mfu: model FLOPs over step_seconds and the published peak, that of 8-bit floats for their
        products; None without a peak.
      tokens_per_second: of the whole mesh; None if the batch has no tokens.
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
    """Result of the check whether the step fits into the GPU's memory.

    Attributes:
      fits: None if only formulas are known and they do not decide it.
      needed: bytes: the compiled peak, or the formula's.
      limit: bytes that JAX may use: memory x `MEMORY_FRACTION` or the environment's fraction.
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
    """The numbers of one step of one plan on N GPUs of one kind.

    Attributes:
      gpu: the card.
      num_devices: number of GPUs.
      mesh: axis -> size.
      plan: the plan's own dictionary (`Plan.as_dict`).
      source: `COMPILED`, or `FORMULA` without the compile-only client (`why_formula` has the reason
        and how to install it).
      compiler: versions and options that the program was compiled with.
      options_dropped: compiler option -> reason why it was left out.
      seconds: time spent compiling; 0 from the cache.
      remarks: reasons why a number is a lower bound, such as a loop whose length the program does
        not say.
      offload: state outside device memory; None if there is none.
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
