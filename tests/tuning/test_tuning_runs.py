"""Runs whose choices were measured: what folder, report and checkpoint say, and runs that go on."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

import zerojax
from tests.support.small_models import apply_functions, init_functions, regression_loss
from tests.support.trajectories import regression_batch
from tests.support.tuning_doubles import Clock, Runs, question
from zerojax.checkpoint import Checkpointer
from zerojax.config import WatchConfig
from zerojax.runtime.watchdog import Watchdog
from zerojax.training.metrics import write_report
from zerojax.training.tuning import tuned_plan

pytestmark = pytest.mark.thorough

MODEL = (init_functions, apply_functions)
WHY = "mosaic_gpu was not chosen: its results are wrong: "


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """CPU devices are taken for GPUs, on which the kernel of the statistics is wrong."""
    clock = Clock()
    wrong = question(Runs(clock, 1.0), Runs(clock, 0.5, result=np.ones(4, np.float32)))
    monkeypatch.setenv("ZEROJAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tuned_plan, "is_on_gpus", lambda plan: True)
    monkeypatch.setattr(tuned_plan, "open_kernels", lambda plan: {"statistics": "stats"})
    monkeypatch.setattr(tuned_plan, "open_calls", lambda plan: {})
    monkeypatch.setattr(tuned_plan, "statistics_question", lambda *_: wrong)


@pytest.mark.usefixtures("refused")
def test_folder_report_and_checkpoint_name_the_choice_and_why(tmp_path: Path) -> None:
    folder, checkpoints = tmp_path / "run", tmp_path / "kept"
    trainer = zerojax.train(
        MODEL,
        {"zero": 1},
        regression_batch,
        loss=regression_loss,
        steps=1,
        run_dir=folder,
        checkpoint=checkpoints,
    )
    trainer.close()
    line = f"gradient statistics by xla: {WHY}"
    assert line in (folder / "plan.txt").read_text()
    assert line in write_report(folder).read_text()
    with Checkpointer(checkpoints / "checkpoints") as checkpointer:
        saved = checkpointer.metadata().plan
    for plan in (json.loads((folder / "plan.json").read_text()), saved):
        assert plan["kernels"]["statistics"] == "xla"
        assert [reason for reason in plan["reasons"] if reason.startswith(line)]


@pytest.mark.usefixtures("refused")
def test_a_run_says_whether_it_is_watched_while_it_measures(monkeypatch):
    given: list[Any] = []

    class Noted(Watchdog):
        def __init__(self, config: Any, **more: Any) -> None:
            given.append(config)
            super().__init__(config, **more)

    monkeypatch.setattr(tuned_plan, "Watchdog", Noted)
    for watch in (WatchConfig(step_timeout=0), None):
        zerojax.train(
            MODEL, {}, regression_batch, loss=regression_loss, steps=1, run_dir=None, watch=watch
        ).close()
    assert given == [WatchConfig(step_timeout=0), WatchConfig()]


def test_a_run_that_goes_on_with_other_kernels_says_so(tmp_path, monkeypatch, capsys):
    """The first part of the run says that its update was a kernel's."""

    def train(steps: int) -> None:
        mesh, folder = {"zero": 1}, str(tmp_path / "run")
        zerojax.train(
            MODEL, mesh, regression_batch, loss=regression_loss, steps=steps, checkpoint=folder
        ).close()

    as_dict = zerojax.Plan.as_dict
    with monkeypatch.context() as patch:
        kernels = {"update": "mosaic_gpu", "statistics": "xla"}
        patch.setattr(zerojax.Plan, "as_dict", lambda plan: {**as_dict(plan), "kernels": kernels})
        train(1)
    train(2)
    told = capsys.readouterr().out
    assert "update by xla, but by mosaic_gpu when the checkpoint of step 1 was written" in told
    train(3)
    assert "when the checkpoint" not in capsys.readouterr().out


class Line(nnx.Module):
    """A model for an engine."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(8, 8, rngs=rngs)

    def loss(self, batch: Any) -> jax.Array:
        return (self.up(batch["x"]) ** 2).mean()


def test_an_engine_that_goes_on_with_other_kernels_says_so(tmp_path, monkeypatch, capsys):
    config = {
        "train_batch_size": 8,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    batch = {"x": np.ones((8, 8), np.float32)}
    said = "update by xla, but by mosaic_gpu when the checkpoint of step 1 was written"

    def engine() -> Any:
        return zerojax.initialize(model=Line(nnx.Rngs(0)), config=config)

    as_dict = zerojax.Plan.as_dict
    with monkeypatch.context() as patch, engine() as first:
        kernels = {"update": "mosaic_gpu", "statistics": "xla"}
        patch.setattr(zerojax.Plan, "as_dict", lambda plan: {**as_dict(plan), "kernels": kernels})
        first.train_batch(batch)
        first.save_checkpoint(tmp_path)
    assert said not in capsys.readouterr().out
    with engine() as second:
        second.load_checkpoint(tmp_path)
        second.train_batch(batch)
    assert said in capsys.readouterr().out
