"""Real processes of which one keeps the others waiting: the right one is named, with a reason."""

import re
import socket
from pathlib import Path

import pytest

from tests.support.process_groups import run_group
from zerojax.training.metrics import read_metrics

pytestmark = pytest.mark.multihost

TESTS = Path(__file__).parents[1]
SECONDS = 0.25
"""How slow the slow one is in each step, by a clock that stands still otherwise."""


def run(folder: Path, processes: int, what: str, rank: int) -> tuple[str, list[str]]:
    """(what process 0 printed, what the others printed)."""
    words = [
        str(TESTS / "support" / "monitor_process.py"),
        str(folder),
        what,
        str(rank),
        str(SECONDS),
    ]
    variables = {"JAX_NUM_CPU_DEVICES": "1"}
    outputs = run_group([words] * processes, folder=folder, variables=variables, join=True)
    return outputs[0], outputs[1:]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("processes", "what", "rank", "reason"),
    [
        (2, "data", 1, "waiting for data"),
        pytest.param(2, "callback", 0, "its own work on the host", marks=pytest.mark.slow),
        pytest.param(4, "data", 0, "waiting for data", marks=pytest.mark.slow),
        pytest.param(4, "callback", 2, "its own work on the host", marks=pytest.mark.slow),
    ],
)
def test_the_slow_process_is_named_with_its_reason(tmp_path, processes, what, rank, reason):
    printed, others = run(tmp_path, processes, what, rank)
    slow = [line for line in printed.splitlines() if " is slow: " in line]
    assert len(slow) == 1, printed
    host = re.escape(socket.gethostname())
    words = rf"step \d+: rank {rank} \({host}\) is slow: it begins each step 0\.\d+ s late"
    assert re.match(words, slow[0])
    assert f"({reason} 0." in slow[0]
    assert not any("is slow" in output for output in others), "only process 0 reports"
    metrics = read_metrics(tmp_path)
    assert metrics.processes[-1]["processes"] == processes
    late = metrics.processes[len(metrics.processes) // 2]
    assert late["slowest_process"] == rank
    assert late["own_seconds_max"] == pytest.approx(SECONDS)
    events = [event for event in metrics.events if event["event"] == "slow_process"]
    assert [event["process"] for event in events] == [rank]


@pytest.mark.thorough
@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_nobody_is_named_where_all_are_alike(tmp_path, processes):
    printed, _ = run(tmp_path, processes, "none", 0)
    assert " is slow: " not in printed
    metrics = read_metrics(tmp_path)
    assert len(metrics.processes) >= 10
    assert not metrics.events
