"""A run with slices in files that is killed at any moment goes on with the bits it would have had.

Durable: from the last whole step. Scratch: from the last checkpoint.
"""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOR_EVER = 10**6


def start(folder: Path, steps: int, kind: str, every: int) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    words = [str(folder), str(steps), kind, str(every)]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.offload_disk_process", *words],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def noted(folder: Path) -> list[tuple[int, str]]:
    """(step, loss) in the order in which they were done; a line that was cut off is left out."""
    path = folder / "losses"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    rows = [line.split() for line in lines if line.endswith("\n")]
    return [(int(step), loss) for step, loss in rows]


def run_to_the_end(folder: Path, steps: int, kind: str, every: int) -> dict[int, str]:
    process = start(folder, steps, kind, every)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    return dict(noted(folder))


def kill_after(folder: Path, kind: str, every: int, delay: float) -> list[tuple[int, str]]:
    """What a process notes that is killed `delay` seconds after its first step."""
    before = len(noted(folder))
    process = start(folder, FOR_EVER, kind, every)
    deadline = time.monotonic() + 240
    while len(noted(folder)) == before:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(delay)
    process.kill()
    process.communicate()
    return noted(folder)[before:]


def check_durable(folder: Path, num_kills: int, longest: float) -> None:
    delays = random.Random(num_kills)
    last = 0
    for _ in range(num_kills):
        steps = [step for step, _ in kill_after(folder, "durable", 0, delays.uniform(0, longest))]
        # Noted steps were whole: none is done again. The last one may have been killed between
        # its files and its note.
        assert last < steps[0] <= last + 2
        assert steps == list(range(steps[0], steps[-1] + 1))
        last = steps[-1]
    found = noted(folder)
    expected = run_to_the_end(folder.with_name("reference"), last, "durable", 0)
    assert [loss for step, loss in found] == [expected[step] for step, _ in found]


@pytest.mark.slow
def test_two_kills_lose_no_step(tmp_path):
    check_durable(tmp_path / "killed", 2, 0.3)


@pytest.mark.slow
def test_thirty_kills_lose_no_step(tmp_path):
    check_durable(tmp_path / "killed", 30, 1.0)


@pytest.mark.slow
def test_scratch_goes_on_from_the_last_checkpoint(tmp_path):
    folder = tmp_path / "killed"
    for delay in (1.0, 0.5, 1.5):
        steps = [step for step, _ in kill_after(folder, "scratch", 4, delay)]
        assert (steps[0] - 1) % 4 == 0  # the step after a checkpoint, or the first of all
    found = noted(folder)
    last = max(step for step, _ in found)
    expected = run_to_the_end(tmp_path / "reference", last, "scratch", 4)
    assert [loss for step, loss in found] == [expected[step] for step, _ in found]
