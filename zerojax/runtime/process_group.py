"""Describes and validates a process group, and assigns GPUs to its processes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from zerojax.config.late_dataclasses import dataclass

COORDINATOR = "ZEROJAX_COORDINATOR"
COORDINATOR_PORT = "ZEROJAX_COORDINATOR_PORT"
NUM_PROCESSES = "ZEROJAX_NUM_PROCESSES"
PROCESS_ID = "ZEROJAX_PROCESS_ID"
LOCAL_PROCESS_ID = "ZEROJAX_LOCAL_PROCESS_ID"
NUM_LOCAL_PROCESSES = "ZEROJAX_NUM_LOCAL_PROCESSES"
SHOW_ALL = "ZEROJAX_SHOW_ALL"
"""Environment variable; if set, the messages of JAX's runtime are shown as they are."""

_LOOPBACK = "127.0.0.1"
# Above the ports that Linux uses for outgoing connections (32768 to 60999).
_FIRST_PORT, _NUM_PORTS = 61440, 4096


@dataclass(frozen=True, kw_only=True)
class ProcessGroup:
    """The processes of a run, and the position of this process among them.

    Attributes:
      coordinator: "host:port" of process 0, which every process can reach.
      num_processes: number of processes of the run.
      process_id: index of this process, from 0.
      local_process_id: index of this process among the processes on its host, from 0; None: not
        known.
      num_local_processes: number of processes on this host; None: not known.
      gpus_per_process: number of GPUs that the scheduler shows only to each process; None: all
        processes of a host see the same GPUs, as far as is known.
      source: name of the source of these values, for messages.
    """

    coordinator: str
    num_processes: int
    process_id: int
    local_process_id: int | None = None
    num_local_processes: int | None = None
    gpus_per_process: int | None = None
    source: str = "ZEROJAX_*"

    def __post_init__(self) -> None:
        split_address(self.coordinator)
        if not 0 <= self.process_id < self.num_processes:
            raise ValueError(
                f"{self.source}: process {self.process_id} is not in [0, {self.num_processes}), "
                "the number of processes; number them from 0"
            )
        local, of = self.local_process_id, self.num_local_processes
        if local is not None and not 0 <= local < (self.num_processes if of is None else of):
            raise ValueError(
                f"{self.source}: process {local} of its host is not among the {of} processes of "
                "that host; number the processes of each host from 0"
            )

    @property
    def is_on_one_host(self) -> bool:
        """True if all processes are known to be on this host."""
        return self.num_local_processes == self.num_processes


def split_address(address: str, name: str = COORDINATOR) -> tuple[str, int]:
    """Splits "host:port" or "[::1]:port" into host and port.

    Args:
      address: the text to split.
      name: variable or option that holds the address, for the message.

    Raises:
      ValueError: the port is missing or invalid.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not host:
        raise ValueError(f"{name}={address!r} has no port; give host:port, such as 127.0.0.1:12355")
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(
            f"{name}={address!r}: {port!r} is not a port; use a number from 1 to 65535"
        )
    return host.strip("[]"), int(port)


def number_of(environment: Mapping[str, str], name: str) -> int:
    """Returns the integer in an environment variable.

    Raises:
      ValueError: the variable is not set, or is not an integer.
    """
    text = environment.get(name, "")
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} is not an integer; use an integer") from None


def optional_number_of(environment: Mapping[str, str], name: str) -> int | None:
    """Returns the integer in an environment variable, or None if the variable is not set."""
    return number_of(environment, name) if environment.get(name) else None


def coordinator_on(
    host: str, environment: Mapping[str, str], *, seed: int, num_hosts: int | None = None
) -> str:
    """Returns the address of process 0 on `host`, with a port that all processes compute alike.

    Args:
      host: host of process 0.
      environment: environment variables.
      seed: a number of this job that other jobs on the host do not have; it selects the port.
      num_hosts: number of hosts of the run. With 1, the returned address cannot be reached from
        other hosts.
    """
    named = optional_number_of(environment, COORDINATOR_PORT)
    port = _FIRST_PORT + seed % _NUM_PORTS if named is None else named
    host = _LOOPBACK if num_hosts == 1 else host
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def visible_gpus(environment: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """Returns the number of NVIDIA GPUs that a process with this environment sees.

    The number is 0 if JAX is set to use CPUs.

    Args:
      environment: environment variables of the process.
      devices: folder of the device files nvidia0, nvidia1, ...; a file to which a cgroup denies
        access does not count.
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
        # CUDA ignores everything after the first unknown name. Names of MIG parts are no numbers.
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
    """Returns the ids of the visible GPUs that this process uses; None: JAX uses all.

    A single process on a host uses all GPUs. If the scheduler shows each process only its own GPUs,
    or a process sees only one GPU, it uses all that it sees. Otherwise the GPUs of the host are
    divided into equal parts, in order. If the number of processes on the host is not known, a
    process uses the one GPU of its local index, or all if that is not known either.

    Args:
      group: the process group.
      num_gpus: number of GPUs that this process sees; 0: CPUs are used.

    Raises:
      ValueError: the GPUs of the host cannot be divided into equal parts, or the local index is not
        known or not that of a GPU.
    """
    local, num_local = group.local_process_id, group.num_local_processes
    if num_gpus == 0 or (num_local is None and num_gpus > 1 and local is None):
        return None
    if num_local == 1 or num_gpus in (1, group.gpus_per_process):
        return list(range(num_gpus))
    if local is None or num_local is None:
        # With a local index i there are at least i + 1 processes on the host. JAX and others use
        # one GPU per process then.
        if local is None or local >= num_gpus:
            raise ValueError(
                f"{group.source}: {num_gpus} GPUs are visible, but no variable assigns any to "
                f"process {group.process_id}; set JAX_LOCAL_DEVICE_IDS, such as 0 or 0,1"
            )
        return [local]
    if num_gpus % num_local:
        raise ValueError(
            f"{num_local} processes on this host cannot share {num_gpus} visible GPUs evenly; "
            f"start {even_counts(num_gpus)} processes, or set JAX_LOCAL_DEVICE_IDS for each"
        )
    share = num_gpus // num_local
    return list(range(local * share, (local + 1) * share))


def even_counts(num_gpus: int) -> str:
    """Returns the numbers of processes that can share `num_gpus` GPUs equally, such as "1, 2, 3 or
    6"."""
    counts = [str(count) for count in range(1, num_gpus + 1) if num_gpus % count == 0]
    return " or ".join([", ".join(counts[:-1]), counts[-1]] if len(counts) > 1 else counts)
