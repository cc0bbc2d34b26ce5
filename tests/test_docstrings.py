"""The examples in docstrings run, and every module says what it decides."""

from __future__ import annotations

import ast
import doctest
import functools
import importlib
from pathlib import Path

import pytest

from tests.syntax_trees import tree_of

ROOT = Path(__file__).resolve().parent.parent
FILES = [
    path
    for package in ("zerojax", "pallas_kernels")
    for path in sorted((ROOT / package).rglob("*.py"))
    if path.name != "__main__.py"
]


@functools.cache
def syntax_trees() -> dict[Path, ast.Module]:
    return {path: tree_of(path) for path in FILES}


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


RIDDLES = {"what", "how", "which", "whether", "when", "where", "who", "why", "by", "that"}
"""A first line is a noun phrase with the field's term; it does not begin as a question does."""


def wrong_first_lines(docstring: str) -> str:
    """The fault at the start of a module's docstring, or nothing."""
    lines = docstring.splitlines()
    if not lines:
        return "needs a docstring"
    if not lines[0].endswith("."):
        return f"the first line must end with a full stop: {lines[0]}"
    if lines[0].split()[0].lower() in RIDDLES:
        return f"the first line must be a noun phrase: {lines[0]}"
    return "the second line must be empty" if len(lines) > 1 and lines[1] else ""


@pytest.mark.thorough
def test_every_modules_first_line_is_a_noun_phrase():
    found = {
        module_name(path): wrong_first_lines(ast.get_docstring(tree) or "")
        for path, tree in syntax_trees().items()
    }
    assert not [f"{name}: {wrong}" for name, wrong in found.items() if wrong]


def bare_names(tree: ast.Module) -> list[str]:
    """Public functions and classes without a docstring."""
    return [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
    ]


def test_public_functions_and_classes_have_docstrings():
    assert not [
        f"{module_name(path)}: {name}"
        for path, tree in syntax_trees().items()
        for name in bare_names(tree)
    ]


def test_the_rules_find_what_they_are_for():
    assert len(FILES) > 100
    assert wrong_first_lines("")
    assert wrong_first_lines("No full stop\n\nMore.")
    assert wrong_first_lines("How a question begins.")
    assert wrong_first_lines("A line.\nAnother.\nMore.")
    assert not wrong_first_lines("A line.\n\nMore.")
    assert not wrong_first_lines("One line.")
    assert bare_names(ast.parse("def f(): pass\nclass A: pass\ndef _g(): pass")) == ["f", "A"]
    assert not bare_names(ast.parse('def f():\n    "It says."'))
