"""Runs that stop early and runs that keep their best step, also across restarts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

import zerojax
from tests.support.small_models import Line, regression_loss
from zerojax.checkpoint import CheckpointError
from zerojax.checkpoint.deletion import removals
from zerojax.config import CheckpointConfig, LogConfig
from zerojax.training.evaluation import EarlyStopping, KeepBest
from zerojax.training.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[2]


def batch(seed: int, sign: float = 1.0) -> dict[str, np.ndarray]:
    x = np.random.default_rng(seed).normal(size=(8, 4)).astype(np.float32)
    return {"x": x, "y": sign * x.sum(1, keepdims=True)}


def train(folder=None, *, callbacks, steps=12, data=None, checkpoint=None, **options):
    """Towards one line, then away from it: the best step is in the middle."""
    towards, away = batch(0), batch(0, -1.0)
    data = data or [*[towards] * 4, *[away] * 8]
    if folder is not None and checkpoint is None:
        path = str(folder / "checkpoints")
        checkpoint = CheckpointConfig(path=path, every=1, keep=1, asynchronous=False)
    return zerojax.train(
        Line,
        {"zero": 1},
        data,
        loss=regression_loss,
        optimizer=zerojax.sgd(0.05),
        steps=steps,
        checkpoint=checkpoint,
        callbacks=callbacks,
        log=LogConfig(every=1, tensorboard=False),
        **{"validation": [towards], "eval_every": 1, "run_dir": folder, **options},
    )


@pytest.mark.thorough
def test_a_callback_that_returns_true_ends_the_run_and_train_returns(tmp_path):
    def stop(trainer, metrics):
        return metrics["step"] == 3

    trainer = train(tmp_path, callbacks=[stop], steps=None)
    assert trainer.num_steps in (3, 4), "a report is read while the next step is under way"
    assert zerojax.load_run(tmp_path, model=Line, loss=regression_loss).step == trainer.num_steps


@pytest.mark.thorough
def test_the_step_that_began_before_an_exception_is_reported(tmp_path):
    """It is in the checkpoint that is saved after the exception."""

    def fail(trainer, metrics):
        if metrics["step"] == 3:
            raise RuntimeError("the callback failed")

    with pytest.raises(RuntimeError, match="the callback failed"):
        train(tmp_path, callbacks=[fail], validation=None, eval_every=None)
    saved = zerojax.load_run(tmp_path, model=Line, loss=regression_loss).step
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    reports = [json.loads(line) for line in lines]
    assert [line["step"] for line in reports if "loss" in line] == [*range(1, saved + 1)]


def test_a_step_is_reported_before_it_is_saved(tmp_path, monkeypatch):
    """A kill after a save finds the step's line in the metrics."""
    reported, save = {}, zerojax.Trainer.save

    def see_and_save(self):
        reported[self.num_steps] = [x["step"] for x in read_metrics(tmp_path).train]
        save(self)

    monkeypatch.setattr(zerojax.Trainer, "save", see_and_save)
    train(tmp_path, callbacks=[], steps=3, eval_every=None, validation=None)
    assert reported == {1: [1], 2: [1, 2], 3: [1, 2, 3]}


@pytest.mark.thorough
def test_early_stopping(tmp_path, capsys):
    stopping = EarlyStopping(patience=2)
    trainer = train(tmp_path, callbacks=[stopping])
    assert stopping.stopped
    assert (stopping.best_step, trainer.num_steps) == (4, 6)
    losses = [values["loss"] for values in trainer.evaluations]
    assert stopping.best == min(losses)
    assert len(losses) == 6, "the step that ended the run is evaluated once"
    said = "stopped early: validation/loss has not improved 2 times in a row; the best was"
    assert capsys.readouterr().out.count(said) == 1


@pytest.mark.thorough
def test_early_stopping_counts_on_after_a_restart(tmp_path):
    whole = EarlyStopping(patience=4)
    trainer = train(callbacks=[whole])
    train(tmp_path, callbacks=[EarlyStopping(patience=4)], steps=6)
    again = EarlyStopping(patience=4)
    resumed = train(tmp_path, callbacks=[again])
    assert (resumed.num_steps, again.best, again.best_step) == (
        trainer.num_steps,
        whole.best,
        whole.best_step,
    )


