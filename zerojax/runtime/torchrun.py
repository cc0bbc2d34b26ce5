"""Process group of torchrun's variables: RANK, WORLD_SIZE, MASTER_ADDR.

Ray and Kubeflow set them, too.
"""

from __future__ import annotations

from collections.abc import Mapping

from zerojax.runtime.process_group import (
    COORDINATOR,
    COORDINATOR_PORT,
    ProcessGroup,
    number_of,
    optional_number_of,
)


def torchrun_group(environment: Mapping[str, str]) -> ProcessGroup | None:
    """The group that RANK and WORLD_SIZE name; None without both, and for a single process.

    Raises:
      ValueError: MASTER_ADDR or MASTER_PORT is missing, or a variable holds no number.
    """
    if not (environment.get("RANK") and environment.get("WORLD_SIZE")):
        return None
    num_processes = number_of(environment, "WORLD_SIZE")
    if num_processes == 1:
        return None
    num_local = optional_number_of(environment, "LOCAL_WORLD_SIZE")
    return ProcessGroup(
        coordinator=environment.get(COORDINATOR) or _coordinator(environment),
        num_processes=num_processes,
        process_id=number_of(environment, "RANK"),
        local_process_id=optional_number_of(environment, "LOCAL_RANK"),
        num_local_processes=num_local,
        source="torchrun's variables",
    )


def _coordinator(environment: Mapping[str, str]) -> str:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not environment.get(name):
            raise ValueError(
                f"RANK={environment['RANK']} and WORLD_SIZE={environment['WORLD_SIZE']} are set, "
                f"but {name} is not; set it to where process 0 is, or unset RANK to run alone"
            )
    port = optional_number_of(environment, COORDINATOR_PORT)
    if port is None:
        port = number_of(environment, "MASTER_PORT")
        # torchrun itself listens on MASTER_PORT for as long as its processes run.
        if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            port += 1 if port < 65535 else -1
    host = environment["MASTER_ADDR"]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
