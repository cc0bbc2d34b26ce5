"""Process group of Open MPI's `mpirun`, versions 4 and 5.

MPI itself is never called.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from zerojax.runtime.process_group import (
    COORDINATOR,
    ProcessGroup,
    coordinator_on,
    number_of,
    optional_number_of,
)


def open_mpi_group(environment: Mapping[str, str]) -> ProcessGroup | None:
    """The processes of this `mpirun`; None outside one, and for a single process.

    Raises:
      ValueError: a variable holds no number, or several hosts take part and nothing says on which
        one process 0 is.
    """
    if not (environment.get("OMPI_COMM_WORLD_RANK") and environment.get("OMPI_COMM_WORLD_SIZE")):
        return None
    num_processes = number_of(environment, "OMPI_COMM_WORLD_SIZE")
    if num_processes == 1:
        return None
    num_local = optional_number_of(environment, "OMPI_COMM_WORLD_LOCAL_SIZE")
    return ProcessGroup(
        coordinator=_coordinator(environment, is_one_host=num_local == num_processes),
        num_processes=num_processes,
        process_id=number_of(environment, "OMPI_COMM_WORLD_RANK"),
        local_process_id=optional_number_of(environment, "OMPI_COMM_WORLD_LOCAL_RANK"),
        num_local_processes=num_local,
        source="Open MPI",
    )


def _coordinator(environment: Mapping[str, str], *, is_one_host: bool) -> str:
    if environment.get(COORDINATOR):
        return environment[COORDINATOR]
    found = _mpirun_4(environment) or _mpirun_5(environment)
    if found is None:
        if not is_one_host:
            raise ValueError(
                "Open MPI started this process, but does not say where process 0 is; run mpirun "
                f"with -x {COORDINATOR}=HOST:PORT, HOST being where process 0 runs"
            )
        found = "localhost", 0
    host, seed = found
    return coordinator_on(host, environment, seed=seed, num_hosts=1 if is_one_host else None)


def _mpirun_4(environment: Mapping[str, str]) -> tuple[str, int] | None:
    """Address of the host of `mpirun` and a number of this job, before Open MPI 5.

    Such as "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911", or "...;tcp6://[fe80::1,...]:43370".
    """
    text = environment.get("OMPI_MCA_orte_hnp_uri", "")
    match = re.match(r"(\d+)\.\d+;(?:tcp://([^,:;]+)|tcp6://\[([^,\]]+))", text)
    # The number of a job is a multiple of 4096.
    return None if match is None else (match[2] or match[3], int(match[1]) // 4096)


def _mpirun_5(environment: Mapping[str, str]) -> tuple[str, int] | None:
    """Name of the host of `mpirun` and its process id, which name a job since Open MPI 5.

    PMIX_NAMESPACE is "prterun-HOST-PID@JOB"; PMIX_SERVER_URI* and PRTE_* begin with it.
    """
    names = ["PMIX_NAMESPACE", *sorted(name for name in environment if _PRTE_NAME.match(name))]
    for name in names:
        match = re.match(r"(?:prterun|prte|mpirun)-(.+)-(\d+)@\d+", environment.get(name, ""))
        if match is not None:
            return match[1], int(match[2])
    return None


_PRTE_NAME = re.compile(r"PMIX_SERVER_URI\d*$|PRTE_MCA_.*_uri$|PRTE_.*NAMESPACE$")
