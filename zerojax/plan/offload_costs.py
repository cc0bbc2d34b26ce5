"""Counts the bytes that offload transfers per step, and the tokens per step with which products
take as long as the transfers.

The update of offloaded parameters follows the backward pass, so nothing overlaps with its
transfers. Transfers of weights, gradients and activations overlap with the products of the layers,
and so does an update in the backward pass.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from zerojax.checkpoint.store.sweep import FEWEST_BUFFERS
from zerojax.config.late_dataclasses import dataclass
from zerojax.config.mesh import DEVICE, HOST, NVME
from zerojax.hardware.gpus import Gpu, gpu_of_device
from zerojax.hardware.gpus.achieved import rates_here
from zerojax.hardware.machine_rates import MeasuredLink, measured_disk
from zerojax.offload.pages import page_gradient_dtype
from zerojax.placement.decisions import Decisions
from zerojax.placement.state_layout import OffloadLayout
from zerojax.plan.counts import (
    ACTIVATIONS,
    GRADIENTS,
    Tiers,
    kept_activation_bytes,
    layers_of,
    model_flops,
    role_tiers,
    tokens_per_step,
)
from zerojax.plan.fp8_costs import eight_bit_share
from zerojax.runtime.memory import nearest_folder

UPDATE, WEIGHTS = "update of the state", "weights"
ATTAINED = 0.5
"""Share of a GPU's peak rate at which products are assumed to run, where their time is compared
with that of transfers."""


@dataclass(frozen=True, kw_only=True)
class Moved:
    """Bytes that one device transfers per step for one purpose.

    Attributes:
      what: purpose: UPDATE, WEIGHTS, "gradients" or "activations".
      to_device, to_host: bytes over the link between the device and host memory, in each direction.
      read, written: bytes of files, which also cross the link.
    """

    what: str
    to_device: int
    to_host: int
    read: int = 0
    written: int = 0


@dataclass(frozen=True, kw_only=True)
class TierRates:
    """Transfer rates in bytes per second.

    Attributes:
      to_device, to_host: rate of the link in one direction alone.
      both: rate of both directions at the same time, summed.
      link: source of the link's rate, as part of a sentence.
      disk: rate of reading and writing at the same time, summed; None if unknown.
      disk_source: source of the disk's rate, as part of a sentence.
    """

    to_device: float
    to_host: float
    both: float
    link: str
    disk: float | None
    disk_source: str


@dataclass(frozen=True, kw_only=True)
class Hiding:
    """Time of offload transfers in a step, compared with the time of products.

    Attributes:
      rates: assumed transfer rates.
      update_seconds: time of the update's transfers on the link and, at the same time, on the disk,
        in which no pass runs; on the link alone if the disk's rate is unknown; 0 for an update in
        the backward pass.
      stream_seconds: time of weights, gradients and activations on the link, and of an update in
        the backward pass.
      disk_seconds: time of the disk alone, which all devices of a machine share; None if its rate
        is unknown.
      disk_in_pass: time of the disk during the forward and backward pass; 0 if its rate is unknown.
      tokens_for_update: number of tokens per step of the whole mesh from which an update after the
        backward pass makes a step at most 10 % longer than products do; None as in `tokens`.
      disk_after: time of the disk in an update after the backward pass; 0 if its rate is unknown.
      link_after: time of the link in such an update.
      in_forward: whether the update is in the next forward pass, which hides a part of it.
      may_be_in_forward: whether the update is after the backward pass, from host memory, so that
        `offload.update_in_forward` could hide a part of it.
      flops: assumed FLOPs per second of one device's products.
      tokens: number of tokens per step of the whole mesh with which products take as long as all
        transfers. None if no number is enough, because activations take longer than products, or if
        the rate of a used disk is unknown.
    """

    rates: TierRates
    update_seconds: float
    stream_seconds: float
    disk_seconds: float | None
    flops: float
    tokens: float | None
    tokens_for_update: float | None = None
    disk_in_pass: float = 0.0
    disk_after: float = 0.0
    link_after: float = 0.0
    in_forward: bool = False
    may_be_in_forward: bool = False


def moved_bytes(plan: Decisions) -> tuple[Moved, ...]:
    """Counts the bytes that one device transfers per step for offload, one entry per purpose;
    returns () without offload.

    update: each slice of master weights and moments is copied from the host, or from files through
    the host, and back.

    weights: a streamed layer is copied in the forward and again in the backward pass of every
    microbatch, except that the last layer stays on the device for both; new weights are written
    back once.

    gradients: the gradients of streamed layers are copied to the host in each microbatch and added
    there to the previous sum, which is read for that; the sum is read once more for the update.
    With an update in the backward pass nothing is transferred.

    activations: each layer input is copied to the host in the forward pass and back in the backward
    pass; with `activations: nvme` it is also written to files and read from them.

    With weights in files, weights and gradients are read from files and written to files, except
    that nothing is read for the gradients of the first microbatch. With an update in the backward
    pass, gradients are written for a step that is clipped, and not read for the update; a clipped
    step transfers those of an update after the pass in addition (`redone_bytes`).
    """
    layout = plan.offload
    if layout is None:
        return ()
    parts = [_update(plan)]
    number = plan.num_microbatches
    compute = jnp.dtype(plan.precision.compute_dtype).itemsize
    far = layout.by_layer - layout.delayed
    streamed = [plan.placement.leaves[name] for name in sorted(far)]
    in_files = bool(layout.paged)
    if streamed:
        shards = [
            (plan.placement.shard_elements(x) * compute, layers_of(plan, x)) for x in streamed
        ]
        brought = sum(shard * (2 * layers - 1) // layers for shard, layers in shards)
        whole = sum(shard for shard, _ in shards)
        parts.append(
            Moved(
                what=WEIGHTS,
                to_device=number * brought,
                to_host=whole,
                read=number * brought * in_files,
                written=whole * in_files,
            )
        )
    left = role_tiers(plan)[GRADIENTS].get(NVME if in_files else HOST, 0)
    if left:
        added = number if number > 1 else 0
        in_backward = in_files and layout.update_in_backward
        to_device = left * (added + (not in_backward))
        there = left * number
        files = {"read": there - left * in_backward, "written": there} if in_files else {}
        parts.append(Moved(what=GRADIENTS, to_device=to_device, to_host=there, **files))
    if layout.activations != DEVICE:
        kept = (kept_activation_bytes(plan) or 0) * number
        there = kept if layout.activations == NVME else 0
        moved = {"read": there, "written": there}
        parts.append(Moved(what=ACTIVATIONS, to_device=kept, to_host=kept, **moved))
    return tuple(part for part in parts if part.to_device or part.to_host)


def _update(plan: Decisions) -> Moved:
    layout = plan.offload
    assert layout is not None
    moved: Tiers = {HOST: 0, NVME: 0}
    sizes = slice_bytes(plan, layout)
    for name, leaf in layout.leaves.items():
        for tier in moved:
            moved[tier] += leaf.counts[tier] * sizes[name]
    both = sum(moved.values())
    disk = moved[NVME]
    return Moved(what=UPDATE, to_device=both, to_host=both, read=disk, written=disk)


def redone_bytes(plan: Decisions) -> Moved:
    """Counts the bytes that one device transfers in addition in a step whose update in the backward
    pass has to be repeated, because its gradients are clipped."""
    layout = plan.offload
    assert layout is not None
    update = _update(plan)
    compute = jnp.dtype(plan.precision.compute_dtype).itemsize
    elements = sum(plan.placement.shard_elements(plan.placement.leaves[n]) for n in layout.paged)
    weights, gradients = elements * compute, elements * page_gradient_dtype(plan).itemsize
    return Moved(
        what="update of a clipped step",
        to_device=update.to_device + gradients,
        to_host=update.to_host + weights,
        read=update.read + gradients,
        written=update.written + weights,
    )


def all_file_bytes(plan: Decisions, num_devices: int) -> int:
    """Returns the bytes of all files of `num_devices` devices: all generations of the state,
    weights (twice with an update in the backward pass), gradients and layer inputs."""
    generations = 2 if plan.settings.offload.durable else 1
    weights, gradients = _page_bytes(plan, num_devices)
    in_backward = plan.offload is not None and plan.offload.update_in_backward
    pages = (1 + in_backward) * weights + gradients + _input_bytes(plan) * num_devices
    return generations * file_bytes(plan, num_devices) + pages


def _input_bytes(plan: Decisions) -> int:
    """Returns the bytes of one device's layer inputs that are stored in files."""
    in_files = plan.offload is not None and plan.offload.activations == NVME
    return (kept_activation_bytes(plan) or 0) * in_files


