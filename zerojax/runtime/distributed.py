"""Starts the process group of `jax.distributed`, and recognizes errors caused by a lost process.

Before the start, the coordinator's address is checked and the GPUs of this process are selected.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence

import jax

from zerojax.config.checks import names_keywords
from zerojax.runtime.plugin_errors import hide_plugin_errors
from zerojax.runtime.process_group import (
    COORDINATOR,
    COORDINATOR_PORT,
    SHOW_ALL,
    local_device_ids,
    number_of,
    split_address,
    visible_gpus,
)
from zerojax.runtime.process_group import ProcessGroup as ProcessGroup
from zerojax.runtime.schedulers import process_group_of
from zerojax.runtime.shutdown import FAILED, leave_on_uncaught_errors, leave_when_one_is_lost

HEARTBEAT_SECONDS, JOIN_SECONDS = "ZEROJAX_HEARTBEAT_SECONDS", "ZEROJAX_JOIN_SECONDS"
DEFAULT_HEARTBEAT_SECONDS = 60
"""Seconds without a sign of life after which a process counts as lost. NCCL detects no lost
process: on GPUs the other processes wait in a collective for this time."""
DEFAULT_JOIN_SECONDS = 300
_OWN_NAME_SECONDS = 60.0
_NAMING_SECONDS = 1.0

_NUM_CPU_DEVICES, _PLATFORMS = "jax_num_cpu_devices", "jax_platforms"
# gRPC reads only these two spellings; the first has priority.
_NO_PROXY, _NO_PROXY_AT_ALL = "no_grpc_proxy", "no_proxy"
BIND_ADDRESS, LOCAL_DEVICES = "JAX_COORDINATOR_BIND_ADDRESS", "JAX_LOCAL_DEVICE_IDS"
_SIGNS = re.compile(
    r"\bgloo\b|\bNCCL\b|nccl(UnhandledCuda|System|Remote|Internal)Error"
    r"|coordination service|CoordinationService|coordination agent|PjRt-Client-Connect"
    r"|Connection reset by peer|Connection closed by peer|heartbeat",
    re.IGNORECASE,
)


@names_keywords()
def join_processes(group: ProcessGroup | None = None) -> ProcessGroup | None:
    """Joins the processes of a run; call it before JAX initializes a device.

    `zerojax train` and `zerojax.train` call it. A script that creates arrays or meshes earlier must
    call it first. A second call does nothing. Afterwards an uncaught exception ends this process at
    once with its exit code; JAX alone would wait five minutes for the other processes. If not all
    processes join within ZEROJAX_JOIN_SECONDS, this process prints an error and ends with code 1.

    Args:
      group: the process group. None: read it from the environment, from ZEROJAX_COORDINATOR,
        ZEROJAX_NUM_PROCESSES and ZEROJAX_PROCESS_ID, or from the variables of Slurm, Open MPI,
        Kubernetes or torchrun. ZEROJAX_NUM_PROCESSES=1 makes every process a separate run.

    Returns:
      The group, or None when this process runs alone.

    Raises:
      ValueError: the environment variables are incomplete or contradict each other.
      RuntimeError: JAX has already initialized its devices.
      ConnectionError: process 0 was not reached within ZEROJAX_JOIN_SECONDS (300).
      OSError: process 0 cannot listen on the coordinator's address.
    """
    hide_plugin_errors()
    # A script may have set the platform in `jax.config`, whose initial value is the variable's.
    num_gpus = visible_gpus({**os.environ, "JAX_PLATFORMS": getattr(jax.config, _PLATFORMS) or ""})
    if not num_gpus and getattr(jax.config, _NUM_CPU_DEVICES) > 1:
        # Virtual CPU devices share threads: two programs with collectives can deadlock.
        jax.config.update("jax_cpu_enable_async_dispatch", False)
    group = process_group_of(os.environ) if group is None else group
    if group is None or jax.distributed.is_initialized():
        return group
    if _devices_have_started():
        raise RuntimeError(_not_joined(group))
    heartbeat = _seconds(HEARTBEAT_SECONDS, DEFAULT_HEARTBEAT_SECONDS)
    limit = _seconds(JOIN_SECONDS, DEFAULT_JOIN_SECONDS)
    # JAX reads this variable itself.
    devices = None if os.environ.get(LOCAL_DEVICES) else local_device_ids(group, num_gpus)
    # By default JAX listens on all network interfaces of the machine.
    bind = os.environ.get(BIND_ADDRESS) or group.coordinator
    _reach_directly(group)
    began = time.monotonic()
    if group.process_id == 0:
        _check_free(bind, group, min(limit, _OWN_NAME_SECONDS))
    else:
        _wait_for(group, limit)
    _initialize(
        group,
        coordinator_bind_address=bind,
        local_device_ids=devices,
        heartbeat_timeout_seconds=heartbeat,
        seconds=max(1.0, limit - (time.monotonic() - began)),
    )
    leave_on_uncaught_errors(is_coordinator=group.process_id == 0)
    if not os.environ.get(SHOW_ALL):
        leave_when_one_is_lost(group.process_id, group.num_processes)
    print(_describe(group, devices, num_gpus), file=sys.stderr, flush=True)
    return group


def check_joined() -> None:
    """Raises if the environment describes a process group that this process has not joined.

    Raises:
      RuntimeError: the process has not joined, so each process would train by itself.
    """
    if jax.distributed.is_initialized():
        return
    group = process_group_of(os.environ)
    if group is not None:
        raise RuntimeError(_not_joined(group))


def _devices_have_started() -> bool:
    """Returns True if JAX has initialized its devices.

    JAX has no query for this. The test uses that JAX refuses to change one of its settings once the
    devices are initialized.
    """
    number = getattr(jax.config, _NUM_CPU_DEVICES)
    try:
        jax.config.update(_NUM_CPU_DEVICES, abs(number) + 1)
    except RuntimeError:
        return True
    jax.config.update(_NUM_CPU_DEVICES, number)
    return False


def _not_joined(group: ProcessGroup) -> str:
    return (
        f"this is process {group.process_id} of {group.num_processes} ({group.source}), but it has "
        "not joined the others, and each would train by itself; call zerojax.join_processes() "
        "before the first array or use of devices, or set ZEROJAX_NUM_PROCESSES=1 if "
        "each process is a separate run"
    )


def _seconds(name: str, default: int) -> int:
    seconds = number_of(os.environ, name) if os.environ.get(name) else default
    if seconds < 1:
        raise ValueError(f"{name}={seconds} is below 1 second; use 1 or more (default {default})")
    return seconds


def _reach_directly(group: ProcessGroup) -> None:
    """Excludes the coordinator's host from HTTP proxies that environment variables set for gRPC."""
    host, _ = split_address(group.coordinator)
    around = os.environ.get(_NO_PROXY) or os.environ.get(_NO_PROXY_AT_ALL)
    os.environ[_NO_PROXY] = ",".join([*(around.split(",") if around else []), host])
    jax.config.update("jax_check_proxy_envs", False)


