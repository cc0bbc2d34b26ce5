"""Reads an engine's metrics from the devices and logs them."""

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
    """Writes the reports of a run to its folder, or prints them if `steps_per_print` is set.

    Args:
      translation: of the configuration.
      folder: of metrics and plan; None: nothing is written.
      steps: length of the run, if known.
      finished: called with the number of each finished step.

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
        """Starts reports after step `step`, of which `skipped` steps were not finite."""
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
        """Writes a line to the log; without a log, process 0 prints it."""
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
        """Registers a step; call it for every step. Reports are read while the next step runs.

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
        """Waits for all steps registered by `follow`."""
        self._reports.wait(plan)

    def close(self, plan: Plan, step: int, *, is_broken: bool = False) -> None:
        """Writes pending reports, and closes the log permanently. May be called twice.

        Args:
          plan: of the run.
          step: batches consumed.
          is_broken: whether a device error or non-finite numbers occurred; then nothing is read
            from the devices.

        Raises:
          FloatingPointError: as `follow`, unless raised before; the log is closed first.
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
