"""This machine: kind and memory of its devices, and measured bandwidths of its links and disks.

Bandwidths are stored in the user's cache; a file that cannot be read or written costs a
measurement, nothing else.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import platform
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from zerojax.config.mesh import HOST_KIND
from zerojax.runtime.bounded_json import load
from zerojax.runtime.memory import nearest_folder
from zerojax.runtime.user_files import replace_text, user_cache

FILE = "rates.json"
MOUNTS = Path("/proc/self/mountinfo")
SIZES = (16 * 2**20, 128 * 2**20, 1024 * 2**20)
"""Bytes of one array: a slice of a small layer, of a large one, and what the link does at best."""
MISSING = "this device offers no pinned host memory, so nothing can be offloaded to it"


def device_kind() -> str:
    """What the first local device calls itself, as in "NVIDIA H100 80GB HBM3" or "cpu"."""
    return jax.local_devices()[0].device_kind


def device_memory() -> dict[str, Any]:
    """Memory of the fullest local device, or of this process where devices do not count theirs.

    Returns:
      source: "device", or "host RSS" (all memory of this process; virtual CPU devices share it).
      in_use, peak, limit: bytes; limit is 0 where it is not known.
    """
    stats = [device.memory_stats() for device in jax.local_devices()]
    counted = [s for s in stats if s and "bytes_in_use" in s]
    if not counted:
        return {"source": "host RSS", **_host_memory()}
    fullest = max(counted, key=lambda s: s.get("peak_bytes_in_use", s["bytes_in_use"]))
    return {
        "source": "device",
        "in_use": fullest["bytes_in_use"],
        "peak": fullest.get("peak_bytes_in_use", fullest["bytes_in_use"]),
        "limit": fullest.get("bytes_limit", 0),
    }


def _host_memory() -> dict[str, int]:
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes there, KiB elsewhere
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    page = os.sysconf("SC_PAGE_SIZE")
    statm = Path("/proc/self/statm")
    in_use = int(statm.read_text().split()[1]) * page if statm.exists() else peak
    installed = os.sysconf("SC_PHYS_PAGES") * page
    return {"in_use": in_use, "peak": max(peak, in_use), "limit": installed}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredLink:
    """Bytes per second between a device and this machine's memory; see `LinkRates`."""

    device_kind: str
    to_device: float
    to_host: float
    both: float
    date: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredDisk:
    """Bytes per second of a disk, by sweeps of the bucket store; see `store.rates.DiskRates`."""

    disk: str
    write: float
    read: float
    both: float
    date: str = ""


def keep_rates(rates: MeasuredLink | MeasuredDisk) -> Path | None:
    """Keeps what was measured in place of what was known.

    Returns:
      The file; None where the cache is switched off or cannot be written.
    """
    path = _path()
    if path is None:
        return None
    is_link = isinstance(rates, MeasuredLink)
    part, name = ("links", rates.device_kind) if is_link else ("disks", rates.disk)
    today = datetime.datetime.now().strftime("%Y-%m-%d")
    known = _read(path)
    machine = known.get(platform.node())
    machine = known[platform.node()] = machine if isinstance(machine, dict) else {}
    entries = machine.get(part)
    entries = machine[part] = entries if isinstance(entries, dict) else {}
    entries[name] = dataclasses.asdict(dataclasses.replace(rates, date=today))
    try:
        replace_text(path, json.dumps(known, indent=1))
    except OSError:
        return None
    return path


def measured_links() -> list[MeasuredLink]:
    """Of the devices of this machine that were measured."""
    return [MeasuredLink(**entry) for entry in _entries("links", MeasuredLink)]


def measured_disk(folder: str | os.PathLike[str]) -> MeasuredDisk | None:
    """Of the disk on which a folder lies, or will lie; None where it was not measured."""
    name = disk_name(folder)
    found = [MeasuredDisk(**entry) for entry in _entries("disks", MeasuredDisk)]
    return next((disk for disk in found if disk.disk == name), None)


