"""`zerojax keys`: lists the settings of a run with types, defaults and reasons."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Iterator

from zerojax import config as settings
from zerojax.cli.arguments import add_command
from zerojax.config.display import show

WIDTH = 96


def add(commands) -> None:
    """Adds the command `zerojax keys` to the parser."""
    parser = add_command(commands, "keys", run, "list all settings with default and meaning")
    parser.add_argument(
        "word", metavar="WORD", nargs="?", help="only settings that contain this word"
    )


def run(args: argparse.Namespace) -> int:
    """Runs `zerojax keys`: prints the settings that mention `args.word`, or all."""
    word = (args.word or "").lower()
    found = [item for item in all_keys() if word in item[0].lower() or word in item[2].lower()]
    if not found:
        raise ValueError(f"no setting mentions {args.word!r}; `zerojax keys` lists all of them")
    for key, default, text in found:
        show(f"{key}={format_value(default)}")
        show(textwrap.fill(text, WIDTH, initial_indent="    ", subsequent_indent="    "))
    return 0


def all_keys(cls: type = settings.RunConfig, prefix: str = "") -> Iterator[tuple[str, object, str]]:
    """Yields (key as written on the command line, default, text) of every setting of a run."""
    texts, defaults = documented_fields(cls), cls()
    for field in dataclasses.fields(cls):
        default = getattr(defaults, field.name)
        if dataclasses.is_dataclass(default):
            yield from all_keys(type(default), f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, default, texts[field.name]


def documented_fields(cls: type) -> dict[str, str]:
    """Returns {field name: its docstring in the source, on one line} of a dataclass."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(tree, ast.ClassDef)
    texts: dict[str, str] = {}
    for statement, following in zip(tree.body, [*tree.body[1:], None], strict=True):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        texts[statement.target.id] = ""
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            texts[statement.target.id] = " ".join(str(following.value.value).split())
    return texts


def format_value(value: object) -> str:
    """Returns a setting's default as a user would type it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(format_value, value))}]"
    return str(value)
