"""The journal of the full suite: what it writes, and which tests a later run leaves out."""

import json
import types

import pytest

from tests.support.journal import Journal, append, passed_tests
from tools import test_all


def report(test, when, outcome, seconds=1.0):
    return types.SimpleNamespace(nodeid=test, when=when, outcome=outcome, duration=seconds)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("reports", "outcome"),
    [
        ([("setup", "passed"), ("call", "passed"), ("teardown", "passed")], "passed"),
        ([("setup", "skipped"), ("teardown", "passed")], "skipped"),
        ([("setup", "passed"), ("call", "failed"), ("teardown", "passed")], "failed"),
        ([("setup", "passed"), ("call", "passed"), ("teardown", "failed")], "failed"),
        ([("setup", "failed"), ("teardown", "passed")], "failed"),
        ([("setup", "passed"), ("???", "failed")], "failed"),  # its worker crashed
    ],
)
def test_a_test_has_its_worst_outcome(reports, outcome, tmp_path):
    journal = Journal(tmp_path / "j", "part", worker=False)
    for when, result in reports:
        journal.pytest_runtest_logreport(report("t", when, result))
    [line] = lines(tmp_path / "j")
    assert line == {"part": "part", "test": "t", "outcome": outcome, "seconds": len(reports)}


def test_workers_write_nothing(tmp_path):
    journal = Journal(tmp_path / "j", "part", worker=True, passed=())
    journal.pytest_runtest_logreport(report("t", "teardown", "passed"))
    assert not (tmp_path / "j").exists()


def test_tests_that_passed_in_this_part_are_left_out(tmp_path):
    path = tmp_path / "j"
    results = {"a": "passed", "b": "failed", "c": "skipped"}
    for test, outcome in results.items():
        append(path, part="quick", test=test, outcome=outcome, seconds=1)
    append(path, part="slow", test="d", outcome="passed", seconds=1)
    assert passed_tests(path, "quick") == {"a", "c"}
    append(path, part="quick", test="b", outcome="passed", seconds=1)
    append(path, part="quick", test="a", outcome="failed", seconds=1)
    assert passed_tests(path, "quick") == {"b", "c"}

    deselected = []
    hook = types.SimpleNamespace(pytest_deselected=lambda items: deselected.extend(items))
    items = [types.SimpleNamespace(nodeid=name) for name in "abcd"]
    journal = Journal(path, "quick", worker=False)
    journal.pytest_collection_modifyitems(types.SimpleNamespace(hook=hook), items)
    assert [item.nodeid for item in items] == ["a", "d"]
    assert [item.nodeid for item in deselected] == ["b", "c"]


def test_the_report_names_failures_slow_files_and_what_was_not_finished(tmp_path):
    path = tmp_path / "j"
    for test, outcome in {"f.py::a": "failed", "f.py::b": "passed", "g.py::c": "failed"}.items():
        append(path, part="quick", test=test, outcome=outcome, seconds=70)
    append(path, part="quick", test="f.py::a", outcome="passed", seconds=70)
    text, passed = test_all._report(path, [])
    assert not passed
    assert "140 s  f.py (quick)" in text
    assert "quick: 1 failed, 2 passed" in text
    assert "1 failed\nquick: g.py::c" in text
    append(path, part="quick", test="g.py::c", outcome="passed", seconds=70)
    assert test_all._report(path, [])[1]
    text, passed = test_all._report(path, ["slow"])
    assert not passed
    assert "not finished: slow" in text
