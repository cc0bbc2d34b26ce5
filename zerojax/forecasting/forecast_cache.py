"""Caches forecasts in files, for all processes of the user.

A failure of the cache never changes a result: it is reported as a warning, and the forecast is
computed again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerojax.config.checks import warn_user
from zerojax.config.regular_files import UnreadableError
from zerojax.runtime import bounded_json
from zerojax.runtime.user_files import (
    CACHE_VARIABLE,
    check_private,
    make_private,
    replace_text,
    user_cache,
)

FORMAT = 1
_OWN = re.compile(r"[0-9a-f]{64}\.json|\.[0-9a-f]{16}\.partial")
"""Names of entries, and of the files that `replace_text` renames to them."""
MAX_BYTES = 256 << 20
"""Largest size of all entries in bytes; above it the least recently used entries are deleted. An
entry takes about 10 to 100 kB."""

ABANDONED_SECONDS = 3600
"""Seconds without a change after which no process writes an incomplete file any more."""


def cache_folder() -> Path | None:
    """Returns the folder of the cache's files; None if the cache is switched off (see
    `runtime.user_cache`)."""
    root = user_cache()
    return None if root is None else root / "forecasts"


def key_of(*parts: object) -> str:
    """Returns the key of a cache entry: 64 hex digits that depend on all parts and on their order.

    Args:
      *parts: text, bytes, numbers, None, or lists and dictionaries of such values.

    Raises:
      TypeError: a part that JSON cannot store, so that the key could not depend on it.
    """
    # The version of the format is part of the key, so that a new format does not read old entries.
    digest = hashlib.sha256(f"zerojax forecast {FORMAT}".encode())
    for part in parts:
        if isinstance(part, bytes):
            kind, content = b"bytes", part
        else:
            kind, content = b"json", json.dumps(part, sort_keys=True).encode()
        digest.update(
            b"%s %d:" % (kind, len(content))
        )  # so that different lists of parts have different digests
        digest.update(content)
    return digest.hexdigest()


def load(key: str) -> dict[str, Any] | None:
    """Returns the value that was stored under `key`, with lists in place of tuples as in JSON; None
    if there is none.

    Warns:
      UserWarning: the entry cannot be read or is damaged; None is returned.
    """
    folder = cache_folder()
    if folder is None:
        return None
    path = _path(folder, key)
    try:
        # Another user who can write the file could choose the numbers on which a run is decided.
        check_private(path)
        entry = bounded_json.load(path, follow=False)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        return _ignore(path, str(error))
    if not isinstance(entry, dict) or not isinstance(entry.get("value"), dict):
        return _ignore(path, "it is not a cache entry")
    # A file that was cut off or copied under another name must not pass for this forecast.
    if entry.get("key") != key or entry.get("digest") != _digest(entry["value"]):
        return _ignore(path, "its content differs from what was stored")
    with contextlib.suppress(OSError):
        os.utime(path)  # the least recently used entry is removed first
    return entry["value"]


def store(key: str, value: Mapping[str, Any]) -> None:
    """Stores `value` under `key` atomically: a reader sees the complete entry or none.

    Args:
      key: result of `key_of`.
      value: a mapping that JSON can store.

    Warns:
      UserWarning: the folder cannot be written.
    """
    folder = cache_folder()
    if folder is None:
        return
    # The key is stored inside as well: a renamed file is then recognized.
    text = json.dumps({"key": key, "digest": _digest(value), "value": value})
    path = _path(folder, key)
    # A cache that cannot be written costs a compilation at the next call, and no result.
    try:
        make_private(folder)
        replace_text(path, text, mode=0o600)
        _shrink(folder, keep=path)
    except (OSError, UnreadableError) as error:
        reason = getattr(error, "strerror", None) or error
        _warn(f"this forecast was not stored: {folder}: {reason}")


def _path(folder: Path, key: str) -> Path:
    return folder / f"{key}.json"


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _shrink(folder: Path, keep: Path) -> None:
    """Deletes the least recently used of the entries and incomplete files in `folder` until all of
    them take at most `MAX_BYTES`. Keeps the file `keep`, incomplete files that a process may still
    be writing, and files that another program put there."""
    found = []
    for path in folder.iterdir():
        if _OWN.fullmatch(path.name):
            with contextlib.suppress(FileNotFoundError):  # another process removed it
                found_file = path.lstat()
                if stat.S_ISREG(found_file.st_mode):
                    found.append((found_file.st_mtime_ns, found_file.st_size, path))
    total = sum(size for _, size, _ in found)
    abandoned = time.time_ns() - ABANDONED_SECONDS * 10**9
    for changed, size, path in sorted(found, key=lambda entry: entry[:2]):
        if total <= MAX_BYTES:
            return
        if path != keep and (path.suffix != ".partial" or changed < abandoned):
            path.unlink(missing_ok=True)
            total -= size


def _ignore(path: Path, why: str) -> None:
    _warn(f"{path} is ignored and its forecast computed again: {why}")


def _warn(sentence: str) -> None:
    remedy = f"set {CACHE_VARIABLE} to another folder, or to off"
    warn_user(f"cache of forecasts: {sentence} ({remedy})")
