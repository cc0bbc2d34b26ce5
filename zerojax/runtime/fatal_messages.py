"""Copies the standard error of a process's C++ code, with one sentence for a lost process.

`shutdown.leave_when_one_is_lost` runs this file as a program of its own. JAX's runtime ends a
process that has lost another one: it writes some 30 lines with a C++ stack, then calls `abort`. No
public setting changes that, and Python code of the same process is too late. This program imports
only few modules of the standard library, because every process of a run starts one.
"""

from __future__ import annotations

import os
import re
import sys

FATAL = re.compile(
    rb"F\d{4} .*\] Terminating process because the JAX distributed service detected fatal errors"
)
# What the runtime writes about the same event before, and a line with which another message begins.
_BEFORE = re.compile(
    rb"(E\d{4} .* coordination_service(_agent)?|[WE]\d{4} .* preemption_sync_manager)\.cc:\d+\]"
)
_NEXT = re.compile(rb"[IWEF]\d{4} [\d:.]+ +\d+ \S+:\d+\]")
_AFTER_THE_CAUSE = (b"*** ", b"=== ", b"RPC: ", b"Additional GRPC")
_FIRST_PROCESS = re.compile(r"leader task was preempted")
_TASKS = re.compile(r"unhealthy[^:]*:\s*([^\n]*)|[Tt]ask (\d+) heartbeat timeout")


def lost_processes(message: str) -> list[int]:
    """Returns the indices of the processes that a message of the runtime names as lost.

    Args:
      message: text of the fatal error.
    """
    if _FIRST_PROCESS.search(message):
        return [0]
    named = _TASKS.search(message)
    # JAX 0.12 writes "1, 2", earlier versions "/job:jax_worker/replica:0/task:1, ...".
    words = re.split(r"[,\s]+", (named[1] or named[2])) if named else []
    ends = [re.search(r"(\d+)$", word) for word in words]
    return sorted({int(end[1]) for end in ends if end})


def sentence(message: str, process: int, num_processes: int) -> str:
    """Returns the line that replaces the runtime's message.

    Args:
      message: text of the fatal error.
      process: index of the process that writes it.
      num_processes: number of processes of the run.
    """
    lost = [str(each) for each in lost_processes(message) if each != process]
    if not lost and num_processes == 2:
        lost = [str(1 - process)]
    who = f"process{'es' if len(lost) > 1 else ''} {', '.join(lost)}" if lost else "another process"
    have = "have" if len(lost) > 1 else "has"
    return (
        f"zerojax: error: {who} of this run {have} ended or can no longer be reached, so this "
        f"process (process {process} of {num_processes}) ends; see the reason in the output of "
        f"{who} or of the launcher; the same command resumes a run from its last checkpoint"
    )


class Copier:
    """Splits a stream of bytes into what is shown and the runtime's fatal message.

    Attributes:
      fatal: lines of the fatal message so far; empty before it.
      is_complete: True once the cause in `fatal` is complete.
    """

    def __init__(self) -> None:
        self.fatal: list[bytes] = []
        self.is_complete = False
        self._begun, self._drops, self._is_inside = b"", False, False

    def feed(self, chunk: bytes) -> bytes:
        """Returns the bytes that are shown when `chunk` has arrived."""
        *lines, rest = (self._begun + chunk).split(b"\n")
        shown = b"".join(self._line(line + b"\n") for line in lines)
        self._begun = rest
        # A line that is no message of the runtime is not held back: it may be a question.
        if rest and rest[:1] not in b"WEF" and not self._drops and not self.fatal:
            shown, self._begun, self._is_inside = shown + rest, b"", True
        return shown

    def close(self) -> bytes:
        """Returns the bytes that are shown when the stream has ended."""
        self.is_complete = self.is_complete or bool(self.fatal)
        return b"" if self._drops or self.fatal else self._begun

    def _line(self, line: bytes) -> bytes:
        if self._is_inside:
            self._is_inside = False
            return line
        if self.fatal:
            self.is_complete = self.is_complete or line.startswith(_AFTER_THE_CAUSE)
            if not self.is_complete:
                self.fatal.append(line)
            return b""
        if FATAL.match(line):
            self.fatal.append(line)
            return b""
        if _NEXT.match(line):
            self._drops = _BEFORE.match(line) is not None
        return b"" if self._drops else line


def main() -> None:
    """Copies standard input to standard error until its end.

    The arguments are the index of the process and the number of processes. Standard output receives
    a byte after the sentence about a lost process has been written.
    """
    process, num_processes = int(sys.argv[1]), int(sys.argv[2])
    copier, is_said = Copier(), False
    chunk = b"."
    while chunk:
        chunk = os.read(0, 1 << 16)
        _write(2, copier.feed(chunk) if chunk else copier.close())
        if copier.is_complete and not is_said:
            is_said = True
            text = b"".join(copier.fatal).decode(errors="replace")
            _write(2, sentence(text, process, num_processes).encode() + b"\n")
            # Last, because the process ends as soon as it reads this byte.
            _write(1, b".")


def _write(descriptor: int, data: bytes) -> None:
    try:
        while data:
            data = data[os.write(descriptor, data) :]
    except OSError:
        pass  # nobody reads it; the input is still read, since a full pipe would block its writer


if __name__ == "__main__":
    main()
