"""Compiled steps of a plan: one step, or one for each compiled row length of a curriculum.

A curriculum trains on shorter rows first. While a step of one row length runs, the step of the next
length is compiled in a thread. JAX caches the compiled program, so the first call with the next
length only runs it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import threading
from collections.abc import Callable
from typing import Any

from zerojax.data import shard_batch
from zerojax.data.row_lengths import shorten
from zerojax.parallel.step import build_step
from zerojax.plan.counts import model_flops, tokens_per_step
from zerojax.plan.make import Plan

logger = logging.getLogger("zerojax.training")


@dataclasses.dataclass(kw_only=True)
class StepProgram:
    """The compiled step for one row length.

    Attributes:
      plan: plan of the step; its `abstract_batch` has rows of this length.
      jitted: jitted step from `build_step`.
      was_called: True if it has taken a step.
      compiling: thread that compiles the step; None: the first call compiles it.
    """

    plan: Plan
    jitted: Any
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

    def _compile(self, lowered: Any) -> None:
        try:
            lowered.compile()
        except Exception:  # the first call compiles again, and raises the error
            logger.debug("compiling a step ahead failed", exc_info=True)

    def __call__(self, state: Any, batch: Any) -> Any:
        """Takes a step, after waiting for a compilation in progress."""
        if self.compiling is not None:
            self.compiling.join()
        result = self.jitted(state, batch)
        self.was_called = True
        return result


class StepPrograms:
    """All compiled steps of a plan, one for each compiled row length.

    Args:
      plan: plan for full rows, with or without a curriculum.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan, self._ladder = plan, plan.ladder
        plans = {0: plan} if plan.ladder is None else plan.ladder.plans
        self._programs = {
            rung: StepProgram(plan=one, jitted=build_step(one)) for rung, one in plans.items()
        }

    def length(self, step: int) -> int | None:
        """Returns the row length in tokens of step `step` (from 1); None without a curriculum."""
        return None if self._ladder is None else self._ladder.config.length(step)

    def rung(self, step: int) -> int | None:
        """Returns the row length for which step `step` (from 1) is compiled; None without a
        curriculum."""
        length = self.length(step)
        return None if length is None else self._ladder.config.rung(length)

    def of(self, step: int) -> StepProgram:
        """Returns the program of step `step` (from 1)."""
        return self._programs[self.rung(step) or 0]

    def place(self, step: int, batch: Any) -> Any:
        """Places a host batch on the devices, with rows shortened for step `step` (from 1)."""
        if self._ladder is not None:
            batch = shorten(batch, self._ladder, step)
        return shard_batch(self.of(step).plan, batch, vocab_size=self._plan.vocab_size)

    def placing(self, after: int) -> Callable[[Any], Any]:
        """Returns a function that places batches after step `after` on the devices, in order."""
        steps = itertools.count(after + 1)
        return lambda batch: self.place(next(steps), batch)

    def compile_next(self, step: int, until: int | None) -> None:
        """Starts to compile the row length that follows that of `step`.

        Args:
          step: number of the current step.
          until: last step of the run; None if it is not known. A length that only later steps would
            use is not compiled.
        """
        if self._ladder is None:
            return
        rung = self.rung(step)
        assert rung is not None
        following = self._ladder.config.first_step_above(rung, step)
        if following is not None and (until is None or following <= until):
            self.of(following).compile_ahead()

    def wait(self) -> None:
        """Waits for the compilation in progress, if there is one."""
        for program in self._programs.values():
            if program.compiling is not None:
                program.compiling.join()

    def describe(self, step: int, *, always: bool = False) -> str | None:
        """Returns a line for the log about the row length of step `step` (from 1).

        Args:
          step: number of the step.
          always: True: return a line even if the previous step has the same length; False: return
            None then. Without a curriculum, None is returned in either case.
        """
        length = self.length(step)
        is_same = step > 1 and length == self.length(step - 1)
        if length is None or (is_same and not always):
            return None
        rung = self.rung(step)
        compiled = "" if rung == length else f", computed with {rung}"
        return f"step {step}: rows of {length} of {self._ladder.seq_len} tokens{compiled}"


@dataclasses.dataclass(frozen=True)
class CountedWork:
    """Numbers of tokens and FLOPs of steps whose rows have different lengths.

    Attributes:
      plan: plan with a curriculum.
    """

    plan: Plan

    @functools.cached_property
    def _of_rung(self) -> dict[int, float]:
        return {rung: model_flops(plan) for rung, plan in self.plan.ladder.plans.items()}

    def tokens(self, after: int, until: int) -> int | None:
        """Returns the tokens with nonzero weight of steps `after` + 1 to `until`, over all devices.

        Returns None if batches have no "tokens".
        """
        ladder = self.plan.ladder
        whole = tokens_per_step(self.plan)
        if whole is None:
            return None
        spans = ladder.config.spans(after, until)
        return sum(whole // ladder.seq_len * length * count for length, count in spans)

    def flops(self, after: int, until: int) -> float:
        """Returns the FLOPs of steps `after` + 1 to `until` over all devices.

        Each step is counted with the row length for which it is compiled.
        """
        config = self.plan.ladder.config
        spans = config.spans(after, until)
        return sum(self._of_rung[config.rung(length)] * count for length, count in spans)
