"""Replays the timeline of a compiled step at given rates: one compute stream, and one link for each
kind of transfer.

Kernels run one after the other, each at the slower of its products and its memory. A transfer
begins when the schedule starts it and its link is free; the schedule waits for it where the
program does. So a transfer hides behind the work between its start and its wait, and one link
never carries two transfers at once.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping
from typing import Any

from zerojax.config.late_dataclasses import dataclass
from zerojax.forecasting.hlo.timeline import BRANCHES, KERNEL, LOOP, START, WAIT, Timeline
from zerojax.operators.marks import weights_of_branches

_WARM = 3
"""Iterations of a loop that are replayed one by one; the others take as long as the last one. What
an iteration starts is waited for in the next one at the latest, so the third is like all later
ones."""


_Seconds = dict[tuple[str, int], float]


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """Time of one step.

    Attributes:
      seconds: time from the first kernel to the last wait.
      kernels: {(kind, where): seconds of these kernels}.
      waited: {(kind of transfer, index): seconds in which the compute stream waits for it}.
    """

    seconds: float
    kernels: Mapping[tuple[str, int], float]
    waited: Mapping[tuple[str, int], float]

    @property
    def busy(self) -> float:
        """Seconds of kernels."""
        return sum(self.kernels.values())

    def waited_for(self, kind: str) -> float:
        """Returns the seconds of waiting for transfers of one kind."""
        return sum(self.waited_for_each(kind).values())

    def waited_for_each(self, kind: str) -> dict[int, float]:
        """Returns {index of a transfer of one kind: seconds of waiting for it}."""
        return {index: seconds for (one, index), seconds in self.waited.items() if one == kind}


def replay(
    timeline: Timeline,
    *,
    kernel: Callable[[list[Any]], float],
    transfer: Callable[[str, int], tuple[str, float]],
) -> Replayed:
    """Replays a step.

    Args:
      timeline: of `read_timeline`.
      kernel: seconds of a kernel's entry, all its launches together.
      transfer: (kind, index) of a transfer -> (name of its link, seconds on this link).
    """
    state = _State(kernel, transfer)
    state.run(timeline)
    # A transfer that nothing waited for still ends within the step.
    for arrivals in state.arrivals.values():
        for index, at in arrivals:
            state.wait(index, at)
    return Replayed(seconds=state.now, kernels=dict(state.kernels), waited=dict(state.waited))


class _State:
    """Clock of the compute stream, when each link is free, and transfers in progress."""

    def __init__(
        self,
        kernel: Callable[[list[Any]], float],
        transfer: Callable[[str, int], tuple[str, float]],
    ):
        self._kernel, self._transfer = kernel, transfer
        self.now = 0.0
        self.free: dict[str, float] = {}
        self.arrivals: dict[str, collections.deque[tuple[tuple[str, int], float]]] = {}
        self.kernels: _Seconds = collections.defaultdict(float)
        self.waited: _Seconds = collections.defaultdict(float)

    def run(self, timeline: Timeline) -> None:
        for entry in timeline:
            word = entry[0]
            if word == KERNEL:
                seconds = self._kernel(entry)
                self.now += seconds
                self.kernels[entry[1], entry[-1]] += seconds
            elif word == START:
                self._start(*entry[1:])
            elif word == WAIT:
                if self.arrivals.get(entry[1]):
                    self.wait(*self.arrivals[entry[1]].popleft())
            elif word == LOOP:
                self._loop(*entry[1:])
            elif word == BRANCHES:
                self._branches(*entry[1:])

    def _start(self, done: str, kind: str, index: int) -> None:
        link, seconds = self._transfer(kind, index)
        # One link carries one transfer at a time, so a later one begins where the last one ended.
        self.free[link] = max(self.now, self.free.get(link, 0.0)) + seconds
        arrivals = self.arrivals.setdefault(done, collections.deque())
        # Transfers of one done arrive in the order in which they started.
        arrivals.append(((kind, index), self.free[link]))

    def wait(self, index: tuple[str, int], at: float) -> None:
        self.waited[index] += max(0.0, at - self.now)
        self.now = max(self.now, at)

    def _loop(self, trips: int, body: Timeline) -> None:
        for _ in range(min(trips, _WARM - 1)):
            self.run(body)
        if trips >= _WARM:
            self._run_times(body, trips - _WARM + 1)

    def _run_times(self, body: Timeline, times: float) -> None:
        """Runs a body once, and counts what it took `times` times."""
        began, kernels, waited = self.now, self.kernels, self.waited
        self.kernels = collections.defaultdict(float)
        self.waited = collections.defaultdict(float)
        self.run(body)
        later = (times - 1) * (self.now - began)
        self.now += later
        # Links and arrivals move along with the clock, or the skipped iterations would hide them.
        self.free = {link: at + later for link, at in self.free.items()}
        for arrivals in self.arrivals.values():
            # Rotates the queue once, so that the order of arrivals stays.
            for _ in range(len(arrivals)):
                index, at = arrivals.popleft()
                arrivals.append((index, at + later))
        for total, new in ((kernels, self.kernels), (waited, self.waited)):
            for key, seconds in new.items():
                total[key] += times * seconds
        self.kernels, self.waited = kernels, waited

    def _branches(self, shares: list[float | None], branches: list[Timeline]) -> None:
        """Runs the branch that takes longest, or the mean over layers if their shares are known."""
        costs = []
        for branch in branches:
            # Only the cost of the branch is asked, so its clock and its transfers must not touch
            # this one.
            alone = _State(self._kernel, self._transfer)
            alone.run(branch)
            costs.append(alone.now)
        for branch, weight in zip(branches, weights_of_branches(costs, shares), strict=True):
            if weight:
                # Where shares are known each branch runs for its share of the layers, and a share
                # may be below 1.
                self._run_times(branch, weight)
