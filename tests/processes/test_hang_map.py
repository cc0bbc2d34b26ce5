"""Runs that hang say which process is missing before which collective of which step."""

import re
from pathlib import Path

import pytest

from tests.support.hang_process import AFTER
from tests.support.process_groups import end_group, run_group

pytestmark = [pytest.mark.multihost, pytest.mark.slow]

STAGES = [
    (kind, processes, missing)
    for processes, missing in ((2, 0), (2, 1), (4, 0), (4, 1), (4, 3))
    for kind in ("stops", "data", "callback", "branch")
]


def said(output: str) -> list[str]:
    """Lines of zerojax itself."""
    return [line for line in output.splitlines() if line.startswith("zerojax: process")]


@pytest.mark.parametrize(("kind", "processes", "missing"), STAGES)
def test_the_missing_process_and_the_collective_are_named(tmp_path, kind, processes, missing):
    words = ["-m", "tests.support.hang_process", kind, str(missing), str(tmp_path / "run")]
    ended = end_group([words] * processes, after_first=15.0)
    maps = [text for index, (_, text) in enumerate(ended) if index != missing and said(text)]
    text = "\n".join(line for one in maps for line in said(one))
    assert text, ended
    print(text)
    steps = re.findall(r"processe?s? [\d, -]+ waits? in step (\d+) ", text)
    assert len({*steps}) == 1, text
    # A report comes one step late, and the next step may have begun.
    assert AFTER < int(steps[0]) <= AFTER + 3
    assert f", which needs process {missing}" in text
    assert "over data" in text, "a collective"
    # A process that was stopped could not say where it stands.
    where = "left no note" if kind == "stops" else r"on .*hang_process\.py:\d+: "
    assert re.search(rf"zerojax: process {missing} {where}", text), text


def test_a_second_start_does_not_wait_for_a_program_from_the_cache(tmp_path: Path) -> None:
    """Process 0 would read the step from the cache, while process 1 compiles it."""
    for start in ("first", "second"):
        words = ["-m", "tests.support.hang_process", "nothing", "0", str(tmp_path / start)]
        variables = {"ZEROJAX_CACHE": str(tmp_path / "cache")}
        outputs = run_group([words] * 2, variables=variables, join=True)
        assert re.search(r"step +6/6", outputs[0])
        assert "not cached" in outputs[0]
