"""docs/tutorial.md, its notebook, and the numbers that its pictures and its table show.

tests/repo/test_readme.py runs the Python of the page itself.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tools import tutorial

ROOT = Path(__file__).resolve().parents[2]
PAGE = tutorial.PAGE.read_text()
NUMBERS = json.loads(tutorial.NUMBERS.read_text())

RUN = """
import json, sys
sys.path.insert(0, {root!r})
from tools import tutorial
names = {{"__name__": "__main__"}}
for number, cell in enumerate(tutorial.cells_of(tutorial.NOTEBOOK.read_text())):
    exec(compile(cell, f"cell {{number}}", "exec"), names)
print(json.dumps(tutorial.losses_of(names)))
"""


def test_the_notebook_is_the_page():
    assert tutorial.NOTEBOOK.read_text() == tutorial.notebook(PAGE), "run tools/tutorial.py"
    assert tutorial.cells_of(tutorial.NOTEBOOK.read_text()) == [
        block.strip() for block in tutorial.code_blocks(PAGE)
    ]


def test_links_of_the_notebook_lead_somewhere():
    cells = json.loads(tutorial.NOTEBOOK.read_text())["cells"]
    text = "".join(line for cell in cells for line in cell["source"])
    targets = [part.partition(")")[0] for part in text.split("](")[1:]]
    paths = [target.partition("#")[0] for target in targets if target.startswith("..")]
    assert len(paths) >= 8
    assert [path for path in paths if not (ROOT / "examples" / path).exists()] == []


def test_pictures_and_table_are_drawn_from_the_recorded_numbers():
    assert tutorial.MEMORY_PICTURE.read_text() == tutorial.memory_picture(NUMBERS)
    assert tutorial.LOSS_PICTURE.read_text() == tutorial.loss_picture(NUMBERS)
    assert tutorial.with_table(PAGE, NUMBERS) == PAGE
    assert list(NUMBERS["memory"]) == list(tutorial.SETTINGS)
    for row in NUMBERS["memory"].values():
        assert sum(row["roles"].values()) == row["peak"]


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.examples
def test_the_notebook_runs_and_its_losses_are_those_of_the_picture(tmp_path):
    variables = {
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # as in conftest.py
    }
    result = subprocess.run(
        [sys.executable, "-c", RUN.format(root=str(ROOT))],
        cwd=tmp_path,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    for name, losses in NUMBERS["loss"].items():
        # Another processor rounds otherwise, and 40 steps enlarge that.
        np.testing.assert_allclose(found["loss"][name], losses, atol=2e-2)


@pytest.mark.gpu_programs
def test_the_recorded_memory_is_what_is_compiled():
    name = 'and roll_remat="full"'
    found = tutorial.compiled_memory(PAGE, [name])[name]
    recorded = NUMBERS["memory"][name]
    # Another version of the compiler arranges temporaries differently.
    assert found["peak"] == pytest.approx(recorded["peak"], rel=0.05)
    assert found["limit"] == recorded["limit"]
    for role in ("master weights", "optimizer state"):
        assert found["roles"][role] == pytest.approx(recorded["roles"][role], rel=0.01)
