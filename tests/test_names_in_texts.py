"""Names such as `zerojax.optim.adamw` in pages, docstrings and messages are what one can type.

In pages and messages after `import zerojax` alone; in docstrings also as a path of modules.
"""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import zerojax

ROOT = Path(__file__).resolve().parent.parent
NAME = re.compile(r"(?<![\w./-])zerojax(?:\.[A-Za-z_]\w*)+(?![\w/])")
PUBLIC = {*zerojax.__all__, *zerojax._PUBLIC_MODULES}
COMMANDS = re.compile(r"""-m zerojax\.[\w.]+|"-m", "zerojax\.[\w.]+""")
"""Modules that are run as programs."""


def pages() -> Iterator[tuple[Path, str]]:
    for path in (ROOT / "README.md", ROOT / "CHANGELOG.md"):
        yield path, path.read_text()
    for folder, pattern in (("docs", "*.md"), ("examples", "**/*.md"), ("examples", "**/*.py")):
        for path in sorted((ROOT / folder).glob(pattern)):
            yield (
                path,
                "\n".join(line for line in path.read_text().splitlines() if "import" not in line),
            )


def texts_of_code() -> Iterator[tuple[Path, str, bool]]:
    """(file, text, whether it is a docstring) of every text with a space in it."""
    for path in sorted((ROOT / "zerojax").rglob("*.py")):
        tree = ast.parse(path.read_text())
        statements = {
            id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)
        }  # docstrings of modules, functions, classes and fields
        for node in ast.walk(tree):
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(text, str) and " " in text:
                yield path, text, id(node) in statements


def names(text: str) -> list[str]:
    return NAME.findall(COMMANDS.sub("", text))


def check_public(name: str, where: object) -> None:
    first, *rest = name.split(".")[1:]
    assert first in PUBLIC, f"{name} in {where} is no attribute after `import zerojax`"
    value = getattr(zerojax, first)
    for part in rest:
        value = getattr(value, part)


def test_names_in_pages_and_messages_are_attributes():
    seen = set()
    messages = [(path, text) for path, text, is_docstring in texts_of_code() if not is_docstring]
    for where, text in [*pages(), *messages]:
        for name in names(text):
            check_public(name, where)
            seen.add(name)
    assert len(seen) > 40


def test_names_in_docstrings_are_modules_or_in_them():
    for where, text, is_docstring in texts_of_code():
        for name in names(text) if is_docstring else ():
            parts, value = name.split("."), zerojax
            for number, part in enumerate(parts[1:], 2):
                if not hasattr(value, part):
                    importlib.import_module(".".join(parts[:number]))
                value = getattr(value, part)
            assert value is not None, f"{name} in {where}"


def test_modules_are_there_after_import_zerojax_alone():
    names = ["optim.adamw", "data.as_masked_source", "schedules.Schedule"]
    code = "import zerojax; " + "; ".join(f"zerojax.{name}" for name in names)
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
