"""Checks before a run whether its host memory and files fit into the available host memory and disk
space."""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jax
from jax.sharding import Mesh

from zerojax.config.mesh import DEVICE, HOST, NVME
from zerojax.hardware.local_devices import shares_host_memory
from zerojax.offload.offload_tiers import plan_offload
from zerojax.placement.device_mesh import state_axes
from zerojax.placement.state_layout import OffloadLayout, store_folder
from zerojax.plan.counts import GRADIENTS, STORED, role_tiers, state_bytes
from zerojax.plan.make import Plan
from zerojax.plan.offload_costs import all_file_bytes, buffer_bytes, slice_bytes
from zerojax.runtime.memory import PINNED_LIMIT, SPARE, Room, free_disk, least_room, nearest_folder
from zerojax.tracing.trees import format_bytes, num_bytes

GIB = 2**30
DEFAULT_PINNED_GIB = 64
"""XLA's default limit for pinned host memory, in GiB."""
STEP = 0.05
"""Difference between the `offload.opt_state` shares that remedies suggest: 5 %."""
POOL = 1.05
"""Ratio between the size of XLA's pool of pinned memory and the arrays in it; it is above 1 because
the pool has gaps."""


def host_bytes(plan: Plan) -> int:
    """Returns the bytes of host memory that this process uses for a plan during training.

    They are the offloaded arrays of its devices, the buffers for reading and writing files, and, if
    the devices are CPUs, also their device memory.
    """
    devices = _local_devices(plan)
    total = sum(tiers.get(HOST, 0) for tiers in role_tiers(plan).values()) * len(devices)
    if plan.offload is not None:
        total += buffer_bytes(plan, plan.offload, len(devices))
    if devices and shares_host_memory(devices[0]):
        total += state_bytes(plan, DEVICE) * len(devices)
    return total


def disk_bytes(plan: Plan) -> int:
    """Returns the bytes of this process's files of offloaded state; a durable run has two
    generations of them."""
    return all_file_bytes(plan, len(_local_devices(plan)))


def check_offload(plan: Plan, *, environ: Mapping[str, str] | None = None) -> None:
    """Raises if the host memory or the files of a run would not fit; called before any memory is
    allocated.

    Args:
      plan: plan on devices of this machine; a plan without offload is not checked.
      environ: environment variables; None: those of this process.

    Raises:
      ValueError: the message states the bytes needed, the bytes available and the remedy.
    """
    if plan.offload is None:
        return
    check_host_memory(plan, least_room())
    check_pinned_limit(plan, os.environ if environ is None else environ)
    check_disk(plan)


def check_host_memory(plan: Plan, room: Room | None) -> None:
    """Raises if the plan does not fit into the available host memory.

    Each process compares its own part. Processes on one machine share its memory.

    Args:
      plan: the plan.
      room: available host memory; None: unknown, so nothing is checked.

    Raises:
      ValueError: the message states the bytes needed, the bytes available and the remedy.
    """
    needed = host_bytes(plan)
    if room is None:  # unknown on this system
        return
    there = int(room.free * SPARE)
    if needed <= there:
        return
    number = len(_local_devices(plan))
    kinds = "device" if number == 1 else "devices"
    limit = f"{format_bytes(there)}: {SPARE:.0%} of what {room.source} leaves"
    raise ValueError(
        f"offload needs {format_bytes(needed)} of host memory for {number} {kinds} of this "
        f"process, but may use only {limit}; {_join(host_remedies(plan, needed, there))}"
    )


def host_remedies(plan: Plan, needed: int, there: int) -> Iterator[str]:
    """Yields settings that lower the host memory of a plan, the cheapest first.

    Args:
      plan: the plan.
      needed: number of bytes of host memory that the plan needs.
      there: number of available bytes.
    """
    shares = _shares_that_fit(plan, needed, there)
    if shares is not None:
        words = ", ".join(f"{tier}: {share:g}" for tier, share in shares.items())
        yield f"offload.opt_state: {{{words}}}, which stores more of the state in files"
    if plan.offload is not None and plan.offload.slices_at_once > 1:
        yield "offload.update_in_backward: false, whose buffers hold one slice instead of a layer"
    axes = state_axes(plan.mesh.shape)
    shards = math.prod(plan.mesh.shape[axis] for axis in axes)
    if plan.zero == 0 and shards > 1:
        yield f"zero=1, which splits the state over the {shards} devices on {' and '.join(axes)}"
    tiers = role_tiers(plan)
    if tiers.get(STORED, {}).get(HOST) or tiers[GRADIENTS].get(HOST):
        yield "offload.params: device, if the weights fit on the devices"
    yield "more devices on other machines" if plan.zero else "a machine with more memory"


def _shares_that_fit(plan: Plan, needed: int, there: int) -> dict[str, float] | None:
    """Finds `offload.opt_state` shares that fit, with as much as possible on the host; returns None
    if there are none.

    Shares on the host are tried in steps of 5 %. The remaining state is stored in files.
    """
    config, layout = plan.settings.offload, plan.offload
    assert layout is not None
    # These need the layers' slices in one tier.
    if config.update_in_backward or config.late_key is not None:
        return None
    near, now = config.shares.get(DEVICE, 0.0), config.shares.get(HOST, 0.0)
    rest = needed - _of_state(plan, layout)
    for steps in reversed(range(math.ceil(now / STEP - 1e-9))):
        host = round(steps * STEP, 2)
        shares = {DEVICE: near, HOST: host, NVME: 1 - near - host}
        changed = plan_offload(
            dataclasses.replace(config, opt_state=tuple(shares.items())),
            plan.placement,
            plan.precision,
            plan.tx,
            plan.mesh,
            stacked=layout.streamed,
        )
        if changed is not None and rest + _of_state(plan, changed) <= there:
            return {tier: share for tier, share in shares.items() if share}
    return None