def _page_bytes(plan: Decisions, num_devices: int) -> tuple[int, int]:
    """Returns (bytes of weights, bytes of gradients) of streamed layers in the files of
    `num_devices` devices."""
    layout = plan.offload
    leaves = [] if layout is None else [layout.leaves[name] for name in layout.paged_order]
    elements = sum(
        leaf.num_slices * leaf.slice_elements * min(num_devices, leaf.num_shards) for leaf in leaves
    )
    weights = jnp.dtype(plan.precision.compute_dtype).itemsize
    return elements * weights, elements * page_gradient_dtype(plan).itemsize


def file_bytes(plan: Decisions, num_devices: int) -> int:
    """Returns the bytes in files of one generation of the state of `num_devices` devices; copies of
    a shard share files."""
    layout = plan.offload
    if layout is None:
        return 0
    sizes = slice_bytes(plan, layout)
    return sum(
        leaf.counts[NVME] * sizes[leaf.name] * min(num_devices, leaf.num_shards)
        for leaf in layout.on_disk
    )


def buffer_bytes(plan: Decisions, layout: OffloadLayout, num_devices: int) -> int:
    """Returns the bytes of host memory that a process of `num_devices` devices uses as buffers for
    its files.

    Arrays of gradients or layer inputs that are being written take their bytes once more. With an
    update in the backward pass, the buffers of the state hold slices of a layer together, and new
    weights have buffers of their own.
    """
    sizes = slice_bytes(plan, layout)
    rows = [sizes[leaf.name] * min(num_devices, leaf.num_shards) for leaf in layout.on_disk]
    rings = max(rows, default=0)
    if not layout.paged:
        return layout.num_buffers * rings
    layers = plan.placement.leaves[layout.paged_order[0]].stored_shape[0]
    weights, gradients = (size // layers for size in _page_bytes(plan, num_devices))
    inputs = _input_bytes(plan) * num_devices // max(layers - 1, 1)
    weights *= 1 + layout.update_in_backward
    return (
        layout.num_buffers * rings
        + FEWEST_BUFFERS * weights
        + (FEWEST_BUFFERS + 1) * (gradients + inputs)
    )


def slice_bytes(plan: Decisions, layout: OffloadLayout) -> dict[str, int]:
    """Returns {offloaded parameter: bytes of one slice of its moments and, if it has one, its
    master weight}.

    Args:
      plan: plan of the state.
      layout: offload layout of the plan, or another possible layout.
    """
    stored = plan.abstract_stored
    sizes = dict.fromkeys(layout.leaves, 0)
    if plan.precision.has_masters:
        sizes = {name: stored["params"][name].dtype.itemsize for name in sizes}
    for path, moment in jax.tree_util.tree_leaves_with_path(stored["opt_state"]):
        name = getattr(path[-1], "key", None) if path else None
        if name in sizes:
            sizes[name] += moment.dtype.itemsize
    return {name: size * layout.leaves[name].slice_elements for name, size in sizes.items()}


def rates_of(gpu: Gpu, folder: str | None = None) -> TierRates:
    """Returns the transfer rates of a GPU's link and of a folder's disk: as measured on this
    machine, or as published.

    Args:
      gpu: specification of the GPU. A measurement on this machine counts only if it is of the same
        GPU, and if the rate of the link is not stated for this plan.
      folder: folder of the files; None: the working folder, in which run folders are created.
    """
    disk = measured_disk(folder or ".")
    there = nearest_folder(folder or ".") if folder else "."
    where = f"the disk of {folder or 'the working folder'}"
    known: dict[str, Any]
    if disk is not None:
        source = f"measured here on {disk.date} ({disk.disk})"
        known = {"disk": disk.both, "disk_source": source}
    else:
        source = f"{where}: not measured; run `zerojax bench io {there}`"
        if gpu.disk_bandwidth is not None:
            source = f"assumed for machines with {gpu.title} ({source})"
        known = {"disk": gpu.disk_bandwidth, "disk_source": source}
    link = next((one for one in rates_here(gpu) if isinstance(one, MeasuredLink)), None)
    if link is not None and "host_gb_per_s" not in gpu.stated:
        return TierRates(
            to_device=link.to_device,
            to_host=link.to_host,
            both=link.both,
            link=f"measured here on {link.date}",
            **known,
        )
    each = gpu.host_bandwidth
    return TierRates(
        to_device=each,
        to_host=each,
        both=2 * each,
        link=f"as published for {gpu.title}",
        **known,
    )


def link_seconds(rates: TierRates, to_device: float, to_host: float) -> float:
    """Returns the least seconds in which a link transfers these bytes; the two directions overlap
    as long as both have bytes left."""
    alone = max(to_device / rates.to_device, to_host / rates.to_host)
    return max(alone, (to_device + to_host) / rates.both)


def hiding(plan: Decisions, gpu: Gpu, rates: TierRates | None = None) -> Hiding | None:
    """Computes how long a plan's offload transfers take on a GPU, and with how many tokens products
    take as long.

    Args:
      plan: the plan.
      gpu: specification of the GPU.
      rates: transfer rates; None: those of `rates_of`.

    Returns:
      The times; None without offload, without tokens in the batch, or if the GPU has no published
      peak for the dtype.
    """
    tokens, eight_bits = tokens_per_step(plan), eight_bit_share(plan.traced.forward)
    peak = gpu.peak_flops(plan.precision.compute_dtype.name, eight_bits)
    moved = moved_bytes(plan)
    if not moved or not tokens or not peak:
        return None
    rates = rates or rates_of(gpu, plan.settings.offload.folder)
    layout = plan.offload
    # In the backward pass a layer is updated while the next layers are computed.
    streaming = layout is not None and bool(
        (layout.updated_in_pass and not layout.in_forward)
        or (layout.update_in_backward and layout.paged)
    )
    update = [part for part in moved if part.what == UPDATE and not streaming]
    beside = [part for part in moved if part.what in (WEIGHTS, GRADIENTS)]
    beside += [part for part in moved if part.what == UPDATE and streaming]
    growing = [part for part in moved if part.what == ACTIVATIONS]
    inputs = sum(part.read + part.written for part in growing)
    # The devices of a machine share its disk; each has its own link.
    number = min(plan.mesh.size, gpu.node_devices)
    in_update, in_pass = _touched(plan, number)
    of_inputs = inputs * number
    touched, disk = in_update + in_pass + of_inputs, rates.disk or math.inf
    disk_seconds = None if rates.disk is None and touched else touched / disk
    flops = peak * ATTAINED
    per_token = model_flops(plan) / tokens / plan.mesh.size / flops
    in_forward = layout is not None and layout.in_forward
    # Only the forward pass, a third of the FLOPs, hides an update that must be done before it ends.
    hides = in_forward / 3
    whole = _seconds(rates, update)
    update_link = max(whole - hides * per_token * tokens, 0.0)
    left = per_token - max(_seconds(rates, growing), of_inputs / disk) / tokens
    update_seconds = max(update_link, in_update / disk)
    stream_seconds = max(_seconds(rates, [*beside, *growing]), (in_pass + of_inputs) / disk)
    fixed = update_seconds + max(_seconds(rates, beside), in_pass / disk)
    if in_forward:  # the whole update has to hide behind a third of the products
        fixed = whole / hides
    known = disk_seconds is not None and left > 0
    return Hiding(
        rates=rates,
        update_seconds=update_seconds,
        stream_seconds=stream_seconds,
        disk_seconds=disk_seconds,
        flops=flops,
        tokens=fixed / left if known else None,
        tokens_for_update=max(whole, in_update / disk) / ((0.1 + hides) * left) if known else None,
        disk_in_pass=(in_pass + of_inputs) / disk,
        disk_after=in_update / disk,
        link_after=update_link,
        in_forward=in_forward,
        may_be_in_forward=bool(update) and plan.num_microbatches == 1 and _is_plain(plan),
    )


def _is_plain(plan: Decisions) -> bool:
    """Returns whether optimizer state is in host memory, not in files, weights are on the device,
    and all updates run after the backward pass."""
    config = plan.settings.offload
    in_memory = HOST in config.shares and not config.on_disk
    return in_memory and config.params == DEVICE and config.late_key is None


def _touched(plan: Decisions, num_devices: int) -> tuple[int, int]:
    """Returns the bytes that `num_devices` devices read and write in files, without layers' inputs:
    (in the update, in forward and backward)."""
    weights, gradients = _page_bytes(plan, num_devices)
    number = plan.num_microbatches
    in_update = 2 * file_bytes(plan, num_devices) + weights + gradients
    # The last layer stays for both passes, which is neglected here.
    if plan.offload is not None and plan.offload.update_in_backward and plan.offload.paged:
        return 0, in_update - gradients + number * (2 * weights + gradients) + (
            number - 1
        ) * gradients
    return in_update, number * (2 * weights + gradients) + (number - 1) * gradients


def _seconds(rates: TierRates, parts: list[Moved]) -> float:
    return link_seconds(
        rates, sum(part.to_device for part in parts), sum(part.to_host for part in parts)
    )


def card_of(plan: Decisions) -> Gpu | None:
    """Returns the specification of a plan's GPUs; None for other devices or an abstract mesh."""
    if not isinstance(plan.mesh, Mesh):
        return None
    return gpu_of_device(plan.mesh.devices.flat[0].device_kind)
