"""Describes the job of a launcher: command and environment of its processes, and how they end."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from zerojax.config.late_dataclasses import dataclass
from zerojax.runtime.launch.handshake import TOKEN
from zerojax.runtime.process_group import (
    COORDINATOR,
    LOCAL_PROCESS_ID,
    NUM_LOCAL_PROCESSES,
    NUM_PROCESSES,
    PROCESS_ID,
    SHOW_ALL,
    even_counts,
    split_address,
    visible_gpus,
)
from zerojax.runtime.shutdown import BAD_INPUT, HUNG, INTERRUPTED, OK, SAVED_AND_STOPPED

RESTART = "ZEROJAX_RESTART"
"""Environment variable with the number of times that this launcher started the run before."""

OF_ONE_PROCESS = ("JAX_COORDINATOR_BIND_ADDRESS", "JAX_LOCAL_DEVICE_IDS", TOKEN)
"""Environment variables that are not passed to the processes, because they differ between processes
or hold the launcher's secret."""

DEFAULT_GRACE = 3.0
MAX_GRACE = 4.0
"""Maximum grace period in seconds. All processes have to end within five seconds after a
failure."""

_BOOT = "zerojax.runtime.launch.boot"
_OPTIONS_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")
_OPTIONS = {
    "num_processes": "--nprocs",
    "num_hosts": "--nnodes",
    "max_restarts": "--max-restarts",
}
TOGETHER = 0.5
"""Seconds within which ends of processes may be observed in another order than they happened."""
_MEANINGS = {
    BAD_INPUT: "exit code 2: invalid input, see its message above",
    HUNG: f"exit code {HUNG}: it made no progress, and its watchdog ended it",
    INTERRUPTED: f"exit code {INTERRUPTED}: it was interrupted",
    -signal.SIGKILL: "SIGKILL: killed by a user, or by the kernel for lack of memory",
    -signal.SIGSEGV: "SIGSEGV: a crash in compiled code",
    -signal.SIGBUS: "SIGBUS: a crash in compiled code, or /dev/shm is full",
    -signal.SIGABRT: "SIGABRT: JAX's runtime gave up, see its message above",
}
_KILLS = (-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGILL, -signal.SIGFPE)


@dataclass(frozen=True, kw_only=True)
class Job:
    """Command that a launcher runs in several processes on one or several hosts.

    Attributes:
      command: words of the command, such as ("zerojax", "train", "x.yaml") or ("python",
        "train.py").
      num_processes: number of processes on each host.
      num_hosts: number of hosts.
      host: index of this host, from 0.
      coordinator: "host:port" of host 0, where its launcher waits for the other launchers; None on
        a single host.
      token_file: file with the secret of the launchers of several hosts; None: the sources listed
        in `runtime.launch.handshake`.
      cpu_devices: number of virtual CPU devices of each process; None: use GPUs, or the devices
        that the command selects.
      max_restarts: maximum number of restarts of all processes after a failure.
      grace: seconds between the first failure and the end of the other processes.
      show_all: True: also print known harmless messages of JAX's runtime and gloo.
    """

    command: tuple[str, ...]
    num_processes: int
    num_hosts: int = 1
    host: int = 0
    coordinator: str | None = None
    token_file: str | None = None
    cpu_devices: int | None = None
    max_restarts: int = 0
    grace: float = DEFAULT_GRACE
    show_all: bool = False

    def __post_init__(self) -> None:
        if not self.command:
            raise ValueError(
                "no command to launch; write it after --, such as: zerojax launch --nprocs 2 -- "
                "zerojax train configs/tiny_shakespeare.yaml"
            )
        for name, least in (("num_processes", 1), ("num_hosts", 1), ("max_restarts", 0)):
            if getattr(self, name) < least:
                raise ValueError(
                    f"{_OPTIONS[name]} {getattr(self, name)} is less than {least}; use at least "
                    f"{least}"
                )
        if self.cpu_devices is not None and self.cpu_devices < 1:
            raise ValueError(f"--cpu-devices {self.cpu_devices} is less than 1; use 1 or more")
        if not 0 <= self.grace <= MAX_GRACE:
            raise ValueError(
                f"--grace {self.grace:g} is not between 0 and {MAX_GRACE:g} seconds, the limit "
                "that lets all processes end soon after a failure; use a value in this range"
            )
        if not 0 <= self.host < self.num_hosts:
            raise ValueError(
                f"--node-rank {self.host} is not in [0, {self.num_hosts}); number the hosts from 0"
            )
        if self.num_hosts > 1 and self.coordinator is None:
            raise ValueError(
                f"--nnodes {self.num_hosts} needs --coordinator HOST:PORT, an address of host 0 "
                "that the other hosts can reach; use the same value for every launcher"
            )
        if self.coordinator is not None:
            split_address(self.coordinator, "--coordinator")

    @property
    def total(self) -> int:
        """Number of processes of the job on all hosts."""
        return self.num_processes * self.num_hosts

    @property
    def process_ids(self) -> range:
        """Indices of the job's processes on this host."""
        first = self.host * self.num_processes
        return range(first, first + self.num_processes)

    def host_of(self, process_id: int) -> int:
        """Returns the index of the host on which a process runs."""
        return process_id // self.num_processes


