"""What a run on a GPU found becomes tables and a decision; the figures here are made up."""

from __future__ import annotations

import json

import pytest

from benchmarks.gpu import report


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
    optimizer += [{**optimizer[-1], "way": report.TABLE, "ms": 1.0, "launches": 3}]
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
        "memory": {
            "rows": [
                {"program": "p", "zero": 0, "predicted_MB": 10.0, "measured_MB": 10.1},
            ],
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
    assert "- `update_many` of adamw: 1.30 times XLA's speed" in said
    assert "| p | 0 | 10 | 10 |" in said
    assert "- gpt2: g: 1.005 (<= 1.01, met)" in said


def test_a_report_of_nothing_is_empty():
    assert report.report({}) == ""
