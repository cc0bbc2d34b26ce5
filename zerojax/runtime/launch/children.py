"""Child processes of a job on this host: start, output, signals and end."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import threading
import time

from zerojax.runtime.launch.endings import End
from zerojax.runtime.launch.job import OF_ONE_PROCESS, Job, command_line, variables_of
from zerojax.runtime.launch.output import Printer

_SECONDS_FOR_OUTPUT = 0.5
"""For the last words of a process that has ended, which one that it has started may say."""


class Children:
    """The processes of this host. Each `End` goes into `events`, after all that it printed."""

    def __init__(self, job: Job, events: queue.SimpleQueue, printer: Printer):
        self._job, self._events, self._printer = job, events, printer
        self._running: dict[int, subprocess.Popen] = {}
        self._lock = threading.Lock()
        self._killed = False
        self._deadline: float | None = None

    def start(self, coordinator: str, restart: int) -> None:
        """Starts all of them. To be called in the main thread, with which they would end."""
        self._killed, self._deadline = False, None
        inherited = {name: os.environ[name] for name in os.environ if name not in OF_ONE_PROCESS}
        for process_id in self._job.process_ids:
            told = variables_of(self._job, process_id, coordinator, restart)
            process = subprocess.Popen(
                command_line(self._job),
                env={**inherited, **told},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                # A terminal's Ctrl-C goes to the launcher alone, which forwards it; and a process
                # is killed together with what it has started.
                start_new_session=True,
            )
            with self._lock:
                self._running[process_id] = process
            threading.Thread(target=self._watch, args=(process_id, process), daemon=True).start()

    def _watch(self, process_id: int, process: subprocess.Popen) -> None:
        readers = [
            threading.Thread(
                target=self._printer.copy,
                args=(process_id, stream),
                kwargs={"is_error": is_error},
                daemon=True,
            )
            for stream, is_error in ((process.stdout, False), (process.stderr, True))
        ]
        for reader in readers:
            reader.start()
        # As long as it is not waited for, its number names this process and no other.
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        when, was_killed = time.monotonic(), self._killed
        for reader in readers:
            reader.join(max(0.0, when + _SECONDS_FOR_OUTPUT - time.monotonic()))
        with self._lock:
            _signal_session(process, signal.SIGKILL)  # what it has started and left behind
            del self._running[process_id]
        code = process.wait()
        self._events.put(End(process_id, code, when, was_killed))

    def forward(self, number: int) -> None:
        """Sends a signal to every process, not to what these have started."""
        with self._lock:
            for process in self._running.values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def end_soon(self, since: float | None = None) -> None:
        """Kills what still runs when the job's grace is over.

        SIGTERM would be of no use: it asks all processes for a save that they agree on.

        Args:
          since: when the first failed, on the monotonic clock; None: now.
        """
        if self._deadline is None:
            self._deadline = (time.monotonic() if since is None else since) + self._job.grace

    def kill(self) -> None:
        """Ends all of them, with what they have started."""
        with self._lock:
            self._killed, self._deadline = True, None
            for process in self._running.values():
                _signal_session(process, signal.SIGKILL)

    def next_event(self, events: queue.SimpleQueue, seconds: float | None = None) -> object:
        """The next of `events`; kills when the grace ends meanwhile.

        Raises:
          queue.Empty: none came within `seconds`.
        """
        until = None if seconds is None else time.monotonic() + seconds
        while True:
            ends = [moment for moment in (until, self._deadline) if moment is not None]
            wait = max(0.0, min(ends) - time.monotonic()) if ends else None
            try:
                return events.get(timeout=wait)
            except queue.Empty:
                if self._deadline is not None and time.monotonic() >= self._deadline:
                    self.kill()
                if until is not None and time.monotonic() >= until:
                    raise


def _signal_session(process: subprocess.Popen, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
