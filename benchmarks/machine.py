"""Description of the machine of a measurement: processor, cores, versions, load.

Does not import JAX, so that it can be used before a process is pinned.
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
"""Load average per core above which times are unreliable."""


def describe_machine() -> dict[str, Any]:
    """Returns processor, cores, memory in GiB, Python, versions and date, as JSON values."""
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
    """Returns the processor's name that the kernel reports."""
    path = Path("/proc/cpuinfo")
    if path.exists():
        for line in path.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def installed_versions() -> dict[str, str]:
    """Returns the versions of the packages that affect the numbers, if they are installed."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def is_quiet(load: float) -> bool:
    """Returns whether times measured at this load average are reliable."""
    return load <= QUIET_LOAD_PER_CORE * (os.cpu_count() or 1)


def load_average() -> float:
    """Returns the number of runnable processes, averaged over the last minute."""
    return round(os.getloadavg()[0], 2)


def pin_to_core(core: int) -> None:
    """Pins this process, and the threads it will start, to one core.

    To be called before the first use of JAX: XLA then makes one worker thread per core that it may
    use.
    """
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[core]})
