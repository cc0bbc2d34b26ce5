"""First failure of a job, its description and its consequence."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Iterable

from zerojax.runtime.exit_codes import BAD_INPUT, HUNG, INTERRUPTED, OK, SAVED_AND_STOPPED

TOGETHER = 0.5
"""Seconds within which ends may be seen in another order than they happened."""

_MEANINGS = {
    BAD_INPUT: "exit code 2: its input was wrong, see its message above",
    HUNG: f"exit code {HUNG}: it was stuck, and its watchdog ended it",
    INTERRUPTED: f"exit code {INTERRUPTED}: it was interrupted",
    -signal.SIGKILL: "SIGKILL: somebody killed it, or the kernel did because memory ran out",
    -signal.SIGSEGV: "SIGSEGV: a crash in compiled code",
    -signal.SIGBUS: "SIGBUS: a crash in compiled code, or /dev/shm is full",
    -signal.SIGABRT: "SIGABRT: JAX's runtime gave up, see its message above",
}
_KILLS = (-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGILL, -signal.SIGFPE)


@dataclasses.dataclass(frozen=True)
class End:
    """One process has ended.

    Attributes:
      process_id: its number in the run.
      code: exit code, or minus the number of the signal.
      when: seconds on the clock of the launcher that decides.
      was_killed: whether a launcher killed it, after another one had failed.
    """

    process_id: int
    code: int
    when: float
    was_killed: bool = False

    @property
    def failed(self) -> bool:
        """Whether it ended otherwise than at its own end or saved and stopped."""
        return self.code not in (OK, SAVED_AND_STOPPED) and not self.was_killed


def first_failure(ends: Iterable[End]) -> End | None:
    """The process whose failure the others followed.

    Of failures at about the same time one from outside (a kill, a crash) comes before one by an
    exit code, and that before an abort: with process 0 the runtime of all others aborts.
    """
    failed = [end for end in ends if end.failed]
    if not failed:
        return None
    earliest = min(end.when for end in failed)
    near = [end for end in failed if end.when - earliest < TOGETHER]
    return min(
        near, key=lambda end: (end.code == -signal.SIGABRT, end.code not in _KILLS, end.when)
    )


def describe(code: int) -> str:
    """What ended a process, such as "exit code 3"."""
    if code in _MEANINGS:
        return _MEANINGS[code]
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def exit_code(code: int) -> int:
    """As shells count: 128 + n for signal n."""
    return code if code >= 0 else 128 - code


def may_restart(code: int) -> bool:
    """Whether starting again can help after a process has ended with `code`."""
    return code not in (OK, BAD_INPUT, SAVED_AND_STOPPED, INTERRUPTED)
