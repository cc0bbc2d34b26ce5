"""`zerojax sweep`: which trials there are, how long each trains, and who goes on."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from tests.support.refusals import Refusal, refused
from tests.training.test_rate_range import config_of
from zerojax.cli import main
from zerojax.config import ConfigError, RunConfig, SweepConfig, load
from zerojax.hardware.gpus import find_gpu
from zerojax.training.run_file import run_from_config
from zerojax.training.sweep_page import write_sweep_page
from zerojax.training.sweep_record import RungResult, SweepRecord, as_result
from zerojax.training.sweep_runs import Sweep, check_fits
from zerojax.training.sweep_trials import (
    SweepRung,
    describe_warmup,
    make_rungs,
    make_trials,
    settings_of_sweep,
    steps_to_train,
)

TWO_RATES = "sweep.axes={optimizer.learning_rate: [1e-3, 1e-2]}"


def rungs_of(trials: int, steps: int, **options: int) -> list[tuple[int, int]]:
    rungs = make_rungs(trials, steps, SweepConfig(**options))
    return [(rung.trials, rung.steps) for rung in rungs]


# --- steps ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trials", "steps", "options", "expected"),
    [
        (27, 2700, {}, [(27, 100), (9, 300), (3, 900), (1, 2700)]),
        (10, 900, {}, [(10, 100), (3, 300), (1, 900)]),
        (8, 80, {"eta": 2}, [(8, 10), (4, 20), (2, 40), (1, 80)]),
        (27, 2700, {"min_steps": 300}, [(27, 300), (9, 900), (3, 2700)]),
        (27, 2, {}, [(27, 1), (9, 2)]),
        (2, 100, {}, [(2, 100)]),
        (1, 1, {}, [(1, 1)]),
    ],
)
def test_rungs(trials, steps, options, expected):
    assert rungs_of(trials, steps, **options) == expected


def test_27_trials_take_the_steps_of_three_runs():
    assert steps_to_train(make_rungs(27, 2700, SweepConfig())) == 3 * 2700


def test_a_trial_trains_only_the_steps_that_its_last_rung_lacks():
    rungs = [SweepRung(steps=2, trials=8), SweepRung(steps=5, trials=3)]
    assert steps_to_train(rungs) == 8 * 2 + 3 * 3


# --- trials ---------------------------------------------------------------------------------------


def trials_of(folder: Path, *words: str) -> list[dict]:
    return [dict(trial.values) for trial in make_trials(config_of(folder, *words), str(folder))]


def test_lists_are_combined_and_keys_are_resolved(tmp_path):
    words = "sweep.axes={learning_rate: [1e-3, 1e-2], optimizer.name: [adamw, lion]}"
    trials = make_trials(config_of(tmp_path, words), str(tmp_path))
    found = [(x.config.optimizer.learning_rate, x.config.optimizer.name) for x in trials]
    assert found == [(1e-3, "adamw"), (1e-3, "lion"), (1e-2, "adamw"), (1e-2, "lion")]
    assert [x.config.run_dir for x in trials] == [f"{tmp_path}/{n:03d}" for n in range(4)]
    assert all(trial.config.sweep == SweepConfig() for trial in trials)


def test_some_combinations_are_drawn_without_repeating_one(tmp_path):
    words = ["sweep.axes={seed: [0, 1, 2], optimizer.beta1: [0.8, 0.9]}", "sweep.trials=5"]
    found = trials_of(tmp_path, *words)
    assert len({json.dumps(x) for x in found}) == 5
    assert found == trials_of(tmp_path, *words)
    assert found != trials_of(tmp_path, *words, "sweep.seed=1")


def test_numbers_are_drawn_from_ranges(tmp_path):
    axes = (
        "{optimizer.learning_rate: {low: 1e-5, high: 1e-1, scale: log}, "
        "optimizer.weight_decay: {low: 0, high: 1}, optimizer.warmup_steps: {low: 0, high: 9}}"
    )
    found = trials_of(tmp_path, f"sweep.axes={axes}", "sweep.trials=60")
    rates = [x["optimizer.learning_rate"] for x in found]
    assert all(1e-5 <= rate <= 1e-1 for rate in rates)
    assert 15 < sum(rate < 1e-3 for rate in rates) < 45  # half of them on a log scale
    assert 15 < sum(x["optimizer.weight_decay"] < 0.5 for x in found) < 45
    assert {x["optimizer.warmup_steps"] for x in found} <= set(range(10))


@pytest.mark.parametrize(
    ("words", "value", "remedy"),
    [
        ([], "nothing", "axes"),
        (["sweep.axes={steps: [10, 20]}"], "steps", "leave"),
        (["sweep.axes={global_batch_size: [8, 16]}"], "global_batch_size", "leave"),
        (["sweep.axes={data.seq_len: [8, 16]}"], "data.seq_len", "leave"),
        (["sweep.axes={sweep.eta: [2, 3]}"], "sweep.eta", "leave"),
        (["sweep.axes={optimizer: [1]}"], "optimizer", "learning_rate"),
        (["sweep.axes={learning_rat: [1]}"], "learning_rat", "learning_rate"),
        (["sweep.axes={beta1: [0.8], optimizer.beta1: [0.9]}"], "two axes", "keep"),
        (["sweep.axes={optimizer.name: {low: 1, high: 2}}", "sweep.trials=2"], "name", "list"),
        (["sweep.axes={optimizer.beta1: {low: 0.8, high: 0.9}}"], "beta1", "sweep.trials"),
        (["sweep.axes={optimizer.beta1: [0.9, 1.5]}"], "trial 001", "beta1"),
        ([TWO_RATES, "checkpoint.path=all"], "all", "leave"),
        ([TWO_RATES, "checkpoint.save_on_exit=false"], "save_on_exit", "true"),
    ],
)
def test_what_cannot_be_swept_is_refused(tmp_path, words, value, remedy):
    def made() -> None:
        make_trials(config_of(tmp_path, *words), str(tmp_path))

    refused(made, value, [remedy], error=ConfigError)


@pytest.mark.parametrize(
    ("section", "value", "remedy"),
    [
        ({"axes": {"seed": {"low": 1}}}, "low", "high"),
        ({"axes": {"seed": []}}, "axis", "list"),
        ({"axes": {"seed": {"low": 2, "high": 1}}}, "2.0", "high"),
        ({"axes": {"seed": {"low": 0, "high": 1, "scale": "log"}}}, "0", "linear"),
        ({"axes": {"seed": {"values": [1], "scale": "log"}}}, "log", "leave"),
        ({"axes": {"seed": {"value": [1]}}}, "value", "values"),
        ({"eta": 1}, "eta: 1", "2"),
        ({"trials": 0}, "trials: 0", "1"),
    ],
)
def test_a_bad_section_is_refused(section, value, remedy):
    refused(lambda: SweepConfig(**section), value, [remedy], error=ConfigError)


def test_the_section_of_a_file_names_the_line(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("sweep:\n  axes:\n    optimizer.beta1: {low: 0.9, high: 0.8}\n")
    refused(lambda: load(RunConfig, path), "0.9", ["high", "run.yaml:3"], error=ConfigError)


def test_a_first_rung_within_the_warm_up_is_said(tmp_path):
    def note(*words: str) -> str | None:
        config = config_of(tmp_path, TWO_RATES, "steps=90", *words)
        return describe_warmup(make_trials(config, ""), make_rungs(9, 90, config.sweep))

    assert "min_steps above 10" in (note() or "")
    assert note("optimizer.warmup_steps=9") is None
    assert note("sweep.min_steps=11") is None


# --- ranking --------------------------------------------------------------------------------------

RUNGS = make_rungs(9, 90, SweepConfig())


def record_of(folder: Path, *losses: float) -> SweepRecord:
    record = SweepRecord(folder, {"steps": 90})
    for trial, loss in enumerate(losses):
        record.add(trial, RUNGS[0].steps, as_result(loss))
    return record


def test_the_best_third_goes_on(tmp_path):
    nan, inf = float("nan"), float("inf")
    record = record_of(tmp_path, 5.0, nan, 3.0, 4.0, 3.0, inf, 9.0, 8.0, 7.0)
    assert record.survivors(RUNGS, 1) == [2, 4, 3]  # equal losses: the lower number
    assert record.survivors(RUNGS, 2) is None
    for trial, loss in ((2, 2.5), (4, nan), (3, 2.0)):
        record.add(trial, RUNGS[1].steps, as_result(loss))
    assert record.survivors(RUNGS, 2) == [3]
    assert record.ranking() == [3, 2, 0, 8, 7, 6, 4, 1, 5]
    again = SweepRecord(tmp_path, {"steps": 90})
    assert again.ranking() == record.ranking()
    assert again.results == record.results


def test_a_trial_without_a_finite_loss_never_goes_on(tmp_path):
    record = record_of(tmp_path, 5.0, *[float("nan")] * 8)
    assert record.survivors(RUNGS, 1) == [0]
    assert record.result(1, RUNGS[0].steps) == RungResult(loss=None, reason="the loss is nan")


def test_a_folder_of_another_sweep_is_refused(tmp_path):
    record_of(tmp_path, 1.0)
    refused(lambda: SweepRecord(tmp_path, {"steps": 91}), "90", ["--out"], error=ValueError)
    (tmp_path / "trials.json").write_text('{"results": ')
    refused(lambda: SweepRecord(tmp_path, {}), "trials.json", ["--out"], error=ValueError)


def test_log_and_folder_do_not_make_another_sweep(tmp_path):
    def settings(*words: str) -> dict:
        config = config_of(tmp_path, TWO_RATES, *words)
        return settings_of_sweep(config, make_trials(config, ""))

    assert settings("log.every=7", "run_dir=elsewhere") == settings()
    assert settings("seed=3") != settings()
    assert settings()["drawn"]["001"] == {"optimizer.learning_rate": 1e-2}


def test_the_page_lists_trials_by_rank_and_escapes_them(tmp_path):
    config = config_of(tmp_path, "sweep.axes={seed: [0, 1, 2, 3, 4, 5, 6, 7, 8]}")
    trials = make_trials(config, str(tmp_path))
    record = record_of(tmp_path, 5.0, float("nan"), 3.0)
    record.add(3, RUNGS[0].steps, RungResult(loss=None, reason="<b>lost</b>"))
    page = write_sweep_page(tmp_path, trials, RUNGS, record, "validation loss").read_text()
    places = [page.index(f"<td>{number:03d}</td>") for number in (2, 0, 1, 3)]
    assert places == sorted(places)
    assert "not finite" in page
    assert "&lt;b&gt;lost" in page
    assert "<svg" in page
    assert "4 of 13 results" in page


# --- plans ----------------------------------------------------------------------------------------


def test_a_dry_run_plans_every_trial_and_writes_nothing(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    words = [
        *("model.num_layers=1", "model.embed_dim=16", "model.num_heads=2", "data.seq_len=16"),
        *("model.max_seq_len=16", "global_batch_size=8", "steps=9", "sweep.eta=2"),
    ]
    path.write_text("sweep: {axes: {optimizer.learning_rate: [1e-3, 1e-2, 1e-1]}}\n")
    folder = tmp_path / "out"
    command = ["sweep", str(path), *words, "--plan", "--max-trials", "2", "--out", str(folder)]
    assert main(command) == 0
    told = capsys.readouterr().out
    assert told.count("optimizer.learning_rate=") == 2
    assert "rung 1: 2 trials to step 4" in told
    assert "warm-up of 4 steps" in told
    assert "13 steps in all" in told  # 2 x 4, then 5 more for one of them
    assert not folder.exists()


def test_a_trial_that_cannot_run_is_refused_before_any_trial_starts(tmp_path):
    """The settings of each trial are valid; only its plan shows that 3 heads cannot be split."""
    axes = "sweep.axes={mesh.zero: [1, 3], mesh.model: [1, 16]}"
    sweep = Sweep(config_of(tmp_path / "run", axes), str(tmp_path / "sweep"))
    refused(sweep.run, "trial 001", ["mesh"], error=ValueError)
    assert list(tmp_path.iterdir()) == []


def test_a_plan_that_is_larger_than_the_device_is_refused(tmp_path):
    sweep = Sweep(config_of(tmp_path / "run", "sweep.axes={seed: [0]}"), str(tmp_path / "sweep"))
    sweep.check()
    _, plan = sweep._prepare(sweep.trials[0])
    card = find_gpu("h100")
    check_fits(plan, card)
    small = dataclasses.replace(card, memory_bytes=1 << 10)
    refused(lambda: check_fits(plan, small), "needs", ["JAX may use"], error=ValueError)


@pytest.mark.slow
def test_a_trial_that_was_trained_outside_of_the_sweep_is_refused(tmp_path):
    config = config_of(tmp_path, "steps=1", "eval_every=null", "sweep.axes={beta1: [0.9]}")
    (trial,) = Sweep(config, str(tmp_path / "one")).trials
    run_from_config(dataclasses.replace(trial.config, steps=2)).close()
    sweep = lambda name: Sweep(config, str(tmp_path / name)).run()  # noqa: E731
    Refusal("one", "000 2 1", "--out", ["other"]).check(sweep)
