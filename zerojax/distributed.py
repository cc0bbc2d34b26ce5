"""How several processes become one run: who coordinates, how many there are, which one this is.

Knows environment variables and `jax.distributed`; nothing of meshes or training.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

import jax

COORDINATOR, NUM_PROCESSES, PROCESS_ID = (
    "ZEROJAX_COORDINATOR",
    "ZEROJAX_NUM_PROCESSES",
    "ZEROJAX_PROCESS_ID",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessGroup:
    """One process among those of a run.

    Attributes:
      coordinator: "host:port" of process 0, which every process can reach.
      num_processes: how many there are.
      process_id: which one this is, from 0.
    """

    coordinator: str
    num_processes: int
    process_id: int

    def __post_init__(self) -> None:
        if ":" not in self.coordinator:
            raise ValueError(
                f"{COORDINATOR}={self.coordinator!r} has no port; give host:port, such as "
                "127.0.0.1:12355"
            )
        if not 0 <= self.process_id < self.num_processes:
            raise ValueError(
                f"{PROCESS_ID}={self.process_id} is not in [0, {NUM_PROCESSES}="
                f"{self.num_processes}); number the processes from 0"
            )


def process_group_of(environment: Mapping[str, str]) -> ProcessGroup | None:
    """The group that the environment names; None when it names none.

    Raises:
      ValueError: only some of the three variables are set, or one is no number.
    """
    names = (COORDINATOR, NUM_PROCESSES, PROCESS_ID)
    missing = [name for name in names if not environment.get(name)]
    if len(missing) == len(names):
        return None
    if missing:
        raise ValueError(f"{missing[0]} is not set; a run of several processes needs {names}")
    numbers = {}
    for name in (NUM_PROCESSES, PROCESS_ID):
        try:
            numbers[name] = int(environment[name])
        except ValueError:
            raise ValueError(f"{name}={environment[name]!r} is not a whole number") from None
    return ProcessGroup(
        coordinator=environment[COORDINATOR],
        num_processes=numbers[NUM_PROCESSES],
        process_id=numbers[PROCESS_ID],
    )


def join(group: ProcessGroup | None = None) -> ProcessGroup | None:
    """Joins the processes of a run; to be called before JAX touches a device.

    Args:
      group: None reads ZEROJAX_COORDINATOR, ZEROJAX_NUM_PROCESSES and ZEROJAX_PROCESS_ID.

    Returns:
      The group, or None when this process runs alone.
    """
    group = process_group_of(os.environ) if group is None else group
    if group is None:
        return None
    # Without this the coordinator listens on every interface of the machine.
    os.environ.setdefault("JAX_COORDINATOR_BIND_ADDRESS", group.coordinator)
    jax.distributed.initialize(group.coordinator, group.num_processes, group.process_id)
    return group
