"""Two processes of two devices are one pipeline, whichever axis lies across them."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.pipeline_process import STEPS
from tests.pipeline_runs import small
from tests.test_processes import free_port, train
from tests.trajectories import TOLERANCE, train_for

pytestmark = pytest.mark.multihost

ROOT = Path(__file__).parents[1]


@functools.cache
def without_a_pipeline() -> np.ndarray:
    """Losses of one process, with as many data shards and microbatches: dropout is on."""
    return train_for(small(layers=4, rate=0.1), devices=2, num_microbatches=4, steps=STEPS).losses


def run_two(out: Path, *words: str) -> dict:
    """What process 0 of two has written."""
    port = free_port()
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.pipeline_process", str(out), *words],
            cwd=ROOT,
            env={
                **os.environ,
                "ZEROJAX_COORDINATOR": f"127.0.0.1:{port}",
                "ZEROJAX_NUM_PROCESSES": "2",
                "ZEROJAX_PROCESS_ID": str(index),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=240)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    for process, output in zip(started, outputs, strict=True):
        assert process.returncode == 0, output
    return json.loads(out.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("order", "owners", "zero"),
    [
        ("0,2,1,3", [[0, 1], [0, 1]], 1),
        pytest.param("0,1,2,3", [[0, 0], [1, 1]], 3, marks=pytest.mark.slow),
        pytest.param("0,2,1,3", [[0, 1], [0, 1]], 3, marks=pytest.mark.slow),
    ],
    ids=["stages apart", "data apart", "stages apart, parameters split"],
)
def test_two_processes_have_the_losses_of_one(order, owners, zero, tmp_path):
    """`owners`: the process of each device of the mesh, [data, stage]."""
    found = run_two(tmp_path / "losses.json", order, str(zero))
    assert found["owners"] == owners
    np.testing.assert_allclose(found["losses"], without_a_pipeline(), rtol=0, atol=TOLERANCE)


@pytest.mark.slow
def test_a_checkpoint_of_two_processes_goes_on_in_one_without_a_pipeline(tmp_path):
    """Four stages of one layer, two on each process; both processes read all rows of the batch."""
    layers, stages = "num_layers=4", ("stage=4", "num_microbatches=4", "stash=input")
    one = train(tmp_path, "one", layers, "steps=6")
    two = train(tmp_path, "two", layers, *stages, "zero=1", "steps=4", processes=2)
    np.testing.assert_allclose(two, one[:4], rtol=0, atol=TOLERANCE)
    resumed = train(tmp_path, "two", layers, "zero=3", "steps=6")
    assert resumed[:4] == two
    np.testing.assert_allclose(resumed[4:], one[4:], rtol=0, atol=TOLERANCE)
