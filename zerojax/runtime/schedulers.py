"""Reads the process group of a run from variables of torchrun, Open MPI, Slurm or Kubernetes.

Imports no JAX, and calls neither MPI nor the API of a cluster. So a Kubernetes pod needs no
permission and no client library.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping

from zerojax.runtime.process_group import (
    COORDINATOR,
    COORDINATOR_PORT,
    LOCAL_PROCESS_ID,
    NUM_LOCAL_PROCESSES,
    NUM_PROCESSES,
    PROCESS_ID,
    ProcessGroup,
    coordinator_on,
    number_of,
    optional_number_of,
)

_PRTE_NAME = re.compile(r"PMIX_SERVER_URI\d*$|PRTE_MCA_.*_uri$|PRTE_.*NAMESPACE$")
# Steps not started by `srun` (batch script, interactive shell, extern) have larger numbers.
_FIRST_RESERVED_STEP = 0xFFFFFFF0
POD_INDEX = "JOB_COMPLETION_INDEX"
_KUBERNETES_PORT = 12355


def process_group_of(environment: Mapping[str, str]) -> ProcessGroup | None:
    """Returns the process group that environment variables describe; None: this process runs alone.

    Variables ZEROJAX_* have priority. ZEROJAX_COORDINATOR, ZEROJAX_NUM_PROCESSES and
    ZEROJAX_PROCESS_ID together describe the group; ZEROJAX_NUM_PROCESSES=1 alone makes each process
    a separate run, whatever else is set. Otherwise Kubernetes, torchrun, Open MPI and Slurm are
    tried in this order, and ZEROJAX_COORDINATOR, if set, replaces their coordinator.

    Raises:
      ValueError: variables contradict each other, are incomplete, or are not numbers.
    """
    if optional_number_of(environment, NUM_PROCESSES) == 1:
        return None
    # Before the variables ZEROJAX_*, of which a pod may set only the number of processes. They
    # alone would count as incomplete.
    if environment.get(POD_INDEX) and not environment.get(PROCESS_ID):
        found = kubernetes_group(environment)
        if found is not None:
            return found
    given = [name for name in (COORDINATOR, NUM_PROCESSES, PROCESS_ID) if environment.get(name)]
    if given and given != [COORDINATOR]:
        return _own_group(environment)
    # The innermost launcher first: torchrun and mpirun may also run inside a Slurm step.
    for look in (torchrun_group, open_mpi_group, slurm_group):
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
    """Returns `group` with the coordinator's address from ZEROJAX_COORDINATOR if that variable is
    set.
    """
    address = environment.get(COORDINATOR)
    return dataclasses.replace(group, coordinator=address) if address else group


def torchrun_group(environment: Mapping[str, str]) -> ProcessGroup | None:
    """Returns the process group described by RANK and WORLD_SIZE; None if a variable is not set or
    there is only one process.

    torchrun, Ray and Kubeflow set these variables.

    Raises:
      ValueError: MASTER_ADDR or MASTER_PORT is missing, or a variable is not a number.
    """
    if not (environment.get("RANK") and environment.get("WORLD_SIZE")):
        return None
    num_processes = number_of(environment, "WORLD_SIZE")
    if num_processes == 1:
        return None
    num_local = optional_number_of(environment, "LOCAL_WORLD_SIZE")
    return ProcessGroup(
        coordinator=environment.get(COORDINATOR) or _torchrun_coordinator(environment),
        num_processes=num_processes,
        process_id=number_of(environment, "RANK"),
        local_process_id=optional_number_of(environment, "LOCAL_RANK"),
        num_local_processes=num_local,
        source="torchrun's variables",
    )


def _torchrun_coordinator(environment: Mapping[str, str]) -> str:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not environment.get(name):
            raise ValueError(
                f"RANK={environment['RANK']} and WORLD_SIZE={environment['WORLD_SIZE']} are set, "
                f"but {name} is not; set it to the host or port of process 0, or unset RANK to "
                "run a single process"
            )
    port = optional_number_of(environment, COORDINATOR_PORT)
    if port is None:
        port = number_of(environment, "MASTER_PORT")
        # torchrun itself listens on MASTER_PORT while its processes run.
        if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            port += 1 if port < 65535 else -1
    host = environment["MASTER_ADDR"]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def open_mpi_group(environment: Mapping[str, str]) -> ProcessGroup | None:
    """Returns the process group that `mpirun` started; None outside `mpirun` and for one process.

    Raises:
      ValueError: a variable is not a number, or the run has several hosts and no variable names the
        host of process 0.
    """
    if not (environment.get("OMPI_COMM_WORLD_RANK") and environment.get("OMPI_COMM_WORLD_SIZE")):
        return None
    num_processes = number_of(environment, "OMPI_COMM_WORLD_SIZE")
    if num_processes == 1:
        return None
    num_local = optional_number_of(environment, "OMPI_COMM_WORLD_LOCAL_SIZE")
    return ProcessGroup(
        coordinator=_open_mpi_coordinator(environment, is_one_host=num_local == num_processes),
        num_processes=num_processes,
        process_id=number_of(environment, "OMPI_COMM_WORLD_RANK"),
        local_process_id=optional_number_of(environment, "OMPI_COMM_WORLD_LOCAL_RANK"),
        num_local_processes=num_local,
        source="Open MPI",
    )


def _open_mpi_coordinator(environment: Mapping[str, str], *, is_one_host: bool) -> str:
    if environment.get(COORDINATOR):
        return environment[COORDINATOR]
    found = _mpirun_4(environment) or _mpirun_5(environment)
    if found is None:
        if not is_one_host:
            raise ValueError(
                "Open MPI started this process, but does not pass the address of process 0; run "
                f"mpirun with -x {COORDINATOR}=HOST:PORT, where HOST is the host of process 0"
            )
        found = "localhost", 0
    host, seed = found
    return coordinator_on(host, environment, seed=seed, num_hosts=1 if is_one_host else None)


def _mpirun_4(environment: Mapping[str, str]) -> tuple[str, int] | None:
    """Returns (address of the host of `mpirun`, number of this job), for Open MPI before 5.

    Parses texts such as "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911" or
    "...;tcp6://[fe80::1,...]:43370".
    """
    text = environment.get("OMPI_MCA_orte_hnp_uri", "")
    match = re.match(r"(\d+)\.\d+;(?:tcp://([^,:;]+)|tcp6://\[([^,\]]+))", text)
    # The number of a job is a multiple of 4096.
    return None if match is None else (match[2] or match[3], int(match[1]) // 4096)


def _mpirun_5(environment: Mapping[str, str]) -> tuple[str, int] | None:
    """Returns (host name, process id) of `mpirun`, which identify a job since Open MPI 5.

    PMIX_NAMESPACE is "prterun-HOST-PID@JOB". PMIX_SERVER_URI* and PRTE_* begin with the same text.
    """
    names = ["PMIX_NAMESPACE", *sorted(name for name in environment if _PRTE_NAME.match(name))]
    for name in names:
        match = re.match(r"(?:prterun|prte|mpirun)-(.+)-(\d+)@\d+", environment.get(name, ""))
        if match is not None:
            return match[1], int(match[2])
    return None


def slurm_group(environment: Mapping[str, str]) -> ProcessGroup | None:
    """Returns the process group of this Slurm job step; None outside a step and in a step of one
    task.

    A shell inside `salloc` and the batch script itself belong to a job, but not to a step of
    several tasks, although SLURM_NTASKS is set there for the allocation.

    Raises:
      ValueError: a variable has a value that Slurm does not write.
    """
    hosts = environment.get("SLURM_STEP_NODELIST")
    if not (environment.get("SLURM_JOB_ID") and environment.get("SLURM_PROCID") and hosts):
        return None
    step = _step_of(environment)
    if step >= _FIRST_RESERVED_STEP:
        return None
    name = "SLURM_STEP_NUM_TASKS" if environment.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    num_processes = number_of(environment, name) if environment.get(name) else 1
    if num_processes == 1:
        return None
    names = list(expand_hosts(hosts))
    # Steps of one job can run on one host at the same time, so the port depends on the step too.
    seed = number_of(environment, "SLURM_JOB_ID") + 31 * step
    return ProcessGroup(
        coordinator=coordinator_on(names[0], environment, seed=seed, num_hosts=len(names)),
        num_processes=num_processes,
        process_id=number_of(environment, "SLURM_PROCID"),
        local_process_id=optional_number_of(environment, "SLURM_LOCALID"),
        num_local_processes=_tasks_here(environment, num_processes, len(names)),
        gpus_per_process=_gpus_per_task(environment),
        source="Slurm",
    )


def _step_of(environment: Mapping[str, str]) -> int:
    for name in ("SLURM_STEP_ID", "SLURM_STEPID"):
        if environment.get(name):
            return number_of(environment, name)
    return 0


def expand_hosts(text: str) -> Iterator[str]:
    """Yields the host names in Slurm's compressed list.

    "n[01-03,7],gpu2" means n01, n02, n03, n7 and gpu2.

    Raises:
      ValueError: the text is not a list in Slurm's format.
    """
    # Commas inside brackets separate numbers, commas outside separate names.
    for name in re.findall(r"(?:[^,\[\]]+|\[[^\[\]]*\])+", text):
        yield from _expand_name(name, text)


def _expand_name(name: str, text: str) -> Iterator[str]:
    before, bracket, rest = name.partition("[")
    if not bracket:
        yield name
        return
    numbers, _, after = rest.partition("]")
    for part in numbers.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None:
            raise ValueError(f"SLURM_STEP_NODELIST={text!r} is not a list of hosts: {part!r}")
        first, last = match[1], match[2] or match[1]
        for number in range(int(first), int(last) + 1):
            for end in _expand_name(after, text) if after else ("",):
                yield f"{before}{number:0{len(first)}}{end}"


def expand_counts(text: str, name: str) -> list[int]:
    """Returns the number of tasks on each host from Slurm's format: "8(x2),4" means 8, 8 and 4.

    Raises:
      ValueError: the text is not in this format.
    """
    counts = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ValueError(f"{name}={text!r} is not a list of tasks per host: {part!r}")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _tasks_here(environment: Mapping[str, str], num_processes: int, num_hosts: int) -> int | None:
    """Returns the number of Slurm tasks on this host; None if Slurm's variables do not say it."""
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        if not environment.get(name):
            continue
        counts = expand_counts(environment[name], name)
        if sum(counts) != num_processes or len(counts) != num_hosts:
            continue  # these variables describe the allocation, and the step has other tasks
        index = optional_number_of(environment, "SLURM_NODEID")
        if len(set(counts)) == 1:
            return counts[0]
        if index is not None and index < len(counts):
            return counts[index]
    if num_hosts == 1:
        return num_processes
    return 1 if num_hosts == num_processes else None


