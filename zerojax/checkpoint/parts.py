"""What each process adds to a save, and how the first one knows that all have written theirs.

Knows a folder that all processes see; never arrays, and no communication between devices, which
belongs to training while a save is written in the background.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zerojax.checkpoint.errors import CheckpointError
from zerojax.checkpoint.fingerprints import Parts

LIMIT = 1800.0
"""Seconds that the first process waits for the others after it has written its own part. One that
has died ends the run long before."""

_PAUSE = 0.01, 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """What one process has written.

    Attributes:
      checksums: of its files.
      sums: of its shards.
      error: why there is nothing of it; None: all is well.
      disk_full: whether that was for lack of space.
    """

    checksums: dict[str, str] = dataclasses.field(default_factory=dict)
    sums: Parts = dataclasses.field(default_factory=dict)
    error: str | None = None
    disk_full: bool = False


def leave(folder: Path, process: int, part: Part) -> None:
    """Tells the first process; everything of this one is on disk, or has failed.

    Raises:
      OSError: what the system says.
    """
    path = _path(folder, process)
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(dataclasses.asdict(part)), encoding="utf-8")
    os.rename(draft, path)


def collect(
    folder: Path,
    processes: range,
    *,
    limit: float = LIMIT,
    sleep: Callable[[float], Any] = time.sleep,
) -> list[Part]:
    """Waits for these processes and takes their notes out of the folder.

    Args:
      folder: where they leave them.
      processes: their numbers.
      limit: seconds.
      sleep: waits; returns True where there is no point in waiting any longer.

    Raises:
      CheckpointError: one of them has failed, or says nothing for too long.
      OSError: what the system says, here or in another process.
    """
    parts, pause = [], _PAUSE[0]
    deadline = time.monotonic() + limit
    for process in processes:
        path = _path(folder, process)
        while (text := _text_of(path)) is None:
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"process {process} has not written its part within {limit:g} s"
                )
            if sleep(pause):
                raise CheckpointError(f"process {process} has not written its part")
            pause = min(2 * pause, _PAUSE[1])
        part = _parsed(text)
        if part.disk_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"process {process}")
        if part.error is not None:
            raise CheckpointError(f"process {process}: {part.error}")
        path.unlink()
        parts.append(part)
    return parts


def _path(folder: Path, process: int) -> Path:
    return folder / f"written.process_{process}.json"


def _text_of(path: Path) -> str | None:
    os.listdir(path.parent)  # a network file system may otherwise remember that it was not there
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None


def _parsed(text: str) -> Part:
    body = json.loads(text)
    sums = {
        name: {int(device): (first, second) for device, (first, second) in of_devices.items()}
        for name, of_devices in body["sums"].items()
    }
    told = {name: body[name] for name in ("checksums", "error", "disk_full")}
    return Part(sums=sums, **told)