def _of_state(plan: Plan, layout: OffloadLayout) -> int:
    """Returns the bytes of host memory for the slices and the file buffers of `layout`."""
    number, sizes = len(_local_devices(plan)), slice_bytes(plan, layout)
    held = sum(leaf.counts[HOST] * sizes[name] for name, leaf in layout.leaves.items())
    return held * number + buffer_bytes(plan, layout, number)


def check_pinned_limit(plan: Plan, environ: Mapping[str, str]) -> None:
    """Raises if XLA's pool of pinned host memory is too small, which would otherwise be an XLA
    error in the middle of a run.

    Only GPUs have such a pool. It is created when JAX starts its devices; the `zerojax` command
    sets the environment variable before that.

    Raises:
      ValueError: the variable is not set, is set too low, or is not a number.
    """
    devices = _local_devices(plan)
    if not _has_pinned_pool(devices):
        return
    told = environ.get(PINNED_LIMIT, "")
    if told and not told.isdigit():
        raise ValueError(
            f"{PINNED_LIMIT}={told!r} is not an integer (GiB); set an integer, or unset the "
            "variable"
        )
    limit = _pinned_limit(environ)
    pinned = _pinned_bytes(plan, devices)
    if pinned * POOL <= limit * GIB:
        return
    origin = f"{PINNED_LIMIT}={told}" if told else f"{PINNED_LIMIT} is not set, so it is {limit}"
    wanted = math.ceil(pinned * POOL / GIB)
    raise ValueError(
        f"offload keeps {format_bytes(pinned)} in pinned host memory, but XLA allocates at most "
        f"{limit} GiB of it ({origin}); set {PINNED_LIMIT}={wanted} before JAX starts its "
        "devices: in the shell, or in os.environ before the first use of jax"
    )


def has_pinned_room(plan: Plan, num_bytes: int, *, environ: Mapping[str, str]) -> bool:
    """Returns whether XLA's pool of pinned memory has room for more than the plan already uses.

    Args:
      plan: plan on devices of this machine.
      num_bytes: number of additional bytes per device.
      environ: environment variables of the process.
    """
    devices = _local_devices(plan)
    if not _has_pinned_pool(devices):
        return True
    needed = _pinned_bytes(plan, devices) + num_bytes * len(devices)
    return needed * POOL <= _pinned_limit(environ) * GIB


def _has_pinned_pool(devices: Sequence[jax.Device]) -> bool:
    return bool(devices) and devices[0].platform in ("gpu", "cuda", "rocm")


def _pinned_bytes(plan: Plan, devices: Sequence[jax.Device]) -> int:
    return sum(tiers.get(HOST, 0) for tiers in role_tiers(plan).values()) * len(devices)


def _pinned_limit(environ: Mapping[str, str]) -> int:
    """Returns XLA's limit of pinned host memory in GiB: the variable, or XLA's default.

    The default applies if the variable is missing or not a number, as in XLA.
    """
    told = environ.get(PINNED_LIMIT, "")
    return int(told) if told.isdigit() else DEFAULT_PINNED_GIB


class NoSpaceError(ValueError):
    """A disk has too little free space for the files of offloaded state."""

    is_bad_input = False  # of a command: the same command works after space was freed


def check_disk(plan: Plan) -> None:
    """Raises if the files of offloaded state do not fit on their disk; files of an earlier run
    count as free space.

    Raises:
      NoSpaceError: the message states the bytes needed, the bytes available and the remedy.
    """
    needed, config = disk_bytes(plan), plan.settings.offload
    if not needed:
        return
    place = store_folder(config)
    there = free_disk(place) + _taken(place)
    if needed <= there:
        return
    in_layers = plan.offload is not None and bool(plan.offload.paged)
    share = "" if in_layers else ", which takes half"  # pages have one generation in any case
    without = " without update_in_backward" * config.update_in_backward
    remedies = [f"offload.durable: false{without}{share}"] if config.durable else []
    remedies += ["to free some space", "another offload.folder"]
    if in_layers:
        remedies += ["offload.params: host"]
    else:
        remedies += ["a larger share of opt_state in host memory or on the device"]
    twice = " in two generations" if config.durable else ""
    each = format_bytes(num_bytes(plan.abstract_portable))
    has_disk = shutil.disk_usage(nearest_folder(place)).total > 0  # /proc has none
    kind = NoSpaceError if has_disk else ValueError
    raise kind(
        f"offload needs {format_bytes(needed)} of disk{twice} in {place}, but only "
        f"{format_bytes(there)} are free (not counting checkpoints, {each} each); "
        f"{_join(iter(remedies))}"
    )


def _taken(folder: Path) -> int:
    """Returns the bytes of state files that an earlier run left in a folder; a new run replaces
    these files."""
    if not folder.is_dir():
        return 0
    files = (path.stat() for path in folder.rglob("buckets*.bin"))
    return sum(512 * file.st_blocks for file in files)


def _join(remedies: Iterator[str]) -> str:
    return "try " + "; or ".join(remedies)


def _local_devices(plan: Plan) -> list:
    """Returns the plan's devices that belong to this process; [] if there are none."""
    if not isinstance(plan.mesh, Mesh):
        return []
    return list(plan.mesh.local_devices)
