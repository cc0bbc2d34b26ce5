"""Dataclasses for the numbers of a forecast: memory, communication, an estimate of time, and the
verdict whether the step fits."""

from __future__ import annotations

from typing import Any

from zerojax.config.late_dataclasses import dataclass
from zerojax.hardware.gpus import Gpu
from zerojax.plan.offload_costs import Hiding, Moved

COMPILED = "compiled"
"""Origin of a number that was read from the compiled program."""
FORMULA = "formula"
"""Origin of a number that was computed from the plan, without a compiler."""

ALLOCATOR_BYTES = 313_000_000
"""Bytes that a GPU counted above the compiled peak: 321 MB in eight programs on an H200, 304 MB in
the same programs on an H100, also before the first step. A likely cause, read and not measured, is
XLA's allocator, which splits a block only if at least 128 MiB or half of it would be left."""

MEMORY_FRACTION = 0.75
"""Share of a GPU's memory that JAX uses unless XLA_PYTHON_CLIENT_MEM_FRACTION is set."""


@dataclass(frozen=True, kw_only=True)
class RoleBytes:
    """Bytes per device that one role, such as activations, takes at the moment of peak memory.

    Attributes:
      role: "master weights", "optimizer state", "gathered weights", "gradients", "activations", ...
      bytes: number of bytes in the compiled program; None if nothing was compiled.
      formula: number of bytes by the ZeRO formula; None for roles without a formula (activations,
        workspace).
    """

    role: str
    bytes: int | None
    formula: int | None


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Memory of one device in a training step, in bytes.

    Attributes that come from the compiled program are None if nothing was compiled.

    Attributes:
      state: bytes of the training state between steps, exact.
      batch: bytes of this device's rows of the batch.
      arguments, outputs, aliased, temporary: bytes of the compiled program's arguments, outputs,
        outputs that reuse donated arguments, and temporary values.
      peak: largest number of bytes in use at once on the device: arguments + outputs - aliased +
        temporary.
      host: largest number of bytes in host memory (offload); by formula if nothing was compiled.
      formula_peak: bytes of state, gathered weights and gradients by formula, without activations.
      roles: bytes of each role at the moment of the peak; they add up to `peak`.
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

    @property
    def on_card(self) -> int | None:
        """Bytes that a GPU should count at the peak; None if nothing was compiled."""
        return None if self.peak is None else self.peak + ALLOCATOR_BYTES


