"""Real processes of which one keeps the others waiting: the right one is named, with a reason."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from zerojax.metrics import read_metrics

pytestmark = pytest.mark.multihost

TESTS = Path(__file__).parent
SECONDS = 0.25
"""How slow the slow one is in each step; a step alone takes some milliseconds here, and under load
some tens."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run(folder: Path, processes: int, what: str, rank: int) -> tuple[str, list[str]]:
    """(what process 0 printed, what the others printed)."""
    port, started = free_port(), []
    try:
        for index in range(processes):
            environment = {
                **os.environ,
                "PYTHONPATH": str(TESTS.parent),
                "JAX_NUM_CPU_DEVICES": "1",
                "ZEROJAX_COORDINATOR": f"127.0.0.1:{port}",
                "ZEROJAX_NUM_PROCESSES": str(processes),
                "ZEROJAX_PROCESS_ID": str(index),
            }
            command = [str(TESTS / "monitor_process.py"), str(folder), what, str(rank)]
            started.append(
                subprocess.Popen(
                    [sys.executable, *command, str(SECONDS)],
                    cwd=folder,
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        outputs = [process.communicate(timeout=240)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    for process, output in zip(started, outputs, strict=True):
        assert process.returncode == 0, output
    return outputs[0], outputs[1:]


@pytest.mark.parametrize(
    ("processes", "what", "rank", "reason"),
    [
        (2, "data", 1, "waiting for data"),
        (2, "callback", 0, "its own work on the host"),
        pytest.param(4, "data", 0, "waiting for data", marks=pytest.mark.slow),
        pytest.param(4, "callback", 2, "its own work on the host", marks=pytest.mark.slow),
    ],
)
def test_the_slow_process_is_named_with_its_reason(tmp_path, processes, what, rank, reason):
    printed, others = run(tmp_path, processes, what, rank)
    slow = [line for line in printed.splitlines() if " is slow: " in line]
    assert len(slow) == 1, printed
    host = re.escape(socket.gethostname())
    assert re.match(rf"step \d+: rank {rank} \({host}\) is slow: 0\.\d+ s of each step", slow[0])
    assert f"({reason} 0." in slow[0]
    assert not any("is slow" in output for output in others), "only process 0 reports"
    metrics = read_metrics(tmp_path)
    assert metrics.processes[-1]["processes"] == processes
    late = metrics.processes[len(metrics.processes) // 2]
    assert late["slowest_process"] == rank
    # Batches are read ahead: what a step takes by itself is not waited for.
    assert late["own_seconds_max"] >= 0.4 * SECONDS
    events = [event for event in metrics.events if event["event"] == "slow_process"]
    assert [event["process"] for event in events] == [rank]


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_nobody_is_named_where_all_are_alike(tmp_path, processes):
    printed, _ = run(tmp_path, processes, "none", 0)
    assert " is slow: " not in printed
    metrics = read_metrics(tmp_path)
    assert len(metrics.processes) >= 10
    assert not metrics.events
