"""Stopwatch of the training loop: every second belongs to one activity."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

DATA, STEP, SAVE, EVAL, HOST = "data", "step", "save", "eval", "host"
ACTIVITIES = (DATA, STEP, SAVE, EVAL, HOST)
"""Waiting for the next batch; the training step, dispatched or waited for; saving; evaluating; all
else that the process does in its loop, such as callbacks and reports."""


class Stopwatch:
    """Adds up seconds by activity; what is inside no `during` block is the host's own work.

    Args:
      clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        # What it is at, since when, and the seconds before that: one object, so that another
        # thread reads what belongs together.
        self._state = HOST, clock(), dict.fromkeys(ACTIVITIES, 0.0)

    @contextlib.contextmanager
    def during(self, activity: str) -> Iterator[None]:
        """Time in the block is spent on `activity`; a block inside of it has its own."""
        before = self._turn_to(activity)
        try:
            yield
        finally:
            self._turn_to(before)

    def read(self) -> dict[str, float]:
        """Seconds by activity since the start; any thread may ask."""
        activity, since, spent = self._state
        return spent | {activity: spent[activity] + self._clock() - since}

    def _turn_to(self, activity: str) -> str:
        before, since, spent = self._state
        now = self._clock()
        self._state = activity, now, spent | {before: spent[before] + now - since}
        return before


def difference(later: dict[str, float], earlier: dict[str, float]) -> dict[str, float]:
    """Seconds by activity between two readings."""
    return {activity: later[activity] - earlier[activity] for activity in later}
