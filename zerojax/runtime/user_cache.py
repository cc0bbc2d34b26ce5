"""Cache files of the user: outlive a process and may be deleted at any time."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

VARIABLE = "ZEROJAX_CACHE"


def user_cache() -> Path | None:
    """The folder of this user's cache, which need not be there yet; None where it is switched off.

    ZEROJAX_CACHE names a folder, or "off"; without it the folder is `zerojax` in XDG_CACHE_HOME, or
    in ~/.cache.
    """
    told = os.environ.get(VARIABLE, "").strip()
    if told.lower() == "off":
        return None
    if told:
        return Path(told).expanduser()
    # An empty or relative XDG_CACHE_HOME is to be ignored (XDG Base Directory Specification 0.8).
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path("~/.cache").expanduser()
    return root / "zerojax"


def replace_text(path: Path, text: str) -> None:
    """Makes `text` the content of a file: a reader sees the old or the new, whole.

    Raises:
      OSError: the folder cannot be made or written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".partial")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.replace(partial, path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise
