"""Lists settings with which a step that does not fit needs less memory, in the order of their cost.

Savings are computed by formula; nothing is compiled.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import jax.numpy as jnp
from jax.extend.core import Jaxpr

from zerojax.config.late_dataclasses import dataclass
from zerojax.config.mesh import DEVICE, HOST, NVME
from zerojax.forecasting.forecast_numbers import Memory
from zerojax.hardware.gpus import Gpu
from zerojax.models.adapt import bound_attribute
from zerojax.optim import Optimizer
from zerojax.pipeline.pipeline_costs import activation_bytes, total_buffer_bytes
from zerojax.placement.device_mesh import DATA, MODEL, STAGE, num_data_shards, state_axes
from zerojax.plan.counts import (
    ACTIVATIONS,
    AVERAGE,
    GATHERED,
    GRADIENTS,
    MASTERS,
    OPTIMIZER,
    PIPELINE_BUFFERS,
    STORED,
    kept_activation_bytes,
    shard_bytes,
    whole_elements,
)
from zerojax.plan.make import Plan
from zerojax.plan.offload_costs import link_seconds, rates_of
from zerojax.schedules import lower, make_schedule
from zerojax.tracing import jaxpr
from zerojax.tracing.trees import format_bytes, num_elements

STATE = (MASTERS, OPTIMIZER, AVERAGE, "optimizer temporaries")
MOST_FRACTION = 0.95
"""Largest share of a card for JAX: CUDA, NCCL and libraries take some 0.5 to 2 GiB in addition."""
PRICES = {
    0: "no time: the same work and traffic",
    1: "little time: more and smaller products",
    2: "50 % more traffic",
    3: "traffic or idle time in every layer",
    4: "up to a third more FLOPs",
    5: "copies between host and device in every step",
}
"""Costs of a remedy in time, the smallest first."""
MICROBATCHES = "num_microbatches="
MARGIN = 0.1
"""Share of the limit by which bytes estimated for activations may be too low: with `remat=full`, a
Llama of 8 layers needed 60.3 GiB where 55.6 were estimated (8 x H100, 68 rows of 4096 tokens)."""
SMALL = 0.01
"""A remedy that saves less than this share of the needed bytes is not listed."""


@dataclass(frozen=True)
class Remedy:
    """A setting with which a step takes less memory.

    Attributes:
      words: the setting as a user types it.
      why: reason why it saves memory.
      saving: estimated number of bytes saved per device; None: only the compiler knows.
      price: cost in time, a key of `PRICES`; None: the remedy needs more devices.
      of_activations: whether bytes of activations are saved, so that the peak may move to a moment
        at which other roles take more than now.
    """

    words: str
    why: str
    saving: float | None
    price: int | None
    of_activations: bool = False


def role_sizes(memory: Memory) -> dict[str, int]:
    """Returns {role: bytes at the peak}, as compiled, or by formula if nothing was compiled."""
    compiled = memory.peak is not None
    sizes = {row.role: row.bytes if compiled else row.formula for row in memory.roles}
    return {role: size for role, size in sizes.items() if size}


def largest_role(memory: Memory, needed: int) -> str:
    """Describes in one line the role that takes the most bytes, and its share of `needed`."""
    sizes = role_sizes(memory)
    if not sizes:
        return "the use of these bytes is not known"
    role = max(sizes, key=lambda name: sizes[name])
    return f"most of it: {role}, {format_bytes(sizes[role])} ({sizes[role] / needed:.0%})"


def find_remedies(
    plan: Plan, gpu: Gpu, memory: Memory, *, excess: int, fraction: float
) -> list[str]:
    """Lists remedies for a step that does not fit on a GPU, one line each.

    The order is: more devices, a higher ZeRO stage, more microbatches, smaller pipeline buffers,
    remat, offload, tensor parallelism, more pipeline stages, and a larger share of the GPU's memory
    for JAX. Savings are estimates from the bytes of each role; only compiling gives exact numbers.

    Args:
      plan: plan of the step.
      gpu: specification of the GPU.
      memory: forecast memory of the step.
      excess: number of bytes per device above the limit.
      fraction: share of the GPU's memory that JAX uses now.
    """
    sizes = role_sizes(memory)
    needed = sum(sizes.values())
    enough = "enough" if memory.peak is not None else "enough without activations"
    # Bytes that are not there at this peak, such as gradients before the backward pass ends.
    pairs = [(row.formula, row.bytes) for row in memory.roles]
    later = sum(max(a - b, 0) for a, b in pairs if a is not None and b is not None)
    lines = []
    remedies = list(all_remedies(plan, gpu, sizes))
    parts = [remedy for remedy in remedies if remedy.words.startswith(MICROBATCHES)]
    for remedy in remedies:
        # Of many numbers of microbatches the page shows the smallest and the largest.
        if remedy in parts[1:-1]:
            continue
        saving, surely = remedy.saving, excess
        if saving is not None and remedy.of_activations:
            saving, surely = saving - later, excess + MARGIN * (needed - excess)
        if saving is None:
            saves = "compile to see how much it saves"
        elif saving < SMALL * needed:
            continue
        else:
            saves = f"saves about {format_bytes(saving)}"
            saves += f", {enough}" if saving >= surely else ""
            saves += f", perhaps {enough}" if excess <= saving < surely else ""
        lines.append(f"try {remedy.words} ({saves}): {remedy.why}")
    wanted = needed / gpu.memory_bytes
    if fraction < wanted <= MOST_FRACTION:
        # One hundredth more than needed, since the allocator leaves gaps.
        share = min(math.ceil(wanted * 100 + 1) / 100, MOST_FRACTION)
        lines.append(
            f"try XLA_CLIENT_MEM_FRACTION={share:g} in the environment of the run ({enough}): "
            f"JAX then uses that share of the GPU's memory, not {fraction:g}"
        )
    if not lines:
        lines.append("no setting of this plan makes it fit: use a GPU with more memory")
    return lines


def all_remedies(plan: Plan, gpu: Gpu | None, sizes: dict[str, int]) -> Iterator[Remedy]:
    """Yields every setting of this plan that can still be changed to save memory, in the order of
    `find_remedies`.

    Args:
      plan: plan of the step.
      gpu: specification of the GPU; None: unknown, so remedies that depend on its links are left
        out.
      sizes: {role: bytes at the peak}.
    """
    yield from _more_devices(plan, sizes)
    yield from _higher_zero(plan, sizes)
    yield from _microbatches(plan, sizes)
    yield from _pipeline(plan)
    yield from _remat(plan, sizes)
    if gpu is not None:
        yield from _offload(plan, gpu, sizes)
        yield from _tensor_parallel(plan, gpu, sizes)
    yield from _more_stages(plan, sizes)


def rows_at_once(plan: Plan) -> int:
    """Returns the number of rows of one microbatch on one data shard."""
    return plan.global_batch_size // plan.division.unit


def remat_of(plan: Plan) -> str | None:
    """Returns the model's recomputation setting: `remat` of a reference model; for other models
    "none", or None if they use `jax.checkpoint`."""
    own = getattr(bound_attribute(plan.model, "config"), "remat", None)
    if own is not None:
        return own
    return None if _has_checkpoint(plan.traced.forward.jaxpr) else "none"


def _has_checkpoint(program: Jaxpr) -> bool:
    return any(
        jaxpr.is_checkpoint(equation)
        or any(_has_checkpoint(inner) for inner in jaxpr.inner_programs(equation.params))
        for equation in program.eqns
    )


def _keeps_inputs_alone(program: Jaxpr) -> bool:
    """Returns whether a jaxpr has a checkpoint that saves only its inputs."""
    # A checkpoint with a policy saves more than its inputs, so full recomputation may still save.
    return any(
        (jaxpr.is_checkpoint(equation) and equation.params.get("policy") is None)
        or any(_keeps_inputs_alone(inner) for inner in jaxpr.inner_programs(equation.params))
        for equation in program.eqns
    )


def _more_devices(plan: Plan, sizes: dict[str, int]) -> Iterator[Remedy]:
    shards = num_data_shards(plan.mesh)
    split = _sum(sizes, *STATE) if plan.zero >= 1 else 0
    split += _sum(sizes, "gradients") if plan.zero >= 2 else 0
    what = ["no state", "optimizer state", "state and gradients", "all state"][plan.zero]
    rows = rows_at_once(plan)
    activations = _sum(sizes, "activations") if rows % 2 == 0 else 0
    # With one row per shard, twice as many devices need half as many microbatches.
    pieces = 2 * shards * (plan.num_microbatches if rows > 1 else plan.num_microbatches // 2)
    if not pieces or plan.global_batch_size % pieces:
        return
    why = f"half as much {what}" if split else "half as many rows"
    also = "" if rows > 1 else f" with num_microbatches={plan.num_microbatches // 2}"
    words = f"--devices {2 * plan.mesh.size}{also}"
    saving = (split + activations) / 2
    yield Remedy(words, f"{why} on each device", saving, None, of_activations=activations > 0)


def _higher_zero(plan: Plan, sizes: dict[str, int]) -> Iterator[Remedy]:
    shards = math.prod(plan.placement.axis_sizes[axis] for axis in state_axes(plan.mesh.shape))
    moved = {1: _sum(sizes, *STATE), 2: _sum(sizes, "gradients")}
    moved[3] = _sum(sizes, "gathered weights")
    names = {1: "optimizer state and masters", 2: "gradients", 3: "weights"}
    saving = 0.0
    # With one shard ZeRO has nothing to split.
    if shards == 1:
        return
    for zero in range(plan.zero + 1, 4):
        # Savings add up: a stage also splits what the stages below it split.
        saving += moved[zero] * (1 - 1 / shards)
        parts = [names[stage] for stage in range(plan.zero + 1, zero + 1)]
        why = f"{' and '.join(parts)} also split over {shards} devices"
        # Up to stage 2 the traffic stays the same; stage 3 gathers the weights once more.
        yield Remedy(f"mesh.zero={zero}", why, saving, 2 if zero == 3 else 0)


def _microbatches(plan: Plan, sizes: dict[str, int]) -> Iterator[Remedy]:
    rows, activations = rows_at_once(plan), _sum(sizes, "activations", PIPELINE_BUFFERS)
    if plan.pipeline is not None and plan.pipeline.schedule.name == "gpipe":
        return  # this schedule stores all microbatches, however many there are
    # A sum of gradients exists only with several microbatches, so the first split adds it.
    extra = accumulation_bytes(plan) if plan.num_microbatches == 1 and not plan.pipeline else 0
    also = "; adds a sum of gradients" if extra > 0 else ""
    factors = [factor for factor in (2, 4, 8, 16, 32, 64) if rows % factor == 0]
    for factor in factors:
        yield Remedy(
            f"{MICROBATCHES}{plan.num_microbatches * factor}",
            f"{rows // factor} instead of {rows} rows per microbatch{also}",
            activations * (1 - 1 / factor) - extra,
            1,
            of_activations=True,
        )


def accumulation_bytes(plan: Plan) -> int:
    """Returns the bytes per device that accumulating gradients over microbatches adds.

    Sharded gradients are added to the sum as they arrive. Gradients that are not sharded are in
    memory beside the sum.
    """
    placement = plan.placement
    sum_bytes = jnp.dtype(plan.precision.accumulate_dtype).itemsize
    replaced = jnp.dtype(plan.precision.reduce_dtype).itemsize
    total = 0
    for leaf in placement.leaves.values():
        if leaf.frozen:
            continue
        if not leaf.access.has_whole_gradient:
            # A shard of a gradient is replaced by its sum, so only a wider dtype adds bytes.
            total += placement.shard_elements(leaf) * (sum_bytes - replaced)
        else:
            total += whole_elements(placement, leaf) * sum_bytes
    return total


def _pipeline(plan: Plan) -> Iterator[Remedy]:
    """Yields remedies that reduce the values that pipeline stages store for the backward pass."""
    layout = plan.pipeline
    if layout is None:
        return
    schedule, now = layout.schedule, total_buffer_bytes(layout)
    if schedule.name == "gpipe":
        sizes = {"stages": schedule.num_stages, "microbatches": schedule.num_microbatches}
        # The buffers of a schedule follow from its table, so the table of the other one is made
        # here.
        table = lower(make_schedule("1f1b", **sizes), stash=layout.table.stash)
        fewer = total_buffer_bytes(dataclasses.replace(layout, table=table))
        why = "a stage then stores fewer microbatches at the same time; the bubble is the same"
        yield Remedy("mesh.pipeline_schedule=1f1b", why, now - fewer, 0)
    if layout.table.stash == "residuals":
        table = lower(schedule, stash="input")
        inputs = dataclasses.replace(layout, table=table, stash_bytes=activation_bytes(layout))
        why = "stages store only their inputs and repeat the forward pass: up to a third more FLOPs"
        yield Remedy("mesh.stash=input", why, now - total_buffer_bytes(inputs), 4)


def _more_stages(plan: Plan, sizes: dict[str, int]) -> Iterator[Remedy]:
    """Yields the remedy of twice as many pipeline stages: each device has half the layers and twice
    the rows."""
    stages, layers = 2 * plan.mesh.shape[STAGE], num_layers(plan)
    leaves = plan.placement.leaves.values()
    if plan.mesh.shape[DATA] % 2 or layers % stages or plan.num_microbatches < stages:
        return
    # Only parameters of layers are divided by more stages.
    stacked = sum(num_elements(leaf.shape) for leaf in leaves if leaf.num_slices > 1)
    half = stacked / plan.placement.num_parameters() / 2
    # At stage 3 layers are gathered one by one, however many a device has.
    split = [] if plan.zero == 3 else ["gathered weights"]
    split += ["gradients"] * (plan.zero < 2) + list(STATE) * (plan.zero < 1)
    why = f"each device has {layers // stages} of {layers} layers; idle slots cost time"
    saving = _sum(sizes, *split) * half
    yield Remedy(f"mesh.data=-1 mesh.stage={stages}", why, saving, 3)


def _remat(plan: Plan, sizes: dict[str, int]) -> Iterator[Remedy]:
    now, activations = remat_of(plan), _sum(sizes, "activations")
    if activations < SMALL * sum(sizes.values()):
        return
    # Checkpoints of the model itself are no setting; rolled layers can save more than these.
    if now is None and plan.stacks and not _keeps_inputs_alone(plan.traced.forward.jaxpr):
        why = "layers store only their input; up to a third more FLOPs"
        yield Remedy("mesh.roll_remat=full", why, None, 4)
    if now in (None, "full"):
        return
    known = hasattr(bound_attribute(plan.model, "config"), "remat")
    own = "mesh.roll_remat=full" if plan.stacks else "nnx.remat (jax.checkpoint) around each block"
    words = "model.remat=full" if known else own
    why = "blocks store only their input; a third more FLOPs"
    layers = num_layers(plan)
    # A transformer block keeps at least 34 bytes per token and channel; its input is 2 of them
    # (Korthikanti et al. 2022, arXiv:2205.05198, section 4.1); one block at a time is kept whole.
    saving = activations * (1 - 2 / 34) * (1 - 1 / layers) if now == "none" and layers > 1 else None
    yield Remedy(words, why, saving, 4, of_activations=True)


def _offload(plan: Plan, gpu: Gpu, sizes: dict[str, int]) -> Iterator[Remedy]:
    """Yields remedies that offload the optimizer state, then also the inputs of layers, then also
    their weights."""
    config, in_slices = plan.settings.offload, can_slice(plan)
    state = _sum(sizes, MASTERS, OPTIMIZER, AVERAGE)
    # Offloaded state is updated slice by slice, which not every optimizer can do.
    if in_slices and config.opt_state != HOST and config.params != NVME and state:
        # Forward and backward then read a permanent copy; at stages 1 and 2 it is in addition to
        # the weights gathered from it.
        kept = 0.0
        if plan.precision.has_masters and plan.zero in (1, 2):
            ratio = plan.precision.compute_dtype.itemsize / plan.precision.param_dtype.itemsize
            kept = _sum(sizes, MASTERS) * ratio
        rates = rates_of(gpu)
        seconds = link_seconds(rates, state, state)
        yield Remedy(
            "mesh.offload.opt_state=host",
            f"{format_bytes(state)} move to host memory for each device (with nvme: to files); "
            f"the update takes {seconds:.2g} s longer at least, at the rate of the link "
            f"{rates.link}",
            state - kept,
            5,
        )
    if plan.pipeline is not None or num_layers(plan) == 1:
        return
    kept_inputs = kept_activation_bytes(plan) or 0
    if config.activations == DEVICE and remat_of(plan) == "full":
        why = "the input of each layer is stored in host memory"
        waiting = min(kept_inputs, _sum(sizes, ACTIVATIONS))
        yield Remedy("mesh.offload.activations=host", why, waiting * (1 - 2 / num_layers(plan)), 5)
    if config.late_key is not None:
        why = "gradients no longer wait on the device between steps; the update is then not hidden"
        yield Remedy(
            f"mesh.offload.{config.late_key}=false",
            why,
            shard_bytes(plan.abstract_state.get("delayed")),
            5,
        )
    elif config.params == DEVICE and in_slices and config.moves_opt_state:
        leaves = plan.placement.leaves.values()
        stacked = sum(num_elements(leaf.shape) for leaf in leaves if leaf.num_slices > 1)
        share = stacked / plan.placement.num_parameters() * (1 - 2 / num_layers(plan))
        why = "layers are copied to the device one by one, and their gradients back"
        held = _sum(sizes, STORED, GRADIENTS) + _sum(sizes, GATHERED) * (plan.zero < 3)
        yield Remedy("mesh.offload.params=host", why, held * share, 5)


def can_slice(plan: Plan) -> bool:
    """Returns whether the optimizer can update any slice of a parameter separately."""
    return isinstance(plan.tx, Optimizer) and plan.tx.begin is not None


def num_layers(plan: Plan) -> int:
    """Returns the number of layers that the model scans over; 1 for a model without such a loop."""
    leaves = plan.placement.leaves.values()
    return max(leaf.num_slices for leaf in leaves)


def _tensor_parallel(plan: Plan, gpu: Gpu, sizes: dict[str, int]) -> Iterator[Remedy]:
    model = plan.mesh.shape[MODEL]
    rules = plan.settings.rules or bound_attribute(plan.model, "tensor_parallel_rules")
    shards = plan.mesh.shape[DATA]
    # Tensor parallelism stays inside a node, where the links are fast.
    if not rules or shards % 2 or 2 * model > gpu.node_devices:
        return
    # The batch is divided into half as many pieces: each device has twice the rows of half a layer.
    saving = _sum(sizes, "gathered weights") / 2
    saving += _sum(sizes, "gradients") / 2 if plan.zero < 2 else 0
    saving += _sum(sizes, *STATE) / 2 if plan.zero < 1 else 0
    why = f"matrices split over {2 * model} devices of a node"
    yield Remedy(f"mesh.data=-1 mesh.model={2 * model}", why, saving, 3)


def _sum(sizes: dict[str, int], *roles: str) -> int:
    return sum(sizes.get(role, 0) for role in roles)
