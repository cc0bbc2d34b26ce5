"""Short runs with an average of the weights, followed by NumPy's recurrence step by step."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from zerojax.data import shard_batch
from zerojax.plan.make import Plan
from zerojax.step.build import build_step
from zerojax.step.initialization import init_state
from zerojax.step.reshard import to_portable_state

DECAY = 0.75
"""1 - DECAY is a power of two, by which no product is rounded: a machine that multiplies and adds
in one instruction and one that rounds in between get the same bits, and so does NumPy."""

Arrays = dict[str, np.ndarray]


def moved(average: Mapping[str, np.ndarray], params: Mapping[str, np.ndarray], rate: Any) -> Arrays:
    """The recurrence in NumPy's float32."""
    rate = np.float32(rate)
    return {name: average[name] + rate * (params[name] - average[name]) for name in average}


def weights_of(plan: Plan, state: Any) -> Arrays:
    """{name: the stored parameter} as float32."""
    return _float32(to_portable_state(plan, state)["params"])


def average_of(plan: Plan, state: Any) -> Arrays:
    """{name: the average}, which has to be float32."""
    average = to_portable_state(plan, state)["opt_state"].ema
    assert {x.dtype.name for x in average.values()} == {"float32"}
    return _float32(average)


def _float32(tree: Mapping[str, Any]) -> Arrays:
    return {name: np.array(x, np.float32) for name, x in tree.items()}


class Followed:
    """A run, and what its average has to be.

    Attributes:
      state: of the run; expected: NumPy's average; count: of updates applied.
    """

    def __init__(
        self, plan: Plan, state: Any = None, *, decay: float = DECAY, warmup: bool = False
    ):
        self.plan, self.step = plan, build_step(plan)
        self.state = init_state(plan) if state is None else state
        self.expected, self.count = weights_of(plan, self.state), 0
        self._decay, self._warmup = decay, warmup
        assert differing(average_of(plan, self.state), self.expected) == []

    def __call__(self, *batches: Any) -> Followed:
        """Takes a step on each batch; those that are skipped do not move NumPy's average."""
        for batch in batches:
            self.state, metrics = self.step(self.state, shard_batch(self.plan, batch))
            if int(metrics["skipped"]):
                continue
            rate = 1 - self._decay
            if self._warmup:
                rate = max(rate, 9 / (10 + self.count))
            self.expected = moved(self.expected, weights_of(self.plan, self.state), rate)
            self.count += 1
        return self

    def on(self, plan: Plan, state: Any) -> Followed:
        """The run as it goes on under another plan."""
        other = copy.copy(self)
        other.plan, other.state, other.step = plan, state, build_step(plan)
        return other

    def check(self) -> None:
        """Every bit of the average is NumPy's, and it is not the weights."""
        found = average_of(self.plan, self.state)
        assert differing(found, self.expected) == []
        assert differing(found, weights_of(self.plan, self.state)) != []
        assert int(self.state["opt_state"].count) == self.count


def differing(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> list[str]:
    """Names of arrays that are not the same bit for bit."""
    assert one.keys() == other.keys()
    return [name for name in one if one[name].tobytes() != other[name].tobytes()]


def num_bytes_of(tree: Any) -> int:
    """Bytes of all arrays on all devices."""
    return sum(s.data.nbytes for x in jax.tree.leaves(tree) for s in x.addressable_shards)
