"""Compiled steps of a plan: one step, or one for each compiled size of its ladder (`plan.ladder`).

A ladder is the series of batch sizes of a run whose early steps have shorter or fewer rows. While a
step of one size runs, the step of the next size is compiled in a thread. JAX caches the compiled
program, so the first call with the next size only runs it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import threading
from collections.abc import Callable
from typing import Any

import jax

from zerojax.config.late_dataclasses import dataclass
from zerojax.config.tree_types import Batch
from zerojax.data import shard_batch, shard_own_batch
from zerojax.forecasting.step_meetings import find_meetings
from zerojax.placement.state import TrainState
from zerojax.plan.counts import model_flops, tokens_per_step
from zerojax.plan.make import Plan
from zerojax.runtime.standstill import Meeting
from zerojax.step.build import LiveStateOnly, build_step

logger = logging.getLogger("zerojax.training")


@dataclasses.dataclass(kw_only=True)
class StepProgram:
    """The compiled step for one size.

    Attributes:
      plan: plan of the step; its `abstract_batch` has this size.
      jitted: jitted step from `build_step`.
      was_called: True if it has taken a step.
      compiling: thread that compiles the step; None: the first call compiles it.
    """

    plan: Plan
    jitted: LiveStateOnly
    was_called: bool = False
    compiling: threading.Thread | None = None

    @property
    def is_waited_for(self) -> bool:
        """True if the next call has to compile, or to wait for a compilation in progress."""
        return not self.was_called and (self.compiling is None or self.compiling.is_alive())

    def compile_ahead(self) -> None:
        """Starts to compile in a thread; does nothing if a thread was started before."""
        if self.compiling is not None or self.was_called:
            return
        plan = self.plan
        try:
            # Lowered in this thread, because JAX's thread-local settings affect the program.
            lowered = self.jitted.lower(plan.abstract_state, plan.abstract_batch)
        except Exception:  # the first call compiles again, and raises the error
            logger.debug("lowering a step ahead failed", exc_info=True)
            return
        self.compiling = threading.Thread(
            target=self._compile, args=(lowered,), name="zerojax-compile"
        )
        self.compiling.start()

    def _compile(self, lowered: jax.stages.Lowered) -> None:
        try:
            lowered.compile()
        except Exception:  # the first call compiles again, and raises the error
            logger.debug("compiling a step ahead failed", exc_info=True)

    def meetings(self) -> list[Meeting]:
        """Returns the collectives in which this process first needs each other process.

        JAX returns the program that runs, without compiling it again.
        """
        lowered = self.jitted.lower(self.plan.abstract_state, self.plan.abstract_batch)
        return find_meetings(self.plan, lowered.compile().as_text())

    def __call__(self, state: TrainState, batch: Batch) -> Any:
        """Takes a step, after waiting for a compilation in progress."""
        if self.compiling is not None:
            self.compiling.join()
        result = self.jitted(state, batch)
        self.was_called = True
        return result


class StepPrograms:
    """All compiled steps of a plan, one for each compiled size.

    Args:
      plan: plan of a full step.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan, self._ladder = plan, plan.ladder
        plans = {0: plan} if plan.ladder is None else plan.ladder.plans
        self._programs = {
            rung: StepProgram(plan=one, jitted=build_step(one)) for rung, one in plans.items()
        }

    def rung(self, step: int) -> int:
        """Returns the rung, a key of `ladder.plans`, for which step `step` (from 1) is compiled; 0
        if all steps have one size."""
        return 0 if self._ladder is None else self._ladder.rung_of(self._ladder.size(step))

    def of(self, step: int) -> StepProgram:
        """Returns the program of step `step` (from 1)."""
        return self._programs[self.rung(step)]

    def place(self, step: int, batch: Batch, shard: Callable[..., Any] = shard_batch) -> Any:
        """Places a host batch on the devices, cut to the size of step `step` (from 1).

        Args:
          shard: `shard_own_batch` if the batch comes from a feed, `shard_batch` otherwise.
        """
        if self._ladder is not None:
            batch = self._ladder.cut(batch, step)
        return shard(self.of(step).plan, batch, vocab_size=self._plan.vocab_size)

    def placing(self, after: int) -> Callable[[Any], Any]:
        """Returns a function that places the batches of a feed after step `after`, in order."""
        steps = itertools.count(after + 1)
        return lambda batch: self.place(next(steps), batch, shard_own_batch)

    def compile_next(self, step: int, until: int | None) -> None:
        """Starts to compile the size that follows that of `step`.

        Args:
          step: number of the current step.
          until: last step of the run; None if it is not known. A size that only later steps would
            have is not compiled.
        """
        following = None if self._ladder is None else self._ladder.next_step(step)
        if following is not None and (until is None or following <= until):
            self.of(following).compile_ahead()

    def wait(self) -> None:
        """Waits for the compilation in progress, if there is one."""
        for program in self._programs.values():
            if program.compiling is not None:
                program.compiling.join()

    def name(self, step: int) -> str:
        """Returns a name for the program of step `step` (from 1), for messages."""
        if self._ladder is None:
            return "the training step"
        return f"the training step for {self._ladder.describe_rung(self.rung(step))}"

    def change(self, step: int, *, always: bool = False) -> tuple[str, str, dict[str, Any]] | None:
        """Returns an event for the log about the size of step `step` (from 1): (its kind, its line,
        its fields).

        Args:
          step: number of the step.
          always: True: return it even if the previous step has the same size; False: return None
            then. If all steps have one size, None is returned in either case.
        """
        ladder = self._ladder
        if ladder is None:
            return None
        size = ladder.size(step)
        if step > 1 and size == ladder.size(step - 1) and not always:
            return None
        kind, field = ladder.event
        return kind, f"step {step}: {ladder.describe_size(size)}", {field: size}


@dataclass(frozen=True)
class CountedWork:
    """Numbers of tokens and FLOPs of steps whose rows or batches have different sizes.

    Attributes:
      plan: plan with several compiled sizes.
    """

    plan: Plan

    @functools.cached_property
    def _of_rung(self) -> dict[int, float]:
        return {rung: model_flops(plan) for rung, plan in self.plan.ladder.plans.items()}

    def tokens(self, after: int, until: int) -> int | None:
        """Returns the tokens of steps `after` + 1 to `until`, over all devices, without those that
        have weight 0 to shorten rows.

        Returns None if batches have no "tokens".
        """
        ladder = self.plan.ladder
        whole = tokens_per_step(self.plan)
        if whole is None:
            return None
        spans = ladder.spans(after, until)
        return sum(whole // ladder.whole * size * count for size, count in spans)

    def flops(self, after: int, until: int) -> float:
        """Returns the FLOPs of steps `after` + 1 to `until` over all devices.

        Each step is counted with the size for which it is compiled.
        """
        ladder = self.plan.ladder
        spans = ladder.spans(after, until)
        return sum(self._of_rung[ladder.rung_of(size)] * count for size, count in spans)
