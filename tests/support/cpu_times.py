"""Processor time of test files and tests, as `--cpu-times` prints it."""

import os
from collections import Counter
from collections.abc import Generator

import pytest


def cpu_seconds() -> float:
    """Of this process and of those that it started and that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


class CpuTimes:
    """A plugin of pytest, also for the workers of pytest-xdist, whose reports carry the times."""

    def __init__(self, num_shown: int):
        self.num_shown = num_shown
        self.until = cpu_seconds()
        self.of_tests: Counter[str] = Counter()

    def pytest_collection_finish(self) -> None:
        self.until = cpu_seconds()  # imports of test files are no test's

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        now = cpu_seconds()
        report.cpu_seconds, self.until = now - self.until, now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.of_tests[report.nodeid] += getattr(report, "cpu_seconds", 0.0)

    def of_files(self) -> Counter[str]:
        files: Counter[str] = Counter()
        for test, seconds in self.of_tests.items():
            files[test.partition("::")[0]] += seconds
        return files

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for title, times in (("files", self.of_files()), ("tests", self.of_tests)):
            total = sum(times.values())
            terminalreporter.section(f"dearest {title} of {total:.0f} s of processor time")
            for name, seconds in times.most_common(self.num_shown):
                terminalreporter.write_line(f"{seconds:8.2f}s {name}")
