"""The files in which a parameter is handed on by name are those of a table, and few."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "zerojax/step/README.md"
MOST = 29


@pytest.mark.thorough
def test_the_route_of_a_parameter_is_the_one_in_the_readme(tmp_path):
    """In a process of its own: what was traced before is not traced again."""
    result = subprocess.run(
        [sys.executable, str(ROOT / "tests/support/route_process.py"), str(tmp_path / "run")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    (found,) = re.findall(r"^ROUTE (.*)$", result.stdout, re.MULTILINE) or [result.stderr]
    expected = re.findall(r"^\| `(.+\.py)` \|", TABLE.read_text(encoding="utf-8"), re.MULTILINE)
    assert found.split() == expected
    assert len(expected) <= MOST