@dataclass(frozen=True, kw_only=True)
class TrafficRow:
    """Collectives of one device in one step that have the same kind, dtype, group and loop depth,
    summed.

    Attributes:
      kind: "all-gather", "reduce-scatter", "all-reduce", "all-to-all" or "collective-permute".
      axis: mesh axes over which the collectives run, such as "data" or "data+model".
      dtype: dtype in which values are sent.
      count: number of executions per step.
      payload_bytes: size in bytes of the whole arrays, summed over all executions.
      wire_bytes: bytes that one device sends in all executions, by the ring algorithm.
      loop_depth: number of loops around the collectives.
      crosses_nodes: whether a group extends beyond one node.
      group: (number of devices in a group, number of them in the node of the group's first device);
        None: computed from the axes and the number of devices in a node.
      network_bytes: part of wire_bytes that one device sends between nodes
        (`roofline.network_share`).
      of_attention: whether attention over a split sequence sends these bytes.
      of_matrices: whether an optimizer that updates whole matrices sends these bytes.
      hidden: share of the transfer time that overlaps with matrix products scheduled between start
        and end, both at published peak rates; 0 if a collective blocks.
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


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes that one device sends per step, as compiled and by formula.

    Attributes that come from the compiled program are None if nothing was compiled.

    Attributes:
      rows: collectives of the compiled program, largest first; empty if nothing was compiled.
      wire_bytes: bytes of all rows.
      network_bytes: bytes between nodes.
      data_wire_bytes: bytes of ZeRO: over the data axes, and over `stage` for parameters that all
        stages read.
      message_wire_bytes: bytes between neighbouring stages of a pipeline.
      attention_wire_bytes: bytes of attention over sequences that are split over `context`.
      formula_bytes: bytes of ZeRO by formula (see `plan.wire`).
      message_formula_bytes: bytes between pipeline stages by formula.
      attention_traced_bytes: bytes of attention, counted in the traced step.
      exchange_wire_bytes: bytes between the devices over which experts are split.
      exchange_formula_bytes: bytes between these devices by formula, for one round (see
        `plan.expert_costs`).
      matrix_wire_bytes: bytes of the update by an optimizer that needs whole matrices.
      matrix_formula_bytes: bytes of this update by formula (see `plan.whole_matrices`).
      unit: unit in which the page expresses bytes: 2 bytes x parameters x (N-1)/N.
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


@dataclass(frozen=True, kw_only=True)
class Offload:
    """State stored outside device memory, and the bytes transferred for it, per device and step.

    Attributes:
      tiers: {role: {"device", "host" or "nvme": bytes}}, by formula.
      moved: transferred bytes for each purpose, by formula.
      hiding: the shortest time of the transfers, and the number of tokens whose products take as
        long; None if the batch has no tokens, or the GPU no published peak.
      compiled_to_device, compiled_to_host: bytes that the compiled program copies in each
        direction; None if nothing was compiled. Reading and writing of files is not part of the
        compiled program and not included.
      by_kernels: part of these copied bytes that kernels move, on the processors that matrix
        products need.
      machine_host, machine_disk: bytes of host memory and of disk space that a machine with
        `Gpu.node_devices` of these devices needs; for durable files twice the disk space.
    """

    tiers: dict[str, dict[str, int]]
    moved: tuple[Moved, ...]
    hiding: Hiding | None
    compiled_to_device: int | None
    compiled_to_host: int | None
    by_kernels: int | None
    machine_host: int
    machine_disk: int


@dataclass(frozen=True, kw_only=True)
class ExpectedItem:
    """A part of a step's expected time.

    Attributes:
      what: line of the user's code as "file:line: source", or what the time goes to.
      seconds: seconds of a step.
    """

    what: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Expected time of a compiled step: its schedule replayed at rates that programs reach.

    Attributes:
      seconds: seconds of a step; the sum of the following ones.
      product_seconds, attention_seconds, memory_seconds: of kernels with matrix products, of
        attention by a library, and of all other kernels.
      wire_seconds, host_seconds: in which the device waits for collectives, and for copies from or
        to host memory.
      disk_seconds: by which files take longer than the program that runs meanwhile, and of the
        update after it.
      items: longest parts, the longest first; a part of the sum.
      source: what the rates are and where they are from, as a part of a sentence.
      mfu: model FLOPs divided by `seconds` and by the published peak.
      tokens_per_second: tokens per second of the whole mesh; None if the batch has no tokens.
    """

    seconds: float
    product_seconds: float
    attention_seconds: float
    memory_seconds: float
    wire_seconds: float
    host_seconds: float
    disk_seconds: float
    items: tuple[ExpectedItem, ...]
    source: str
    mfu: float | None
    tokens_per_second: float | None


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Roofline estimate of a step: the shortest time that published peak rates allow. It is not
    measured; real steps take longer.

    Attributes:
      flops: FLOPs of the matrix products of one device per step, including recomputation.
      model_flops: FLOPs without recomputation; the numerator of MFU.
      hbm_bytes: bytes of device memory that the compiled program reads and writes; None if nothing
        was compiled.
      compute_seconds, memory_seconds, wire_seconds: time of products, of device memory and of
        communication, each alone at its published peak.
      exposed_wire_seconds: communication time that does not overlap with matrix products in the
        schedule.
      offload_seconds: time of transfers to and from host memory and disk that does not overlap: all
        transfers of the update, and the part of other transfers beyond max(compute, memory). 0
        without offload.
      step_seconds: max(compute, memory) + exposed communication + offload.
      bound_by: "compute", "memory", "wire", or for offload "link" (to host memory) or "disk".
      mfu: model FLOPs divided by step_seconds and by the published peak, with the peak of 8-bit
        floats for 8-bit products; None without a published peak.
      tokens_per_second: tokens per second of the whole mesh; None if the batch has no tokens.
      eight_bits: share of `flops` that are products of 8-bit floats, from 0 to 1.
      expected: expected time; None if nothing was compiled, or the GPU has no published peak.
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
    expected: Expected | None = None

    @property
    def expected_seconds(self) -> float | None:
        """Seconds by which settings are compared: expected ones, or else the bound."""
        return self.step_seconds if self.expected is None else self.expected.seconds

    @property
    def expected_wire_seconds(self) -> float:
        """Seconds of a step in which the device waits for collectives: expected ones, or else those
        of the bound."""
        return self.exposed_wire_seconds if self.expected is None else self.expected.wire_seconds


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Result of the check whether a step fits into the GPU's memory.

    Attributes:
      fits: whether the step fits; None if only formulas are known and they do not decide it.
      needed: number of bytes that the step needs: the compiled peak, or the peak by formula.
      limit: number of bytes that JAX may use: GPU memory times `MEMORY_FRACTION`, or times the
        fraction set in the environment.
      headroom: limit - needed.
      reasons: lines of text that explain the verdict; remedies come last.
    """

    fits: bool | None
    needed: int
    limit: int
    headroom: int
    reasons: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ForecastNumbers:
    """Numbers of one training step of one plan on a number of GPUs of one kind.

    Attributes:
      gpu: specification of the GPU.
      num_devices: number of GPUs.
      mesh: {mesh axis: size}.
      plan: the plan as a dictionary (`Plan.as_dict`).
      source: `COMPILED`, or `FORMULA` without the compile-only client.
      why_formula: reason why formulas were used and how to install the client; None if compiled.
      compiler: versions and options with which the program was compiled.
      options_dropped: {compiler option: reason why it was left out}.
      seconds: time spent compiling; 0 if the result came from the cache.
      memory, traffic, estimate, verdict: memory, communication and time of the step, and whether it
        fits.
      remarks: reasons why a number is only a lower bound, such as a loop whose number of iterations
        the program does not state.
      offload: state outside device memory and its transfers; None if there is none.
      compressed: numbers of a step after the warm-up of a 1-bit optimizer, which runs another
        program; None with other optimizers. `verdict` is then that of the program that needs more
        memory; all other attributes are those of the warm-up.
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
    compressed: ForecastNumbers | None = None
