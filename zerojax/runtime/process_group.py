"""Description of a process group: number, index and addresses, validated."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

COORDINATOR = "ZEROJAX_COORDINATOR"
COORDINATOR_PORT = "ZEROJAX_COORDINATOR_PORT"
NUM_PROCESSES = "ZEROJAX_NUM_PROCESSES"
PROCESS_ID = "ZEROJAX_PROCESS_ID"
LOCAL_PROCESS_ID = "ZEROJAX_LOCAL_PROCESS_ID"
NUM_LOCAL_PROCESSES = "ZEROJAX_NUM_LOCAL_PROCESSES"

_LOOPBACK = "127.0.0.1"
# Above the ports that Linux gives to outgoing connections (32768 to 60999).
_FIRST_PORT, _NUM_PORTS = 61440, 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessGroup:
    """One process among those of a run.

    Attributes:
      coordinator: "host:port" of process 0, which every process can reach.
      num_processes: how many there are.
      process_id: which one this is, from 0.
      local_process_id: which one this is among those on this host, from 0; None: not known.
      num_local_processes: how many are on this host; None: not known.
      gpus_per_process: GPUs that the scheduler shows to each process alone; None: all processes of
        a host see the same GPUs, as far as is known.
      source: what said so, for messages.
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
                f"{self.source}: process {local} of its host is not among the {of} processes "
                "there; number those of each host from 0"
            )

    @property
    def is_on_one_host(self) -> bool:
        """Whether all processes are known to be on this host."""
        return self.num_local_processes == self.num_processes


def split_address(address: str) -> tuple[str, int]:
    """Host and port of "host:port" or "[::1]:port".

    Raises:
      ValueError: there is no port, or it is none.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not host:
        raise ValueError(
            f"{COORDINATOR}={address!r} has no port; give host:port, such as 127.0.0.1:12355"
        )
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(
            f"{COORDINATOR}={address!r}: {port!r} is no port; give a number from 1 to 65535"
        )
    return host.strip("[]"), int(port)


def number_of(environment: Mapping[str, str], name: str) -> int:
    """The whole number that a variable holds.

    Raises:
      ValueError: it holds something else, or is not set.
    """
    text = environment.get(name, "")
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} is not a whole number") from None


def optional_number_of(environment: Mapping[str, str], name: str) -> int | None:
    """As `number_of`; None where the variable is not set."""
    return number_of(environment, name) if environment.get(name) else None


def coordinator_on(
    host: str, environment: Mapping[str, str], *, seed: int, num_hosts: int | None = None
) -> str:
    """The address of process 0 on `host`, with a port on which all processes agree unasked.

    Args:
      seed: a number of this job that other jobs on the host do not have.
      num_hosts: of the run; with one, the address is one that other hosts cannot reach.
    """
    named = optional_number_of(environment, COORDINATOR_PORT)
    port = _FIRST_PORT + seed % _NUM_PORTS if named is None else named
    host = _LOOPBACK if num_hosts == 1 else host
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
