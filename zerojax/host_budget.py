"""Whether what a plan puts into host memory and files fits there, found out before a run.

Knows plans, this process's devices, limits of memory and free disk; never makes an array or a file.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from jax.sharding import Mesh

from zerojax.config.offload import DEVICE, HOST, NVME
from zerojax.link_rates import shares_host_memory
from zerojax.mesh import DATA
from zerojax.offload_costs import file_bytes, slice_bytes_per_element
from zerojax.plan_counts import GRADIENTS, MASTERS, OPTIMIZER, STORED, role_tiers, state_bytes
from zerojax.planned import Planned
from zerojax.store.sweep import FEWEST_BUFFERS
from zerojax.system_memory import PINNED_LIMIT, SPARE, Room, free_disk, least_room
from zerojax.trees import format_bytes

GIB = 2**30
DEFAULT_PINNED_GIB = 64
"""XLA's, where the variable is not set."""
POOL = 1.05
"""What is asked of the pool over what is put into it: its pieces are not packed without gaps."""


def host_bytes(plan: Planned) -> int:
    """Bytes that this process keeps in host memory for a plan, while it trains.

    Arrays of its devices, buffers through which files are read and written, and, where the devices
    are the CPU itself, their memory too.
    """
    devices = _local_devices(plan)
    total = sum(tiers.get(HOST, 0) for tiers in role_tiers(plan).values()) * len(devices)
    total += FEWEST_BUFFERS * _largest_bucket(plan)
    if devices and shares_host_memory(devices[0]):
        total += state_bytes(plan, DEVICE) * len(devices)
    return total


def saving_bytes(plan: Planned) -> int:
    """Bytes of host memory that a checkpoint takes beside the state while it is copied.

    Masters and moments with slices on the host are put together there, each in one piece. Those
    with slices in files go to the checkpoint slice by slice.
    """
    layout = plan.offload
    if layout is None:
        return 0
    number = len(_local_devices(plan))
    joined = [
        leaf for leaf in layout.leaves.values() if leaf.counts[HOST] and not leaf.counts[NVME]
    ]
    elements = sum(leaf.num_slices * leaf.slice_elements for leaf in joined)
    return elements * slice_bytes_per_element(plan) * number


def disk_bytes(plan: Planned) -> int:
    """Bytes that this process's files take; a durable run keeps two generations of them."""
    one = file_bytes(plan, len(_local_devices(plan)))
    return one * (2 if plan.settings.offload.durable else 1)


def _largest_bucket(plan: Planned) -> int:
    layout = plan.offload
    if layout is None:
        return 0
    size, number = slice_bytes_per_element(plan), len(_local_devices(plan))
    return max(
        (leaf.slice_elements * size * min(number, leaf.num_shards) for leaf in layout.on_disk),
        default=0,
    )


def check_offload(
    plan: Planned, *, folder: Path | None = None, environ: Mapping[str, str] | None = None
) -> None:
    """Refuses a run whose host memory or files would not fit, before it takes any memory.

    Args:
      plan: on devices that are here; nothing is checked of one without offload.
      folder: where the run's checkpoints lie; None: it has none.
      environ: None takes the process's.

    Raises:
      ValueError: with the bytes needed and there, and what would help.
    """
    if plan.offload is None:
        return
    saving = 0 if folder is None else saving_bytes(plan)
    check_host_memory(plan, least_room(), saving)
    check_pinned_limit(plan, os.environ if environ is None else environ, saving)
    check_disk(plan, folder)


def check_host_memory(plan: Planned, room: Room | None, saving: int = 0) -> None:
    """Refuses what does not fit into the memory that is there.

    Args:
      plan: the plan; room: what is there; saving: what a checkpoint takes for a while.

    Raises:
      ValueError: see `check_offload`.
    """
    needed = host_bytes(plan) + saving
    there = None if room is None else int(room.free * SPARE)
    if room is None or there is None or needed <= there:
        return
    number = len(_local_devices(plan))
    kinds = "device" if number == 1 else "devices"
    whereof = f" ({format_bytes(saving)} of it while a checkpoint is copied)" if saving else ""
    limit = f"{format_bytes(there)}: {SPARE:.0%} of what {room.source} leaves"
    raise ValueError(
        f"offload needs {format_bytes(needed)} of host memory{whereof} for {number} {kinds} of "
        f"this process and may take {limit}; "
        f"{_join(host_remedies(plan, needed - saving - there))}"
    )


