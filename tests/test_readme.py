"""What README.md says is done here: its Python, its commands, and that the tests it names exist."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    return [line for block in blocks("sh") for line in block.splitlines()]


NOT_DECIDED = 3
"""What `zerojax plan` answers where nothing can be compiled and formulas do not decide."""


def run(words: list[str], folder: Path) -> str:
    variables = {
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "8",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # as in conftest.py
        "ZEROJAX_CACHE": str(folder / "cache"),  # rates that `zerojax bench` measures are kept
    }
    result = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=300,
    )
    fine = (0, NOT_DECIDED) if "plan" in words else (0,)
    assert result.returncode in fine, f"{words}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.mark.slow
@pytest.mark.examples
def test_the_python_blocks_run_one_after_another(tmp_path):
    program = "\n".join(blocks("python"))
    assert program.count("zerojax.train(") == 3
    assert "bytes per device" in run(["-c", program], tmp_path)


@pytest.mark.slow
@pytest.mark.examples
def test_the_commands_run_one_after_another(tmp_path):
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    text = (ROOT / "zerojax" / "data" / "shakespeare.txt").read_text()
    (tmp_path / "my_text.txt").write_text(text[:200_000])
    ours = [line for line in commands() if line.startswith("zerojax ")]
    assert len(ours) > 5
    for line in ours:
        assert run(["-m", *shlex.split(line)], tmp_path)


@pytest.mark.parametrize("line", [line for line in commands() if line.startswith("make ")])
def test_make_knows_the_target(line):
    """What the targets do is run by .ci/run and by whoever types them; here, that they exist."""
    result = subprocess.run(
        ["make", "-n", *shlex.split(line)[1:]], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    wanted = {"make train": "zerojax train", "make test": "pytest"}
    assert wanted[line] in result.stdout


@pytest.mark.parametrize("line", [line for line in commands() if line.startswith("pip ")])
def test_the_extras_exist(line):
    extras = re.findall(r"\[(\w+)\]", line)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(extras) <= set(project["optional-dependencies"])


def test_every_command_is_looked_at():
    assert {line.split()[0] for line in commands()} == {"make", "pip", "zerojax"}


@pytest.mark.parametrize("reference", re.findall(r"`(tests/\w+\.py::\w+)`", README))
def test_the_named_test_exists(reference):
    file, name = reference.split("::")
    tree = ast.parse((ROOT / file).read_text())
    assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_every_line_of_the_table_names_a_test():
    rows = re.findall(r"^\| [^|\n]+ \|.*\|$", README, flags=re.MULTILINE)
    assert len(rows) > 20
    assert [row for row in rows if not re.search(r"`tests/\w+\.py::\w+`", row)] == []