def check_gpus(job: Job, environment: Mapping[str, str]) -> None:
    """Raises if the job's processes cannot share this host's GPUs equally. Called before any
    process is started.

    Raises:
      ValueError: the message lists the numbers of processes that can share the GPUs.
    """
    if job.cpu_devices is not None:
        return
    num_gpus = visible_gpus(environment)
    if num_gpus == 1 and job.num_processes > 1:
        raise ValueError(
            f"--nprocs {job.num_processes} processes cannot share the one visible GPU; start "
            "one process, "
            "or try the run on CPUs with --cpu-devices 1"
        )
    if num_gpus % job.num_processes:
        # JAX_LOCAL_DEVICE_IDS cannot help, because it is not passed on (see `OF_ONE_PROCESS`).
        raise ValueError(
            f"{job.num_processes} processes on this host cannot share {num_gpus} visible GPUs "
            f"evenly; use --nprocs {even_counts(num_gpus)}, or try CPUs with --cpu-devices 1"
        )


def variables_of(job: Job, process_id: int, coordinator: str, restart: int) -> dict[str, str]:
    """Returns the environment variables that one process gets in addition to the launcher's."""
    told = {
        COORDINATOR: coordinator,
        NUM_PROCESSES: str(job.total),
        PROCESS_ID: str(process_id),
        LOCAL_PROCESS_ID: str(process_id - job.process_ids[0]),
        NUM_LOCAL_PROCESSES: str(job.num_processes),
        RESTART: str(restart),
        # Makes processes print whole lines at once, also if they are killed later.
        "PYTHONUNBUFFERED": "1",
    }
    if job.show_all:
        told[SHOW_ALL] = "1"
    if job.cpu_devices is not None:
        told |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(job.cpu_devices)}
    return told


def command_line(job: Job, launcher: int | None = None) -> list[str]:
    """Returns the command line that starts one process, through `zerojax.runtime.launch.boot`.

    In the command, `zerojax` means this installation and `python` its Python. Another Python is
    named by its path or version (python3.12). Any other program replaces the boot process.

    Args:
      job: the job.
      launcher: process id; the started process ends when this process ends. None: the calling
        process.

    Raises:
      ValueError: the command is `python` without a script or module.
    """
    own = [f"--launcher={os.getpid() if launcher is None else launcher}"]
    first, *rest = job.command
    name = Path(first).name
    if name == "zerojax":
        is_train = job.cpu_devices is not None and rest[:1] == ["train"]
        devices = [f"cpu_devices={job.cpu_devices}"] if is_train else []
        return [sys.executable, "-m", _BOOT, *own, "-m", "zerojax", *rest, *devices]
    if re.fullmatch(r"python(\d(\.\d+)?)?", name):
        options, script = _split_options(rest)
        if script[:1] in ([], ["-c"]):
            raise ValueError(
                f"{' '.join(job.command)!r} names neither a script nor a module (-m) to launch"
            )
        # Without an activated environment, `python` may be a Python without zerojax.
        interpreter = sys.executable if first in ("python", "python3") else first
        return [interpreter, *options, "-m", _BOOT, *own, *script]
    if first.endswith(".py"):
        return [sys.executable, "-m", _BOOT, *own, *job.command]
    return [sys.executable, "-m", _BOOT, *own, "--exec", *job.command]


def _split_options(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits a command's words into Python's options, and the script or module with its words."""
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] not in ("-m", "-c", "-"):
        at += 2 if words[at] in _OPTIONS_WITH_VALUE else 1
    return list(words[:at]), list(words[at:])


@dataclass(frozen=True)
class End:
    """How and when one process of a job ended.

    Attributes:
      process_id: index of the process in the run.
      code: exit code, or minus the number of the signal.
      when: time in seconds on the clock of host 0's launcher.
      was_killed: True if a launcher killed it after another process had failed.
    """

    process_id: int
    code: int
    when: float
    was_killed: bool = False

    @property
    def failed(self) -> bool:
        """True if the process failed by itself: it did not end normally, did not save and stop, and
        was not killed by a launcher."""
        return self.code not in (OK, SAVED_AND_STOPPED) and not self.was_killed


def first_failure(ends: Iterable[End]) -> End | None:
    """Returns the failure that caused the other processes to end, or None.

    Among failures at about the same time, a failure from outside (a kill, a crash) has priority
    over an exit code, and an exit code over an abort: when process 0 ends, JAX's runtime aborts all
    other processes.
    """
    failed = [end for end in ends if end.failed]
    if not failed:
        return None
    earliest = min(end.when for end in failed)
    near = [end for end in failed if end.when - earliest < TOGETHER]
    return min(
        near, key=lambda end: (end.code == -signal.SIGABRT, end.code not in _KILLS, end.when)
    )


def describe(code: int) -> str:
    """Describes how a process ended, such as "exit code 3"."""
    if code in _MEANINGS:
        return _MEANINGS[code]
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def exit_code(code: int) -> int:
    """Converts a process's end to a shell's exit code: 128 + n for signal n."""
    return code if code >= 0 else 128 - code


def may_restart(code: int) -> bool:
    """Returns True if a restart can help after a process ended with exit code `code`."""
    return code not in (OK, BAD_INPUT, SAVED_AND_STOPPED, INTERRUPTED)