def host_remedies(plan: Planned, excess: int) -> Iterator[str]:
    """What would make it fit, the cheapest first.

    Args:
      excess: bytes of host memory above what may be taken, without those of a checkpoint: what has
        slices in files needs none for it.
    """
    config, shares, number = (
        plan.settings.offload,
        plan.settings.offload.shares,
        len(_local_devices(plan)),
    )
    tiers = role_tiers(plan)
    movable = number * sum(tiers[role].get(HOST, 0) for role in (MASTERS, OPTIMIZER))
    share = shares.get(HOST, 0.0)
    if movable and share:
        least = movable / (100 * share)  # a hundredth of the state
        left = max(movable - max(excess, least), 0)
        kept = math.floor(100 * share * left / movable + 1e-6) / 100
        rest = {tier: part for tier, part in shares.items() if tier == DEVICE}
        disk = round(1 - kept - sum(rest.values()), 2)
        parts = {**rest, **({HOST: kept} if kept else {}), NVME: disk}
        if movable >= excess:
            words = ", ".join(f"{tier}: {part:g}" for tier, part in parts.items())
            yield f"set offload.opt_state: {{{words}}}, which puts the rest into files"
    if plan.zero == 0 and plan.mesh.shape[DATA] > 1:
        yield f"zero=1, which splits it over the {plan.mesh.shape[DATA]} devices on data"
    if config.params == HOST and (tiers.get(STORED, {}).get(HOST) or tiers[GRADIENTS].get(HOST)):
        yield "leave params on the device, if it fits there"
    yield "more devices on other machines" if plan.zero else "a machine with more memory"


def check_pinned_limit(plan: Planned, environ: Mapping[str, str], saving: int = 0) -> None:
    """Refuses what XLA's pool of pinned memory would refuse in the middle of a run.

    Only for GPUs. The pool is made when JAX starts its devices; the `zerojax` command sets the
    variable before that.

    Raises:
      ValueError: the variable is not set, or to too little, or is no number.
    """
    devices = _local_devices(plan)
    if not devices or devices[0].platform not in ("gpu", "cuda", "rocm"):
        return
    told = environ.get(PINNED_LIMIT, "")
    if told and not told.isdigit():
        raise ValueError(f"{PINNED_LIMIT}={told!r} is no whole number of GiB; set it, or unset it")
    limit = int(told) if told else DEFAULT_PINNED_GIB
    pinned = sum(tiers.get(HOST, 0) for tiers in role_tiers(plan).values()) * len(devices)
    pinned += saving
    if pinned * POOL <= limit * GIB:
        return
    origin = f"{PINNED_LIMIT}={told}" if told else f"{PINNED_LIMIT} is not set, so it is {limit}"
    wanted = math.ceil(pinned * POOL / GIB)
    raise ValueError(
        f"offload keeps {format_bytes(pinned)} in pinned host memory, and XLA takes at most "
        f"{limit} GiB of it ({origin}); set {PINNED_LIMIT}={wanted} before JAX starts "
        " its devices: in the shell, or in os.environ above the first use of jax"
    )


def check_disk(plan: Planned, folder: Path | None) -> None:
    """Refuses files that do not fit on their disk. Files of an earlier run count as free.

    Raises:
      ValueError: see `check_offload`.
    """
    needed, config = disk_bytes(plan), plan.settings.offload
    if not needed:
        return
    place = Path(config.folder) if config.folder else (folder or Path("."))
    there = free_disk(place) + _taken(place)
    if needed <= there:
        return
    remedies = ["durable: false, which takes half"] if config.durable else []
    remedies += [
        "free some space",
        "another offload.folder",
        "a larger share of opt_state in host memory or on the device",
    ]
    twice = " in two generations" if config.durable else ""
    raise ValueError(
        f"offload needs {format_bytes(needed)} of disk{twice} in {place}, "
        f"{format_bytes(there)} are there, checkpoints not counted; {_join(iter(remedies))}"
    )


def _taken(folder: Path) -> int:
    """Bytes of the files in a folder that is there, which its next store replaces."""
    if not folder.is_dir():
        return 0
    files = (path.stat() for path in folder.glob("**/buckets*.bin"))
    return sum(512 * file.st_blocks for file in files)


def _join(remedies: Iterator[str]) -> str:
    return "try " + "; or ".join(remedies)


def _local_devices(plan: Planned) -> list:
    """This process's devices of the plan; [] where they are not here."""
    if not isinstance(plan.mesh, Mesh):
        return []
    return list(plan.mesh.local_devices)