def test_it_watches_training_and_more_of_what_is_better():
    stopping = EarlyStopping("loss", mode="max", patience=3)
    trainer = train(callbacks=[stopping], validation=None, eval_every=None, data=[batch(0)] * 12)
    assert stopping.best == trainer.history[0]["loss"]
    assert trainer.num_steps < 12


@pytest.mark.thorough
def test_the_best_step_survives_retention_pruning_and_a_restart(tmp_path):
    keep = KeepBest()
    trainer = train(tmp_path, callbacks=[keep], steps=8)
    assert keep.best_step == 4
    best = {v["step"]: v["loss"] for v in trainer.evaluations}[4]
    assert keep.best == best
    path = tmp_path / "checkpoints"
    steps = lambda: sorted(int(p.name) for p in path.iterdir() if p.name.isdigit())  # noqa: E731
    assert steps() == [4, 8], "keep=1 keeps the newest"
    trainer.close()
    again = KeepBest()
    resumed = train(tmp_path, callbacks=[again])
    assert resumed.num_steps == 12
    assert (again.best_step, again.best) == (4, best)
    assert steps() == [4, 12]
    resumed.close()
    # A restart without the callback does not forget it either.
    train(tmp_path, callbacks=[], steps=14, data=[batch(1)]).close()
    assert steps() == [4, 14]
    assert removals(path, keep=1) == []
    loaded = zerojax.load_run(tmp_path, "best", model=Line, loss=regression_loss)
    assert loaded.step == 4
    assert loaded.evaluate([batch(0)])["loss"] == pytest.approx(best)
    third = train(tmp_path, callbacks=[], steps=14)
    assert third.restore("best").num_steps == 4
    assert third.evaluate([batch(0)])["loss"] == pytest.approx(best)


@pytest.mark.thorough
def test_a_better_step_takes_the_place_of_the_best(tmp_path):
    keep = KeepBest()
    train(tmp_path, callbacks=[keep], data=[batch(0)], steps=5).close()
    kept = json.loads((tmp_path / "checkpoints" / "kept.json").read_text())
    assert kept == {"best": {"step": 5, "metric": "validation/loss", "value": keep.best}}
    assert sorted(p.name for p in (tmp_path / "checkpoints").glob("[0-9]*")) == ["4", "5"]


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (lambda: EarlyStopping(patience=0), "patience=0 is not valid; use a whole number"),
        (lambda: EarlyStopping(mode="less"), "mode='less' is not valid; use 'min' or 'max'"),
        (lambda: KeepBest(min_delta=-1), "min_delta=-1 is not valid"),
    ],
)
def test_wrong_options_are_refused(make, part):
    with pytest.raises(ValueError, match=part):
        make()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("callback", "options", "part"),
    [
        (KeepBest(), {}, "pass checkpoint='runs/NAME'"),
        (EarlyStopping(), {"validation": None, "eval_every": None}, "no validation data; pass"),
        (EarlyStopping(), {"eval_every": None}, "only at its end; pass eval_every=STEPS"),
        (
            EarlyStopping("validation/accuracy"),
            {},
            "an evaluation has .*validation/loss, validation/weight; name",
        ),
        (EarlyStopping("accuracy"), {}, "a report has .*loss.*; name one"),
    ],
)
def test_what_can_never_be_seen_is_refused(callback, options, part):
    with pytest.raises(ValueError, match=part):
        train(callbacks=[callback], steps=2, **options)


def test_a_name_that_nothing_is_kept_under(tmp_path):
    trainer = train(tmp_path, callbacks=[], steps=1)
    with pytest.raises(CheckpointError, match=r"no step is kept as 'best'.*KeepBest\(\)"):
        trainer.restore("best")
    assert trainer.num_steps == 1


