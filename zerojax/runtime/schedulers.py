"""Process group of a run, from the environment variables of its launcher.

No JAX is imported.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from zerojax.runtime.kubernetes import INDEX, kubernetes_group
from zerojax.runtime.open_mpi import open_mpi_group
from zerojax.runtime.process_group import (
    COORDINATOR,
    LOCAL_PROCESS_ID,
    NUM_LOCAL_PROCESSES,
    NUM_PROCESSES,
    PROCESS_ID,
    ProcessGroup,
    number_of,
    optional_number_of,
)
from zerojax.runtime.slurm import slurm_group
from zerojax.runtime.torchrun import torchrun_group

# The innermost first: torchrun and mpirun are also started inside a step of Slurm.
_OTHERS = (torchrun_group, open_mpi_group, slurm_group)


def process_group_of(environment: Mapping[str, str]) -> ProcessGroup | None:
    """The group that the environment names; None when this process runs alone.

    ZEROJAX_* come first: COORDINATOR, NUM_PROCESSES and PROCESS_ID together say all, and
    ZEROJAX_NUM_PROCESSES=1 alone makes each process a run of its own, whatever else is set. Then
    Kubernetes, torchrun's variables, Open MPI and Slurm, with ZEROJAX_COORDINATOR in place of what
    they say, where it is set.

    Raises:
      ValueError: variables contradict each other, are incomplete, or hold no numbers.
    """
    if optional_number_of(environment, NUM_PROCESSES) == 1:
        return None
    if environment.get(INDEX) and not environment.get(PROCESS_ID):
        found = kubernetes_group(environment)
        if found is not None:
            return found
    given = [name for name in (COORDINATOR, NUM_PROCESSES, PROCESS_ID) if environment.get(name)]
    if given and given != [COORDINATOR]:
        return _own_group(environment)
    for look in _OTHERS:
        found = look(environment)
        if found is not None:
            return _moved(found, environment)
    return _own_group(environment) if given else None


def _own_group(environment: Mapping[str, str]) -> ProcessGroup:
    names = (COORDINATOR, NUM_PROCESSES, PROCESS_ID)
    missing = [name for name in names if not environment.get(name)]
    if missing:
        raise ValueError(f"{missing[0]} is not set; a run of several processes needs {names}")
    return ProcessGroup(
        coordinator=environment[COORDINATOR],
        num_processes=number_of(environment, NUM_PROCESSES),
        process_id=number_of(environment, PROCESS_ID),
        local_process_id=optional_number_of(environment, LOCAL_PROCESS_ID),
        num_local_processes=optional_number_of(environment, NUM_LOCAL_PROCESSES),
    )


def _moved(group: ProcessGroup, environment: Mapping[str, str]) -> ProcessGroup:
    """`group` with the coordinator that ZEROJAX_COORDINATOR names, where it is set."""
    address = environment.get(COORDINATOR)
    return dataclasses.replace(group, coordinator=address) if address else group
