"""Processes of a test that form a group over the loopback interface, bounded in time."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax

from zerojax.runtime import distributed

ROOT = Path(__file__).resolve().parents[2]


def join(devices: int, *, optimised: bool = False) -> None:
    """Makes this process one of its group, with CPU devices; what starts XLA comes after it."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    jax.config.update("jax_disable_most_optimizations", not optimised)
    if os.environ.get("ZEROJAX_NUM_PROCESSES"):
        distributed.join_processes()


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def end_group(
    words: Sequence[Sequence[str]],
    *,
    folder: Path | None = None,
    variables: Mapping[str, str] | None = None,
    join: bool = True,
    seconds: float = 240,
    after_first: float | None = None,
) -> list[tuple[int, str]]:
    """Returns (exit code, output) of each of several Python processes.

    Args:
      words: of each process, what stands behind `python`.
      folder: they run in.
      variables: of the environment of all of them.
      join: also the variables that make a group of them for zerojax.
      seconds: until they are killed.
      after_first: seconds after the end of the first one until the others are killed; None: there
        is no such limit.
    """
    address, started = f"127.0.0.1:{free_port()}", []
    common = {**os.environ, "PYTHONPATH": str(ROOT), **(variables or {})}
    try:
        for index, own in enumerate(words):
            group = {
                "ZEROJAX_COORDINATOR": address,
                "ZEROJAX_NUM_PROCESSES": str(len(words)),
                "ZEROJAX_PROCESS_ID": str(index),
            }
            started.append(
                subprocess.Popen(
                    [sys.executable, *own],
                    cwd=folder,
                    env=common | (group if join else {}),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        if after_first is not None:
            threading.Thread(target=_kill_late, args=(started, after_first), daemon=True).start()
        outputs = [process.communicate(timeout=seconds)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    return [(one.returncode, text) for one, text in zip(started, outputs, strict=True)]


def _kill_late(started: Sequence[subprocess.Popen[str]], seconds: float) -> None:
    """Kills the processes that still run some seconds after the first of them has ended."""
    while all(process.poll() is None for process in started):
        time.sleep(0.1)
    time.sleep(seconds)
    for process in started:
        process.kill()


def run_group(
    words: Sequence[Sequence[str]],
    *,
    folder: Path | None = None,
    variables: Mapping[str, str] | None = None,
    join: bool = False,
    seconds: float = 240,
) -> list[str]:
    """Returns the outputs of `end_group`, whose processes all have to end with 0."""
    ended = end_group(words, folder=folder, variables=variables, join=join, seconds=seconds)
    codes = [code for code, _ in ended]
    outputs = [text for _, text in ended]
    assert codes == [0] * len(codes), "\n".join([str(codes), *outputs])
    return outputs
