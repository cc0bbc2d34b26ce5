"""What README.md and docs/ say is done here: their Python, their commands, the tests they name."""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from benchmarks import readme_table
from tests.support.chat_samples import CHATS, TEMPLATES
from tests.support.hugging_face_folders import write_chat_model

ROOT = Path(__file__).resolve().parents[2]
DOCS = sorted((ROOT / "docs").glob("*.md"))
TESTED_ELSEWHERE = {
    "from_deepspeed.md": "deepspeed/test_from_deepspeed.py",
    "deepspeed_tutorial.md": "deepspeed/test_deepspeed_tutorial.py",
}
"""Pages with programs that are not for zerojax alone, and the tests that run them."""

PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in [ROOT / "README.md", *DOCS]
    if path.name not in TESTED_ELSEWHERE
}


def blocks(language: str, page: str) -> list[str]:
    pattern = rf"^```{language}\n(.*?)^```"
    return re.findall(pattern, PAGES[page], flags=re.MULTILINE | re.DOTALL)


def commands(page: str) -> list[str]:
    return [line for block in blocks("sh", page) for line in block.splitlines()]


ALL_COMMANDS = [line for page in PAGES for line in commands(page)]

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
@pytest.mark.parametrize("page", [page for page in PAGES if blocks("python", page)])
def test_the_python_blocks_run_one_after_another(page, tmp_path):
    for number, text in enumerate(blocks("json", page)):
        assert number == 0, "one file, ds_config.json"
        (tmp_path / "ds_config.json").write_text(text)
    assert run(["-c", "\n".join(blocks("python", page))], tmp_path)


