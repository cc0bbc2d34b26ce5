"""Worker processes that take steps on request, so that several ways can be timed in alternation.

Handles pipes, cores and time limits, whatever a step does. Imports neither JAX nor torch.
"""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

HOST = "127.0.0.1"
_ANSWER = "answer "
_ENDED = None
_SECONDS_TO_END = 20.0


class WorkerFailed(RuntimeError):
    """Raised if a worker has ended, or has not answered in time."""


class Workers:
    """A group of processes, one per command, that step together.

    Args:
      commands: command line of each process.
      environments: environment variables of each process.
      folder: working folder of the processes.
      log: file for their standard error; None shows it.
      seconds: time limit for the answer to a request.
    """

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        environments: Sequence[Mapping[str, str]],
        *,
        folder: Path | None = None,
        log: Path | None = None,
        seconds: float = 600,
    ) -> None:
        self._seconds = seconds
        self._processes: list[subprocess.Popen[str]] = []
        self._lines: list[queue.Queue[str | None]] = []
        self._readers: list[threading.Thread] = []
        with contextlib.ExitStack() as stack:
            errors = None if log is None else stack.enter_context(log.open("a"))
            for command, environment in zip(commands, environments, strict=True):
                process = subprocess.Popen(
                    command,
                    cwd=folder,
                    env=dict(environment),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                )
                self._processes.append(process)
                lines: queue.Queue[str | None] = queue.Queue()
                self._lines.append(lines)
                reader = threading.Thread(target=_read, args=(process, lines), daemon=True)
                reader.start()
                self._readers.append(reader)

    def ask(self, steps: int) -> list[dict[str, Any]]:
        """Lets all processes take `steps` steps; returns their answers, in order.

        Raises:
          WorkerFailed: a process has ended, or an answer took too long.
        """
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(OSError):  # the missing answer reports that it has ended
                process.stdin.write(f"{steps}\n")
                process.stdin.flush()
        return self._answers(time.monotonic() + self._seconds)

    def _answers(self, deadline: float) -> list[dict[str, Any]]:
        """Collects answers of all processes in turn, since the others hang if one has ended."""
        answers: dict[int, dict[str, Any]] = {}
        while len(answers) < len(self._processes):
            for index, lines in enumerate(self._lines):
                if index in answers:
                    continue
                with contextlib.suppress(queue.Empty):
                    line = lines.get(timeout=0.01)
                    if line is _ENDED:
                        status = self._processes[index].wait(timeout=_SECONDS_TO_END)
                        raise WorkerFailed(f"worker {index} ended with status {status}")
                    if line.startswith(_ANSWER):  # libraries write to standard output as well
                        answers[index] = json.loads(line.removeprefix(_ANSWER))
            if time.monotonic() > deadline:
                raise WorkerFailed(f"no answer within {self._seconds:g} s; it was ended")
        return [answers[index] for index in range(len(self._processes))]

    def end(self, seconds: float = _SECONDS_TO_END) -> None:
        """Ends the workers by closing their input; kills those that run after `seconds`."""
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
        deadline = time.monotonic() + seconds
        for process, reader in zip(self._processes, self._readers, strict=True):
            try:
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            reader.join(timeout=_SECONDS_TO_END)
            assert process.stdout is not None
            process.stdout.close()


def _read(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put(_ENDED)


def serve(take_step: Callable[[], Mapping[str, float]], finish: Callable[[], Mapping]) -> None:
    """Runs the worker's side: takes the number of steps in each line of standard input.

    Args:
      take_step: takes one step, waits for it, and returns {name: value}. Values are collected in
        lists, together with the seconds `wall` and `cpu` (CPU time of this process).
      finish: returns further values for every answer.
    """
    for line in sys.stdin:
        answer: dict[str, Any] = {"wall": [], "cpu": []}
        for _ in range(int(line)):
            wall, cpu = time.perf_counter(), time.process_time()
            more = take_step()
            answer["wall"].append(time.perf_counter() - wall)
            answer["cpu"].append(time.process_time() - cpu)
            for name, value in more.items():
                answer.setdefault(name, []).append(value)
        print(_ANSWER + json.dumps(answer | dict(finish())), flush=True)


def slowest(answers: Sequence[Mapping[str, Any]], clock: str) -> list[float]:
    """Returns for each step the time of the slowest process."""
    return [max(times) for times in zip(*(answer[clock] for answer in answers), strict=True)]


def free_port() -> int:
    """Returns a free port of the loopback interface."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]