def _check_free(bind: str, group: ProcessGroup, limit: float) -> None:
    """Raises if this process, the coordinator, cannot listen on the address `bind`.

    JAX's own errors do not name the reason.

    Args:
      bind: "host:port" to listen on.
      group: the process group.
      limit: seconds until the host name must be resolvable; clusters publish names after a start.

    Raises:
      ConnectionError: the host name cannot be resolved.
      OSError: the address is in use, is not an address of this host, or cannot be reached from
        other hosts.
    """
    is_own_choice = bind != group.coordinator
    host, port = split_address(bind, BIND_ADDRESS if is_own_choice else COORDINATOR)
    addresses = _resolve(host, port, limit)
    several_hosts = group.num_local_processes is not None and not group.is_on_one_host
    all_local = all(ipaddress.ip_address(address[0]).is_loopback for _, address in addresses)
    if several_hosts and all_local and not is_own_choice:
        raise OSError(
            f"the coordinator {bind} is {addresses[0][1][0]} on this host, which no other host can "
            "reach; set ZEROJAX_COORDINATOR to an address of the network between the hosts"
        )
    failures = []
    for family, address in addresses:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # Ignores lingering connections of an ended run, as servers do.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
            except OSError as error:
                failures.append(error.errno or 0)
    if errno.EADDRINUSE in failures:
        raise OSError(
            f"the coordinator's address {bind} is in use by another program of this host; end that "
            f"program, or set another port for all processes with {_names_of_port(is_own_choice)}"
        )
    if len(failures) == len(addresses):
        raise OSError(
            f"process 0 cannot listen on {bind}: {os.strerror(failures[0])}; no network interface "
            f"of {socket.gethostname()} has that address, or the port is not allowed. Set "
            f"ZEROJAX_COORDINATOR to an address of the host of process 0, or {BIND_ADDRESS} if "
            "that host uses another address itself"
        )


def _names_of_port(is_own_choice: bool) -> str:
    """Returns, for a message, the environment variables that change the port of process 0."""
    if is_own_choice:
        return f"{BIND_ADDRESS} and {COORDINATOR}"
    # A complete address has priority over a port.
    return COORDINATOR if os.environ.get(COORDINATOR) else f"{COORDINATOR_PORT} or {COORDINATOR}"


