"""Defines the schema of ds_config keys, and validates a ds_config against it.

DeepSpeed ignores unknown top-level keys and refuses unknown keys in its typed sections. This module
does the same with two differences. An unknown top-level key gives a warning. A key that looks like
a misspelt key is refused, and the message has the correct name, because a setting without effect is
hard to notice.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from zerojax.config.display import cut, printable, quoted
from zerojax.config.late_dataclasses import dataclass
from zerojax.deepspeed_config.translation import Line, Verdict

AUTO = "auto"
_MAX_NAME = 100
"""Maximum number of characters of an unknown key in the search for similar keys."""


@dataclass(frozen=True)
class Key:
    """Schema of one key of a ds_config, and how zerojax handles the key.

    Attributes:
      kind: type of the key's value: "bool", "int", "float", "text", "list", "dict" or "any".
      default: DeepSpeed's default if the key is absent.
      verdict: how zerojax handles the key, one of `translation.VERDICTS`.
      why: reason of the verdict, one sentence.
      only: values to which the verdict applies; other values are refused. None: all values.
      otherwise: why other values are refused, and what to write instead.
    """

    kind: str
    default: Any
    verdict: Verdict
    why: str
    only: tuple[Any, ...] | None = None
    otherwise: str = ""


@dataclass(frozen=True)
class AbsentFeature:
    """A feature that zerojax does not have; its section is refused if the feature is enabled.

    Attributes:
      why: sentence that says what is missing and what to do instead.
      is_on: function that returns True if a value enables the feature.
      known: names of the keys in the section; empty: any key is accepted.
    """

    why: str
    is_on: Callable[[Any], bool]
    known: tuple[str, ...] = ()


Table = Mapping[str, "Key | AbsentFeature | Table"]
_KINDS = {
    bool: "bool",
    int: "int",
    float: "float",
    str: "text",
    list: "list",
    dict: "dict",
    object: "any",
}


def honoured(
    default: object, why: str, only: tuple[Any, ...] | None = None, otherwise: str = ""
) -> Key:
    """Makes a key with the verdict "honoured".

    Args:
      default: DeepSpeed's default, or the type of a key without a default.
      why, only, otherwise: fields of `Key`.
    """
    return _key(default, "honoured", why, only, otherwise)


def mapped(default: object, why: str) -> Key:
    """Makes a key with the verdict "mapped"; arguments as of `honoured`."""
    return _key(default, "mapped", why)


def _key(given: object, verdict: Verdict, *rest: Any) -> Key:
    kind, default = (given, None) if isinstance(given, type) else (type(given), given)
    return Key(_KINDS[kind], default, verdict, *rest)


def not_needed(why: str, **defaults: Any) -> dict[str, Key]:
    """Makes keys with the verdict "not needed", all for the same reason.

    Args:
      why: the reason, which is the end of a sentence that begins with "no effect".
      defaults: {name of a key: DeepSpeed's default, or the type of a key without a default}.
    """
    return _without_effect("not needed", why, defaults)


def left_to_compiler(why: str, **defaults: Any) -> dict[str, Key]:
    """Makes keys with the verdict "compiler", all for the same reason; arguments as of
    `not_needed`."""
    return _without_effect("compiler", why, defaults)


def _without_effect(verdict: Verdict, why: str, defaults: Mapping[str, Any]) -> dict[str, Key]:
    return {name: _key(given, verdict, f"no effect; {why}") for name, given in defaults.items()}


def is_enabled(value: object) -> bool:
    """Returns True if a section of a ds_config has `"enabled": true`."""
    return bool(value.get("enabled", False)) if isinstance(value, Mapping) else bool(value)


def is_enabled_inside(value: object) -> bool:
    """Returns True if a section of a ds_config, or a section inside it, has `"enabled": true`."""
    if not isinstance(value, Mapping):
        return False
    return is_enabled(value) or any(map(is_enabled_inside, value.values()))


class KeyNotes:
    """Collects one line for each key of a ds_config: value, verdict and reason. A refusal is never
    replaced. `warnings` and `reasons` are those of `Translation`."""

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

    def say(self, key: str, value: object, verdict: Verdict, why: str) -> None:
        line = self._lines.get(key)
        if line is None or line.verdict != "refused":
            self._lines[key] = Line(key, value, verdict, why)

    def change(self, key: str, verdict: Verdict, why: str) -> None:
        """Replaces verdict and reason in the line of `key`, if the ds_config has that key."""
        if key in self._lines:
            self.say(key, self._lines[key].value, verdict, why)

    def refuse(self, key: str, value: object, why: str) -> None:
        self.say(key, value, "refused", why)


def check(
    values: Mapping[str, Any], table: Table, notes: KeyNotes, prefix: str = ""
) -> dict[str, Any]:
    """Checks a ds_config, or a section, against a table; returns {path: value} of its known keys.

    Values are converted to the types of the table: 5e8 becomes an integer. null and "auto" count as
    absent; `auto_values` has replaced each "auto" that stands for a value.

    Args:
      values: content of the ds_config or of the section.
      table: the known keys.
      notes: collects one line for each key.
      prefix: path of the section, with a final dot; "" for the whole file.
    """
    return dict(_check(values, table, prefix, notes, table))


def _check(
    values: Mapping[str, Any], table: Table, prefix: str, notes: KeyNotes, whole: Table
) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        path, entry = f"{prefix}{name}", table.get(name)
        if entry is None and not prefix and not _is_misspelt(str(name)[:_MAX_NAME], value, table):
            _ignore(path, value, table, notes)
        elif entry is None:
            notes.refuse(path, value, f"unknown key; {_nearest(name, table, prefix, whole)}")
        elif isinstance(entry, AbsentFeature):
            _check_absent(path, value, entry, notes)
        elif isinstance(entry, Key):
            if _check_key(path, value, entry, notes):
                yield path, as_kind(entry.kind, value)
        elif isinstance(value, Mapping):
            yield from _check(value, entry, f"{path}.", notes, whole)
        elif value is not None:
            notes.refuse(path, value, f"expected a section with the keys {', '.join(entry)}")


def _ignore(name: str, value: object, table: Table, notes: KeyNotes) -> None:
    notes.say(name, value, "ignored", "unknown key; DeepSpeed ignores it, too")
    is_comment, text = name.startswith("_"), name[:_MAX_NAME]
    match = () if is_comment else difflib.get_close_matches(text, [*table], 1, 0.6)
    near = f"; the nearest key is {match[0]!r}" if match else ""
    shown = cut(printable(name), _MAX_NAME)
    notes.warnings.append(f"{shown}: unknown key, which has no effect, as in DeepSpeed{near}")


def _is_misspelt(name: str, value: object, table: Table) -> bool:
    """Returns True if an unknown top-level key is probably a misspelt known key.

    A key counts as misspelt if its spelling is similar to a known key, if it is the name of a key
    in a section, if it has two or more words that all occur in one known key
    ("train_micro_batch_size"), or if it is the first word of a section's name and contains keys of
    that section ("zero": {"stage": 3}).
    """
    if name.startswith("_"):
        return False
    nested = {path.rpartition(".")[2] for path in (*paths(table), *_sections(table))}
    if name in nested or difflib.get_close_matches(name, [*table], 1, 0.8):
        return True
    longer = _longer(name, table)
    if "_" in name:
        return bool(longer)
    keys = set(value) if isinstance(value, Mapping) else set()
    sections = [entry for known in longer if isinstance(entry := table[known], Mapping)]
    return bool(keys) and any(keys <= {*section} for section in sections)


def _check_absent(path: str, value: Any, entry: AbsentFeature, notes: KeyNotes) -> None:
    strange = [key for key in value if key not in entry.known] if entry.known else []
    if entry.is_on(value):
        notes.refuse(path, value, entry.why)
    elif strange and isinstance(value, Mapping):
        near = nearest(strange[0], entry.known)
        notes.refuse(f"{path}.{strange[0]}", value[strange[0]], f"unknown key; {near}")
    else:
        notes.say(path, value, "honoured", "off, as here")


def _check_key(path: str, value: object, entry: Key, notes: KeyNotes) -> bool:
    """Adds the line of a key; returns False if the value is absent or of the wrong kind."""
    if value is None or value == AUTO:
        shown = f"{'null' if value is None else AUTO}: treated as absent"
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


def as_kind(kind: str, value: object) -> Any:
    """Converts a value to the type `kind`. Whole numbers written as floats (5e8) or text ("5e8")
    become integers.

    Raises:
      ValueError: the value has another type.
    """
    if kind in ("int", "float"):
        return _as_number(kind, value)
    types = {"bool": bool, "text": str, "list": (list, tuple), "dict": Mapping}
    if kind != "any" and not isinstance(value, types[kind]):
        raise ValueError(f"expected {_WANTED[kind]}, got {quoted(value)} ({type(value).__name__})")
    return value


def _as_number(kind: str, value: object) -> int | float:
    wrong = ValueError(f"expected {_WANTED[kind]}, got {quoted(value)} ({type(value).__name__})")
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
    """Returns the end of a message about an unknown key: the most similar key in `known`, or all
    of them."""
    match = difflib.get_close_matches(str(name)[:_MAX_NAME], known, 1, 0.6)
    return f"did you mean '{match[0]}'?" if match else f"known keys here: {', '.join(known)}"


def _nearest(name: str, table: Table, prefix: str, whole: Table) -> str:
    """Returns the end of a message about an unknown key: the most similar key in the same section,
    otherwise in the whole file."""
    name = str(name)[:_MAX_NAME]
    by_name = {path.rpartition(".")[2]: path for path in (*_sections(whole), *paths(whole))}
    match = (
        difflib.get_close_matches(name, [*table], 1, 0.8)
        or [by_name[name] for _ in range(name in by_name)]
        or _longer(name, table)
        or difflib.get_close_matches(name, [*table], 1, 0.6)
        or [by_name[near] for near in difflib.get_close_matches(name, [*by_name], 1, 0.75)]
    )
    if match:
        return f"did you mean '{match[0]}'?"
    where = prefix.rstrip(".") or "the top of the file"
    return f"no key of {where} is similar"


def _longer(name: str, table: Table) -> list[str]:
    """Returns keys that contain all words of `name`, and sections that start with `name`."""
    words = set(name.split("_"))
    return [
        known
        for known, entry in table.items()
        if words <= set(known.split("_"))
        and (len(words) > 1 or (isinstance(entry, Mapping) and known.startswith(f"{name}_")))
    ]


def _sections(table: Table, prefix: str = "") -> Iterator[str]:
    """Yields the path, such as "zero_optimization", of every section in a table of keys."""
    for name, entry in table.items():
        if isinstance(entry, Mapping):
            yield f"{prefix}{name}"
            yield from _sections(entry, f"{prefix}{name}.")


def paths(table: Table, prefix: str = "") -> Iterator[str]:
    """Yields the path, such as "zero_optimization.stage", of every key in a table of keys."""
    for name, entry in table.items():
        if isinstance(entry, (Key, AbsentFeature)):
            yield f"{prefix}{name}"
        else:
            yield from paths(entry, f"{prefix}{name}.")


def default_of(table: Table, path: str) -> Any:
    """Returns DeepSpeed's default of the key at `path`."""
    entry: Any = table
    for name in path.split("."):
        entry = entry[name]
    return entry.default
