"""Process group of a Kubernetes indexed Job or JobSet.

The cluster's API is never called, so a pod needs no permission and no client library.
"""

from __future__ import annotations

from collections.abc import Mapping

from zerojax.runtime.process_group import (
    COORDINATOR,
    COORDINATOR_PORT,
    NUM_PROCESSES,
    ProcessGroup,
    number_of,
    optional_number_of,
)

INDEX = "JOB_COMPLETION_INDEX"
DEFAULT_PORT = 12355


def kubernetes_group(environment: Mapping[str, str]) -> ProcessGroup | None:
    """The pods of this indexed Job; None outside one.

    JOB_COMPLETION_INDEX comes from Kubernetes, ZEROJAX_NUM_PROCESSES from the manifest. Without the
    latter each pod of the Job is a run of its own.

    Raises:
      ValueError: nothing names the pod of process 0, or a variable holds no number.
    """
    if not environment.get(INDEX) or not environment.get(NUM_PROCESSES):
        return None
    num_processes = number_of(environment, NUM_PROCESSES)
    if num_processes == 1:
        return None
    if optional_number_of(environment, "JOB_INDEX"):
        raise ValueError(
            f"JOB_INDEX={environment['JOB_INDEX']}: the pods of several Jobs of a JobSet cannot be "
            f"numbered by {INDEX} alone; use one Job of {num_processes} completions (replicas: 1)"
        )
    return ProcessGroup(
        coordinator=_coordinator(environment),
        num_processes=num_processes,
        process_id=number_of(environment, INDEX),
        local_process_id=0,
        num_local_processes=1,
        source="Kubernetes",
    )


def _coordinator(environment: Mapping[str, str]) -> str:
    """Process 0 by the name that the headless service of the Job gives its pod."""
    address = environment.get(COORDINATOR, "")
    if ":" in address:
        return address
    jobset, job = environment.get("JOBSET_NAME"), environment.get("REPLICATED_JOB_NAME")
    if not address and jobset and job:
        address = f"{jobset}-{job}-0-0.{jobset}"
    if not address:
        name = environment.get("HOSTNAME", "JOB-N").rpartition("-")[0]
        raise ValueError(
            f"{INDEX} and {NUM_PROCESSES} are set, but nothing names process 0; give the Job a "
            f"headless service and set {COORDINATOR}={name}-0.SERVICE:{DEFAULT_PORT} in its "
            "manifest (in a JobSet, JOBSET_NAME and REPLICATED_JOB_NAME will do)"
        )
    return f"{address}:{optional_number_of(environment, COORDINATOR_PORT) or DEFAULT_PORT}"
