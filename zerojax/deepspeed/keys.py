"""What a table of keys is made of, and how a file is held against it, key by key.

Knows kinds of values and verdicts; never which keys there are.

DeepSpeed ignores unknown keys at the top of a file and refuses those in its typed sections; here a
key that the table does not have is refused wherever it stands, with the nearest one that it has.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from zerojax.deepspeed.result import Line, Verdict
from zerojax.display import quoted

AUTO = "auto"
_MAX_NAME = 100
"""Characters of a key that is looked for among those that there are."""


@dataclasses.dataclass(frozen=True)
class Key:
    """One key.

    Attributes:
      kind: of its value: "bool", "int", "float", "text", "list", "dict" or "any".
      default: DeepSpeed's, where the key is absent.
      verdict: what becomes of it.
      why: one sentence.
      only: values that have this verdict; None: all. Others are refused.
      otherwise: why others are refused, and what to write instead.
    """

    kind: str
    default: Any
    verdict: Verdict
    why: str
    only: tuple[Any, ...] | None = None
    otherwise: str = ""


@dataclasses.dataclass(frozen=True)
class Absent:
    """A feature that zerojax does not have: its section is refused where it is on.

    Attributes:
      why: what is missing, and what to do instead.
      is_on: whether a value turns it on.
      known: keys of the section; empty: any.
    """

    why: str
    is_on: Callable[[Any], bool]
    known: tuple[str, ...] = ()


Table = Mapping[str, "Key | Absent | Table"]


def is_enabled(value: Any) -> bool:
    """Whether a section says `"enabled": true`."""
    return bool(value.get("enabled", False)) if isinstance(value, Mapping) else bool(value)


def is_enabled_inside(value: Any) -> bool:
    """Whether a section, or one inside it, says `"enabled": true`."""
    if not isinstance(value, Mapping):
        return False
    return is_enabled(value) or any(map(is_enabled_inside, value.values()))


class Notes:
    """Lines by key while a file is read. Each key has one; a refusal stays what it is."""

    def __init__(self) -> None:
        self._lines: dict[str, Line] = {}
        self.warnings: list[str] = []
        self.reasons: list[str] = []

    @property
    def lines(self) -> tuple[Line, ...]:
        return tuple(self._lines.values())

    @property
    def refused(self) -> tuple[Line, ...]:
        return tuple(line for line in self.lines if line.verdict == "refused")

    def say(self, key: str, value: Any, verdict: Verdict, why: str) -> None:
        line = self._lines.get(key)
        if line is None or line.verdict != "refused":
            self._lines[key] = Line(key, value, verdict, why)

    def change(self, key: str, verdict: Verdict, why: str) -> None:
        """Another sentence for a key, if the file has it."""
        if key in self._lines:
            self.say(key, self._lines[key].value, verdict, why)

    def refuse(self, key: str, value: Any, why: str) -> None:
        self.say(key, value, "refused", why)


def check(
    values: Mapping[str, Any], table: Table, notes: Notes, prefix: str = ""
) -> dict[str, Any]:
    """{path: value} of all keys that the table knows, with a line for each key of the file.

    Values have their kinds: 5e8 is an integer. null and, in a nested section, "auto" count as
    absent, as in DeepSpeed; "auto" that means something has been filled before.

    Args:
      prefix: path of the section that this is, with its dot.
    """
    return dict(_check(values, table, prefix, notes, table))


def _check(
    values: Mapping[str, Any], table: Table, prefix: str, notes: Notes, whole: Table
) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        path, entry = f"{prefix}{name}", table.get(name)
        if entry is None:
            notes.refuse(path, value, f"unknown key; {_nearest(name, table, prefix, whole)}")
        elif isinstance(entry, Absent):
            _check_absent(path, value, entry, notes)
        elif isinstance(entry, Key):
            if _check_key(path, value, entry, notes):
                yield path, as_kind(entry.kind, value)
        elif isinstance(value, Mapping):
            yield from _check(value, entry, f"{path}.", notes, whole)
        elif value is not None:
            notes.refuse(path, value, f"expected a section with the keys {', '.join(entry)}")


def _check_absent(path: str, value: Any, entry: Absent, notes: Notes) -> None:
    strange = [key for key in value if key not in entry.known] if entry.known else []
    if entry.is_on(value):
        notes.refuse(path, value, entry.why)
    elif strange and isinstance(value, Mapping):
        near = nearest(strange[0], entry.known)
        notes.refuse(f"{path}.{strange[0]}", value[strange[0]], f"unknown key; {near}")
    else:
        notes.say(path, value, "honoured", "off, as here")


def _check_key(path: str, value: Any, entry: Key, notes: Notes) -> bool:
    """Says what becomes of a value; whether there is one to be used."""
    if value is None or value == AUTO:
        shown = f"{'null' if value is None else AUTO}: as if it were not there"
        default = "" if entry.default is None else f" (DeepSpeed's default: {entry.default})"
        notes.say(path, value, entry.verdict, f"{shown}{default}; {entry.why}")
        return False
    try:
        typed = as_kind(entry.kind, value)
    except ValueError as error:
        notes.refuse(path, value, str(error))
        return False
    if entry.only is not None and typed not in entry.only:
        notes.refuse(path, typed, entry.otherwise)
    elif entry.kind in ("int", "float") and typed < 0 and (entry.default or 0) >= 0:
        notes.refuse(path, typed, "must be at least 0")
    else:
        notes.say(path, typed, entry.verdict, entry.why)
    return True


_WANTED = {
    "bool": "true or false",
    "int": "an integer",
    "float": "a number",
    "text": "text",
    "list": "a list",
    "dict": "a section",
}


def as_kind(kind: str, value: Any) -> Any:
    """A value as its kind: whole numbers written as floats (5e8) or text ("5e8") are integers.

    Raises:
      ValueError: it is something else.
    """
    if kind in ("int", "float"):
        return _as_number(kind, value)
    types = {"bool": bool, "text": str, "list": (list, tuple), "dict": Mapping}
    if kind != "any" and not isinstance(value, types[kind]):
        raise ValueError(
            f"expected {_WANTED[kind]}, found {quoted(value)} ({type(value).__name__})"
        )
    return value


def _as_number(kind: str, value: Any) -> int | float:
    wrong = ValueError(f"expected {_WANTED[kind]}, found {quoted(value)} ({type(value).__name__})")
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise wrong
    try:
        number = float(value)
    except (ValueError, OverflowError):
        raise wrong from None
    if not math.isfinite(number) or (kind == "int" and not number.is_integer()):
        raise wrong
    if kind == "float":
        return number
    return value if isinstance(value, int) else int(number)


def nearest(name: str, known: Sequence[str]) -> str:
    """The end of an unknown-key sentence: the key that was probably meant, or all there are."""
    match = difflib.get_close_matches(str(name)[:_MAX_NAME], known, 1, 0.6)
    return f"did you mean '{match[0]}'?" if match else f"known keys here: {', '.join(known)}"


def _nearest(name: str, table: Table, prefix: str, whole: Table) -> str:
    """The nearest key of this section or, where there is none, of the whole file."""
    if difflib.get_close_matches(str(name)[:_MAX_NAME], [*table], 1, 0.6):
        return nearest(name, [*table])
    by_name = {path.rpartition(".")[2]: path for path in paths(whole)}
    match = difflib.get_close_matches(str(name)[:_MAX_NAME], [*by_name], 1, 0.75)
    if match:
        return f"did you mean '{by_name[match[0]]}'?"
    where = prefix.rstrip(".") or "the top of the file"
    return f"there is none like it in {where}"


def paths(table: Table, prefix: str = "") -> Iterator[str]:
    """Every key of a table, as a path."""
    for name, entry in table.items():
        if isinstance(entry, (Key, Absent)):
            yield f"{prefix}{name}"
        else:
            yield from paths(entry, f"{prefix}{name}.")


def default_of(table: Table, path: str) -> Any:
    """DeepSpeed's default of a key."""
    entry: Any = table
    for name in path.split("."):
        entry = entry[name]
    return entry.default