def _resolve(host: str, port: int, limit: float) -> list[tuple[int, tuple]]:
    deadline = time.monotonic() + limit
    while True:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            return [(family, address) for family, _, _, _, address in found]
        except OSError as error:
            if time.monotonic() + 1.0 > deadline:
                raise ConnectionError(
                    f"the coordinator's host {host!r} could not be resolved on this host within "
                    f"{limit:g} seconds ({error.strerror or error}); set ZEROJAX_COORDINATOR to a "
                    "name or address that every host can resolve"
                ) from None
        time.sleep(1.0)


def _wait_for(group: ProcessGroup, limit: float) -> None:
    """Waits until process 0 listens on the coordinator's address. A cluster may publish the host
    name only when process 0 starts.

    Raises:
      ConnectionError: process 0 does not listen within `limit` seconds.
    """
    host, port = split_address(group.coordinator)
    deadline, pause = time.monotonic() + limit, 0.05
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
            return
        except OSError as error:
            reason = error.strerror or str(error)
        if time.monotonic() + pause > deadline:
            break
        time.sleep(pause)
        pause = min(2 * pause, 1.0)
    raise ConnectionError(
        f"process {group.process_id} of {group.num_processes} did not reach the coordinator "
        f"{group.coordinator} within {limit:g} seconds ({reason}); check that process 0 has "
        "started on that host and that no firewall blocks the port, or set ZEROJAX_JOIN_SECONDS "
        "to wait longer"
    )


def _initialize(group: ProcessGroup, *, seconds: float, **options: object) -> None:
    """Calls `jax.distributed.initialize`. If that takes longer than `seconds`, prints an error and
    ends the process with code `FAILED`."""

    def give_up() -> None:
        print(
            f"zerojax: error: not all {group.num_processes} processes of the run have reached the "
            f"coordinator {group.coordinator} in time (this is process {group.process_id}); check "
            "whether a process failed or was not started, or set ZEROJAX_JOIN_SECONDS to wait more",
            file=sys.stderr,
            flush=True,
        )
        os._exit(FAILED)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        jax.distributed.initialize(
            group.coordinator,
            group.num_processes,
            group.process_id,
            # `process_group_of` has found the group already.
            cluster_detection_method="deactivate",
            initialization_timeout=int(seconds) + 60,  # later than our own message
            **options,  # type: ignore[arg-type]
        )
    finally:
        timer.cancel()


def _describe(group: ProcessGroup, devices: list[int] | None, num_gpus: int) -> str:
    """Returns one line that describes this process; for process 0 the line begins with a
    description of the whole group."""
    if os.environ.get(LOCAL_DEVICES):
        where = f"devices [{os.environ[LOCAL_DEVICES]}]"
    elif devices is not None:
        where = f"devices {devices}"
    else:
        where = f"all {num_gpus} GPUs" if num_gpus else "on CPUs"
    name = f"rank {group.process_id}/{group.num_processes} on {socket.gethostname()}, {where}"
    if group.process_id:
        return name
    return f"{group.num_processes} processes ({group.source}) at {group.coordinator}; {name}"


class PeerLostError(RuntimeError):
    """Another process of this run has ended, so this process cannot continue.

    Args:
      step: the last step that this process began.
      saved: numbers of the existing checkpoints, oldest first.
      resume_hint: sentence part that says how to continue the run.
    """

    exit_code = FAILED
    is_bad_input = False

    def __init__(self, step: int, saved: Sequence[int], resume_hint: str) -> None:
        last = f"the last checkpoint is step {saved[-1]}" if saved else "no step is saved"
        process, of = jax.process_index(), jax.process_count()
        super().__init__(
            f"{f'process {1 - process}' if of == 2 else 'another process'} of this run has ended; "
            f"this process (process {process} of {of}) noticed it after step {step}; see the "
            "reason in the output of that process or of "
            f"the launcher; {last}; {resume_hint}"
        )


def is_peer_loss(error: BaseException) -> bool:
    """Returns True if an error, or its cause, comes from a lost connection to another process.

    The error does not say which one. So of more than two processes each, except process 0, waits
    for a second: if process 0 was lost, `leave_when_one_is_lost` names it and ends this process.
    """
    is_loss = any(_SIGNS.search(str(each)) for each in _chain(error))
    if is_loss and jax.process_count() > 2 and jax.process_index() != 0:
        time.sleep(_NAMING_SECONDS)
    return is_loss


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
