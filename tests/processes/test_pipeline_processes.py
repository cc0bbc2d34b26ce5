"""Two processes of two devices are one pipeline, whichever axis lies across them."""

import functools
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.processes.test_processes import train
from tests.support.pipeline_process import STEPS, inputs_of
from tests.support.process_groups import run_group
from tests.support.trajectories import TOLERANCE, advance
from zerojax import init_state, make_mesh
from zerojax.plan.make import plan_of

pytestmark = pytest.mark.multihost

ROOT = Path(__file__).parents[2]


@functools.cache
def without_a_pipeline(theta: float) -> np.ndarray:
    """Losses of one process, with as many data shards and microbatches: dropout is on."""
    plan = plan_of(inputs_of(theta), make_mesh({"data": 2}, jax.devices()[:2]), zero=1)
    return advance(plan, init_state(plan, 0), range(STEPS)).losses


def run_two(out: Path, *words: str) -> dict:
    """What process 0 of two has written."""
    run_group(
        [["-m", "tests.support.pipeline_process", str(out), *words]] * 2, folder=ROOT, join=True
    )
    return json.loads(out.read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("order", "owners", "zero", "theta"),
    [
        ("0,2,1,3", [[0, 1], [0, 1]], 1, 1),
        ("0,1,2,3", [[0, 0], [1, 1]], 3, 1),
        ("0,2,1,3", [[0, 1], [0, 1]], 3, 1),
        ("0,1,2,3", [[0, 0], [1, 1]], 3, 0.3),
        ("0,2,1,3", [[0, 1], [0, 1]], 3, 0.3),
    ],
    ids=[
        "stages apart",
        "data apart",
        "stages apart, parameters split",
        "data apart, layer drop",
        "stages apart, layer drop",
    ],
)
def test_two_processes_have_the_losses_of_one(order, owners, zero, theta, tmp_path):
    """`owners`: the process of each device of the mesh, [data, stage]."""
    found = run_two(tmp_path / "losses.json", order, str(zero), str(theta))
    assert found["owners"] == owners
    np.testing.assert_allclose(found["losses"], without_a_pipeline(theta), rtol=0, atol=TOLERANCE)


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
