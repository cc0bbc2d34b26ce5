"""Holds the compiled steps of a plan: one, or one for each compiled length of a curriculum.

While a step of one length runs, the next length is compiled in a thread. JAX keeps the compiled
program, so that the first call with the next length only runs it.
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
      plan: of the step; its `abstract_batch` has the length's shapes.
      jitted: from `build_step`.
      was_called: whether it has taken a step.
      compiling: thread that compiles it; None: it compiles at its first call.
    """

    plan: Plan
    jitted: Any
    was_called: bool = False
    compiling: threading.Thread | None = None

    @property
    def is_waited_for(self) -> bool:
        """Whether the next call has to compile, or to wait for a compilation in progress."""
        return not self.was_called and (self.compiling is None or self.compiling.is_alive())

    def compile_ahead(self) -> None:
        """Starts to compile in a thread; does nothing if that was started before."""
        if self.compiling is not None or self.was_called:
            return
        plan = self.plan
        try:
            # In this thread, whose settings of JAX are part of what is compiled.
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
        """Takes a step, after waiting for the compilation."""
        if self.compiling is not None:
            self.compiling.join()
        result = self.jitted(state, batch)
        self.was_called = True
        return result


class StepPrograms:
    """The compiled steps of a plan.

    Args:
      plan: of whole rows, with or without a ladder.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan, self._ladder = plan, plan.ladder
        plans = {0: plan} if plan.ladder is None else plan.ladder.plans
        self._programs = {
            rung: StepProgram(plan=one, jitted=build_step(one)) for rung, one in plans.items()
        }

    def length(self, step: int) -> int | None:
        """Returns the tokens of a row in a step, from 1; None without a curriculum."""
        return None if self._ladder is None else self._ladder.config.length(step)

    def rung(self, step: int) -> int | None:
        """Returns the compiled length of a step, from 1; None without a curriculum."""
        length = self.length(step)
        return None if length is None else self._ladder.config.rung(length)

    def of(self, step: int) -> StepProgram:
        """Returns the program of a step, from 1."""
        return self._programs[self.rung(step) or 0]

    def place(self, step: int, batch: Any) -> Any:
        """Returns the host batch of a step, from 1, on the devices, shortened for the step."""
        if self._ladder is not None:
            batch = shorten(batch, self._ladder, step)
        return shard_batch(self.of(step).plan, batch, vocab_size=self._plan.vocab_size)

    def placing(self, after: int) -> Callable[[Any], Any]:
        """Returns a function that places the batches after step `after`, one after the other."""
        steps = itertools.count(after + 1)
        return lambda batch: self.place(next(steps), batch)

    def compile_next(self, step: int, until: int | None) -> None:
        """Starts to compile the length that follows that of `step`.

        Args:
          until: last step of the run; None: not known. A length that only later steps have is not
            compiled.
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
        """Returns a line about the length of a step, from 1.

        Args:
          always: also if the step before has the same length; None is returned then otherwise, and
            without a curriculum.
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
    """Tokens and FLOPs of steps whose rows have different lengths.

    Attributes:
      plan: with a ladder.
    """

    plan: Plan

    @functools.cached_property
    def _of_rung(self) -> dict[int, float]:
        return {rung: model_flops(plan) for rung, plan in self.plan.ladder.plans.items()}

    def tokens(self, after: int, until: int) -> int | None:
        """Returns the tokens with weight of the steps `after` + 1 to `until`, over all devices.

        None if batches have no "tokens".
        """
        ladder = self.plan.ladder
        whole = tokens_per_step(self.plan)
        if whole is None:
            return None
        spans = ladder.config.spans(after, until)
        return sum(whole // ladder.seq_len * length * count for length, count in spans)

    def flops(self, after: int, until: int) -> float:
        """Returns the FLOPs of steps `after` + 1 to `until` over all devices.

        Each step counts with the row length that it is compiled for.
        """
        config = self.plan.ladder.config
        spans = config.spans(after, until)
        return sum(self._of_rung[config.rung(length)] * count for length, count in spans)