def test_a_trainer_says_what_it_is(tmp_path):
    trainer = train(tmp_path, callbacks=[], steps=2)
    text = repr(trainer)
    assert text.startswith("Trainer(2 steps, loss ")
    assert str(tmp_path / "checkpoints") in text
    assert "\n" not in text
    assert "bad_leaf" not in trainer.metrics, "every gradient was finite"
    assert trainer.metrics["largest_leaf"] in ("out/kernel", "out/bias")


class Wrong:
    def __call__(self, trainer, metrics): ...

    def on_evaluation(self, trainer): ...


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("callback", "words"),
    [
        (lambda trainer: None, r"callbacks\[0\] is called with \(trainer, metrics\)"),
        (lambda trainer, metrics, more: None, "missing a required argument: 'more'"),
        (Wrong(), r"callbacks\[0\].on_evaluation is called with \(trainer, metrics\)"),
        (Wrong, r"or an instance, Wrong\(...\)"),
    ],
)
def test_a_callback_that_cannot_be_called_is_refused_before_anything_is_planned(callback, words):
    with pytest.raises(TypeError, match=words):
        train(callbacks=[callback], data=lambda step: pytest.fail("a batch was read"))


def test_a_run_without_a_folder_reports_to_the_terminal_alone(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train(callbacks=[], steps=2, run_dir=None)
    out = capsys.readouterr().out
    assert "step 2/2  loss" in out
    assert "run folder" not in out
    assert not list(tmp_path.iterdir())


def test_a_run_without_checkpoints_says_so_once(tmp_path, capsys):
    trainer = train(callbacks=[], steps=1, run_dir=tmp_path)
    said = "no weights will be saved: pass checkpoint='runs/NAME' to train"
    assert capsys.readouterr().out.count(said) == 1
    trainer.fit([batch(0)], 2)
    assert said not in capsys.readouterr().out
    train(tmp_path / "saved", callbacks=[], steps=1)
    assert said not in capsys.readouterr().out


def test_a_run_that_is_complete_says_so_in_one_line(tmp_path, capsys):
    train(tmp_path, callbacks=[], steps=4).close()
    capsys.readouterr()
    assert train(tmp_path, callbacks=[], steps=2).num_steps == 4
    out = capsys.readouterr().out
    assert out.count("nothing to train: the run is at step 4 of 2; raise steps=") == 1
    assert "resuming" not in out
    assert "4/2" not in out


SCRIPT = """
import signal
import jax
jax.config.update("jax_num_cpu_devices", 2)
import numpy as np
import zerojax
from flax import nnx

def interrupt(trainer, metrics):
    if metrics["step"] == 2:
        signal.raise_signal(signal.SIGINT)

zerojax.train(
    lambda rngs: nnx.Linear(4, 1, rngs=rngs), None, [{"x": np.ones((8, 4), np.float32)}],
    loss=lambda model, batch: (model(batch["x"]) ** 2).mean(), steps=50, checkpoint="run",
    callbacks=[interrupt], log=zerojax.LogConfig(every=1, tensorboard=False),
)
"""


@pytest.mark.thorough
def test_ctrl_c_in_a_script_is_one_line(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    lines = [line for line in done.stderr.splitlines() if line]
    assert done.returncode == 1
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("zerojax: SIGINT after step 3: saved in ")
    assert lines[0].count("resume") == 1


@pytest.mark.parametrize(("mode", "sign"), [("min", 1), ("max", -1)])
def test_an_improvement_is_larger_than_min_delta(mode, sign):
    trainer = types.SimpleNamespace(num_steps=4, say=lambda text: None)
    stopping = EarlyStopping("loss", mode=mode, patience=2, min_delta=0.5)
    losses = [3.0, 2.0, 1.75, 1.5]  # neither 0.25 nor 0.5 below 2.0 is enough
    ends = [stopping(trainer, {"loss": sign * x, "step": i}) for i, x in enumerate(losses)]
    assert ends == [False, False, False, True]
    assert (stopping.best, stopping.best_step) == (sign * 2.0, 1)
