"""Experts over the devices of two processes: the losses of one, its checkpoints, and folders."""

import json
import re
from pathlib import Path

import numpy as np
import optax
import pytest
from safetensors.numpy import load_file

import zerojax
from tests.processes.test_processes import train
from tests.support.expert_folder_process import STEPS, batch
from tests.support.hugging_face_folders import tensors_of, write_folder
from tests.support.process_groups import run_group
from tests.support.trajectories import TOLERANCE, train_for

pytestmark = pytest.mark.multihost

EXPERT = re.compile(r"\.experts\.(\d+)\.")
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


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("case", ["mixtral", "olmoe"])
def test_each_process_reads_its_own_experts_from_a_folder(case, zero, tmp_path):
    """No tensor of another's expert, no byte twice; the losses are those of one device."""
    folder = write_folder(tmp_path / "theirs", case)
    words = ["-m", "tests.support.expert_folder_process", str(folder), str(tmp_path), str(zero)]
    run_group([words] * 2, folder=Path.cwd(), join=True)
    one = train_for(
        zerojax.from_hugging_face(folder),
        devices=1,
        optimizer=optax.sgd(0.1),
        steps=STEPS,
        batch=batch,
    )
    tensors = tensors_of(case)
    number = 1 + max(int(expert) for name in tensors for expert in EXPERT.findall(name))
    for process in range(2):
        found = json.loads((tmp_path / f"process_{process}.json").read_text())
        own = {str(expert) for expert in range(number) if expert // (number // 2) == process}
        experts = {name for name in tensors if EXPERT.search(name)}
        wanted = {name for name in experts if EXPERT.findall(name)[0] in own}
        assert len(wanted) == len(experts) / 2
        assert experts.intersection(found["names"]) == wanted
        assert found["counted"] == found["own"]
        np.testing.assert_allclose(found["losses"], one.losses, rtol=0, atol=TOLERANCE)
    written = load_file(tmp_path / "exported" / "model.safetensors")
    assert {name: x.tobytes() for name, x in written.items()} == {
        name: x.tobytes() for name, x in tensors.items()
    }
