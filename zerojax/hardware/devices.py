"""Devices of this process: their kind, and the memory in use on them."""

import os
import resource
import sys
from pathlib import Path
from typing import Any

import jax


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
