"""Detects stragglers (slow processes) from the seconds that each process spends on activities.

All processes end a step together, so its duration does not show which process was slow. But each
process measures the time that it spends on its own work (data, callbacks) while its devices are
idle: `late_data` and `late_host`. The other processes wait in a collective during that time.
"""

from __future__ import annotations

import statistics
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple
from typing import Any

from zerojax.config.late_dataclasses import dataclass

LEAST_SECONDS = 0.01
"""Minimum delay of a straggler in seconds per step; the OS scheduler can cause smaller delays."""
IN_A_ROW = 3
"""Number of consecutive reports after which a process is reported as slow, or as no longer slow."""

_FORMAT = struct.Struct("<6d40s")

DATA, STEP, SAVE, EVAL, HOST = "data", "step", "save", "eval", "host"
ACTIVITIES = (DATA, STEP, SAVE, EVAL, HOST)
"""Activities, in this order: waiting for the next batch; dispatching the training step or waiting
for it; saving; evaluating; everything else in the loop, such as callbacks and reports."""


@dataclass(frozen=True, kw_only=True)
class ProcessTimes:
    """Seconds that one process has measured since its last report.

    Attributes:
      steps: number of steps since the last report.
      seconds: wall time of these steps, without saving and evaluating.
      data: part of `seconds` spent waiting for batches.
      host: part of `seconds` spent on the process's own work between steps.
      late_data: part of `data` during which the process's devices were idle.
      late_host: part of `host` during which the process's devices were idle.
      name: name of the process's machine.
    """

    steps: float
    seconds: float
    data: float
    host: float
    late_data: float
    late_host: float
    name: str

    def as_bytes(self) -> bytes:
        """Returns the times encoded in a fixed number of bytes."""
        *numbers, name = astuple(self)
        return _FORMAT.pack(*numbers, name.encode()[:40])

    @classmethod
    def from_bytes(cls, row: bytes) -> ProcessTimes:
        """Decodes the times from bytes that `as_bytes` returned."""
        *numbers, name = _FORMAT.unpack(row)
        text = name.rstrip(b"\0").decode(errors="replace")
        names = ("steps", "seconds", "data", "host", "late_data", "late_host")
        return cls(**dict(zip(names, numbers, strict=True)), name=text)

    @property
    def late(self) -> float:
        """Seconds per step during which devices were idle because of this process."""
        return (self.late_data + self.late_host) / max(self.steps, 1)


def spread(rows: Sequence[ProcessTimes]) -> dict[str, Any]:
    """Returns the minimum, median and maximum over processes of three times, in seconds per step:
    "step_seconds", "own_seconds" (`late`) and "data_seconds", with "_min", "_median" and "_max"
    appended. Also "processes" (their number) and "slowest_process" (index of the largest
    `late`)."""
    late = [row.late for row in rows]
    waits = [row.data / max(row.steps, 1) for row in rows]
    steps = [row.seconds / max(row.steps, 1) for row in rows]
    found: dict[str, Any] = {"processes": len(rows)}
    for name, values in (("step_seconds", steps), ("own_seconds", late), ("data_seconds", waits)):
        found[f"{name}_min"] = min(values)
        found[f"{name}_median"] = statistics.median(values)
        found[f"{name}_max"] = max(values)
    found["slowest_process"] = late.index(max(late))
    return found


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A change to report: a process has become slow, or is no longer slow."""

    process: int
    is_slow: bool
    text: str


class Stragglers:
    """Finds processes for which the others wait, at several consecutive reports.

    Args:
      threshold: minimum delay as a fraction of the step time; None: detect no stragglers.
    """

    def __init__(self, threshold: float | None) -> None:
        self._threshold = threshold
        self._counts: dict[int, int] = {}
        self._named: set[int] = set()

    def see(self, rows: Sequence[ProcessTimes]) -> list[Finding]:
        """Adds one report of all processes, in process order; returns a finding for each process
        that has now been slow, or no longer slow, at `IN_A_ROW` reports."""
        findings = []
        for process, row in enumerate(rows):
            others = [other for at, other in enumerate(rows) if at != process]
            is_slow = self._is_slow(row, others)
            differs = is_slow != (process in self._named)
            self._counts[process] = self._counts.get(process, 0) + 1 if differs else 0
            if self._counts[process] < IN_A_ROW:
                continue
            self._counts[process] = 0
            (self._named.add if is_slow else self._named.discard)(process)
            who = f"rank {process} ({row.name})"
            text = _slow_words(who, row, others) if is_slow else f"{who} is no longer slow"
            findings.append(Finding(process=process, is_slow=is_slow, text=text))
        return findings

    def _is_slow(self, row: ProcessTimes, others: Sequence[ProcessTimes]) -> bool:
        if self._threshold is None or not others or row.steps < 1:
            return False
        step = row.seconds / row.steps
        excess = step - _without(row, others)
        return excess > max(self._threshold * step, LEAST_SECONDS)


def _without(row: ProcessTimes, others: Sequence[ProcessTimes]) -> float:
    """Returns the seconds that a step would take if a process were as fast as the others.

    A process that waits for its data in each step, although the step waits for another process as
    well, would wait for them anyway: a step takes at least as long as each process's own part.
    """
    step = row.seconds / row.steps
    delay = row.late - statistics.median(other.late for other in others)
    own = max((other.data + other.host) / max(other.steps, 1) for other in others)
    return min(step, max(step - delay, own, 0.0))


def _slow_words(who: str, row: ProcessTimes, others: Sequence[ProcessTimes]) -> str:
    usual, steps = statistics.median(other.late for other in others), row.steps
    step = row.seconds / steps
    parts = [("waiting for data", row.late_data), ("its own work on the host", row.late_host)]
    of_it = ", ".join(f"{what} {part / steps:.2g} s" for what, part in parts if part > 0.1 * step)
    without = _without(row, others)
    return (
        f"{who} is slow: it begins each step {row.late:.2g} s late "
        f"({of_it or 'waiting for data and own work'}), the others {usual:.2g} s; a step takes "
        f"{step:.2g} s, and would take about {without:.2g} s without this delay"
    )


class Stopwatch:
    """Sums seconds by activity; time outside of `during` blocks counts as `HOST`.

    Args:
      clock: function that returns a monotonic time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        # (current activity, its start, earlier seconds) are in one tuple, so that another thread
        # reads a consistent state.
        self._state = HOST, clock(), dict.fromkeys(ACTIVITIES, 0.0)

    def during(self, activity: str) -> _During:
        """Counts the time of a `with` block as `activity`; inner blocks count separately."""
        return _During(self, activity)

    def read(self) -> dict[str, float]:
        """Returns {activity: seconds} since the start. Thread-safe."""
        activity, since, spent = self._state
        return spent | {activity: spent[activity] + self._clock() - since}

    def turn_to(self, activity: str) -> str:
        """Counts the time from now on as `activity`; returns the activity until now."""
        before, since, spent = self._state
        now = self._clock()
        self._state = activity, now, spent | {before: spent[before] + now - since}
        return before


class _During:
    """The `with` block of `Stopwatch.during`."""

    def __init__(self, watch: Stopwatch, activity: str) -> None:
        self._watch, self._activity = watch, activity

    def __enter__(self) -> None:
        self._activity = self._watch.turn_to(self._activity)

    def __exit__(self, *_: object) -> None:
        self._watch.turn_to(self._activity)


def difference(later: dict[str, float], earlier: dict[str, float]) -> dict[str, float]:
    """Returns {activity: seconds} between two readings of a stopwatch."""
    return {activity: later[activity] - earlier[activity] for activity in later}
