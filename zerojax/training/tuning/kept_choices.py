"""Measured choices, kept in the user's cache by device, versions, source and sizes.

A file that cannot be read or written costs a measurement, nothing else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from zerojax.runtime.bounded_json import load
from zerojax.runtime.user_files import replace_text, user_cache

FILE = "tuned.json"
MAX_ENTRIES = 512


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kept:
    """One answer.

    Attributes:
      choice: name of the way that was taken.
      seconds: of the reference; other_seconds: of the other way; both of the slowest process.
      date: when it was measured, YYYY-MM-DD.
    """

    choice: str
    seconds: float
    other_seconds: float
    date: str


class KeptChoices:
    """The answers of this machine.

    Args:
      folder: of the cache; None keeps nothing.
      process: number of this process, for marks.
    """

    def __init__(self, folder: Path | None, process: int = 0) -> None:
        self._folder, self._process = folder, process

    @classmethod
    def of_user(cls, process: int = 0) -> KeptChoices:
        """Those in the user's cache (`ZEROJAX_CACHE`)."""
        return cls(user_cache(), process)

    def find(self, key: Mapping[str, Any]) -> Kept | None:
        """The answer to a question of this key; None where there is none, or no whole one."""
        entry: Any = self._read().get(_text(key))
        return Kept(**entry) if _has_form(entry) else None

    def keep(self, key: Mapping[str, Any], kept: Kept) -> None:
        """Keeps an answer in place of what was known; the first process of all writes."""
        if self._folder is None or self._process:
            return
        entries = self._read()
        entries.pop(_text(key), None)
        entries[_text(key)] = dataclasses.asdict(kept)
        newest = dict(list(entries.items())[-MAX_ENTRIES:])
        with contextlib.suppress(OSError):
            replace_text(self._folder / FILE, json.dumps(newest, indent=1))

    @contextlib.contextmanager
    def marked(self, key: Mapping[str, Any]) -> Iterator[None]:
        """A mark on the disk while something is tried that may end this process."""
        mark = self._mark(key)
        if mark is not None:
            with contextlib.suppress(OSError):
                replace_text(mark, _text(key))
        try:
            yield
        finally:  # what ends the process at once leaves the mark
            if mark is not None:
                with contextlib.suppress(OSError):
                    mark.unlink(missing_ok=True)

    def is_marked(self, key: Mapping[str, Any]) -> bool:
        """Whether an earlier start of this process ended while it tried."""
        mark = self._mark(key)
        return mark is not None and mark.is_file()

    def _mark(self, key: Mapping[str, Any]) -> Path | None:
        if self._folder is None:
            return None
        name = hashlib.sha256(_text(key).encode()).hexdigest()[:16]
        return self._folder / f"trying-{name}-{self._process}"

    def _read(self) -> dict[str, Any]:
        if self._folder is None:
            return {}
        try:
            found = load(self._folder / FILE)
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


def _text(key: Mapping[str, Any]) -> str:
    return json.dumps(key, sort_keys=True)


def _has_form(entry: Any) -> bool:
    names = {field.name for field in dataclasses.fields(Kept)}
    if not isinstance(entry, dict) or set(entry) != names:
        return False
    times = (entry["seconds"], entry["other_seconds"])
    return all(isinstance(entry[name], str) for name in ("choice", "date")) and all(
        isinstance(x, float) and math.isfinite(x) and x > 0 for x in times
    )
