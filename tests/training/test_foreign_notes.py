"""Logs and notes that other programs wrote: huge, damaged, or made to deceive who reads them."""

import json
import time
import tracemalloc

import pytest

from tests.support.refusals import refused
from zerojax.checkpoint.errors import Damage
from zerojax.cli import main
from zerojax.runtime import standstill
from zerojax.runtime.standstill import FOLDER, read_notes
from zerojax.training.metrics import metric_files, read_metrics
from zerojax.training.metrics.metric_files import FILE_NAME, first_loss, set_aside
from zerojax.training.metrics.report import write_report

NOTE = {
    "process": 0,
    "num_processes": 2,
    "host": "h",
    "pid": 1,
    "since": 1.5,
    "doing": "x",
    "line": None,
    "entered": 5,
    "finished": 4,
    "program": "p",
    "meetings": [{"what": "a", "processes": [1]}],
}


def write_note(folder, name="process-0.json", **values):
    (folder / FOLDER).mkdir(exist_ok=True)
    (folder / FOLDER / name).write_text(json.dumps(NOTE | values))


BAD = {
    "num_processes": [3e8, 10**7, 10**30, -1, 0, "2", True, None, [2]],
    "process": [-1, 2, 10**30, 1.5, "0"],
    "pid": [10**30, -1, "1"],
    "since": [1e300, -1.0, "inf", None],
    "entered": [10**30, 2.5],
    "host": [None, ["h"]],
    "meetings": [None, [{}], [{"what": 1, "processes": []}], [{"what": "a", "processes": [2]}]],
}


