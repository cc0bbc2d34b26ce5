"""Describes the devices of this process: their kind, driver, memory in use, and bandwidth to host
memory."""

from __future__ import annotations

import ctypes
import functools
import os
import re
import resource
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from zerojax.config.late_dataclasses import dataclass
from zerojax.config.mesh import HOST_KIND

SIZES = (16 * 2**20, 128 * 2**20, 1024 * 2**20)
"""Sizes of the measured arrays in bytes: a slice of a small layer, a slice of a large layer, and
the size at which the link is fastest."""
DRIVER_FILE = Path("/proc/driver/nvidia/version")
NVML = "libnvidia-ml.so.1"
MISSING = "this device has no pinned host memory, so nothing can be offloaded to it"


def device_kind() -> str:
    """Returns the name of the first local device, such as "NVIDIA H100 80GB HBM3" or "cpu"."""
    return jax.local_devices()[0].device_kind


@functools.cache
def driver_version() -> str | None:
    """Returns the version of NVIDIA's driver, such as "580.159.04"; None if it is unknown.

    JAX itself reports only the CUDA version that it was built with.
    """
    try:
        line = DRIVER_FILE.read_text(encoding="utf-8", errors="replace").partition("\n")[0]
    except OSError:  # a container may have the library but not the file
        return _version_by_nvml()
    found = re.search(r"\s(\d+\.\d+(\.\d+)?)\s", line)
    return found[1] if found else _version_by_nvml()


def _version_by_nvml() -> str | None:
    try:
        nvml = ctypes.CDLL(NVML)
    except OSError:
        return None
    # NVML returns 0 for success.
    if nvml.nvmlInit_v2():
        return None
    try:
        text = ctypes.create_string_buffer(80)
        failed = nvml.nvmlSystemGetDriverVersion(text, len(text))
    finally:
        nvml.nvmlShutdown()
    return None if failed else text.value.decode(errors="replace")


def device_memory() -> dict[str, Any]:
    """Measures the memory of the local device whose peak of memory in use is the highest, or of
    this process if devices report none.

    Returns:
      A dict with these keys:
      source: "device", or "host RSS" (all memory of this process, which virtual CPU devices share).
      in_use, peak, limit: numbers of bytes; limit is 0 if it is not known.
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


@dataclass(frozen=True, kw_only=True)
class LinkRates:
    """Measured bandwidth between a device and pinned host memory in bytes per second, for one array
    in each direction; the best of several passes.

    Attributes:
      num_bytes: size of the array in bytes.
      to_device: bandwidth from pinned host memory to the device.
      to_host: bandwidth from the device to pinned host memory.
      both: sum of both directions if they run at the same time.
    """

    num_bytes: int
    to_device: float
    to_host: float
    both: float


def has_pinned_host(device: jax.Device) -> bool:
    """Returns whether a device can access pinned host memory."""
    return HOST_KIND in {memory.kind for memory in device.addressable_memories()}


def shares_host_memory(device: jax.Device) -> bool:
    """Returns whether a device's memory is the host's memory, so that there is no link to
    measure."""
    return device.platform == "cpu"


def measure_link(
    *, num_bytes: int = 2**30, repeats: int = 5, device: jax.Device | None = None
) -> LinkRates:
    """Measures the bandwidth of copies of an array of `num_bytes` between a device and pinned host
    memory.

    Args:
      num_bytes: size of each array. Up to three arrays are on the device and two in host memory.
      repeats: number of timed passes, of which the best counts. One more pass before them is not
        timed, because it allocates pages of host memory.
      device: the device; None: the first device of this process.

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
    """Returns the shortest time in seconds of `repeats` calls of `move`, each until its arrays are
    ready."""
    jax.block_until_ready(move())
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(move())
        best = min(best, time.perf_counter() - start)
    return best
