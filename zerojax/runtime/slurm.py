"""Process group of Slurm's `srun`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from zerojax.runtime.process_group import (
    ProcessGroup,
    coordinator_on,
    number_of,
    optional_number_of,
)

# Steps that no `srun` has started (batch script, interactive shell, extern) have numbers above.
_FIRST_RESERVED_STEP = 0xFFFFFFF0


def slurm_group(environment: Mapping[str, str]) -> ProcessGroup | None:
    """The tasks of this job step; None outside one, and in a step of a single task.

    A shell inside `salloc` and the batch script itself stand in a job, but in no step of several
    tasks, whatever SLURM_NTASKS says there of the allocation.

    Raises:
      ValueError: a variable holds what Slurm does not write.
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
    """Hosts of a compressed list: "n[01-03,7],gpu2" names n01, n02, n03, n7 and gpu2.

    Raises:
      ValueError: the list is not one that Slurm writes.
    """
    # Commas inside brackets separate numbers, those outside separate names.
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
            raise ValueError(f"SLURM_STEP_NODELIST={text!r} is no list of hosts: {part!r}")
        first, last = match[1], match[2] or match[1]
        for number in range(int(first), int(last) + 1):
            for end in _expand_name(after, text) if after else ("",):
                yield f"{before}{number:0{len(first)}}{end}"


def expand_counts(text: str, name: str) -> list[int]:
    """Tasks of each host of "8(x2),4": 8, 8 and 4.

    Raises:
      ValueError: the text is no such list.
    """
    counts = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ValueError(f"{name}={text!r} is no list of tasks per host: {part!r}")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _tasks_here(environment: Mapping[str, str], num_processes: int, num_hosts: int) -> int | None:
    """Tasks on this host; None where Slurm's variables do not say."""
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        if not environment.get(name):
            continue
        counts = expand_counts(environment[name], name)
        if sum(counts) != num_processes or len(counts) != num_hosts:
            continue  # of the allocation, while the step has other tasks
        index = optional_number_of(environment, "SLURM_NODEID")
        if len(set(counts)) == 1:
            return counts[0]
        if index is not None and index < len(counts):
            return counts[index]
    if num_hosts == 1:
        return num_processes
    return 1 if num_hosts == num_processes else None


def _gpus_per_task(environment: Mapping[str, str]) -> int | None:
    """What --gpus-per-task asked for: "2", or with a type, "h200:2" or "gpu:h200:2"."""
    text = environment.get("SLURM_GPUS_PER_TASK", "")
    last = text.rpartition(":")[2]
    return int(last) if last.isdecimal() else None
