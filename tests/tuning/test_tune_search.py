"""`zerojax tune RUN --search`: plans of a search take steps on the devices here."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.support.marks import needs_compiler
from tests.support.refusals import check_words
from zerojax.cli import main, tune_search
from zerojax.config import RunConfig, load
from zerojax.training import tuning
from zerojax.training.tuning import whole_steps

TINY = [
    *("cpu_devices=8", "model.num_layers=2", "model.embed_dim=16", "model.num_heads=2"),
    *("model.vocab_size=64", "data.seq_len=16", "model.max_seq_len=16", "global_batch_size=16"),
]
FAST = ["mesh.data=-1", "mesh.zero=3", "num_microbatches=2"]
SLOW = ["mesh.data=-1", "mesh.zero=1", "num_microbatches=1"]
IMPOSSIBLE = ["mesh.data=3"]


def found(*trials: Any, chosen: bool = True) -> dict[str, Any]:
    """A search's answer whose choice is the first of `trials`."""
    listed = [
        {"status": status, "words": words, "seconds": seconds} for status, words, seconds in trials
    ]
    first = {"chosen": listed[0], "words": listed[0]["words"]} if chosen else {"chosen": None}
    return {"trials": listed, "sentence": "None of the candidates fits.", **first}


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Injected seconds of a step by the name of its plan; each plan takes its steps for real."""
    given: dict[str, float] = {}
    measured = whole_steps.time_steps

    def timed(plans: Any) -> Any:
        for step in measured(plans):
            assert 0 < step.seconds < float("inf"), step
            yield dataclasses.replace(step, seconds=given.get(step.name, 1.0))

    monkeypatch.setattr(tuning, "time_steps", timed)
    return given


@pytest.mark.thorough
def test_the_fastest_plan_is_written_as_a_run_file(tmp_path, seconds, monkeypatch, capsys):
    """Plans that cannot run here are left out with the reason; slower ones are not tried."""
    trials = [("chosen", SLOW, 0.1), ("beaten", ["mesh.zero=0"], None), ("fits", FAST, 0.3)]
    trials += [("fits", IMPOSSIBLE, 0.2), ("fits", ["mesh.zero=2"], 0.4)]
    monkeypatch.setattr(tune_search, "_search", lambda *_: found(*trials))
    seconds[" ".join(FAST)] = 0.5
    out, run = tmp_path / "fastest.yaml", tmp_path / "own.yaml"
    run.write_text("optimizer: {name: lion}\n")
    words = [str(run), *TINY, "--search", "--gpu", "h100", "--best", "3", "--out", str(out)]
    assert main(["tune", *words]) == 0
    told = capsys.readouterr().out
    assert f"  {' '.join(FAST)}: 500 ms a step" in told
    assert f"  {' '.join(IMPOSSIBLE)}: not timed" in told
    assert "mesh.zero=2" not in told
    assert load(RunConfig, out) == load(RunConfig, str(run), [*TINY, *FAST, "run_dir=runs/fastest"])
    assert "500 ms a step" in out.read_text()
    assert main(["tune", *words]) == 2
    check_words(capsys.readouterr().err, str(out), "new")


def test_nothing_is_written_where_nothing_fits(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        tune_search, "_search", lambda *_: found(("does not fit", FAST, 1.0), chosen=False)
    )
    out = tmp_path / "fastest.yaml"
    assert main(["tune", *TINY, "--search", "--gpu", "h100", "--out", str(out)]) == 1
    assert "None of the candidates fits." in capsys.readouterr().out
    assert not out.exists()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["--best", "2"], "--search"),
        (["--search", "--no-steps"], "--no-steps"),
        (["--search", "--best", "0"], "--best 0"),
        (["--search", "--budget", "0"], "above 0"),
        (["--search"], "--gpu"),
        (["--search", "--gpu", "h300"], "h300"),
    ],
)
def test_options_that_do_not_fit_together_are_refused(words, remedy, capsys):
    assert main(["tune", *TINY, *words]) == 2
    check_words(capsys.readouterr().err, [remedy])


@pytest.mark.slow
@needs_compiler
def test_the_search_itself_finds_plans_that_run_here(tmp_path: Path, capsys):
    out = tmp_path / "fastest.yaml"
    words = ["--search", "--gpu", "h100", "--best", "2", "--budget", "20", "--out", str(out)]
    assert main(["tune", *TINY, *words]) == 0
    told = capsys.readouterr().out
    assert told.count(" ms a step") >= 2
    assert load(RunConfig, out).mesh.data == -1
