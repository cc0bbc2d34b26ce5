"""metrics.jsonl survives kills and resumes, and its reader tells one story."""

from __future__ import annotations

import json
import math

import pytest

from zerojax.training.metrics import read_metrics
from zerojax.training.metrics.metric_files import FILE_NAME, MetricsFile


def write(folder, *records):
    file = MetricsFile(folder / FILE_NAME)
    for kind, step, loss in records:
        file.write({"kind": kind, "step": step, "loss": loss})
    file.close()


def losses(records):
    return [(record["step"], record["loss"]) for record in records]


def test_lines_are_json_and_appended(tmp_path):
    write(tmp_path, ("train", 1, 3.0))
    write(tmp_path, ("train", 2, 2.0))
    lines = (tmp_path / FILE_NAME).read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_becomes_null(tmp_path, value):
    write(tmp_path, ("train", 1, value))
    assert "null" in (tmp_path / FILE_NAME).read_text()
    assert losses(read_metrics(tmp_path).train) == [(1, None)]


def test_a_line_cut_off_by_a_kill_does_not_spoil_the_next(tmp_path):
    write(tmp_path, ("train", 1, 3.0), ("train", 2, 2.0))
    path = tmp_path / FILE_NAME
    path.write_bytes(path.read_bytes()[:-9])
    write(tmp_path, ("train", 2, 2.5))
    metrics = read_metrics(tmp_path)
    assert losses(metrics.train) == [(1, 3.0), (2, 2.5)]
    assert metrics.unreadable_lines == 1


def test_a_resumed_run_supersedes_what_it_does_again(tmp_path):
    write(tmp_path, *[("train", step, 1.0) for step in (10, 20, 30, 40)], ("eval", 25, 9.0))
    write(tmp_path, ("train", 20, 2.0), ("eval", 20, 8.0))
    metrics = read_metrics(tmp_path)
    # 30, 40 and the evaluation at 25 belong to a future that was given up.
    assert losses(metrics.train) == [(10, 1.0), (20, 2.0)]
    assert losses(metrics.evals) == [(20, 8.0)]


def test_an_evaluation_and_a_report_of_one_step_do_not_displace_each_other(tmp_path):
    write(tmp_path, ("train", 10, 1.0), ("eval", 10, 2.0), ("eval", 20, 2.0), ("train", 20, 1.0))
    metrics = read_metrics(tmp_path)
    assert losses(metrics.train) == [(10, 1.0), (20, 1.0)]
    assert losses(metrics.evals) == [(10, 2.0), (20, 2.0)]


@pytest.mark.parametrize("line", ["[1, 2]", '{"step": 3}', '{"kind": "other", "step": 1}', "{"])
def test_foreign_lines_are_counted(tmp_path, line):
    write(tmp_path, ("train", 1, 3.0))
    with (tmp_path / FILE_NAME).open("a") as file:
        file.write(line + "\n\n")
    assert read_metrics(tmp_path).unreadable_lines == 1
    assert len(read_metrics(tmp_path).train) == 1


def test_a_folder_that_is_no_run_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no metrics\.jsonl in '.*'; pass the folder"):
        read_metrics(tmp_path)
