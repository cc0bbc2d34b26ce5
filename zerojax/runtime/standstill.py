"""Notes of processes that make no progress: one small file per process in the folder of the run.

A process writes its note when it has made no progress for some seconds, and removes it with the
next sign of progress. So a run that makes progress writes nothing, and a process without a note,
while others have one, is stopped, has ended, or still makes progress. `hang_map` reads the notes of
all processes.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from zerojax.config.display import cut, printable, quoted
from zerojax.config.late_dataclasses import dataclass
from zerojax.config.regular_files import UnreadableError
from zerojax.config.tree_types import Tree
from zerojax.runtime import bounded_json
from zerojax.runtime.user_files import replace_text

FOLDER = "where"
"""Folder of the notes, in the folder of the run."""
NOTE_SECONDS = 10.0
"""Seconds without progress after which a process writes its note."""
WAITING_FOR_DATA = "waiting for data"
"""Activity of a process whose next batch is not there."""
MAX_PROCESSES = 1 << 17
"""Largest number of processes of a run whose notes are read."""
_MAX_BYTES = 1 << 20
_MAX_BYTES_OF_ALL = 128 << 20
"""Limit of all notes together; those of 4,000 processes have 100 MB."""
_MAX_TEXT = 1000
_STEPS = 64
"""Steps whose results are remembered; more than a training loop lets the devices queue."""


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """A collective, and the processes that it needs besides those of earlier collectives.

    Attributes:
      what: description such as "all-gather.3 over data, f32: layers/0..5/kernel".
      processes: indices of the processes, without the one that writes the note.
    """

    what: str
    processes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Note:
    """State of a process that makes no progress.

    Attributes:
      process: index of the process; num_processes: their number.
      host: name of its machine.
      pid: its number on this machine.
      since: time of its last sign of progress, in seconds since 1970.
      doing: its activity, such as "waiting for data".
      line: line of the user's code in its main thread, as "file:line: source"; None if there is
        none.
      entered: newest step that was given to the devices; 0 if there is none.
      finished: newest step whose results are available; 0 if there is none.
      program: description of the program of step `entered`.
      meetings: collectives of this program in the order in which it first needs other processes.
    """

    process: int
    num_processes: int
    host: str
    pid: int
    since: float
    doing: str
    line: str | None
    entered: int
    finished: int
    program: str
    meetings: tuple[Meeting, ...] = ()


class StandstillNotes:
    """Writes and removes the note of this process. Files are written in a thread of their own,
    because the disk may be what hangs.

    Args:
      folder: folder of the run; None: nothing is written.
      process: index of this process.
      num_processes: number of processes.
      line: function that returns the line of the user's code that runs, or None. It is called with
        True if the process waits for data.
    """

    def __init__(
        self,
        folder: Path | None,
        process: int,
        num_processes: int,
        *,
        line: Callable[[bool], str | None] = lambda _: None,
    ) -> None:
        self._folder = None if folder is None else folder / FOLDER
        self._process, self._num_processes, self._line = process, num_processes, line
        self._given: collections.deque[tuple[int, Any]] = collections.deque(maxlen=_STEPS)
        self._entered = self._finished = 0
        self._program = ""
        self._meetings: Callable[[], Sequence[Meeting]] | None = None
        self._noted: object = None
        self._thread: threading.Thread | None = None

    def entered(
        self, step: int, result: Tree, program: str, meetings: Callable[[], Sequence[Meeting]]
    ) -> None:
        """Registers a step that was given to the devices.

        Args:
          step: number of the step, from 1.
          result: array that the step computes; its method `is_ready` tells when the step has ended.
          program: description of the step's program.
          meetings: function that returns the collectives of this program.
        """
        self._given.append((step, result))
        self._entered, self._program, self._meetings = step, program, meetings

    def note(self, key: object, doing: str, waited: float) -> None:
        """Writes the note in a thread. Does nothing if it was written for the same standstill.

        Args:
          key: any object that identifies the standstill.
          doing: current activity of the process.
          waited: seconds since the last sign of progress.
        """
        if self._folder is None or key == self._noted or self._is_busy():
            return
        self._noted, since = key, time.time() - waited
        self._start(lambda: self._write(doing, since))

    def forget(self) -> None:
        """Removes the note in a thread, if one was written."""
        if self._noted is not None and not self._is_busy():
            self._noted = None
            self._start(self._remove)

    def remove(self, seconds: float = 1.0) -> None:
        """Removes the note, also one of an earlier start. Waits at most `seconds`, first for the
        note that is being written or removed."""
        if self._folder is None:
            return
        end = time.monotonic() + seconds
        self.wait(seconds)
        self._noted = None
        self._start(self._remove)
        self.wait(max(0.0, end - time.monotonic()))

    def wait(self, seconds: float) -> None:
        """Waits until the note is written, for at most `seconds`."""
        if self._thread is not None:
            self._thread.join(seconds)

    def _is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _start(self, work: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=work, name="zerojax-note", daemon=True)
        self._thread.start()

    @property
    def _path(self) -> Path:
        assert self._folder is not None
        return self._folder / f"process-{self._process}.json"

    def _remove(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)
            self._path.parent.rmdir()  # if it is empty

    def _write(self, doing: str, since: float) -> None:
        note = Note(
            process=self._process,
            num_processes=self._num_processes,
            host=socket.gethostname(),
            pid=os.getpid(),
            since=since,
            doing=doing,
            line=self._line(doing == WAITING_FOR_DATA),
            entered=self._entered,
            finished=self._read_finished(),
            program=self._program,
        )
        self._replace(note)
        if self._meetings is None or note.entered == note.finished:
            return
        # In a second file content, because a large program takes seconds to read.
        with contextlib.suppress(Exception):
            self._replace(dataclasses.replace(note, meetings=tuple(self._meetings())))

    def _read_finished(self) -> int:
        while self._given and self._given[0][1].is_ready():
            self._finished = self._given.popleft()[0]
        return self._finished

    def _replace(self, note: Note) -> None:
        with contextlib.suppress(OSError, UnreadableError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace_text(self._path, json.dumps(dataclasses.asdict(note)))


def read_notes(folder: Path) -> list[Note]:
    """Reads the notes of all processes, ordered by process; files that are not notes are left out.

    The files may be of anybody: numbers have limits, and texts neither lines nor control characters
    of their own.

    Args:
      folder: folder of the run.

    Raises:
      ValueError: the notes are too large.
    """
    found, num_bytes, numbers = [], 0, {}
    for path in sorted((folder / FOLDER).glob("process-*.json")):
        with contextlib.suppress(OSError):
            # A larger file is refused below and takes no memory.
            num_bytes += min(path.lstat().st_size, _MAX_BYTES)
        if num_bytes > _MAX_BYTES_OF_ALL:
            raise ValueError(
                f"the notes in {folder / FOLDER} have more than {_MAX_BYTES_OF_ALL} bytes, the "
                "limit; remove those that are of no process of this run"
            )
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
            values = bounded_json.load(path, max_bytes=_MAX_BYTES, follow=False)
            note = _note_of(values, numbers)
            # A copied file must not speak for another process.
            if path.name == f"process-{note.process}.json":
                found.append(note)
    return sorted(found, key=lambda note: note.process)


def _note_of(values: dict[str, Any], numbers: dict[int, int]) -> Note:
    """Returns the note in a parsed file.

    Args:
      values: content of the file.
      numbers: {number: number} of the processes in earlier notes, so that each is stored once.

    Raises:
      ValueError, TypeError, KeyError, AttributeError: a value is missing, or no such value.
    """
    count = _number(values["num_processes"], MAX_PROCESSES + 1)
    limits = {"process": count, "pid": 2**32, "entered": 2**53, "finished": 2**53}
    fields: dict[str, Any] = {name: _number(values[name], end) for name, end in limits.items()}
    fields |= {name: _line(values[name]) for name in ("host", "doing", "program")}
    return Note(
        **fields,
        num_processes=count,
        since=float(_number(values["since"], 2**40, int, float)),
        line=None if values["line"] is None else _line(values["line"]),
        meetings=tuple(
            Meeting(
                what=_line(one["what"]),
                processes=tuple(
                    numbers.setdefault(process, process)
                    for process in one["processes"]
                    if _number(process, count) >= 0
                ),
            )
            for one in values["meetings"]
        ),
    )


def _number(value: Any, end: int, *kinds: type) -> Any:
    if type(value) not in (kinds or (int,)) or not 0 <= value < end:
        raise ValueError(f"{quoted(value)} is not a number from 0 to below {end}")
    return value


def _line(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{quoted(value)} is not a text")
    return printable(cut(value, _MAX_TEXT))
