"""The shell command that calls this installation again."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path


def command_name() -> str:
    """What to type for this `zerojax`: its name where the shell finds it, else where it lies.

    `make train` runs inside a virtual environment that is not on the user's PATH.
    """
    installed = Path(sys.executable).parent / "zerojax"
    if not installed.exists():
        return f"{shlex.quote(_short(Path(sys.executable)))} -m zerojax"
    found = shutil.which("zerojax")
    if found is not None and Path(found).samefile(installed):
        return "zerojax"
    return shlex.quote(_short(installed))


def _short(path: Path) -> str:
    """Relative to the working folder where the path is below it."""
    here = Path.cwd()
    return os.path.relpath(path, here) if path.is_relative_to(here) else str(path)
