"""A clock that somebody sets while a run goes on: nothing that a run decides hangs on it.

The wall clock of the processes alone is moved, for Python and C++ alike, by a library that is
loaded before all others.
"""

import json
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from tests.support.fault_runs import Run
from zerojax.runtime import shutdown

pytestmark = [pytest.mark.multihost, pytest.mark.slow]

DAY = 86_400


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler here to make the library that moves the clock")
    target = tmp_path_factory.mktemp("clock") / "clock.so"
    source = Path(__file__).parents[1] / "support" / "jumping_clock.c"
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(target), str(source), "-ldl"]
    subprocess.run(command, check=True, timeout=60)
    return target


@pytest.mark.parametrize("processes", [1])
def test_a_clock_that_jumps_both_ways_changes_nothing(tmp_path, library, processes):
    whole = Run(tmp_path / "whole", processes=processes)
    assert whole.run().codes == [shutdown.OK] * processes
    run = Run(tmp_path / "run", processes=processes)
    moved = tmp_path / "seconds"
    moved.write_bytes(struct.pack("q", 0))
    environment = {"LD_PRELOAD": str(library), "CLOCK_SECONDS_FILE": str(moved)}
    run.start("watch.step_timeout=30", pace=0.3, environment=environment)
    for step, days in ((4, 10), (8, -20), (12, 1)):
        run.wait_for_step(step)
        with moved.open("r+b") as file:  # the processes look into this very file
            file.write(struct.pack("q", days * DAY))
    ended = run.end()
    assert ended.codes == [shutdown.OK] * processes, ended.outputs
    run.check_losses(dict(whole.losses()))
    assert run.saved() == whole.saved(), "checkpoints are counted in steps"

    lines = (tmp_path / "run" / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["kind"] == "train"]
    stamps = [row["time"] for row in rows]
    assert max(stamps) - min(stamps) > 25 * DAY, "the clock has really jumped"
    seconds = [row["seconds"] for row in rows]
    assert seconds == sorted(seconds)
    assert seconds[-1] - seconds[0] < 240
    rates = [row["tokens_per_second_per_device"] for row in rows[1:]]
    # By the wall clock a step would take days, or less than nothing.
    assert all(512 / processes / 60 < rate < 1e6 for rate in rates)
    shown = [line for line in ended.outputs[0].splitlines() if "ETA " in line]
    assert len(shown) == 15
    assert all("ETA 0:" in line or "ETA 1:" in line for line in shown), "minutes, not days"
