"""Whole training steps, timed: as planned, with the other kernels, with other buckets.

A measurement of one computation by itself does not see what runs beside it. Here each variant of a
plan trains by itself for some steps on a batch of zeros: its state is made, and given back before
the next one's is.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.choice import Choice
from zerojax.parallel.bucket_sizes import other_bucket_sizes
from zerojax.parallel.initialization import init_state
from zerojax.parallel.step import build_step
from zerojax.plan.make import Plan
from zerojax.training.tuning import tuned_plan
from zerojax.training.tuning.measured_choices import Exchange, exchange_between_processes

AS_PLANNED = "as planned"
FIRST_STEPS, STEPS = 3, 12
SECONDS = 10.0
"""Of the steps after the first ones."""
WARM_UP = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimedStep:
    """A variant of a plan.

    Attributes:
      name: what differs, as it is written in a run file.
      seconds: of a step, the median, on the slowest process; infinite where it failed.
      failure: why there is no time, on this process.
    """

    name: str
    seconds: float
    failure: str | None = None


def time_steps(
    variants: Mapping[str, Plan],
    *,
    clock: Callable[[], float] = time.perf_counter,
    exchange: Exchange | None = None,
) -> Iterator[TimedStep]:
    """Trains each variant for some steps, one after the other. Collective.

    Args:
      variants: {name: plan}, in order; each on the devices of this job.
      clock: seconds.
      exchange: see `decide`.

    Yields:
      Each when it is done, so that what ends a process does so after the ones before are told.
    """
    exchange = exchange or exchange_between_processes
    for name, plan in variants.items():
        trial = TimedSteps(plan, clock)
        slowest = float(exchange(np.array([trial.median_of(FIRST_STEPS)])).max())
        # All processes take as many steps: a step waits for all of them.
        more = min(STEPS - FIRST_STEPS, int(SECONDS / slowest)) if math.isfinite(slowest) else 0
        if more:
            slowest = float(exchange(np.array([trial.median_of(more)])).max())
        yield TimedStep(name=name, seconds=slowest, failure=trial.failure)
        del trial  # and its state, before the next one's is made


class TimedSteps:
    """Steps of one plan on a batch of zeros.

    Args:
      plan: on devices that are here; clock: seconds.

    Attributes:
      failure: why it takes no more steps; None while it does.
    """

    def __init__(self, plan: Plan, clock: Callable[[], float]) -> None:
        self._plan, self._clock = plan, clock
        self._state: Any = None
        self._times: list[float] = []
        self.failure: str | None = None

    def median_of(self, steps: int) -> float:
        """Seconds of a step, after so many more; infinite where one failed."""
        try:
            self._take(steps)
        except Exception as error:  # what a variant does must not end the others
            self.failure = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
            self._state = None
            return math.inf
        return statistics.median(self._times)

    def _take(self, steps: int) -> None:
        if self._state is None:
            self._state = init_state(self._plan, seed=0)
            self._step, self._batch = build_step(self._plan), _zeros(self._plan)
            for _ in range(WARM_UP):
                self._state, _ = self._step(self._state, self._batch)
            jax.block_until_ready(self._state)
        for _ in range(steps):
            before = self._clock()
            self._state, _ = self._step(self._state, self._batch)
            jax.block_until_ready(self._state)
            self._times.append(self._clock() - before)


def variants_of(plan: Plan, kernel: str | None = None) -> dict[str, Plan]:
    """The plan, and the plan with other implementations of kernels, buckets, and layers unrolled.

    Args:
      plan: on devices that are here.
      kernel: what is tried beside "xla"; None: "mosaic_gpu".
    """
    kernel = kernel or tuned_plan.OTHER_KERNEL
    return {AS_PLANNED: plan} | _of_kernels(plan, kernel) | _of_buckets(plan) | _of_loops(plan)


def _of_kernels(plan: Plan, kernel: str) -> dict[str, Plan]:
    """All kernels, and none, where they can run and the plan has not just that."""
    known, planned = tuned_plan.open_kernels(plan), plan.program.kernels
    found = {}
    for name in ("xla", kernel):
        is_planned = all(planned[what].implementation == name for what in known)
        if is_planned or any(tuned_plan.obstacle_of(plan, name, one) for one in known.values()):
            continue
        others = {what: Choice(name, "measured") for what in known}  # type: ignore[arg-type]
        program = dataclasses.replace(plan.program, kernels={**planned, **others})
        found[f"mesh.kernels={name}"] = dataclasses.replace(plan, program=program)
    return found


def _of_buckets(plan: Plan) -> dict[str, Plan]:
    """Other sizes of buckets, where they make other collectives."""
    found = {}
    for option, size in other_bucket_sizes(plan):
        changes: dict[str, Any] = {option: size}
        settings = dataclasses.replace(plan.settings, **changes)
        found[f"mesh.{option}={size}"] = dataclasses.replace(plan, settings=settings)
    return found


def _of_loops(plan: Plan) -> dict[str, Plan]:
    """Loops over layers as straight code, where the settings and the model allow it."""
    if plan.settings.unroll:
        return {}
    remake: Any = plan.remake
    settings = dataclasses.replace(plan.settings, unroll=True)
    try:
        unrolled = dataclasses.replace(remake, settings=settings)(plan.mesh)
    except ValueError:  # what needs the loop, or has none
        return {}
    return {"mesh.unroll=true": dataclasses.replace(unrolled, program=plan.program)}


def _zeros(plan: Plan) -> Any:
    """A batch of the plan's shapes: the first row of every table, and values of 0."""

    shardings = jax.tree.map(lambda x: x.sharding, plan.abstract_batch)

    def make() -> Any:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), plan.abstract_batch)

    return jax.jit(make, out_shardings=shardings)()
