"""What a durable store keeps beside its buckets, and what it refuses."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.support.offload_disk_runs import (
    SHARES,
    Regression,
    close,
    differing,
    offload,
    plan_of,
    portable,
    train,
)
from tests.support.refusals import refused
from tests.support.trajectories import regression_batch
from zerojax.checkpoint.store import StoreError
from zerojax.config import MeshConfig
from zerojax.offload.disk_durable import Generations, common_generation, resume, resume_step
from zerojax.offload.offload_tiers import check_durable
from zerojax.optim import adamw
from zerojax.optim.precision import Precision, as_precision
from zerojax.training.checkpointing import first_state
from zerojax.training.entry import train as train_run


@pytest.fixture(scope="module")
def left(tmp_path_factory):
    """(folder of a durable store after two steps, the state's portable form)."""
    folder = tmp_path_factory.mktemp("durable")
    plan = plan_of(offload(folder, durable=True), data=2, zero=3, freeze=("down/bias",))
    state, _ = train(plan, 2)
    expected = portable(plan, state)
    close(state)
    return folder, expected


@pytest.mark.thorough
def test_everything_comes_back(left):
    folder, expected = left
    plan = plan_of(offload(folder, durable=True), data=2, zero=3, freeze=("down/bias",))
    assert resume_step(plan) == 2
    state, _ = resume(plan)
    assert differing(portable(plan, state), expected) == []
    assert {n: x.dtype for n, x in state["params"].items()} == {
        n: x.dtype for n, x in plan.abstract_state["params"].items()
    }
    close(state)


@pytest.mark.thorough
def test_the_newer_of_store_and_checkpoint_wins(left):
    folder, _ = left
    plan = plan_of(offload(folder, durable=True), data=2, zero=3, freeze=("down/bias",))
    assert first_state(plan, 0, 3) is None
    state, _ = first_state(plan, 0, 2)
    assert int(state["step"]) == 2
    close(state)


@pytest.mark.thorough
def test_another_slicing_is_refused(left):
    folder, _ = left
    config = type(offload(folder))(
        opt_state="nvme", folder=str(folder), slice_elements=50, min_elements=100, durable=True
    )
    with pytest.raises(StoreError, match=r"another model, .* or slicing.*delete"):
        resume(plan_of(config, data=2, zero=3, freeze=("down/bias",)))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("copied", "words"),
    [("state-2.npz", "generation 2 delete checkpoint"), ("frozen.npz", "run delete checkpoint")],
)
def test_files_of_another_generation_or_run_are_refused(left, tmp_path, copied, words):
    folder = Path(shutil.copytree(left[0], tmp_path / "durable"))
    plan = plan_of(offload(folder, durable=True), data=2, zero=3, freeze=("down/bias",))
    own = folder / "process_0" / "state-3.npz"
    assert own.exists()
    if copied == "frozen.npz":
        arrays = dict(np.load(folder / "process_0" / copied))
        about = json.loads(arrays["about"].tobytes())
        text = json.dumps({**about, "filling": about["filling"] + 1}).encode()
        np.savez(folder / "process_0" / copied, **arrays | {"about": np.frombuffer(text, np.uint8)})
    else:
        shutil.copy(folder / "process_0" / copied, own)
    refused(lambda: (resume_step(plan), resume(plan)), words, str(folder), error=StoreError)


@pytest.mark.thorough
def test_a_scratch_store_is_never_gone_on_from(tmp_path):
    plan = plan_of(offload(tmp_path), data=2)
    state, _ = train(plan, 1)
    close(state)
    assert resume_step(plan) is None
    assert resume_step(plan_of(offload(tmp_path, durable=True), data=2)) is None
    assert not list((tmp_path / "process_0").glob("*.npz"))


@pytest.mark.parametrize(
    ("shares", "precision", "match"),
    [
        (SHARES, Precision(), "state in device and host memory is lost with the process"),
        ("nvme", as_precision("bf16", param_dtype="bf16"), "rebuilt from float32 master weights"),
    ],
)
def test_what_a_killed_run_could_not_go_on_from(tmp_path, shares, precision, match):
    config = offload(tmp_path, shares, durable=True)
    with pytest.raises(ValueError, match=rf"{match}.*leave durable out"):
        check_durable(config, precision)
    check_durable(offload(tmp_path, shares), precision)
    assert np.isclose(sum(config.shares.values()), 1)


@pytest.mark.parametrize(
    ("found", "common"),
    [
        ([(7, 6, 1), (7, 6, 1)], 7),
        ([(7, 6, 1), (6, 5, 1)], 6),
        ([(6, 6, 1), (7, 6, 1)], 6),
        ([(-1, -1, 0), (-1, -1, 0)], None),
        ([(1, 1, 2), (300, 299, 1)], None),  # killed while it filled its files anew
        ([(0, 0, 0), (300, 299, 1)], None),
        ([(7, 6, 1), (5, 4, 1)], "process 0: 7, process 1: 5"),
        ([(7, 7, 1), (6, 5, 1)], "process 0: 7, process 1: 6"),
        ([(7, 6, 1), (7, 6, 2)], "process 0: 7, process 1: 7"),
        ([(7, 6, 1), (-1, -1, 0)], "process 0: 7, process 1: none"),
    ],
)
def test_the_last_generation_of_several_processes(tmp_path, found, common):
    every = [Generations(*own) for own in found]
    if not isinstance(common, str):
        assert common_generation(tmp_path, every) == common
        return
    value = [tmp_path, common]
    refused(
        lambda: common_generation(tmp_path, every), value, "delete checkpoint", error=StoreError
    )


@pytest.mark.thorough
def test_a_run_that_is_over_says_so_and_saves_nothing_twice(tmp_path):
    """Its store and its checkpoint are of the same step."""
    settings = MeshConfig(data=-1, offload=offload(tmp_path / "store", durable=True))
    for _ in range(2):
        trainer = train_run(
            Regression,
            settings,
            [regression_batch(index) for index in range(4)],
            optimizer=adamw(1e-2),
            steps=2,
            checkpoint=str(tmp_path / "run"),
            run_dir=None,
        )
        trainer.close()
        assert trainer.num_steps == 2
