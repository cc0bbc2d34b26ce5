"""Defines `StepRunner`, which runs single steps of a planned run, with state, reports and log."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import jax
from jax.sharding import Mesh

from zerojax.checkpoint import Checkpointer
from zerojax.config.mesh import MeshConfig
from zerojax.config.tree_types import Batch, Tree
from zerojax.data import shard_batch
from zerojax.optim import Weights
from zerojax.placement.state import TrainState
from zerojax.placement.user_shardings import on_mesh_of_plan
from zerojax.plan.make import Plan
from zerojax.runtime.memory import TRAINING_STEP, allocating_for
from zerojax.runtime.redaction import redact
from zerojax.runtime.watchdog import Watchdog
from zerojax.step.build import build_evaluation, build_finish
from zerojax.step.host_budget import check_offload
from zerojax.step.reshard import reshard_state
from zerojax.step.trained_model import model_of
from zerojax.training.checkpointing import (
    end_state,
    first_state,
    folder_of,
    optimizer_state_of,
    restore_state,
    what_differs,
)
from zerojax.training.metrics import RunLog
from zerojax.training.metrics.stragglers import EVAL
from zerojax.training.process_times import LoopClock
from zerojax.training.reporting import Metrics, Reports, with_names
from zerojax.training.resumed_settings import settings_that_differ
from zerojax.training.run_folder import open_log
from zerojax.training.run_spec import RunSpec, plan_run
from zerojax.training.step_programs import StepProgram, StepPrograms


class StepRunner:
    """Runs single steps and evaluations of a planned run, and reports them.

    It has no state until `begin` or `restore_from` is called. `Trainer` and the engine of
    DeepSpeed's interface are loops around it.

    Args:
      plan: plan of the run, on devices of this machine.
      spec: description of the run from which `plan` was made; None: inputs of the plan, no log.
      watchdog: watchdog that supervises the run; None: no time limits.

    Attributes:
      plan: current plan; `reshard` replaces it.
      state: current train state, with all its updates: reading it completes one that waits
        (`offload.update_in_forward`). It is donated to each step, so do not keep references to its
        arrays.
      held_state: the same without completing an update; its counters are right at any time.
      num_steps: number of batches consumed.
      metrics: metrics of the last report, on the host.
      history: metrics of every report, oldest first.
      clock: clock of the training loop.
      jitted_step: compiled step of the current plan; if steps have several sizes, of the last
        step.
      step_plan: plan of `jitted_step`.
    """

    def __init__(
        self, plan: Plan, spec: RunSpec | None = None, *, watchdog: Watchdog | None = None
    ) -> None:
        self.plan = plan
        self.held_state: Tree = None
        self._may_wait = False
        self.num_steps = 0
        self.metrics: Metrics = {}
        self.history: list[Metrics] = []
        self.clock = LoopClock()
        self._spec = RunSpec(inputs=plan.inputs, mesh=plan.settings) if spec is None else spec
        self._settings = redact(self._spec.settings_of(plan))
        self._data_state: dict[str, Any] | None = None
        self._log: RunLog | None = None
        self._notes: list[str] = []
        self._watchdog = watchdog or Watchdog()
        self._reports = self._new_reports()
        self._last_step = self._spec.steps
        self._build()

    @property
    def state(self) -> Any:
        """Current train state, with all its updates."""
        if self._may_wait:
            with allocating_for("an update that waited"):
                self.held_state, self._may_wait = self._finish(self.held_state), False
        return self.held_state

    @state.setter
    def state(self, state: Any) -> None:
        self.held_state, self._may_wait = state, state is not None

    def _build(self) -> None:
        self._programs = StepPrograms(self.plan)
        self._step_was_called = False
        self._use(self._programs.of(self.num_steps + 1))
        ladder = self.plan.ladder
        self._first_check = None if ladder is None else ladder.first_check(build_evaluation)
        self._evaluate, self._evaluate_was_called = build_evaluation(self.plan), False
        self._finish = build_finish(self.plan)
        self._watchdog.plan_changed()

    def _use(self, program: StepProgram) -> None:
        self.jitted_step, self.step_plan = program.jitted, program.plan

    @on_mesh_of_plan
    def begin(self, latest: int | None = None) -> bool:
        """Makes a new state, or resumes from durable files of offloaded state.

        Args:
          latest: number of the newest step in the run's checkpoints, or None.

        Returns:
          False if the checkpoint must be restored instead; then there is no state yet.
        """
        first = first_state(self.plan, self._spec.seed, latest)
        if first is None:
            return False
        self.state, self._data_state = first
        self.num_steps = int(self.held_state["step"])
        self._reports = self._new_reports()
        return True

    # --- stepping ---------------------------------------------------------------------------------

    @on_mesh_of_plan
    def step(self, batch: Batch) -> dict[str, jax.Array]:
        """Takes one step on a host batch; returns metrics on the devices (`float` waits)."""
        return self._step_on_devices(self._programs.place(self.num_steps + 1, batch))

    def _place(self, plan: Plan, batch: Batch) -> Any:
        return shard_batch(plan, batch, vocab_size=plan.vocab_size)

    def _new_reports(self) -> Reports:
        skipped = 0 if self.held_state is None else int(self.held_state["skipped"])
        limit, finished = self._spec.loop.max_skipped, self._watchdog.finished
        return Reports(limit, skipped=skipped, clock=self.clock, finished=finished)

    @allocating_for(TRAINING_STEP)
    def _step_on_devices(
        self, batch: Batch, data_state: Mapping[str, Any] | None = None
    ) -> dict[str, jax.Array]:
        # A run that resumes from its durable files after this step continues behind this batch.
        if disk := self.held_state.get("disk"):
            disk.data_state = data_state
        step = self.num_steps + 1
        program = self._programs.of(step)
        self._use(program)
        self._say_size(step)
        first = program.is_waited_for
        if not program.was_called:
            self._watchdog.plan_changed()
        what = f"{'compiling, or ' * first}in step {step}"
        name = self._programs.name(step)
        compiling = self._compiling(name) if first else contextlib.nullcontext()
        with compiling, self.clock.stepping(), self._watchdog.during(what, is_long=first):
            self._check_lengths(step, batch)
            self.state, metrics = program(self.held_state, batch)
        self._watchdog.notes.entered(step, metrics["loss"], name, program.meetings)
        self._step_was_called = True
        self.num_steps = step
        self._programs.compile_next(step, self._last_step)
        return metrics

    def _say_size(self, step: int) -> None:
        change = self._programs.change(step, always=not self._step_was_called)
        if change is not None and self._log is not None:
            kind, text, fields = change
            self._log.event(kind, step, text, **fields)

    def _check_lengths(self, step: int, batch: Batch) -> None:
        """Runs the ladder's check that shorter rows compute what the model means, until it has run
        once."""
        check = self._first_check
        if check is not None and check(self.held_state, batch, self.step_plan, step):
            self._first_check = None

    def follow(self, metrics: Mapping[str, jax.Array], *, is_reported: bool) -> bool:
        """Registers a step taken by `step`, and reads the report of an earlier step.

        A loop that uses this method must call it after every step. It waits only if too many steps
        are running.

        Args:
          metrics: metrics that `step` returned.
          is_reported: True: report this step. The report is written while later steps run.

        Returns:
          True if a callback ends the run.

        Raises:
          FloatingPointError: loss or gradients were not finite in too many reports.
        """
        plan = self.plan
        self._reports.follow(plan, self.num_steps, metrics, self._log)
        try:
            return self._report()
        finally:  # also after an error in a callback, because the step has been taken
            if is_reported:
                self._reports.hold(self.step_plan, self.num_steps, metrics)

    def wait(self) -> None:
        """Waits for all steps that were registered by `follow`.

        Raises:
          FloatingPointError: a step overflowed at the smallest loss scale.
        """
        self._reports.wait(self.plan)

    def _compiling(self, what: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._log is None else self._log.compiling(what)

    @allocating_for("an evaluation")
    @on_mesh_of_plan
    def eval_step(self, batch: Batch) -> dict[str, jax.Array]:
        """Evaluates one host batch; returns sums over its rows on the devices (`float` waits).

        The mean loss is "loss" divided by "weight".
        """
        first = not self._evaluate_was_called
        what = f"{'compiling, or ' * first}evaluating after step {self.num_steps}"
        watched = self._watchdog.during(what, is_long=first, is_apart=True)
        with self.clock.during(EVAL), watched:
            return self._evaluate_one(self.state, self._place(self.plan, batch))

    def _evaluate_one(self, state: TrainState, batch: Batch) -> Any:
        self._watchdog.alive()  # the result of the previous batch was read
        first, self._evaluate_was_called = not self._evaluate_was_called, True
        with self._compiling("the evaluation") if first else contextlib.nullcontext():
            return self._evaluate(state, batch)

    # --- reports and log --------------------------------------------------------------------------

    def _read_report(self) -> Metrics | None:
        """Reads, logs and records the metrics of an earlier step; None if no report is due."""
        params = None if self.held_state is None else self.held_state["params"]
        values = self._reports.read(self.plan, self._log, params)
        if values is not None:
            values = with_names(self.plan, values)
            self.metrics = values
            self.history.append(values)
        return values

    def _report(self) -> bool:
        """Reports the metrics of an earlier step; returns True if a callback ends the run."""
        values = self._read_report()
        if values is None:
            return False
        with self._watchdog.during("in a callback", is_long=True):
            # A list: every callback is called, also after one that ends the run.
            return True in [callback(self, values) for callback in self._spec.loop.callbacks]

    def open_log(self, steps: int | None = None) -> None:
        """Opens the run's log, if the run has one; `fit` calls it.

        Args:
          steps: number of steps of the whole run; None if it is not known.
        """
        self._log = open_log(self._spec, self.plan, self.num_steps, steps)
        if self._log is not None:
            for text in self.take_notes():
                self._log.message(text)

    @property
    def has_log(self) -> bool:
        """True if the run's log is open."""
        return self._log is not None

    def take_notes(self) -> list[str]:
        """Returns lines about the restored checkpoint that were not logged yet, and clears them."""
        notes, self._notes = self._notes, []
        return notes

    def close_log(self) -> None:
        """Ends and closes the run's log; does nothing if no log is open."""
        log, self._log = self._log, None
        if log is not None:
            log.end(self.num_steps, self.clock.take()[0])
            log.close()

    def finish_reports(self) -> None:
        """Reads the pending report, waits for all steps, and logs steps that were not finite.

        Raises:
          FloatingPointError: loss or gradients were not finite in too many reports.
        """
        self._report()
        self._reports.settle(self.plan, self._log)

    def wait_for_compilation(self) -> None:
        """Waits for the compilation of a later size, if a thread is compiling one."""
        self._programs.wait()

    def _untimed(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._log is None else self._log.untimed()

    def say(self, text: str) -> None:
        """Writes a line to the run's log; does nothing outside of the training loop."""
        if self._log is not None:
            self._log.message(text)

    def log_image(self, name: str, image: object, *, step: int | None = None) -> Path | None:
        """Writes an image into the run's TensorBoard file and, as PNG, into its folder and report.

        Call it in a callback, in every process or in process 0 alone; only process 0 writes.

        Args:
          name: name of the image, such as "samples"; later steps have the same name.
          image: array on the host or on the devices, [height, width] or [height, width, channels]
            with 1, 3 or 4 channels; uint8, or floats, which are clipped to [0, 1].
          step: number of the step; None: number of batches consumed, `num_steps`.

        Returns:
          Path of the PNG file; None if the run has no folder, or in another process.

        Raises:
          RuntimeError: the run has no open log, because it is not training.
          ValueError: the name, the shape or the dtype is invalid.
        """
        if self._log is None:
            raise RuntimeError(
                f"log_image({name!r}) needs the log of a run that is training; call it in a "
                "callback, for example in on_evaluation(trainer, metrics)"
            )
        return self._log.write_image(self.num_steps if step is None else step, name, image)

    # --- state ------------------------------------------------------------------------------------

    @on_mesh_of_plan
    def restore_from(
        self, checkpointer: Checkpointer, step: int | None = None, *, may_be_durable: bool = True
    ) -> Any:
        """Restores a checkpoint from any folder. ZeRO stage, mesh and number of devices may differ.

        Args:
          checkpointer: checkpointer of the folder.
          step: number of a saved step; None: the newest.
          may_be_durable: True: a run without a state uses its durable offload files instead, if
            they hold a later step.

        Returns:
          The result of `Checkpointer.restore`.

        Raises:
          CheckpointError: the step does not exist, or belongs to another model.
        """
        # Raises before the current state is deleted.
        checkpointer.check_step(step, pretrained=folder_of(self.plan))
        at_start = may_be_durable and self.held_state is None
        # Released first, so that two states never exist at the same time.
        end_state(self.held_state)
        self.state = None
        with self._watchdog.during("reading a checkpoint", is_long=True):
            restored, self.state = restore_state(checkpointer, self.plan, step, at_start=at_start)
        self.num_steps = restored.step
        self._data_state = restored.data_state or None
        self._notes += what_differs(self.plan, restored)
        self._notes += settings_that_differ(self.plan, restored, self._settings)
        self._reports = self._new_reports()
        return restored

    @on_mesh_of_plan
    def reshard(self, mesh_config: Mapping[str, Any] | MeshConfig | Mesh) -> Self:
        """Changes the ZeRO stage or the mesh between two steps, without a restart.

        Args:
          mesh_config: mesh options in any form that `zerojax.train` takes. The batch is unchanged.
        """
        # A pending report has numbers of parameters, which only the plan of its step can name.
        self._report()
        self.wait()
        plan = plan_run(self._spec, mesh_config)
        check_offload(plan)
        self._release_files()
        self.state = reshard_state(self.plan, plan, self.state, data_state=self._data_state)
        self.plan = plan
        self._build()
        self.say(f"step {self.num_steps}: resharded to {plan.describe()}")
        return self

    def _release_files(self) -> None:
        """Called before the files of a durable state are replaced; subclasses may override it."""

    @on_mesh_of_plan
    def to_model(self, *, weights: Weights = "trained") -> Any:
        """Returns the trained model in the user's form: `nnx.Module`, linen variables or a tree.

        Every process gets unsharded arrays, so the model must fit on one device.

        Args:
          weights: "ema" returns the averaged weights in float32, "trained" the current weights.

        Raises:
          ValueError: the run keeps no EMA.
        """
        return model_of(self.plan, self.state, weights)

    @on_mesh_of_plan
    def optimizer_state(self) -> Any:
        """Returns the optimizer state in optax's form: as the model's own tree, without padding.

        Use it, for example, to read an average that your own optax transformation computes.
        """
        return optimizer_state_of(self.plan, self.state)
