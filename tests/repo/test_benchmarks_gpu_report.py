"""What a run on a GPU found becomes tables and a decision; the figures here are made up."""

import functools
import json

import pytest

from benchmarks.gpu import collect, report, tune
from tests.support.tuning_doubles import Clock, Runs, question
from zerojax.training.tuning import Kept, KeptChoices, decide
from zerojax.training.tuning.kept_choices import FILE


def timed(leaves, kind, **times):
    return [{"leaves": leaves, "kind": kind, "way": way, "ms": ms} for way, ms in times.items()]


def decided(rows, kind="adamw"):
    return next(one for one in report.decide(rows) if one.kind == kind)


@pytest.mark.parametrize(
    ("one", "many", "takes"),
    [
        ((1.0, 0.9), (1.0, 1.0), True),
        ((1.0, 0.99), (1.0, 0.7), True),
        ((1.0, 0.9), (1.0, 1.05), False),  # ahead in one place, behind in another
        ((1.0, 0.99), (1.0, 1.0), False),  # within the noise
    ],
)
def test_a_kernel_is_taken_that_is_ahead_somewhere_and_behind_nowhere(one, many, takes):
    rows = timed("1 leaf", "adamw", XLA=one[0], kernel=one[1])
    rows += timed("148 leaves", "adamw", XLA=many[0], kernel=many[1])
    assert decided(rows).takes_kernel is takes


def test_what_was_not_measured_decides_nothing():
    rows = timed("1 leaf", "stats", XLA=1.0)
    rows.append({"leaves": "1 leaf", "kind": "stats", "way": "kernel", "note": "left out"})
    assert decided(rows, "stats").takes_kernel is None
    assert decided(rows, "lion").takes_kernel is None
    assert decided(rows, "stats").kernel == "gradient_stats"


def run_file(folder):
    model_rows = [
        {"way": way, "step_ms": 50.0, "tokens_per_s": speed, "TFLOP/s": 400.0, "MFU": 0.4}
        for way, speed in (("bare jit", 1000.0), ("zerojax.train", 995.0))
    ]
    goal = {"name": "g", "value": 1.005, "limit": 1.01, "at_least": False, "met": True}
    optimizer = timed("1 leaf", "adamw", XLA=10.0, kernel=9.0)
    optimizer += timed("148 leaves", "adamw", XLA=1.3, kernel=1.3)
    machine = {"date": "2000-01-01", "versions": {"jax": "0.11.2"}}
    records = {
        "environment": {
            "device_kind": "a card",
            "machine": machine,
            "rows": [{"TFLOP/s": 800.0}, {"TB/s": 3.0}],
            "goals": [],
        },
        "gpt2": {"rows": model_rows, "goals": [goal]},
        "optimizer": {"rows": optimizer, "goals": []},
        "tune": {
            "rows": [
                {
                    "what": "update by adamw",
                    "choice": "xla",
                    "ways": "xla or mosaic_gpu",
                    "reference_ms": 1.0,
                    "other_ms": 1.25,
                },
                {"what": "whole step", "choice": "as planned", "ms": 50.0},
            ],
            "goals": [],
        },
        "memory": {
            "rows": [{"program": "p", "zero": 0, "predicted_MB": 10.0, "measured_MB": 10.1}],
            "goals": [],
        },
    }
    path = folder / "gpu.json"
    status = dict.fromkeys(records, "ok: 1 s")
    path.write_text(json.dumps({"smoke": False, "status": status, "parts": records}))
    return path


def test_a_report_has_the_figures_and_the_line_to_change(tmp_path, capsys):
    report.main([str(run_file(tmp_path))])
    said = capsys.readouterr().out
    assert "a card, driver None, 2000-01-01, jax 0.11.2: bf16 product 800 TFLOP/s" in said
    assert "| gpt2 | zerojax.train | 50.0 | 995 | 0.400 | 0.500 | 1.000 |" in said
    assert "- `adamw`: take the kernel; the kernel needs of XLA's time 0.900 in 1 leaf" in said
    assert '`"adamw": "the kernel needs of XLA' in said
    assert "| p | 0 | 10 | 10 |" in said
    assert "| update by adamw | xla | xla or mosaic_gpu | 1.000 | 1.250 |  |" in said
    assert "| whole step | as planned |  |  |  | 50.00 |" in said
    assert "- gpt2: g: 1.005 (<= 1.01, met)" in said


def test_a_report_of_a_users_cache_has_what_was_kept(tmp_path, capsys):
    """By the code that keeps it."""
    kept = KeptChoices(tmp_path)
    key = {"device": "a card", "driver": "1.2", "elements": 2**20, "ways": ["xla", "mosaic_gpu"]}
    kept.keep(
        {**key, "what": "adamw"},
        Kept(choice="mosaic_gpu", seconds=2e-3, other_seconds=1e-3, date="2000-01-01"),
    )
    kept.keep({"n": 1}, Kept(choice="xla", seconds=1.0, other_seconds=1.0, date="2000-01-01"))
    report.main([str(run_file(tmp_path)), str(tmp_path / FILE)])
    said = capsys.readouterr().out
    row = "| adamw | a card | 1.2 | 1,048,576 | mosaic_gpu | xla or mosaic_gpu | 2.000 | 1.000 | "
    assert f"{row}2000-01-01 |" in said
    assert "| update by adamw | xla |" in said


def test_what_is_measured_has_the_form_of_the_cache(monkeypatch):
    clock, kept = Clock(), {}
    about = {"what": "sum", "ways": ["xla", "mosaic_gpu"]}
    right, fast = Runs(clock, 1.0), Runs(clock, 0.5)
    monkeypatch.setattr(tune, "decide", functools.partial(decide, clock=clock))
    row = tune.choose("a sum", lambda: question(right, fast, **about), kept)
    assert (row["choice"], row["reference_ms"], row["other_ms"]) == ("mosaic_gpu", 1e3, 5e2)
    assert "refused" not in row
    (found,) = collect.rows_of_cache(kept)
    assert {name: found[name] for name in tune.TIMES} == {name: row[name] for name in tune.TIMES}
    noisy = Runs(clock, 0.1, 0.1, 0.1, 0.2, 0.9, 0.1, 0.8, 0.3, 0.9, 0.1)
    assert "refused" not in tune.choose("a sum", lambda: question(right, noisy, **about), {})
    wrong = Runs(clock, 0.5, result=RuntimeError("no such card"))
    assert "no such card" in tune.choose("a sum", lambda: question(right, wrong), {})["refused"]

    def ask():
        raise ValueError("no such package")

    assert "no such package" in tune.choose("a sum", ask, {})["refused"], "it says nothing else"


def test_a_report_of_nothing_is_empty():
    assert report.report({}) == ""
