"""Computes the transfers of offload per step, and the tokens per step that hide them.

The update of sliced parameters follows the backward pass, so nothing hides its bytes: the plan
reports the number of tokens for which the rest of the step takes as long. Transfers of weights,
gradients and activations overlap with the products of the layers, and so does an update in the
backward pass.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from zerojax.checkpoint.store.sweep import FEWEST_BUFFERS
from zerojax.config.mesh import DEVICE, HOST, NVME
from zerojax.hardware.gpus import Gpu, gpu_of_device
from zerojax.hardware.machine_rates import measured_disk, measured_links
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
from zerojax.plan.decisions import Decisions
from zerojax.plan.eight_bits import eight_bit_share
from zerojax.plan.state_layout import OffloadLayout
from zerojax.runtime.memory import nearest_folder

UPDATE, WEIGHTS = "update of the state", "weights"
ATTAINED = 0.5
"""Assumed share of a card's peak for products, where their time is compared with a link's."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Moved:
    """Bytes that one device moves per step for one purpose.

    Attributes:
      what: UPDATE, WEIGHTS, "gradients" or "activations".
      to_device, to_host: over the link to its host's memory.
      read, written: of files, which also cross the link.
    """

    what: str
    to_device: int
    to_host: int
    read: int = 0
    written: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class TierRates:
    """Transfer rates in bytes per second.

    Attributes:
      to_device, to_host: of the link in one direction at a time; both: sum of both directions at
        the same time.
      link: source of the link's rate, as a clause.
      disk: reading and writing at the same time, the sum; None if unknown.
      disk_source: source of the disk's rate.
    """

    to_device: float
    to_host: float
    both: float
    link: str
    disk: float | None
    disk_source: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hiding:
    """Time of offload in a step, compared with that of the products.

    Attributes:
      rates: the assumed rates.
      update_seconds: of the update's bytes on the link and, at the same time, on the disk; of the
        link alone where no rate of the disk is known; 0 for an update in the backward pass.
      stream_seconds: of weights, gradients and activations on the link, and of that update.
      disk_seconds: of the disk alone, which all devices of a machine share; None: no known rate.
      flops: assumed rate of the products of one device, per second.
      tokens: per step of the whole mesh, for which the products take as long as update and stream
        together; None where no number is enough, because activations take longer than products, or
        where the rate of a disk in use is unknown.
    """

    rates: TierRates
    update_seconds: float
    stream_seconds: float
    disk_seconds: float | None
    flops: float
    tokens: float | None


def moved_bytes(plan: Decisions) -> tuple[Moved, ...]:
    """Returns what one device moves per step, one entry per purpose; () without offload.

    update: each slice of master and moments is copied from the host, or through it from files, and
      back.
    weights: a streamed layer is copied in the forward and again in the backward pass of every
      microbatch, except that the last layer stays for both; new copies are written back once.
    gradients of streamed layers: those of each microbatch are copied to the host, added there to
      the previous ones, which are read for that; all are read once more for the update. None with
      an update in the backward pass.
    With weights in files, all of these are read from files and written to them, except that
      nothing is read for the first microbatch's gradients.
    activations: each layer input is copied out in the forward pass and back in the backward; with
      `activations: nvme` it is written to files and read from them.
    """
    layout = plan.offload
    if layout is None:
        return ()
    parts = [_update(plan)]
    number = plan.num_microbatches
    compute = jnp.dtype(plan.precision.compute_dtype).itemsize
    streamed = [plan.placement.leaves[name] for name in sorted(layout.by_layer)]
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
        to_device = left * (added + 1)
        there = left * number
        files = {"read": there, "written": there} if in_files else {}
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


def page_gradient_dtype(plan: Decisions) -> Any:
    """Returns the dtype in which gradients of layers wait in files for the update."""
    precision = plan.precision
    several = plan.num_microbatches > 1
    return jnp.dtype(precision.accumulate_dtype if several else precision.reduce_dtype)


def all_file_bytes(plan: Decisions, num_devices: int) -> int:
    """Returns the bytes of all files of `num_devices`: generations of the state, and pages."""
    generations = 2 if plan.settings.offload.durable else 1
    pages = sum(_page_bytes(plan, num_devices)) + _input_bytes(plan) * num_devices
    return generations * file_bytes(plan, num_devices) + pages


def _input_bytes(plan: Decisions) -> int:
    """Returns the bytes of the layers' inputs of one device in files."""
    in_files = plan.offload is not None and plan.offload.activations == NVME
    return (kept_activation_bytes(plan) or 0) * in_files


def _page_bytes(plan: Decisions, num_devices: int) -> tuple[int, int]:
    """Returns the bytes of all pages of weights, and of gradients, of `num_devices`."""
    layout = plan.offload
    leaves = [] if layout is None else [layout.leaves[name] for name in layout.paged_order]
    elements = sum(
        leaf.num_slices * leaf.slice_elements * min(num_devices, leaf.num_shards) for leaf in leaves
    )
    weights = jnp.dtype(plan.precision.compute_dtype).itemsize
    return elements * weights, elements * page_gradient_dtype(plan).itemsize


