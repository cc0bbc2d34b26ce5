"""What a measurement was made on: processor, cores, versions, load.

Knows the operating system; never imports JAX, so that it can be asked before a process is pinned.
"""

from __future__ import annotations

import datetime
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "torch")
QUIET_LOAD_PER_CORE = 0.75
"""Load average, per core, above which times are not to be trusted."""


def describe_machine() -> dict[str, Any]:
    """Processor, cores, memory in GiB, Python, package versions and the date, JSON-able."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "memory_gib": round(pages / 2**30, 1),
        "python": platform.python_version(),
        "versions": installed_versions(),
        "date": datetime.date.today().isoformat(),
    }


def cpu_model() -> str:
    """The processor's name as the kernel tells it."""
    path = Path("/proc/cpuinfo")
    if path.exists():
        for line in path.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def installed_versions() -> dict[str, str]:
    """Versions of the packages that decide the numbers; those not installed are left out."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def is_quiet(load: float) -> bool:
    """Whether times taken at this load average are to be trusted."""
    return load <= QUIET_LOAD_PER_CORE * (os.cpu_count() or 1)


def load_average() -> float:
    """Processes that wanted to run, averaged over the last minute."""
    return round(os.getloadavg()[0], 2)


def pin_to_core(core: int) -> None:
    """Keeps this process, and the threads it will start, on one core.

    To be called before the first use of JAX: XLA then makes one worker thread per core that it may
    use.
    """
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[core]})
