"""Faults that the test suite must find: one small change of the source each, and the tests for it.

`python -m tests.mutations` makes each change in a copy of the sources, runs the named tests there,
and lists the changes that no test noticed. `tests/repo/test_mutations.py` holds the table to the
source.

`table.txt` has for each change a line with arguments of pytest, then `- ` before each line of the
text and `+ ` before each line of what takes its place.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Mutation:
    """One change of the source.

    Attributes:
      old: text that occurs exactly once in the sources of both packages.
      new: the text that takes its place.
      tests: arguments of pytest, without the slow tests; at least one of these tests must fail.
    """

    old: str
    new: str
    tests: str


def read_table(text: str) -> tuple[Mutation, ...]:
    """Returns the changes of a table as `table.txt` is one."""
    found = []
    for line in text.splitlines():
        if line.startswith("tests/"):
            found.append((line, [], []))
        else:
            _, old, new = found[-1]
            {"-": old, "+": new}[line[:1]].append(line[2:])
    return tuple(Mutation("\n".join(old), "\n".join(new), tests) for tests, old, new in found)


MUTATIONS = read_table((Path(__file__).parent / "table.txt").read_text())
