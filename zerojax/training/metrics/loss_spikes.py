"""Detection of loss spikes."""

from __future__ import annotations

import collections
import math
import statistics
from dataclasses import dataclass

WINDOW = 100
"""Values that a new one is compared with."""
LEAST = 32
"""Fewer than this say too little about their own spread."""
LEAST_JUMP = 0.05
"""Part of the median below which nothing is called a spike, however quiet the values were."""
LEAST_SETBACK = 0.01
"""Part of the decrease since the first loss that a spike undoes at least. Losses of a run that has
converged near zero vary by factors, which are small beside the loss that it began with."""
_NORMAL = 1.4826
"""Standard deviations of a normal distribution per median absolute deviation."""


@dataclass(frozen=True, kw_only=True)
class Spike:
    """One value far above those before it.

    Attributes:
      value: it.
      median: of those before it.
      times: by how many of their robust standard deviations it is above.
    """

    value: float
    median: float
    times: float


class SpikeDetector:
    """Compares each value with the median of the last `WINDOW`, in units of their own spread.

    Median and median absolute deviation do not move when some values are far out, so that one spike
    does not hide the next. A rise that stays is one spike.

    Args:
      threshold: robust standard deviations; None finds nothing.
      first: the first loss of the run, where it is not the first value seen here (a resumed run).
    """

    def __init__(self, threshold: float | None, *, first: float | None = None) -> None:
        self._threshold = threshold
        self._first = first
        self._values: collections.deque[float] = collections.deque(maxlen=WINDOW)
        self._is_high = False

    def see(self, value: float) -> Spike | None:
        """The spike that `value` is, if it is one and the value before it was none."""
        if self._threshold is None or not math.isfinite(value):
            return None
        if self._first is None:
            self._first = value
        spike = self._spike(value)
        self._values.append(value)
        was_high, self._is_high = self._is_high, spike is not None
        return None if was_high else spike

    def _spike(self, value: float) -> Spike | None:
        assert self._threshold is not None
        assert self._first is not None
        if len(self._values) < LEAST:
            return None
        median = statistics.median(self._values)
        deviation = _NORMAL * statistics.median(abs(x - median) for x in self._values)
        jump = value - median
        gained = max(0.0, self._first - median)
        least = max(LEAST_JUMP * abs(median), LEAST_SETBACK * gained)
        if jump <= max(self._threshold * deviation, least):
            return None
        return Spike(value=value, median=median, times=jump / deviation if deviation else math.inf)