def _gpus_per_task(environment: Mapping[str, str]) -> int | None:
    """Returns the number in Slurm's --gpus-per-task, which is "2", or with a type "h200:2" or
    "gpu:h200:2"."""
    text = environment.get("SLURM_GPUS_PER_TASK", "")
    last = text.rpartition(":")[2]
    return int(last) if last.isdecimal() else None


def kubernetes_group(environment: Mapping[str, str]) -> ProcessGroup | None:
    """Returns the process group of the pods of this indexed Kubernetes Job; None outside a Job.

    Kubernetes sets JOB_COMPLETION_INDEX; the user's manifest sets ZEROJAX_NUM_PROCESSES. Without
    ZEROJAX_NUM_PROCESSES each pod of the Job is a separate run.

    Raises:
      ValueError: no variable names the pod of process 0, or a variable is not a number.
    """
    if not environment.get(POD_INDEX) or not environment.get(NUM_PROCESSES):
        return None
    num_processes = number_of(environment, NUM_PROCESSES)
    if num_processes == 1:
        return None
    if optional_number_of(environment, "JOB_INDEX"):
        raise ValueError(
            f"JOB_INDEX={environment['JOB_INDEX']}: the pods of several Jobs of a JobSet cannot be "
            f"numbered by {POD_INDEX} alone; use one Job of {num_processes} completions "
            "(replicas: 1)"
        )
    return ProcessGroup(
        coordinator=_kubernetes_coordinator(environment),
        num_processes=num_processes,
        process_id=number_of(environment, POD_INDEX),
        local_process_id=0,
        num_local_processes=1,
        source="Kubernetes",
    )


def _kubernetes_coordinator(environment: Mapping[str, str]) -> str:
    """Returns the address of process 0: the name that a headless service gives to its pod."""
    address = environment.get(COORDINATOR, "")
    if ":" in address:
        return address
    jobset, job = environment.get("JOBSET_NAME"), environment.get("REPLICATED_JOB_NAME")
    if not address and jobset and job:
        address = f"{jobset}-{job}-0-0.{jobset}"
    if not address:
        name = environment.get("HOSTNAME", "JOB-N").rpartition("-")[0]
        raise ValueError(
            f"{POD_INDEX} and {NUM_PROCESSES} are set, but no variable names process 0; give the "
            f"Job a headless service and set {COORDINATOR}={name}-0.SERVICE:{_KUBERNETES_PORT} in "
            "its manifest (in a JobSet, JOBSET_NAME and REPLICATED_JOB_NAME are enough)"
        )
    return f"{address}:{optional_number_of(environment, COORDINATOR_PORT) or _KUBERNETES_PORT}"
