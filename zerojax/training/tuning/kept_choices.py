"""Caches measured choices on disk, by device, versions, source code and sizes.

The cache is in the user's cache folder. If its file cannot be read or written, the choice is
measured again, without an error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import math
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from zerojax.config.checks import warn_user
from zerojax.config.late_dataclasses import dataclass
from zerojax.config.regular_files import UnreadableError, open_regular
from zerojax.runtime.bounded_json import load
from zerojax.runtime.user_files import check_private, make_private, replace_text, user_cache

FILE = "tuned.json"
MARKS = "trying-"
MAX_ENTRIES = 512


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A cached decision between two implementations of a computation.

    Attributes:
      choice: name of the chosen implementation.
      seconds: time of the reference on the slowest process.
      other_seconds: time of the other implementation on the slowest process.
      date: date of the measurement, YYYY-MM-DD.
    """

    choice: str
    seconds: float
    other_seconds: float
    date: str


class KeptChoices:
    """The cached decisions of this machine, and marker files of trials that run or have failed.

    A marker is a file `trying-*` in the cache folder. It exists while a trial runs, and remains if
    the trial fails or ends its process.

    Args:
      folder: cache folder; None: cache nothing.
      process: index of this process, for the names of markers.
    """

    def __init__(self, folder: Path | None, process: int = 0) -> None:
        self._folder, self._process = folder, process

    @classmethod
    def of_user(cls, process: int = 0) -> KeptChoices:
        """Returns the choices in the user's cache folder (`ZEROJAX_CACHE`)."""
        return cls(user_cache(), process)

    def find(self, key: Mapping[str, Any]) -> Kept | None:
        """Returns the cached decision for a key; None if there is none or it is malformed."""
        return _kept_of(_text(key), self._read().get(_text(key)))

    def all(self) -> list[tuple[dict[str, Any], Kept]]:
        """Returns (key, decision) for every well-formed decision, oldest first."""
        found = []
        for text, entry in self._read().items():
            with contextlib.suppress(ValueError):
                key = json.loads(text)
                if isinstance(key, dict) and (kept := _kept_of(text, entry)) is not None:
                    found.append((key, kept))
        return found

    @property
    def is_first(self) -> bool:
        """True if this is process 0."""
        return self._process == 0

    def tried(self) -> list[dict[str, Any]]:
        """Returns the keys of trials that failed or ended their process; later starts skip these
        trials.
        """
        found: list[dict[str, Any]] = []
        for mark in self._marks("*"):
            key = _key_of(mark)
            if key is not None and key not in found and _is_over(mark):
                found.append(key)
        return found

    def keep(self, key: Mapping[str, Any], kept: Kept) -> None:
        """Caches a decision, replacing an older one, and drops the oldest above `MAX_ENTRIES`; does
        nothing if the same decision is cached."""
        if self._folder is None or self.find(key) == kept:
            return
        entries = self._read()
        # A replaced decision moves to the end: it is the newest now.
        entries.pop(_text(key), None)
        entries[_text(key)] = dataclasses.asdict(kept) | {"digest": _digest(_text(key), kept)}
        newest = dict(list(entries.items())[-MAX_ENTRIES:])
        with contextlib.suppress(OSError, UnreadableError):
            make_private(self._folder)
            replace_text(self._folder / FILE, json.dumps(newest, indent=1), mode=0o600)

    @contextlib.contextmanager
    def marked(self, key: Mapping[str, Any]) -> Iterator[Callable[[], None]]:
        """Creates a marker file for the duration of a trial, because the trial may end the process.

        The file replaces the markers of earlier starts.

        Yields:
          A function that makes the marker permanent, so that the next start skips the trial.
        """
        old, mark = self._left_by_others(key), self._new_mark(key)
        for path in old:
            _remove(path)
        stays: list[bool] = []
        try:
            yield lambda: stays.append(True)
        finally:  # not reached if the process is killed, so the marker remains
            if mark is not None:
                path, lock = mark
                if not stays:
                    _remove(path)
                os.close(lock)

    def is_marked(self, key: Mapping[str, Any]) -> bool:
        """Returns True if this trial failed in, or ended, an earlier start of this process.

        A marker of another run that is trying the same at this moment does not count.
        """
        return bool(self._left_by_others(key))

    def _left_by_others(self, key: Mapping[str, Any]) -> list[Path]:
        marks = self._marks(f"{self._name(key)}-*")
        return [mark for mark in marks if _key_of(mark) is not None and _is_over(mark)]

    def _marks(self, names: str) -> list[Path]:
        try:
            return [] if self._folder is None else sorted(self._folder.glob(MARKS + names))
        except OSError:
            return []

    def _name(self, key: Mapping[str, Any]) -> str:
        return f"{_short(key)}-{self._process}"

    def _new_mark(self, key: Mapping[str, Any]) -> tuple[Path, int] | None:
        """Writes a marker file; returns (path, file descriptor of its lock), or None if this is not
        possible.
        """
        if self._folder is None:
            return None
        mark = self._folder / f"{MARKS}{self._name(key)}-{secrets.token_hex(4)}"
        # Renamed when it is complete: a marker without a lock would count as one of an ended
        # process.
        unseen = mark.with_name(f".{mark.name}.partial")
        lock = None
        try:
            make_private(self._folder)
            lock = os.open(unseen, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            os.write(lock, _text(key).encode())
            with contextlib.suppress(OSError):  # the file system has no locks
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.rename(unseen, mark)
        except OSError:
            if lock is not None:
                _remove(unseen)
                os.close(lock)
            return None
        return mark, lock

    def _read(self) -> dict[str, Any]:
        if self._folder is None:
            return {}
        path = self._folder / FILE
        try:
            check_private(path)
            found = load(path, follow=False)
        except PermissionError as error:
            warn_user(f"measured choices are not used: {error}")
            return {}
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


def _key_of(mark: Path) -> dict[str, Any] | None:
    """Returns the key in a marker file; None if it is damaged, of another key, or if another user
    can have written it."""
    try:
        check_private(mark)
        key = load(mark, follow=False)
    except (OSError, ValueError):
        return None
    has_name = isinstance(key, dict) and mark.name.startswith(f"{MARKS}{_short(key)}-")
    return key if has_name else None


def _short(key: Mapping[str, Any]) -> str:
    return hashlib.sha256(_text(key).encode()).hexdigest()[:16]


def _is_over(mark: Path) -> bool:
    """Returns True if the process that wrote a marker file has ended, so that the operating system
    has released its lock.
    """
    try:
        lock = open_regular(mark, follow=False)
    except (OSError, UnreadableError):  # the file was removed meanwhile
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # the file system has no locks
        return True
    finally:
        os.close(lock)
    return True


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def _text(key: Mapping[str, Any]) -> str:
    return json.dumps(key, sort_keys=True)


def _kept_of(text: str, entry: object) -> Kept | None:
    """Returns a decision as it was stored under the key `text`; None if it is malformed, damaged or
    of another key."""
    names = {field.name for field in dataclasses.fields(Kept)}
    if not isinstance(entry, dict) or set(entry) != {*names, "digest"}:
        return None
    times = (entry["seconds"], entry["other_seconds"])
    has_form = all(isinstance(entry[name], str) for name in ("choice", "date")) and all(
        isinstance(x, float) and math.isfinite(x) and x > 0 for x in times
    )
    kept = Kept(**{name: entry[name] for name in names})
    return kept if has_form and entry["digest"] == _digest(text, kept) else None


def _digest(text: str, kept: Kept) -> str:
    """Returns the digest of a key and of what was decided; the date decides nothing."""
    content = [text, kept.choice, kept.seconds, kept.other_seconds]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
