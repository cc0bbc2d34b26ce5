"""Runs the trials of a sweep one after the other, by successive halving.

Every trial is an ordinary run with a folder of its own. Its plan is for the whole run, so the
learning rate follows the schedule of the whole run; a rung only ends it earlier, with a checkpoint
from which the next rung continues.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from pathlib import Path

import jax

from zerojax.config import ConfigError, RunConfig
from zerojax.config.loader import user_path
from zerojax.data import RowSource
from zerojax.forecasting import forecast
from zerojax.hardware.gpus import Gpu, gpu_of_device
from zerojax.plan.make import Plan
from zerojax.runtime.distributed import join_processes
from zerojax.runtime.user_files import not_for_everybody
from zerojax.step.host_budget import check_offload
from zerojax.tracing.trees import format_bytes
from zerojax.training.run_file import check_devices, make_folder, open_data, spec_from_config
from zerojax.training.run_lifecycle import fit, open_run
from zerojax.training.run_spec import RunSpec, plan_run
from zerojax.training.sweep_page import write_sweep_page
from zerojax.training.sweep_record import RungResult, SweepRecord, as_result
from zerojax.training.sweep_trials import (
    SweepTrial,
    describe_warmup,
    make_rungs,
    make_trials,
    settings_of_sweep,
)
from zerojax.training.trainer import Trainer

Say = Callable[[str], None]


class Sweep:
    """The trials of a run file, with their plans and results.

    Args:
      config: settings of the run, with `sweep.axes`.
      folder: folder of the sweep; None: that of the run with "-sweep" at its end.

    Attributes:
      trials: all trials, in the order of their numbers.
      rungs: rungs of successive halving.
      folder: folder of the sweep.
      measure: what ranks the trials, in words.

    Raises:
      ConfigError: the axes or a trial's settings are invalid.
    """

    def __init__(self, config: RunConfig, folder: str | None = None) -> None:
        self.folder = user_path(folder or f"{config.run_dir}-sweep")
        self.trials = make_trials(config, str(self.folder))
        self.rungs = make_rungs(len(self.trials), config.steps, config.sweep)
        self._config, self._prepared = config, dict[int, tuple[RunSpec, Plan]]()
        self._rows: RowSource | None = None
        self.measure = "validation loss"

    def check(self, progress: Say = lambda text: None) -> None:
        """Plans every trial, and raises if one cannot run; nothing is trained.

        Raises:
          ValueError: a trial's settings are invalid, it does not fit these devices, or there are
            several processes.
        """
        join_processes()
        if jax.process_count() > 1:
            raise ValueError(
                f"a sweep runs in one process, and this job has {jax.process_count()}; start "
                "`zerojax sweep` without a launcher, or train each trial with `zerojax train`"
            )
        source, validation, _ = open_data(self._config)
        if validation is None:
            self._rows = source
            self.measure = "training loss without dropout, over the same rows for all trials"
        for trial in self.trials:
            progress(f"planning trial {trial.name} of {len(self.trials)}")
            try:
                _, plan = self._prepare(trial)
                check_fits(plan, gpu_of_device(jax.devices()[0].device_kind))
            except (ValueError, TypeError) as error:
                raise _of_trial(trial, error) from error

    def _prepare(self, trial: SweepTrial) -> tuple[RunSpec, Plan]:
        """Returns description and plan of a trial's run, made once."""
        if trial.number not in self._prepared:
            config = trial.config.on_devices(jax.device_count())
            check_devices(config)
            quiet = dataclasses.replace(config.log, console="quiet")
            spec = spec_from_config(dataclasses.replace(config, log=quiet))
            # Trials that differ only in numbers, such as the learning rate, then share a compiled
            # step.
            inputs = dataclasses.replace(spec.inputs, numbers_are_inputs=True)
            spec = dataclasses.replace(spec, inputs=inputs)
            self._prepared[trial.number] = spec, plan_run(spec)
        return self._prepared[trial.number]

    def run(self, say: Say = lambda text: None, resume_hint: str = "") -> SweepRecord:
        """Trains the trials rung by rung, and writes results and the page after each.

        Results in the folder are used: a trial goes on from its newest checkpoint.

        Args:
          say: called with a line about every result.
          resume_hint: sentence part that says how to go on after an interruption.

        Returns:
          All results.

        Raises:
          ValueError: the folder holds another sweep, or a trial was trained outside of it.
          Interrupted: Ctrl-C or SIGTERM; the trial in progress was saved.
        """
        say(f"planning {len(self.trials)} trials")
        if (note := describe_warmup(self.trials, self.rungs)) is not None:
            say(f"note: {note}")
        self.check()
        with not_for_everybody():
            self.folder.mkdir(parents=True, exist_ok=True)
            record = SweepRecord(self.folder, settings_of_sweep(self._config, self.trials))
            record.write()
        for number, rung in enumerate(self.rungs):
            going_on = record.survivors(self.rungs, number)
            assert going_on is not None
            for trial in (self.trials[each] for each in sorted(going_on)):
                if record.result(trial.number, rung.steps) is not None:
                    continue
                title = f"rung {number + 1} of {len(self.rungs)}, trial {trial.name}"
                say(f"{title}: training to step {rung.steps} ({trial.describe()})")
                result = self._train(trial, rung.steps, resume_hint)
                with not_for_everybody():
                    record.add(trial.number, rung.steps, result)
                    self.write_page(record)
                found = result.reason if result.loss is None else f"{result.loss:.5g}"
                say(f"{title}: {self.measure} after {rung.steps} steps: {found}")
        with not_for_everybody():
            self.write_page(record)
        return record

    def _train(self, trial: SweepTrial, steps: int, resume_hint: str) -> RungResult:
        """Trains a trial to the end of a rung, and returns its result."""
        spec, plan = self._prepare(trial)
        loop = dataclasses.replace(spec.loop, resume_hint=resume_hint)
        make_folder(Path(trial.config.run_dir))
        try:
            trainer = fit(open_run(dataclasses.replace(spec, loop=loop), plan), until=steps)
        except FloatingPointError as error:
            return RungResult(loss=None, reason=str(error))
        finally:
            gc.collect()  # the state of the previous trial may be in a reference cycle
        with trainer:
            if trainer.num_steps != steps:
                raise ValueError(
                    f"trial {trial.name} in '{trial.config.run_dir}' has {trainer.num_steps} "
                    f"steps, and the rung ends at {steps}: it was trained outside of the sweep; "
                    "name another folder with --out"
                )
            return as_result(self._loss(trainer))

    def _loss(self, trainer: Trainer) -> float:
        """Returns the loss that ranks a trial, of its trained weights at the current step."""
        if self._rows is not None:
            return trainer.evaluate(self._rows, self._config.eval_batches)["loss"]
        evaluation = trainer.evaluations[-1]
        assert evaluation["step"] == trainer.num_steps
        return evaluation["loss"]

    def write_page(self, record: SweepRecord) -> Path:
        """Writes the report of the sweep, and returns its path."""
        return write_sweep_page(self.folder, self.trials, self.rungs, record, self.measure)


def check_fits(plan: Plan, gpu: Gpu | None) -> None:
    """Raises if a plan cannot fit its devices, as far as a bound shows without compiling.

    Args:
      plan: plan on devices of this machine.
      gpu: kind of these devices; None: not known, and only offloaded state is checked.

    Raises:
      ValueError: the message states the bytes needed, the limit and a remedy.
    """
    check_offload(plan)
    if gpu is None:
        return
    verdict = forecast(plan, gpu=gpu, why_formula="a bound rules out what cannot fit").verdict
    if verdict.fits is False:
        raise ValueError(
            f"it needs {format_bytes(verdict.needed)} of the {format_bytes(verdict.limit)} that "
            f"JAX may use on each {gpu.title}; {verdict.reasons[-1] if verdict.reasons else ''}"
        )


def _of_trial(trial: SweepTrial, error: Exception) -> Exception:
    """Returns the error with the trial that it belongs to; a `ConfigError` keeps its key."""
    where = f"trial {trial.name} ({trial.describe()})"
    if isinstance(error, ConfigError):
        return ConfigError(f"{where}: {error.message}", error.key, error.where)
    kind = TypeError if isinstance(error, TypeError) else ValueError
    return kind(f"{where}: {error}")