@pytest.mark.parametrize(("key", "value"), [(key, x) for key, xs in BAD.items() for x in xs])
def test_a_note_with_an_impossible_value_is_left_out(key, value, tmp_path, capsys):
    write_note(tmp_path, **{key: value})
    assert read_notes(tmp_path) == []
    assert main(["where", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "left out: 1" in out
    assert "no process" in out


def test_a_note_of_very_many_processes_is_answered(tmp_path, capsys):
    write_note(tmp_path, num_processes=standstill.MAX_PROCESSES)
    write_note(tmp_path, "process-7.json", num_processes=9, process=7)
    write_note(tmp_path, "process-8.json", process=1)
    before = time.process_time()
    tracemalloc.start()
    assert main(["where", str(tmp_path)]) == 0
    assert tracemalloc.get_traced_memory()[1] < 100 << 20
    tracemalloc.stop()
    assert time.process_time() - before < 10
    assert len(capsys.readouterr().out) < 5000


def test_notes_that_are_too_large_together(tmp_path, monkeypatch):
    write_note(tmp_path)
    monkeypatch.setattr(standstill, "_MAX_BYTES_OF_ALL", 100)
    refused(lambda: read_notes(tmp_path), [str(tmp_path / FOLDER), 100], "remove")


@pytest.mark.parametrize("key", ["host", "doing", "program", "line"])
def test_a_note_forges_no_lines(key, tmp_path, capsys):
    forged = "x\nprocess 1 is fine\r\x1b[2J\u202e" + "y" * 100_000
    write_note(tmp_path, **{key: forged}, finished=5)
    write_note(tmp_path, "process-1.json", **{key: forged}, process=1, entered=6)
    assert main(["where", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert not any(line.startswith("process 1 is fine") for line in out.split("\n"))
    assert not any(control in out for control in "\r\x1b\u202e")
    assert len(out) < 10_000


def test_a_damaged_file_forges_no_lines():
    assert "\n" not in str(Damage(file="a\nstep 3: intact", what="is\x1b[2J missing", leaf="b\n"))


def report(step: int, **values) -> str:
    times = {"time": 1.0, "seconds": float(step)}
    return json.dumps({"kind": "train", "step": step, **times, **values}) + "\n"


START = json.dumps({"kind": "start", "step": 0, "time": 1.0, "seconds": 0.0, "num_devices": 1})


def test_of_a_large_file_some_reports_are_read(tmp_path, monkeypatch):
    lines = [report(step, loss=3.0, spent_step=0.5, spent_save=1e-6) for step in range(1, 1001)]
    lines += [report(step, loss=2.0, spent_step=0.5) for step in range(900, 2001)]
    path = tmp_path / FILE_NAME
    path.write_text(START + "\n" + "".join(lines))
    all_of_them = read_metrics(tmp_path)
    assert all_of_them.left_out == 0
    monkeypatch.setattr(metric_files, "READ_BYTES", path.stat().st_size // 20)
    found = read_metrics(tmp_path)
    steps = [record["step"] for record in found.train]
    assert steps == sorted(set(steps))
    assert (steps[0], steps[-1]) == (1, 2000)
    assert 50 < len(steps) < 150
    assert len(steps) < 2000 < len(steps) + found.left_out
    assert all(one["loss"] == (3.0 if one["step"] < 900 else 2.0) for one in found.train)
    for name, error in (("spent_step", 20), ("spent_save", 1e-4)):
        sums = [sum(x.get(name) or 0 for x in of.train) for of in (found, all_of_them)]
        assert sums[0] == pytest.approx(sums[1], abs=error)
    assert "were left out" in write_report(tmp_path).read_text()


def test_only_the_newest_events_of_a_large_file_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(metric_files, "READ_BYTES", 10_000)
    event = '{{"kind": "event", "step": {}, "event": "x", "text": "{}"}}\n'
    lines = [event.format(step, "y" * 100) for step in range(1000)]
    (tmp_path / FILE_NAME).write_text(report(1, loss=1.0) + "".join(lines))
    found = read_metrics(tmp_path)
    assert found.events[-1]["step"] == 999
    assert 50 < len(found.events) < 100
    assert len(found.events) + found.left_out == 1000


def test_lines_of_others_in_a_large_file_take_little_time(tmp_path):
    others = '{"x":1}\n' * 2_000_000 + "\n"
    (tmp_path / FILE_NAME).write_text(f"{others}{report(1, loss=2.0)}{others}{report(2, loss=1.0)}")
    before = time.process_time()
    found = read_metrics(tmp_path)
    assert first_loss(tmp_path) == 2.0
    assert time.process_time() - before < 5  # 50 s if each is parsed
    assert [one["step"] for one in found.train] == [1, 2]
    assert found.unreadable_lines == 4_000_002
    with (tmp_path / FILE_NAME).open("a") as file:
        file.write(report(3, loss="high"))
    refused(lambda: read_metrics(tmp_path), [f"{FILE_NAME}:4000005", "loss", "high"], "remove")


@pytest.mark.parametrize("content", ["\0", "[", '{"a":', "9", '"'])
def test_a_huge_line_is_not_in_memory(content, tmp_path, monkeypatch):
    monkeypatch.setattr(metric_files, "MAX_LINE", 1 << 16)
    path = tmp_path / FILE_NAME
    end = report(2, loss=1.0)
    path.write_text(f"{report(1, loss=2.0)}{content * (20 << 20)}\n{end}")
    tracemalloc.start()
    found = read_metrics(tmp_path)
    assert first_loss(tmp_path) == 2.0
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()
    assert ([one["step"] for one in found.train], found.unreadable_lines) == ([1, 2], 1)
    assert set_aside(path) == tmp_path / "metrics.1.jsonl"


@pytest.mark.parametrize("value", ["1e999", "-1e999", "NaN", "1" + "0" * 200, "true", '"x"'])
def test_numbers_that_are_none(value, tmp_path):
    """Infinite ones are gaps; others are refused as before."""
    (tmp_path / FILE_NAME).write_text(report(1, loss=7.5).replace("7.5", value))
    if value[0] in '1"' and value != "1e999":
        refused(lambda: read_metrics(tmp_path), "loss", "remove")
    else:
        (record,) = read_metrics(tmp_path).train
        assert record["loss"] in (None, True)
