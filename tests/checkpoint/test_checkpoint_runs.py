"""A run whose newest checkpoint is damaged says so and goes on from the one before, bit by bit."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from tests.support.offload_disk_runs import Regression, close, differing, offload, plan_of, portable
from tests.support.offload_disk_runs import train as train_steps
from tests.support.refusals import refused
from tests.support.trajectories import regression_batch
from zerojax.checkpoint import Checkpointer, CheckpointError
from zerojax.config import CheckpointConfig, LogConfig
from zerojax.optim import adamw
from zerojax.step.reshard import to_portable_state
from zerojax.tracing.trees import flatten_names
from zerojax.training.checkpointing import restore_state, save_state
from zerojax.training.entry import train


def run(folder: Path, steps: int):
    """A run that saves every two steps; returns its state, closed."""
    trainer = train(
        Regression,
        {"zero": 2},
        [regression_batch(index) for index in range(4)],
        optimizer=adamw(1e-2, clip_norm=1.0),
        steps=steps,
        checkpoint=CheckpointConfig(path=str(folder / "saves"), every=2, keep=9),
        run_dir=str(folder),
        log=LogConfig(every=1, tensorboard=False, console="lines"),
    )
    trainer.close()
    named = flatten_names(to_portable_state(trainer.plan, trainer.state))
    return trainer, {name: np.asarray(x) for name, x in named.items()}


def edit_config(folder: Path) -> None:
    path = folder / "metadata.json"
    body = path.read_text()
    assert '"num_devices": 8' in body
    path.write_text(body.replace('"num_devices": 8', '"num_devices": 4'))


def damage_values(folder: Path) -> None:
    """A flipped bit in the file that holds the arrays."""
    path = max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.thorough
@pytest.mark.parametrize("damage", [edit_config, damage_values])
def test_a_run_goes_on_from_the_step_before(
    tmp_path: Path, capsys: pytest.CaptureFixture, damage
) -> None:
    run(tmp_path / "damaged", 6)
    damage(tmp_path / "damaged" / "saves" / "6")
    capsys.readouterr()
    with pytest.warns(RuntimeWarning, match="/6 is damaged: .*; step 4 is used") as told:
        trainer, found = run(tmp_path / "damaged", 8)
    assert len(told) == 1, "said once"
    assert capsys.readouterr().out.count("/6 is damaged: ") == 1, "and once in the log"
    assert [values["step"] for values in trainer.history] == [5, 6, 7, 8]
    _, expected = run(tmp_path / "whole", 8)
    assert {n: x.tobytes() for n, x in found.items()} == {
        n: x.tobytes() for n, x in expected.items()
    }
    names = sorted(os.listdir(tmp_path / "damaged" / "saves"))
    assert names == ["2", "4", "6", "6.damaged", "8"]
    with Checkpointer(tmp_path / "damaged" / "saves") as checkpointer:
        assert all(checkpointer.verify(step).is_good for step in checkpointer.steps())


@pytest.mark.thorough
def test_a_run_without_a_whole_step_ends_and_touches_nothing(tmp_path: Path) -> None:
    run(tmp_path, 4)
    for step in ("2", "4"):
        edit_config(tmp_path / "saves" / step)
    before = {p: p.read_bytes() for p in (tmp_path / "saves").rglob("*") if p.is_file()}
    with pytest.raises(CheckpointError, match=r"so are the earlier steps \(2\); nothing was"):
        run(tmp_path, 6)
    assert before == {p: p.read_bytes() for p in (tmp_path / "saves").rglob("*") if p.is_file()}


@pytest.mark.thorough
def test_the_switch_of_the_run_file_reaches_the_checkpoint(tmp_path: Path) -> None:
    train(
        Regression,
        None,
        [regression_batch(0)],
        optimizer=adamw(1e-2),
        steps=1,
        checkpoint=CheckpointConfig(path=str(tmp_path), fingerprints=False),
        run_dir=None,
    ).close()
    body = json.loads((tmp_path / "1" / "metadata.json").read_text())
    assert body["fingerprints"] == {}
    assert body["checksums"]


@pytest.mark.thorough
def test_durable_files_are_preferred_to_an_older_step(tmp_path: Path) -> None:
    """The checkpoints are of steps 1 and 3, the files of step 2, and 3 turns out to be damaged."""
    about = {"data_state": {}, "config": {}, "plan": {}}
    plan = plan_of(offload(tmp_path / "store", durable=True), data=2)
    with Checkpointer(tmp_path / "saves") as checkpointer:
        state, _ = train_steps(plan, 1)
        for step in (1, 3):
            save_state(checkpointer, plan, state, step=step, about=about)
        state, _ = train_steps(plan, 1, state, first=1)
        expected = portable(plan, state)
        checkpointer.wait()
        close(state)
        damage_values(tmp_path / "saves" / "3")
        with pytest.warns(RuntimeWarning, match="/3 is damaged: pieces/"):
            restored, state = restore_state(checkpointer, plan, at_start=True)
    assert restored.step == 2
    assert differing(portable(plan, state), expected) == []
    close(state)


def reports(steps: int, **options):
    """Trains to `steps` in total; returns {step: loss} of the steps that this call made."""
    trainer = train(
        Regression,
        {"zero": 1},
        regression_batch,
        optimizer=adamw(1e-2),
        steps=steps,
        log=LogConfig(every=1, tensorboard=False, console="quiet"),
        **options,
    )
    trainer.close()
    return {report["step"]: report["loss"] for report in trainer.history}


def test_checkpoints_without_a_path_are_in_the_folder_of_the_run(tmp_path: Path) -> None:
    config = CheckpointConfig(every=2, keep=2)
    reports(4, run_dir=str(tmp_path), checkpoint=config)
    assert Checkpointer(tmp_path / "checkpoints").steps() == (2, 4)
    assert list(reports(6, checkpoint=str(tmp_path))) == [5, 6], "the same folder, named shortly"


@pytest.mark.thorough
def test_the_folder_of_a_run_is_not_taken_for_its_checkpoints(tmp_path: Path) -> None:
    """Such a run would start again from step 1."""
    reports(4, checkpoint=str(tmp_path / "run"))
    wrong = CheckpointConfig(path=str(tmp_path / "run"))
    words = ("checkpoints", "run_dir")
    refused(lambda: reports(6, checkpoint=wrong), "is the folder of a run", words)
    right = CheckpointConfig(path=str(tmp_path / "run" / "checkpoints"))
    assert list(reports(6, checkpoint=right)) == [5, 6]
