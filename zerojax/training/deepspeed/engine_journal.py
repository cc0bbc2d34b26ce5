"""Metrics of an engine: read back from the devices and logged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax

from zerojax.config import WatchConfig
from zerojax.plan.counts import tokens_per_step
from zerojax.plan.make import Plan
from zerojax.training import deepspeed
from zerojax.training.metrics import RunLog
from zerojax.training.process_times import LoopClock
from zerojax.training.reporting import Metrics, Reports
from zerojax.training.run_lifecycle import RunFiles, open_log

_MAX_SKIPPED = 5
_DEFAULT_EVERY = 10


class Journal:
    """Reports of one run: in its folder, or printed where the configuration says how often.

    Args:
      translation: of the configuration.
      folder: of metrics and plan; None: nothing is written.
      steps: length of the run, where it is known.
      finished: told the number of each step whose numbers are there.

    Attributes:
      clock: the clock of the loop.
    """

    def __init__(
        self,
        translation: deepspeed.Translation,
        folder: Path | None,
        steps: int | None,
        finished: Callable[[int], object],
    ) -> None:
        self.clock = LoopClock()
        self._translation, self._folder, self._steps = translation, folder, steps
        self._log: RunLog | None = None
        self._reports = Reports(_MAX_SKIPPED, clock=self.clock, finished=finished)
        self._finished = finished

    def begin(self, plan: Plan, step: int, skipped: int) -> None:
        """Steps follow on `step`, after `skipped` of them that were not finite."""
        finished = self._finished
        self._reports = Reports(_MAX_SKIPPED, skipped=skipped, clock=self.clock, finished=finished)
        if self._log is None and self._folder is not None:
            self._log = open_log(self._files(plan, self._folder), plan, step)

    def _files(self, plan: Plan, folder: Path) -> RunFiles:
        found = self._translation
        return RunFiles(
            folder=folder,
            log=found.log,
            watch=WatchConfig(),
            checkpoint=None,
            config=dict(found.resolved),
            reasons=tuple(found.reasons),
            steps=self._steps,
            tokens_per_step=tokens_per_step(plan),
        )

    def say(self, text: str) -> None:
        """A line in the log, or printed where there is none, by the first process."""
        if self._log is not None:
            self._log.message(text)
        elif jax.process_index() == 0:
            print(text, flush=True)

    @property
    def _every(self) -> int:
        if self._log is not None:
            return self._translation.log.every
        return self._translation.steps_per_print or _DEFAULT_EVERY

    def follow(self, plan: Plan, step: int, metrics: Mapping[str, jax.Array]) -> None:
        """To be told of every step; one that is due is reported when the next one is under way.

        Raises:
          FloatingPointError: loss or gradients stayed non-finite.
        """
        self._reports.follow(plan, step, metrics, self._log)
        self._report(plan)
        if step % self._every == 0:
            self._reports.hold(plan, step, metrics)

    def _report(self, plan: Plan) -> None:
        values = self._reports.read(plan, self._log)
        if values is None or self._log is not None or self._translation.steps_per_print is None:
            return
        if jax.process_index() == 0:
            print(_line(values, plan.traced.metric_names), flush=True)

    def wait(self, plan: Plan) -> None:
        """Waits for all steps that `follow` was told of."""
        self._reports.wait(plan)

    def close(self, plan: Plan, step: int, *, is_broken: bool = False) -> None:
        """Reports what is due, and closes the log for good. May be called twice.

        Args:
          is_broken: whether devices or numbers have failed: nothing is read from them any more.

        Raises:
          FloatingPointError: as `follow`, where that has not been told yet; the log is closed.
        """
        try:
            if not is_broken:
                self._report(plan)
                self._reports.settle(plan, self._log)
        finally:
            log, self._log, self._folder = self._log, None, None
            if log is not None:
                log.end(step, self.clock.take()[0])
                log.close()


def _line(values: Metrics, own: Sequence[str]) -> str:
    rate = f", lr=[{values['learning_rate']:.6g}]" if "learning_rate" in values else ""
    return (
        f"step={int(values['step'])}, skipped={int(values['num_skipped'])}{rate}, "
        f"loss={values['loss']:.6g}, grad_norm={values['grad_norm']:.6g}"
        + "".join(f", {name}={values[name]:.6g}" for name in own)
    )