@pytest.mark.slow
@pytest.mark.examples
@pytest.mark.parametrize("page", [page for page in PAGES if blocks("sh", page)])
def test_the_commands_run_one_after_another(page, tmp_path):
    for folder in ("configs", "examples"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    text = (ROOT / "zerojax" / "data" / "shakespeare.txt").read_text()
    (tmp_path / "my_text.txt").write_text(text[:200_000])
    (tmp_path / "chats.jsonl").write_text(f"{json.dumps(CHATS['one'])}\n" * 400)
    (tmp_path / "chatml.jinja").write_text(TEMPLATES["chatml"])
    write_chat_model(tmp_path / "my_model")
    for content in blocks("json", page):
        (tmp_path / "ds_config.json").write_text(content)
    ours = [line for line in commands(page) if line.startswith("zerojax ")]
    assert ours
    for line in ours:
        assert run(["-m", *shlex.split(line)], tmp_path)


@pytest.mark.parametrize("line", [line for line in ALL_COMMANDS if line.startswith("make ")])
def test_make_knows_the_target(line):
    """What the targets do is run by .ci/run and by whoever types them; here, that they exist."""
    result = subprocess.run(
        ["make", "-n", *shlex.split(line)[1:]], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    wanted = {"make train": "zerojax train", "make test": "pytest"}
    assert wanted[line] in result.stdout


@pytest.mark.parametrize("line", [line for line in ALL_COMMANDS if line.startswith("pip ")])
def test_the_extras_exist(line):
    extras = re.findall(r"\[(\w+)\]", line)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(extras) <= set(project["optional-dependencies"])


def test_every_command_is_looked_at():
    assert {line.split()[0] for line in ALL_COMMANDS} == {"make", "pip", "zerojax"}


def named_tests() -> list[str]:
    found = (re.findall(r"`(tests/[\w/]+\.py::\w+)`", text) for text in PAGES.values())
    return sorted({reference for references in found for reference in references})


def test_the_named_tests_exist():
    @functools.cache
    def tests_of(file):
        tree = ast.parse((ROOT / file).read_text())
        return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}

    named = [reference.split("::") for reference in named_tests()]
    assert len(named) > 300
    assert [f"{file}::{name}" for file, name in named if name not in tests_of(file)] == []


def test_every_line_of_a_table_of_promises_names_a_test():
    """Such a table has a last column of tests: "shown by" or "tried in"."""
    least = {"docs/claims.md": 300, "docs/troubleshooting.md": 20}
    for page, text in PAGES.items():
        tables = re.findall(r"(?:^\|.*\|\n)+", text, flags=re.MULTILINE)
        promises = [table for table in tables if re.match(r".*\| (shown by|tried in) \|\n", table)]
        rows = [row for table in promises for row in table.splitlines()[2:]]
        assert [row for row in rows if not re.search(r"`tests/[\w/]+\.py::\w+` \|$", row)] == []
        assert len(rows) >= least.get(page, 0), page


def test_the_counts_of_known_faults_are_those_of_its_tables():
    page = PAGES["docs/known_faults.md"]
    rows = re.findall(r"^\| .*github\.com.* \| (?:yes|no) \| `tests/.*$", page, flags=re.MULTILINE)
    found = [row for row in rows if "**not found**" not in row]
    lines = [row for row in found if " | yes | " in row]
    introduction = page.split("\n\n")[1]
    assert len(rows) == 20
    assert [int(number) for number in re.findall(r"\d+", introduction)] == [len(found), len(lines)]


def test_the_readme_shows_parts_of_a_page_of_a_plan():
    (excerpt,) = blocks("text", "README.md")
    (page,) = blocks("text", "docs/plan.md")
    shown = [line for line in excerpt.splitlines() if line != "..."]
    assert len(shown) >= 9
    assert [line for line in shown if line not in page.splitlines()] == []


def test_the_readme_stays_readable():
    assert len(PAGES["README.md"].splitlines()) <= 180


def test_the_index_of_pages_has_each():
    index = (ROOT / "docs" / "README.md").read_text()
    assert [path.name for path in DOCS if f"]({path.name})" not in index] == ["README.md"]


def test_links_between_pages_lead_somewhere():
    for page, text in PAGES.items():
        for target in re.findall(r"\]\(([\w./]+)(?:#[\w-]+)?\)", text):
            assert (ROOT / page).parent.joinpath(target).exists(), f"{page}: {target}"


def test_pages_that_are_tested_elsewhere_are():
    for path in DOCS:
        if path.name in TESTED_ELSEWHERE:
            assert path.name in (ROOT / "tests" / TESTED_ELSEWHERE[path.name]).read_text()


@pytest.mark.parametrize(
    ("page", "ways"), [("README.md", readme_table.SHORT), ("docs/comparison.md", ())]
)
def test_the_comparison_is_that_of_the_committed_result(page, ways):
    record = json.loads(readme_table.RESULT.read_text())
    part = readme_table.comparison(record, ways)
    assert [way for way in ways if f"| {way} |" not in part] == []
    assert readme_table.with_comparison(PAGES[page], part) == PAGES[page]


def test_a_comparison_has_one_line_per_way():
    rows = [
        {"way": "zerojax ZeRO 1", "processes": 2, "steps/s": 1.234, "lines": 9},
        {"way": "DeepSpeed ZeRO 1", "processes": 2, "note": "not installed", "lines": 12},
    ]
    machine = {"cores": 2, "cpu": "some", "date": "2026-11-22", "versions": {"jax": "0.10.2"}}
    notes = ["steps/s: median", "zerojax takes 1.57 times the wall time of torch eager"]
    load = {"before": 0.1}
    record = {
        "smoke": False,
        "machine": machine,
        "load_average": load,
        "rows": rows,
        "notes": notes,
    }
    record["notes"] = notes
    *_, ours, theirs, _, words = readme_table.comparison(record).splitlines()
    assert words == "zerojax takes 1.57 times the wall time of torch eager."
    assert ours == "| zerojax ZeRO 1 | 2 | 1.23 |  |  |  |  | 9 |"
    assert theirs == "| DeepSpeed ZeRO 1 | 2 |  |  |  |  |  | 12 |"


def columns(row: str) -> int:
    """The number of columns of a row of a table; bars in code and after a backslash are text."""
    text = re.sub(r"`[^`]*`", "", row.strip().strip("|"))
    return len(re.findall(r"(?<!\\)\|", text)) + 1


@pytest.mark.parametrize("page", PAGES)
def test_all_rows_of_a_table_have_its_columns(page):
    text = re.sub(r"^```.*?^```", "", PAGES[page], flags=re.MULTILINE | re.DOTALL)
    for table in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
        rows = table.splitlines()
        assert {columns(row) for row in rows} == {columns(rows[0])}, table[:300]
