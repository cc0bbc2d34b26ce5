"""Runs the programs of one window at the same time and lets them take steps in turn.

Handles processes, cores and environment variables, whatever a program does in its step.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.compare.catalogue import BARE, Way
from benchmarks.workers import HOST, WorkerFailed, Workers, free_port, slowest

ROOT = Path(__file__).resolve().parent.parent.parent
WARM_UP = 3
STEPS_PER_TURN = 3
TURNS = 5
SMOKE_TURNS = 3
CORES = 2
PATIENCE = 240.0
"""Time limit in seconds of the steps of a turn, or of start, compilation and warm-up."""
_LOG_LINES = 12


@dataclasses.dataclass
class Taken:
    """Measurements of a program: lists with one entry per step; times exclude the warm-up.

    Attributes:
      wall, cpu: seconds per step of the slower process.
      losses: losses of all steps, averaged over the processes.
      sent: bytes of the process that sent more; None if the system does not count them.
      peak_mb: peak memory of the larger process, in MB.
      failure: reason why the program did not finish.
    """

    wall: list[float] = dataclasses.field(default_factory=list)
    cpu: list[float] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)
    sent: list[int | None] = dataclasses.field(default_factory=list)
    peak_mb: int | None = None
    failure: str | None = None

    def add(self, answers: list[dict[str, Any]], *, timed: bool) -> None:
        """Adds the answers of all processes to one request."""
        of_steps = zip(*(answer["loss"] for answer in answers), strict=True)
        self.losses += [sum(losses) / len(losses) for losses in of_steps]
        peaks = [answer["peak_mb"] for answer in answers]
        self.peak_mb = None if None in peaks else max(peaks)
        if timed:
            self.wall += slowest(answers, "wall")
            self.cpu += slowest(answers, "cpu")
            of_steps = zip(*(answer["sent"] for answer in answers), strict=True)
            self.sent += [None if None in sent else max(sent) for sent in of_steps]


def measure(
    ways: Iterable[Way],
    pythons: Mapping[str, str],
    folder: Path,
    *,
    smoke: bool,
    patience: float = PATIENCE,
) -> dict[str, Taken]:
    """Returns {name: measurements} of the programs and of the bare steps of their frameworks.

    Args:
      ways: programs whose packages are installed.
      pythons: {"jax" | "torch" | "deepspeed": Python interpreter with this package}.
      folder: folder of the exported files; logs are written to it as well.
      smoke: use a tiny model and fewer turns.
      patience: seconds after which a program without an answer is ended.
    """
    ways = list(ways)
    bare = dict.fromkeys(way.bare for way in ways)
    running = {name: BARE[name] for name in bare} | {way.name: way for way in ways}
    taken = {name: Taken() for name in running}
    groups = {
        name: Workers(
            *_processes(way, pythons, folder, smoke),
            folder=ROOT,
            log=_log_of(way, folder),
            seconds=patience,
        )
        for name, way in running.items()
    }
    try:
        _turn(groups, taken, WARM_UP, reverse=False, timed=False)
        for turn in range(SMOKE_TURNS if smoke else TURNS):
            _turn(groups, taken, STEPS_PER_TURN, reverse=turn % 2 == 1, timed=True)
    finally:
        for group in groups.values():
            group.end()
    for name, one in taken.items():
        if one.failure:
            one.failure += _last_lines(_log_of(running[name], folder))
    return taken


def _turn(
    groups: dict[str, Workers], taken: dict[str, Taken], steps: int, *, reverse: bool, timed: bool
) -> None:
    """Lets each program take `steps` steps while the others wait; failed programs are left out."""
    for name in list(reversed(groups)) if reverse else list(groups):
        try:
            taken[name].add(groups[name].ask(steps), timed=timed)
        except WorkerFailed as error:
            taken[name].failure = str(error)
            groups.pop(name).end()


def _processes(
    way: Way, pythons: Mapping[str, str], folder: Path, smoke: bool
) -> tuple[list[list[str]], list[dict[str, str]]]:
    """Returns (commands, environments) of a program's processes on cores 0, 1, ...

    A way of one process runs once per core, without talking, so that T1 has a busy machine, too.
    """
    commands, environments = [], []
    port = free_port()
    talking = way.processes > 1
    for core in range(CORES):
        task = {
            "way": way.file,
            "options": dict(way.options),
            "framework": way.framework,
            "index": core if talking else 0,
            "count": way.processes,
            "core": core,
            "folder": str(folder),
            "smoke": smoke,
        }
        command = [pythons[way.needs], "-m", "benchmarks.compare.worker", json.dumps(task)]
        commands.append(command)
        environments.append(_environment(core, port if talking else None))
    return commands, environments


def _environment(index: int, port: int | None) -> dict[str, str]:
    """Returns variables for one thread per process and, with a port, torchrun's variables."""
    unwanted = ("XLA_FLAGS", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in unwanted}
    environment |= {
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
    }
    if port is not None:
        environment |= {
            "MASTER_ADDR": HOST,
            "MASTER_PORT": str(port),
            "RANK": str(index),
            "LOCAL_RANK": str(index),
            "WORLD_SIZE": str(CORES),
            "GLOO_SOCKET_IFNAME": "lo",
        }
    return environment


def _log_of(way: Way, folder: Path) -> Path:
    return folder / f"{way.name.replace(' ', '_').replace(',', '')}.log"


def _last_lines(log: Path) -> str:
    text = log.read_text(errors="replace") if log.is_file() else ""
    lines = [line for line in text.splitlines() if line.strip()]
    return "".join(f"\n    {line}" for line in lines[-_LOG_LINES:])
