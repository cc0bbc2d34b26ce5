"""Collects a report from each process about its part of a save, through files in the shared folder.

No device collective is used, because a save runs in the background of training.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zerojax.checkpoint.errors import (
    GivenUpError,
    MachineError,
    is_disk_full,
    os_error_code,
    reason,
)
from zerojax.checkpoint.fingerprints import Parts
from zerojax.config.late_dataclasses import dataclass
from zerojax.runtime.bounded_json import loads, read_bytes
from zerojax.runtime.user_files import replace_text

LIMIT = 1800.0
"""Seconds that the first process waits for the reports of the others, after it has written its own
part. If a process dies, the run ends long before this limit."""

_PAUSE = 0.01, 1.0
_NOTE = re.compile(r"written\.process_(\d+)\.(?:json|errno_(\d+))")


@dataclass(frozen=True, kw_only=True)
class Contribution:
    """Report of one process about its part of a save.

    Attributes:
      checksums: {file name: checksum} of each file that the process wrote.
      sums: fingerprints of the shards on the devices of the process.
      error: reason of the failure; None if the process succeeded.
      disk_full: True if the disk had too little space.
    """

    checksums: dict[str, str] = dataclasses.field(default_factory=dict)
    sums: Parts = dataclasses.field(default_factory=dict)
    error: str | None = None
    disk_full: bool = False


def report_written(folder: Path, process: int, part: Contribution) -> None:
    """Reports to the first process that all data of this process is on disk.

    Raises:
      OSError: the operating system reports an error.
    """
    # Atomic, because process 0 reads a report as soon as its name is there.
    replace_text(_path(folder, process), json.dumps(dataclasses.asdict(part)))


def report_failure(folder: Path, process: int, error: BaseException) -> None:
    """Reports to the first process why this process failed. Does nothing if that is not possible.

    If a full disk has no space for the text, the error number is reported in the name of an empty
    file.
    """
    with contextlib.suppress(OSError):  # also if the first process has removed the folder
        report_written(
            folder, process, Contribution(error=reason(error), disk_full=is_disk_full(error))
        )
        return
    code = os_error_code(error) or errno.EIO
    with contextlib.suppress(OSError):
        (folder / f"written.process_{process}.errno_{code}").touch()


def raise_failures(folder: Path) -> None:
    """Raises if another process has reported a failure; does not wait for reports.

    Raises:
      MachineError: another process has failed.
      OSError: another process has no disk space, or the operating system reports an error here.
    """
    for process, name in _notes(folder).items():
        _raise_failure(process, _read(folder, name))


def collect(
    folder: Path,
    processes: range,
    *,
    limit: float = LIMIT,
    sleep: Callable[[float], Any] = time.sleep,
) -> list[Contribution]:
    """Waits until each of `processes` has reported its part of a save; returns the reports and
    deletes their files.

    Args:
      folder: folder of the reports.
      processes: numbers of the processes.
      limit: maximum number of seconds to wait.
      sleep: function that waits a number of seconds and returns True to stop waiting.

    Raises:
      MachineError: a process has failed, or does not report within `limit`.
      GivenUpError: `sleep` returned True.
      OSError: a process has no disk space, or the operating system reports an error here.
    """
    parts, pause = [], _PAUSE[0]
    deadline = time.monotonic() + limit
    for process in processes:
        while (name := _notes(folder).get(process)) is None:
            if time.monotonic() > deadline:
                raise MachineError(
                    f"process {process} has not written its part of the checkpoint within "
                    f"{limit:g} s"
                )
            if sleep(pause):
                raise GivenUpError(f"process {process} has not written its part of the checkpoint")
            pause = min(2 * pause, _PAUSE[1])
        part = _read(folder, name)
        _raise_failure(process, part)
        # Everything that stays in this folder becomes part of the checkpoint.
        (folder / name).unlink()
        parts.append(part)
    return parts


def _raise_failure(process: int, part: Contribution) -> None:
    if part.disk_full:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"process {process}")
    if part.error is not None:
        raise MachineError(f"process {process}: {part.error}")


def _path(folder: Path, process: int) -> Path:
    return folder / f"written.process_{process}.json"


def _notes(folder: Path) -> dict[int, str]:
    """Returns {process number: file name of its report} for the reports in `folder`.

    Lists the folder instead of testing each file, because a network file system may cache that a
    file does not exist.
    """
    found = filter(None, map(_NOTE.fullmatch, os.listdir(folder)))
    return {int(match[1]): match[0] for match in found}


def _read(folder: Path, name: str) -> Contribution:
    match = _NOTE.fullmatch(name)
    assert match is not None
    if match[2] is None:
        return _parsed(read_bytes(folder / name, follow=False))
    error = OSError(int(match[2]), os.strerror(int(match[2])))
    return Contribution(error=reason(error), disk_full=is_disk_full(error))


def _parsed(text: bytes) -> Contribution:
    body = loads(text)
    sums = {
        name: {int(device): (first, second) for device, (first, second) in of_devices.items()}
        for name, of_devices in body["sums"].items()
    }
    told = {name: body[name] for name in ("checksums", "error", "disk_full")}
    return Contribution(sums=sums, **told)
