"""Output of the processes, line by line with their number, without known noise."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from collections.abc import Iterator
from typing import BinaryIO, TextIO

_GLOO = re.compile(rb"\[Gloo\] Rank|\d is connected to \d+ peer ranks")
# Each device of a process says it from a thread of its own, a few words at a time.
_GLOO_WORDS = re.compile(
    rb"\[Gloo\] Rank|is connected to|peer ranks|Expected number of connected|is :|[\s\d.]+"
)
_SIGTERM = re.compile(rb"W\d{4} [\d:.]+ +\d+ preemption_notifier\.cc:\d+\] SIGTERM caught")
# What the runtime says of a process that another one has left, some 40 lines with a C++ stack.
_RUNTIME = re.compile(
    rb"[IWEF]\d{4} [\d:.]+ +\d+ "
    rb"(client\.h|coordination_service_agent\.cc|preemption_sync_manager\.cc|coordination_service\.cc)"
    rb":\d+\]"
)
_MORE_OF_IT = re.compile(
    rb"\s*$|RPC: |Additional GRPC|:UNKNOWN:|\*\*\* Check failure|\s+@ |\*\*\* SIGABRT|PC: @"
)
RUNTIME_SUMMARY = b"(JAX's runtime has lost the other processes; --show-all prints what it says)"


def without_noise(lines: Iterator[bytes]) -> Iterator[bytes]:
    """Lines of one stream of one process, less what gloo and the runtime say of nothing wrong.

    The runtime's last words become one line.
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
    """Writes whole lines of many processes to this one's own streams."""

    def __init__(self, num_processes: int, *, show_all: bool = False):
        self._width = len(str(num_processes - 1))
        self._show_all = show_all
        self._lock = threading.Lock()
        self._given_up: set[bool] = set()

    def copy(self, process_id: int, source: BinaryIO, *, is_error: bool) -> None:
        """Copies `source` to its end; to be run in a thread of its own."""
        prefix = f"[{process_id:{self._width}}] ".encode()
        lines = (line.rstrip(b"\r\n") for line in source)
        for line in lines if self._show_all else without_noise(lines):
            self._write(prefix + line + b"\n", is_error)

    def say(self, sentence: str) -> None:
        """A sentence of the launcher itself."""
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
                # What processes say is still read: one whose pipe is full would stand still.
                self._given_up.add(is_error)
                reason = error
                _discard(stream)
        if not isinstance(reason, BrokenPipeError):  # a reader, such as `head`, that has left
            name = "standard error" if is_error else "standard output"
            sentence = f"{name} takes nothing more ({reason.strerror}); the run goes on without it"
            self._write(f"zerojax launch: {sentence}\n".encode(), not is_error)


def _discard(stream: TextIO) -> None:
    """From now on what is left in the stream's buffer, and what comes, goes nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    with contextlib.suppress(OSError, ValueError):  # a stream without a descriptor
        os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