def disk_name(folder: str | os.PathLike[str]) -> str:
    """What the disk of a folder is called here, such as "/dev/nvme0n1p1 on /data".

    Of a folder that is not there, that of the nearest one above it.
    """
    number = os.stat(nearest_folder(folder)).st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    try:
        lines = MOUNTS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return device
    for line in lines:  # proc_pid_mountinfo(5)
        words = line.split()
        if len(words) > 6 and words[2] == device and "-" in words:
            return f"{words[words.index('-') + 2]} on {words[4]}"
    return device


def _entries(part: str, kind: type) -> list[dict[str, Any]]:
    """The entries of this machine that have the form of `kind`."""
    path = _path()
    if path is None:
        return []
    machine = _read(path).get(platform.node(), {})
    entries = machine.get(part, {}) if isinstance(machine, Mapping) else {}
    values = entries.values() if isinstance(entries, Mapping) else ()
    return [dict(entry) for entry in values if _has_form(entry, kind)]


def _has_form(entry: Any, kind: type) -> bool:
    """Whether an entry has the fields of `kind`, with text and positive numbers in them."""
    fields = dataclasses.fields(kind)
    if not isinstance(entry, Mapping) or set(entry) != {field.name for field in fields}:
        return False
    return all(
        isinstance(entry[field.name], str)
        if field.type == "str"
        else isinstance(entry[field.name], float) and entry[field.name] > 0
        for field in fields
    )


def _path() -> Path | None:
    folder = user_cache()
    return None if folder is None else folder / FILE


def _read(path: Path) -> dict[str, Any]:
    try:
        found = load(path)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinkRates:
    """What the link did with one array each way, bytes per second; the best of some passes.

    Attributes:
      num_bytes: of the array.
      to_device: from pinned host memory; to_host: to it.
      both: both directions at once, their bytes together.
    """

    num_bytes: int
    to_device: float
    to_host: float
    both: float


def has_pinned_host(device: Any) -> bool:
    """Whether a device reaches pinned host memory."""
    return HOST_KIND in {memory.kind for memory in device.addressable_memories()}


def shares_host_memory(device: Any) -> bool:
    """Whether its memory is the host's own, so that nothing crosses a link."""
    return device.platform == "cpu"


def measure_link(*, num_bytes: int = 2**30, repeats: int = 5, device: Any = None) -> LinkRates:
    """Copies an array of `num_bytes` between a device and pinned host memory.

    Args:
      num_bytes: of each array; three of them are on the device and two in host memory at a time.
      repeats: passes of which the best counts; one before them is not timed, since it makes the
        host's pages.
      device: None takes the first one of this process.

    Raises:
      RuntimeError: the device has no pinned host memory.
    """
    device = jax.local_devices()[0] if device is None else device
    if not has_pinned_host(device):
        raise RuntimeError(f"{device}: {MISSING}")
    near = SingleDeviceSharding(device, memory_kind="device")
    far = SingleDeviceSharding(device, memory_kind=HOST_KIND)
    number = max(num_bytes // 4, 1)
    inside = jax.device_put(jnp.zeros(number, jnp.float32), near)
    outside = jax.device_put(inside, far)
    jax.block_until_ready((inside, outside))

    def to_device() -> Sequence[jax.Array]:
        return [jax.device_put(outside, near)]

    def to_host() -> Sequence[jax.Array]:
        return [jax.device_put(inside, far)]

    def both() -> Sequence[jax.Array]:
        return [*to_device(), *to_host()]

    moved = inside.nbytes
    return LinkRates(
        num_bytes=moved,
        to_device=moved / _best_seconds(to_device, repeats),
        to_host=moved / _best_seconds(to_host, repeats),
        both=2 * moved / _best_seconds(both, repeats),
    )


def _best_seconds(move: Callable[[], Sequence[jax.Array]], repeats: int) -> float:
    """The least time from the call to arrays that are there; what came is freed in between."""
    jax.block_until_ready(move())
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(move())
        best = min(best, time.perf_counter() - start)
    return best
