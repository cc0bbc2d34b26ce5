"""Experts over the devices of two processes: the losses of one, and its checkpoints."""

from __future__ import annotations

import numpy as np
import pytest

from tests.processes.test_processes import train
from tests.support.trajectories import TOLERANCE

pytestmark = pytest.mark.multihost

MIXTURE = (
    *("model.name=llama", "model.moe.num_experts=8", "model.moe.expert_dim=24"),
    *("model.moe.balance_weight=0.1", "model.moe.z_weight=0.01"),
)


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 3])
def test_two_processes_train_and_one_goes_on_at_another_degree(zero, tmp_path):
    """`expert` is 4 over both processes, then 2 and 1 in one; each has four devices in all."""
    stage = f"zero={zero}"
    one = train(tmp_path, "one", *MIXTURE, "steps=8")
    two = train(tmp_path, "two", *MIXTURE, stage, "mesh.expert=4", "steps=4", processes=2)
    np.testing.assert_allclose(two, one[:4], rtol=0, atol=TOLERANCE)
    resumed = train(tmp_path, "two", *MIXTURE, stage, "mesh.expert=2", "steps=6")
    assert resumed[:4] == two
    last = train(tmp_path, "two", *MIXTURE, stage, "steps=8")
    assert last[:6] == resumed
    np.testing.assert_allclose(last, one, rtol=0, atol=TOLERANCE)
