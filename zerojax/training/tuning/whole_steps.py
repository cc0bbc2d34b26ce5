"""Times complete training steps of variants of a plan: other kernels, other buckets, other loops.

A measurement of a single computation does not show what runs concurrently in a step. Here each
variant of a plan trains for some steps on a batch of zeros. The state of a variant is freed before
the state of the next variant is created.
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
from zerojax.config.late_dataclasses import dataclass
from zerojax.config.tree_types import Tree
from zerojax.plan.make import Plan
from zerojax.step.build import build_step
from zerojax.step.initialization import init_state
from zerojax.training.tuning import tuned_plan
from zerojax.training.tuning.measured_choices import Exchange, exchange_between_processes
from zerojax.transport.bucket_sizes import other_bucket_sizes

AS_PLANNED = "as planned"
FIRST_STEPS, STEPS = 3, 12
SECONDS = 10.0
"""Maximum seconds for the steps after the first ones."""
WARM_UP = 2


@dataclass(frozen=True, kw_only=True)
class TimedStep:
    """The measured step time of a variant of a plan.

    Attributes:
      name: the changed setting, as written in a run file.
      seconds: median seconds of a step on the slowest process; infinite if a step failed.
      failure: description of the failure on this process; None if it did not fail.
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
    """Trains each variant for some steps, one after the other. Every process must call it.

    Args:
      variants: {name: plan} in order; each plan is on the devices of this job.
      clock: function that returns seconds.
      exchange: function that gathers numbers from all processes; None: gather through JAX.

    Yields:
      Each result as soon as it is measured, so that it is not lost if a later variant ends the
      process.
    """
    exchange = exchange or exchange_between_processes
    for name, plan in variants.items():
        trial = TimedSteps(plan, clock)
        slowest = float(exchange(np.array([trial.median_of(FIRST_STEPS)])).max())
        # All processes must take the same number of steps, because a step is collective.
        more = min(STEPS - FIRST_STEPS, int(SECONDS / slowest)) if math.isfinite(slowest) else 0
        if more:
            slowest = float(exchange(np.array([trial.median_of(more)])).max())
        yield TimedStep(name=name, seconds=slowest, failure=trial.failure)
        del trial  # frees its state before the state of the next variant is created


class TimedSteps:
    """Takes and times steps of one plan on a batch of zeros.

    Args:
      plan: plan on devices of this machine.
      clock: function that returns seconds.

    Attributes:
      failure: description of the error that ended the steps; None if there was none.
    """

    def __init__(self, plan: Plan, clock: Callable[[], float]) -> None:
        self._plan, self._clock = plan, clock
        self._state: Tree = None
        self._times: list[float] = []
        self.failure: str | None = None

    def median_of(self, steps: int) -> float:
        """Takes `steps` more steps; returns the median seconds of all steps timed so far, infinite
        if a step failed."""
        try:
            self._take(steps)
        except Exception as error:  # a failing variant must not end the others
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
    """Returns {name: plan}: the plan, and variants with other kernels, buckets or unrolled layers.

    Args:
      plan: plan on devices of this machine.
      kernel: implementation to try besides "xla"; None: "mosaic_gpu".
    """
    kernel = kernel or tuned_plan.OTHER_KERNEL
    return {AS_PLANNED: plan} | _of_kernels(plan, kernel) | _of_buckets(plan) | _of_loops(plan)


def _of_kernels(plan: Plan, kernel: str) -> dict[str, Plan]:
    """Returns variants with all or no kernels that can run and differ from the plan."""
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
    """Returns variants with other bucket sizes, if these change the collectives."""
    found = {}
    for option, size in other_bucket_sizes(plan):
        changes: dict[str, Any] = {option: size}
        settings = dataclasses.replace(plan.settings, **changes)
        found[f"mesh.{option}={size}"] = dataclasses.replace(plan, settings=settings)
    return found


def _of_loops(plan: Plan) -> dict[str, Plan]:
    """Returns a variant with unrolled layer loops, if settings and model allow it."""
    if plan.program.unroll:
        return {}
    remake: Any = plan.remake
    settings = dataclasses.replace(plan.settings, unroll=True)
    try:
        unrolled = dataclasses.replace(remake, settings=settings)(plan.mesh)
    except ValueError:  # an option needs the loop, or there is no loop
        return {}
    program = dataclasses.replace(plan.program, unroll=True)
    return {"mesh.unroll=true": dataclasses.replace(unrolled, program=program)}


def _zeros(plan: Plan) -> Any:
    """Returns a batch of zeros with the plan's shapes."""

    shardings = jax.tree.map(lambda x: x.sharding, plan.abstract_batch)

    def make() -> Any:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), plan.abstract_batch)

    return jax.jit(make, out_shardings=shardings)()
