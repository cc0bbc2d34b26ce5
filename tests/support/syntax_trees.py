"""Syntax trees of sources, which several tests look at, made once a process."""

import ast
import functools
from pathlib import Path


@functools.cache
def parsed(text: str) -> ast.Module:
    return ast.parse(text)


@functools.cache
def nodes(text: str) -> tuple[ast.AST, ...]:
    """All that is in a module, as `ast.walk` gives it."""
    return tuple(ast.walk(parsed(text)))


def tree_of(path: Path) -> ast.Module:
    return parsed(path.read_text())


def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    return nodes(path.read_text())
