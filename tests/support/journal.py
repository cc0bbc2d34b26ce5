"""A file with one line of JSON for each test that ended; later runs skip the tests that passed.

`tools/test_all.py` uses it, so that the full suite can be interrupted.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest


def passed_tests(path: Path, part: str) -> set[str]:
    """Returns the tests of a part that passed or were skipped, by the last result of each."""
    if not path.exists():
        return set()
    outcomes = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        result = json.loads(line)
        if result["part"] == part:
            outcomes[result["test"]] = result["outcome"]
    return {test for test, outcome in outcomes.items() if outcome != "failed"}


def append(path: Path, *, part: str, test: str, outcome: str, seconds: float) -> None:
    """Adds one result: `outcome` is passed, skipped or failed."""
    result = {"part": part, "test": test, "outcome": outcome, "seconds": round(seconds, 3)}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(result) + "\n")


class Journal:
    """A plugin of pytest that writes results and deselects the tests that passed before.

    Args:
      path: of the journal.
      part: the name under which results are written.
      worker: whether this process is a worker of pytest-xdist, which writes nothing.
      passed: tests to leave out; by default those of the journal. Every worker gets them from the
        process that started it: all must collect the same tests, also one that replaces another.
    """

    def __init__(self, path: Path, part: str, *, worker: bool, passed: Iterable[str] | None = None):
        self.path, self.part, self.worker = path, part, worker
        self.passed = frozenset(passed_tests(path, part) if passed is None else passed)
        self.open: dict[str, tuple[str, float]] = {}

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["passed_tests"] = sorted(self.passed)

    @pytest.hookimpl(trylast=True)  # after `-m` chose
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        left_out = [item for item in items if item.nodeid in self.passed]
        if left_out:
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if item.nodeid not in self.passed]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test has a report for set-up, call and teardown; a crash of its worker is the last."""
        if self.worker:
            return
        outcome, seconds = self.open.pop(report.nodeid, ("passed", 0.0))
        seconds += report.duration
        if outcome != "failed" and report.outcome != "passed":
            outcome = report.outcome
        if report.when in ("setup", "call"):
            self.open[report.nodeid] = outcome, seconds
        else:
            append(self.path, part=self.part, test=report.nodeid, outcome=outcome, seconds=seconds)
