"""Assignment of a host's GPUs to its processes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from zerojax.runtime.process_group import ProcessGroup


def visible_gpus(environment: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """How many NVIDIA GPUs a process with this environment sees; 0 where JAX is to use CPUs.

    Args:
      devices: folder of the files nvidia0, nvidia1, ...; one that a cgroup denies does not count.
    """
    platforms = environment.get("JAX_PLATFORMS", "").split(",")
    if platforms != [""] and not {"cuda", "gpu"} & set(platforms):
        return 0
    present = sum(_may_open(path) for path in sorted(devices.glob("nvidia[0-9]*")))
    named = environment.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return present
    words = [word.strip() for word in named.split(",")]
    known = 0
    for word in words:
        # CUDA stops at the first name that it does not know. Names of MIG parts are no numbers.
        if word in ("", "-1") or (word.isdecimal() and int(word) >= present):
            break
        known += 1
    return known if present else 0


def _may_open(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def local_device_ids(group: ProcessGroup, num_gpus: int) -> list[int] | None:
    """Which of the GPUs that it sees this process takes; None leaves it to JAX: all there are.

    One process on the host takes all. A process that sees one GPU takes it, as where the scheduler
    shows each task its own, and so with any number that the scheduler gives to each. Else the GPUs
    of the host are dealt out in equal parts, in order.

    Args:
      num_gpus: that this process sees; 0: CPUs are used.

    Raises:
      ValueError: the GPUs of the host cannot be dealt out in equal parts.
    """
    local, num_local = group.local_process_id, group.num_local_processes
    if num_gpus == 0 or (num_local is None and num_gpus > 1 and local is None):
        return None
    if num_local == 1 or num_gpus in (1, group.gpus_per_process):
        return list(range(num_gpus))
    if local is None or num_local is None:
        # The host of a process that has a number has at least that many processes; JAX and
        # others take one GPU each then.
        if local is None or local >= num_gpus:
            raise ValueError(
                f"{group.source}: {num_gpus} GPUs are visible, but nothing says which of them "
                f"process {group.process_id} takes; set JAX_LOCAL_DEVICE_IDS, such as 0 or 0,1"
            )
        return [local]
    if num_gpus % num_local:
        raise ValueError(
            f"{num_local} processes on this host cannot share {num_gpus} visible GPUs evenly; "
            f"start {_even_counts(num_gpus)} processes, or set JAX_LOCAL_DEVICE_IDS for each"
        )
    share = num_gpus // num_local
    return list(range(local * share, (local + 1) * share))


def _even_counts(num_gpus: int) -> str:
    counts = [str(count) for count in range(1, num_gpus + 1) if num_gpus % count == 0]
    return " or ".join([", ".join(counts[:-1]), counts[-1]] if len(counts) > 1 else counts)
