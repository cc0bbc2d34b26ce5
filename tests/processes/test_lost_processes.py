"""A process of a run is killed: each of the others ends with one sentence, its code and no stack.

Real processes that only wait, so that no failed collective tells them before JAX's runtime does.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.process_groups import ROOT, free_port
from zerojax.runtime import shutdown

pytestmark = [pytest.mark.multihost, pytest.mark.thorough]

SCRIPT = """
import os, sys, time
from pathlib import Path
import jax, zerojax
group = zerojax.join_processes()
jax.devices()
os.write(2, b"from C\\n")
print("from Python", file=sys.stderr)
(Path(__file__).parent / f"pid-{group.process_id}").write_text(f"{os.getpid()}\\n")
time.sleep(240)
"""


def by_hand(index: int, count: int, port: int) -> dict[str, str]:
    return {
        "ZEROJAX_COORDINATOR": f"127.0.0.1:{port}",
        "ZEROJAX_NUM_PROCESSES": str(count),
        "ZEROJAX_PROCESS_ID": str(index),
    }


def by_slurm(index: int, count: int, port: int) -> dict[str, str]:
    return {
        "ZEROJAX_COORDINATOR_PORT": str(port),
        "SLURM_JOB_ID": "4242",
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": str(count),
        "SLURM_STEP_NUM_TASKS": str(count),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_TASKS_PER_NODE": str(count),
        "SLURM_PROCID": str(index),
        "SLURM_LOCALID": str(index),
        "SLURM_NODEID": "0",
    }


def started(folder: Path, words: list[str], variables: dict[str, str]) -> subprocess.Popen[str]:
    common = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "ZEROJAX_HEARTBEAT_SECONDS": "4"}
    return subprocess.Popen(
        [sys.executable, *words, str(folder / "script.py")],
        env={**os.environ, **common, **variables},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def pids(folder: Path, count: int) -> list[int]:
    """Process ids of all processes, once they have joined."""
    deadline = time.monotonic() + 120
    paths = [folder / f"pid-{index}" for index in range(count)]
    while not all(path.exists() and path.read_text().endswith("\n") for path in paths):
        assert time.monotonic() < deadline, "the processes have not joined"
        time.sleep(0.05)
    return [int(path.read_text()) for path in paths]


def check_said(output: str, lost: int) -> None:
    assert output.count("from C\n") == output.count("from Python\n") == 1, output
    assert len(re.findall(r"zerojax: error: ", output)) == 1, output
    assert f"zerojax: error: process {lost} of this run has ended" in output
    assert not re.search(r"\*\*\*|@ +0x|[EF]\d{4} |===|absl", output), output


@pytest.mark.parametrize(
    ("variables", "count", "lost"), [(by_hand, 2, 0), (by_slurm, 2, 0), (by_hand, 3, 1)]
)
def test_the_others_name_the_killed_process(tmp_path, variables, count, lost):
    (tmp_path / "script.py").write_text(SCRIPT)
    port = free_port()
    group = [started(tmp_path, [], variables(index, count, port)) for index in range(count)]
    try:
        os.kill(pids(tmp_path, count)[lost], signal.SIGKILL)
        outputs = [process.communicate(timeout=60)[1] for process in group]
    finally:
        for process in group:
            process.kill()
    for index, (process, output) in enumerate(zip(group, outputs, strict=True)):
        if index != lost:
            assert process.returncode == shutdown.FAILED, output
            check_said(output, lost)


@pytest.mark.parametrize("shows_all", [False, True])
def test_the_launcher_shows_one_sentence_or_all(tmp_path, shows_all):
    (tmp_path / "script.py").write_text(SCRIPT)
    options = ["--nprocs", "2", *(["--show-all"] if shows_all else []), "--"]
    launcher = started(tmp_path, ["-m", "zerojax", "launch", *options], {})
    try:
        os.kill(pids(tmp_path, 2)[0], signal.SIGKILL)
        output = launcher.communicate(timeout=60)[1]
    finally:
        launcher.kill()
    assert launcher.returncode == 128 + signal.SIGKILL, output
    if shows_all:
        assert "Check failure stack trace" in output
    else:
        own = [line[4:] for line in output.splitlines() if line.startswith("[1] ")]
        check_said("\n".join([*own, ""]), 0)