def file_bytes(plan: Decisions, num_devices: int) -> int:
    """Returns the bytes of one generation of the state of `num_devices` in files.

    Copies of a shard share files.
    """
    layout = plan.offload
    if layout is None:
        return 0
    sizes = slice_bytes(plan, layout)
    return sum(
        leaf.counts[NVME] * sizes[leaf.name] * min(num_devices, leaf.num_shards)
        for leaf in layout.on_disk
    )


def buffer_bytes(plan: Decisions, layout: OffloadLayout, num_devices: int) -> int:
    """Returns the host buffer bytes through which a process of `num_devices` accesses files.

    Arrays on their way into a page of gradients or inputs take its bytes once more.
    """
    sizes = slice_bytes(plan, layout)
    rows = [sizes[leaf.name] * min(num_devices, leaf.num_shards) for leaf in layout.on_disk]
    rings = max(rows, default=0)
    if not layout.paged:
        return FEWEST_BUFFERS * rings
    layers = plan.placement.leaves[layout.paged_order[0]].stored_shape[0]
    weights, gradients = (size // layers for size in _page_bytes(plan, num_devices))
    inputs = _input_bytes(plan) * num_devices // max(layers - 1, 1)
    return FEWEST_BUFFERS * (rings + weights) + (FEWEST_BUFFERS + 1) * (gradients + inputs)


def slice_bytes(plan: Decisions, layout: OffloadLayout) -> dict[str, int]:
    """Returns {sliced parameter: bytes of one slice of its master, if any, and moments}.

    Args:
      plan: whose state it is; layout: the plan's, or another possible one.
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
    """Returns the rates of a card's link and a folder's disk: measured here, or of the card.

    Args:
      gpu: the card. Only a measurement of the same card on this machine is used.
      folder: of the files; None takes the working folder, where runs are put.
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
    for link in measured_links():
        card = gpu_of_device(link.device_kind)
        if card is not None and card.name == gpu.name:
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
    """Returns the minimum seconds for these bytes; both directions overlap while both have some."""
    alone = max(to_device / rates.to_device, to_host / rates.to_host)
    return max(alone, (to_device + to_host) / rates.both)


def hiding(plan: Decisions, gpu: Gpu, rates: TierRates | None = None) -> Hiding | None:
    """Returns how long a plan's offload takes on a card, and the tokens that hide it.

    Args:
      plan: any; gpu: the card; rates: None takes `rates_of`.

    Returns:
      None without offload, without tokens in the batch, or where the card has no peak for the
      dtype.
    """
    tokens, eight_bits = tokens_per_step(plan), eight_bit_share(plan.traced.forward)
    peak = gpu.peak_flops(plan.precision.compute_dtype.name, eight_bits)
    moved = moved_bytes(plan)
    if not moved or not tokens or not peak:
        return None
    rates = rates or rates_of(gpu, plan.settings.offload.folder)
    layout = plan.offload
    # In the backward pass a layer is updated while the next layers are computed.
    streaming = layout is not None and layout.update_in_backward
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
    update_link = _seconds(rates, update)
    flops = peak * ATTAINED
    per_token = model_flops(plan) / tokens / plan.mesh.size / flops
    left = per_token - max(_seconds(rates, growing), of_inputs / disk) / tokens
    update_seconds = max(update_link, in_update / disk)
    stream_seconds = max(_seconds(rates, [*beside, *growing]), (in_pass + of_inputs) / disk)
    fixed = update_seconds + max(_seconds(rates, beside), in_pass / disk)
    known = disk_seconds is not None and left > 0
    return Hiding(
        rates=rates,
        update_seconds=update_seconds,
        stream_seconds=stream_seconds,
        disk_seconds=disk_seconds,
        flops=flops,
        tokens=fixed / left if known else None,
    )


def _touched(plan: Decisions, num_devices: int) -> tuple[int, int]:
    """Returns bytes read and written in files of `num_devices`: (in the update, in forward and
    backward).

    Layers' inputs are not among them.
    """
    weights, gradients = _page_bytes(plan, num_devices)
    number = plan.num_microbatches
    in_update = 2 * file_bytes(plan, num_devices) + weights + gradients
    # The last layer stays for both passes, which is neglected here.
    return in_update, number * (2 * weights + gradients) + (number - 1) * gradients


def _seconds(rates: TierRates, parts: list[Moved]) -> float:
    return link_seconds(
        rates, sum(part.to_device for part in parts), sum(part.to_host for part in parts)
    )


def card_of(plan: Decisions) -> Gpu | None:
    """Returns the GPU specification of a plan's devices; None for other or absent devices."""
    if not isinstance(plan.mesh, Mesh):
        return None
    return gpu_of_device(plan.mesh.devices.flat[0].device_kind)
