"""Manages the child processes of a job on this host: start, output, signals and end.

Prints their output line by line with the index of the process, without known harmless messages.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import BinaryIO, TextIO

from zerojax.runtime.launch.job import OF_ONE_PROCESS, End, Job, command_line, variables_of

_SECONDS_FOR_OUTPUT = 0.5
"""Seconds to wait for the last output of an ended process, whose own child processes may still
write."""
_GLOO = re.compile(rb"\[Gloo\] Rank|\d is connected to \d+ peer ranks")
# Each device of a process prints this message from its own thread, a few words at a time.
_GLOO_WORDS = re.compile(
    rb"\[Gloo\] Rank|is connected to|peer ranks|Expected number of connected|is :|[\s\d.]+"
)
_SIGTERM = re.compile(rb"W\d{4} [\d:.]+ +\d+ preemption_notifier\.cc:\d+\] SIGTERM caught")
# The runtime's message about a lost process, some 40 lines with a C++ stack.
_RUNTIME = re.compile(
    rb"[IWEF]\d{4} [\d:.]+ +\d+ "
    rb"(client\.h|coordination_service_agent\.cc|preemption_sync_manager\.cc|coordination_service\.cc)"
    rb":\d+\]"
)
_MORE_OF_IT = re.compile(
    rb"\s*$|RPC: |Additional GRPC|:UN[A-Z]+:|=== Source|external/"
    rb"|\*\*\* Check failure|\s+@ |\*\*\* SIGABRT|PC: @"
)
RUNTIME_SUMMARY = b"(JAX's runtime has lost the other processes; --show-all prints what it says)"


class Children:
    """Processes of a job on this host. When a process has ended and its output was read, an `End`
    is put into `events`."""

    def __init__(self, job: Job, events: queue.SimpleQueue, printer: Printer):
        self._job, self._events, self._printer = job, events, printer
        self._running: dict[int, subprocess.Popen] = {}
        self._lock = threading.Lock()
        self._killed = False
        self._deadline: float | None = None

    def start(self, coordinator: str, restart: int) -> None:
        """Starts all processes of this host. Must be called in the main thread, because the
        processes end with the thread that starts them."""
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
                # A terminal's Ctrl-C then reaches only the launcher, which forwards it, and a
                # process can be killed together with its own children.
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
        # Until the process is waited for, its process id cannot be reused.
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        # Before the rest of the output is read: a kill from now on has not ended this process.
        when, was_killed = time.monotonic(), self._killed
        for reader in readers:
            reader.join(max(0.0, when + _SECONDS_FOR_OUTPUT - time.monotonic()))
        with self._lock:
            _signal_session(process, signal.SIGKILL)  # for its children that still run
            del self._running[process_id]
        code = process.wait()
        self._events.put(End(process_id, code, when, was_killed))

    def forward(self, number: int) -> None:
        """Sends the signal `number` to every process of this host, but not to their children."""
        with self._lock:
            for process in self._running.values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def end_soon(self, since: float | None = None) -> None:
        """Sets the end of the job's grace period, at which `next_event` kills the remaining
        processes; a second call changes nothing.

        SIGTERM would not help: it requests a save, on which all processes would have to agree.

        Args:
          since: time of the first failure in seconds on the monotonic clock; None: now.
        """
        if self._deadline is None:
            self._deadline = (time.monotonic() if since is None else since) + self._job.grace

    def kill(self) -> None:
        """Kills all processes of this host, with their children."""
        with self._lock:
            self._killed, self._deadline = True, None
            for process in self._running.values():
                _signal_session(process, signal.SIGKILL)

    def next_event(self, events: queue.SimpleQueue, seconds: float | None = None) -> object:
        """Returns the next event of `events`; kills the processes if the grace period ends first.

        Raises:
          queue.Empty: no event arrived within `seconds`.
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


def without_noise(lines: Iterator[bytes]) -> Iterator[bytes]:
    """Yields the lines of one process's output without harmless messages of gloo and JAX's runtime.

    The long message of the runtime about a lost process is shortened to one line.
    """
    inside, summarised, after_gloo = False, False, False
    for line in lines:
        if _SIGTERM.match(line):
            continue
        after_gloo = _is_gloo(line) or (after_gloo and not line.strip(b" 0123456789"))
        if after_gloo:
            continue
        if _RUNTIME.match(line):
            inside = True
            if not summarised:
                summarised = True
                yield RUNTIME_SUMMARY
            continue
        inside = inside and _MORE_OF_IT.match(line) is not None
        if not inside:
            yield line


def _is_gloo(line: bytes) -> bool:
    return _GLOO.search(line) is not None and not _GLOO_WORDS.sub(b"", line)


class Printer:
    """Prints whole lines of many processes to this process's standard output and error."""

    def __init__(self, num_processes: int, *, show_all: bool = False):
        self._width = len(str(num_processes - 1))
        self._show_all = show_all
        self._lock = threading.Lock()
        self._given_up: set[bool] = set()

    def copy(self, process_id: int, source: BinaryIO, *, is_error: bool) -> None:
        """Copies the output stream `source` of a process until its end; call it in a thread."""
        prefix = f"[{process_id:{self._width}}] ".encode()
        lines = (line.rstrip(b"\r\n") for line in source)
        for line in lines if self._show_all else without_noise(lines):
            self._write(prefix + line + b"\n", is_error)

    def say(self, sentence: str) -> None:
        """Prints a sentence from the launcher, marked as such, to standard error."""
        self._write(f"zerojax launch: {sentence}\n".encode(), True)

    def _write(self, line: bytes, is_error: bool) -> None:
        stream = sys.stderr if is_error else sys.stdout
        with self._lock:
            if is_error in self._given_up:
                return
            try:
                stream.buffer.write(line)
                stream.flush()
                return
            except OSError as error:
                # Output of processes is still read: a full pipe would block its writer.
                self._given_up.add(is_error)
                reason = error
                _discard(stream)
        if not isinstance(reason, BrokenPipeError):  # else the reader, such as `head`, has ended
            name = "standard error" if is_error else "standard output"
            sentence = f"{name} cannot be written ({reason.strerror}); the run continues without it"
            self._write(f"zerojax launch: {sentence}\n".encode(), not is_error)


def _discard(stream: TextIO) -> None:
    """Discards the content of a stream's buffer and everything that is written to it later."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    with contextlib.suppress(OSError, ValueError):  # the stream has no descriptor
        os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
