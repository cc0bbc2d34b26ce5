"""Docstrings: what is public has one, and the examples in them run."""

from __future__ import annotations

import ast
import doctest
import importlib
from pathlib import Path

import pytest

from tests.support.syntax_trees import tree_of

ROOT = Path(__file__).resolve().parents[2]
FILES = [
    path
    for package in ("zerojax", "pallas_kernels")
    for path in sorted((ROOT / package).rglob("*.py"))
    if path.name != "__main__.py"
]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


EXAMPLES = [path for path in FILES if ">>>" in path.read_text()]


@pytest.mark.parametrize("path", EXAMPLES, ids=module_name)
def test_the_docstring_examples_run(path):
    module = importlib.import_module(module_name(path))
    failures, attempts = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert attempts
    assert not failures


def bare_names(tree: ast.Module) -> list[str]:
    """Returns what has no docstring: the module, public functions and classes."""
    public = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
    ]
    return [
        getattr(node, "name", "module") for node in [tree, *public] if not ast.get_docstring(node)
    ]


def test_modules_and_public_functions_and_classes_have_docstrings():
    assert len(FILES) > 100
    found = {path: bare_names(tree_of(path)) for path in FILES}
    assert not {module_name(path): names for path, names in found.items() if names}


def test_the_rule_finds_what_it_is_for():
    assert bare_names(ast.parse("def f(): pass\nclass A: pass\ndef _g(): pass")) == [
        "module",
        "f",
        "A",
    ]
    assert not bare_names(ast.parse('"It says."\ndef f():\n    "It says."'))
