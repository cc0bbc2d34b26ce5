"""The examples in docstrings run, and every module says what it decides."""

from __future__ import annotations

import ast
import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = [
    path
    for package in ("zerojax", "pallas_kernels")
    for path in sorted((ROOT / package).rglob("*.py"))
    if path.name != "__main__.py"
]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_the_docstring_examples_run(path):
    if ">>>" not in path.read_text():
        return  # importing is the business of test_public_api.py
    module = importlib.import_module(module_name(path))
    failures, attempts = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert attempts
    assert not failures


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_the_module_says_what_it_decides_and_what_it_must_not_know(path):
    lines = (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()
    assert len(lines) >= 3, "a first line, an empty one, and what the module must not know"
    assert lines[0].endswith("."), lines[0]
    assert lines[1] == ""


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_public_functions_and_classes_have_docstrings(path):
    bare = [
        node.name
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
    ]
    assert not bare, f"{path.relative_to(ROOT)}: no docstring: {', '.join(bare)}"
