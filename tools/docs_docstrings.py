"""Docstrings as the site shows them; an extension of Griffe, which reads them for mkdocstrings."""

from __future__ import annotations

import re
from typing import Any

import griffe

SECTION = re.compile(r"^( *)(Args|Attributes):$")
SHARED = re.compile(r"^( +)(\w+(?:, \w+)+):(.*)$")
"""An entry of several names, `b1, b2: decay of the moments.`"""


LATE = "zerojax.config.late_dataclasses.dataclass"


class ShownDocstrings(griffe.Extension):
    """Gives each name of a shared entry its own, with its type, and marks examples as code.

    Classes that `LATE` decorates are shown as the dataclasses that they are.
    """

    def on_alias_instance(self, *, alias: Any, **kwargs: Any) -> None:
        if alias.target_path == LATE:
            alias.target_path = "dataclasses.dataclass"

    def on_instance(self, *, obj: Any, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fence_examples(split_entries(obj.docstring.value))


def split_entries(text: str) -> str:
    """Returns a docstring in which entries of several names are repeated for each name."""
    lines: list[str] = []
    rest = text.splitlines()
    section = None
    while rest:
        line = rest.pop(0)
        indent = len(line) - len(line.lstrip())
        if line.strip() and section is not None and indent <= section:
            section = None
        if match := SECTION.match(line):
            section = len(match[1])
        shared = SHARED.match(line) if section is not None else None
        if shared is None:
            lines.append(line)
            continue
        more = []
        while rest and rest[0].strip() and len(rest[0]) - len(rest[0].lstrip()) > indent:
            more.append(rest.pop(0))
        for name in shared[2].split(", "):
            lines += [f"{shared[1]}{name}:{shared[3]}", *more]
    return "\n".join(lines)


def fence_examples(text: str) -> str:
    """Returns a docstring with each example, `>>>` to the next empty line, as a block of code."""
    lines: list[str] = []
    fence = ""
    for line in [*text.splitlines(), ""]:
        if line.lstrip().startswith(">>>") and not fence:
            fence = " " * (len(line) - len(line.lstrip())) + "```"
            lines.append(f"{fence}pycon")
        elif not line.strip() and fence:
            lines.append(fence)
            fence = ""
        lines.append(line)
    return "\n".join(lines).rstrip()
