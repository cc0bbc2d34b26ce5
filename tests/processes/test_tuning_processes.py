"""Real processes that choose a kernel: two together, and runs that a kernel ends or holds up."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.process_groups import ROOT, end_group
from zerojax.runtime.shutdown import HUNG

pytestmark = [pytest.mark.multihost, pytest.mark.thorough]

LIMIT = 120.0
"""Seconds until a process is killed; one that has lost the other ends within some seconds."""


def run_both(first: list[str], second: list[str]) -> list[tuple[int, str]]:
    """(exit status, what it printed) of each process."""
    words = [["-m", "tests.support.tuning_process", *own] for own in (first, second)]
    return end_group(words, folder=ROOT, variables={"JAX_PLATFORMS": "cpu"}, seconds=LIMIT)


def chosen(first: list[str], second: list[str]) -> list[str]:
    """The lines that both print, which end well."""
    found = run_both(first, second)
    assert [status for status, _ in found] == [0, 0], found
    return [text.splitlines()[-1] for _, text in found]


def test_opposite_times_and_a_cache_of_one_alone(tmp_path: Path) -> None:
    shared, own = str(tmp_path / "shared"), str(tmp_path / "own")
    both = chosen(["0.5", shared], ["1.2", shared])
    assert all(line.startswith("xla: mosaic_gpu is 0.83 times as fast") for line in both)
    kept = chosen(["0.5", shared], ["0.5", shared])
    assert kept == both, "what was measured together is kept"
    anew = chosen(["0.5", shared], ["0.5", own])
    assert all(line.startswith("mosaic_gpu: mosaic_gpu is 2.00") for line in anew)


def test_a_process_that_dies_while_it_measures_ends_the_other_and_is_not_tried_again(tmp_path):
    folder = str(tmp_path)
    (status, output), (killed, _) = run_both(["0.5", folder], ["0.5", folder, "dies"])
    assert killed == -signal.SIGKILL
    assert status != 0, output
    assert "mosaic_gpu:" not in output, "nothing was chosen"
    first, second = chosen(["0.5", folder], ["0.5", folder])
    assert first.startswith("xla: mosaic_gpu was not chosen: it cannot run on another process")
    assert "it failed in an earlier start, or ended it" in second
    tried = chosen(["0.5", folder, "again"], ["0.5", folder, "again"])
    assert all(line.startswith("mosaic_gpu: mosaic_gpu is 2.00 times") for line in tried)


def test_a_process_that_hangs_while_it_measures_ends_with_the_other_one(tmp_path: Path) -> None:
    folder = str(tmp_path)
    (status, output), (hung, told) = run_both(["0.5", folder], ["0.5", folder, "hangs"])
    assert hung == HUNG, told
    assert "it is trying mosaic_gpu for a sum; the limit is 3 s" in told
    assert status != 0, output
    assert "mosaic_gpu:" not in output, "nothing was chosen"
    lines = chosen(["0.5", folder], ["0.5", folder])
    assert all(line.startswith("xla: mosaic_gpu was not chosen: it ") for line in lines)
    assert any("it failed in an earlier start, or ended it" in line for line in lines)


def start(*words: str) -> subprocess.CompletedProcess[str]:
    """A run of one process, which has `LIMIT` seconds."""
    return subprocess.run(
        [sys.executable, "-m", "tests.support.tuning_run_process", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT,
    )


ENDS = {"hangs": HUNG, "exits": 3, "faults": -signal.SIGSEGV}


@pytest.mark.parametrize("mode", ENDS)
def test_a_run_that_a_kernel_ended_or_held_up_goes_on_without_it(mode: str, tmp_path: Path) -> None:
    folder, limit = str(tmp_path), "3"
    ended = start(mode, folder, limit)
    assert ended.returncode == ENDS[mode], ended.stdout
    assert "trained" not in ended.stdout
    if mode == "hangs":
        assert "it is trying mosaic_gpu for gradient statistics; the limit is 3 s" in ended.stdout
        assert "start again: the failed trial is skipped" in ended.stdout
    again = start(mode, folder, limit)  # it would end, or hang, as before
    assert again.returncode == 0, again.stdout
    why = "mosaic_gpu was not chosen: it failed in an earlier start, or ended it"
    assert f"gradient statistics by xla: {why}" in again.stdout
    assert "trained 2 steps" in again.stdout


def test_a_run_with_a_kernel_that_works_leaves_no_mark(tmp_path: Path) -> None:
    found = start("works", str(tmp_path), "60")
    assert found.returncode == 0, found.stdout
    assert "trained 2 steps" in found.stdout
    assert "earlier start" not in found.stdout
    assert not list(tmp_path.glob("trying-*"))
