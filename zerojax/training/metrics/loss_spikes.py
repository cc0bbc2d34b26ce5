"""Detects loss spikes: values far above the values before."""

from __future__ import annotations

import bisect
import collections
import math
import statistics

from zerojax.config.late_dataclasses import dataclass

WINDOW = 100
"""Number of previous values with which a new value is compared."""
LEAST = 32
"""Minimum number of values from which their spread is estimated."""
LEAST_JUMP = 0.05
"""Minimum jump of a spike, as a fraction of the median, however small the spread is."""
LEAST_SETBACK = 0.01
"""Minimum jump of a spike, as a fraction of the decrease since the first loss. Losses near zero, of
a converged run, vary by large factors, but the changes are small compared with the first loss."""
RARE = 3
"""Number of previous values as high that make a value usual: the loss of a run with mixup, whose
batches are mixed by random shares, is high in some of 100 steps."""
ABOVE_RARE = 2.0
"""Factor by which a spike is further above the median than the `RARE`-th highest value before."""
_NORMAL = 1.4826
"""Standard deviation of a normal distribution divided by its median absolute deviation."""


@dataclass(frozen=True, kw_only=True)
class Spike:
    """A value far above the previous values.

    Attributes:
      value: the value.
      median: median of the previous values.
      times: distance of the value above the median, in robust standard deviations.
    """

    value: float
    median: float
    times: float


class SpikeDetector:
    """Compares each value with the median of the last `WINDOW` values, in units of their spread.

    Median and median absolute deviation are insensitive to outliers, so one spike does not hide the
    next. A lasting rise counts as one spike.

    Args:
      threshold: number of robust standard deviations that make a spike; None: detect no spikes.
      first: first loss of the run, if the first value passed here is a later one (resumed run).
    """

    def __init__(self, threshold: float | None, *, first: float | None = None) -> None:
        self._threshold = threshold
        self._first = first
        self._values: collections.deque[float] = collections.deque()
        self._ordered: list[float] = []
        self._is_high = False

    def see(self, value: float) -> Spike | None:
        """Adds a value, unless it is not finite; returns a `Spike` if it is a spike and the value
        before was not."""
        if self._threshold is None or not math.isfinite(value):
            return None
        if self._first is None:
            self._first = value
        spike = self._spike(value)
        if len(self._values) == WINDOW:
            del self._ordered[bisect.bisect_left(self._ordered, self._values.popleft())]
        self._values.append(value)
        bisect.insort(self._ordered, value)
        was_high, self._is_high = self._is_high, spike is not None
        return None if was_high else spike

    def _spike(self, value: float) -> Spike | None:
        assert self._threshold is not None
        assert self._first is not None
        count = len(self._ordered)
        if count < LEAST:
            return None
        # Kept in order, because sorting 100 losses at every step costs more than reading a loss.
        median = (self._ordered[(count - 1) // 2] + self._ordered[count // 2]) / 2
        jump = value - median
        gained = max(0.0, self._first - median)
        if jump <= max(LEAST_JUMP * abs(median), LEAST_SETBACK * gained):
            return None  # nearly all values; their deviation is not needed
        if jump <= ABOVE_RARE * (self._ordered[-RARE] - median):
            return None
        deviation = _NORMAL * statistics.median(abs(x - median) for x in self._values)
        if jump <= self._threshold * deviation:
            return None
        return Spike(value=value, median=median, times=jump / deviation if deviation else math.inf)
