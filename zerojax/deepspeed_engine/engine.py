"""Defines `initialize` and `Engine`, which offer DeepSpeed's methods on top of a zerojax step."""

from __future__ import annotations

import contextlib
import dataclasses
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import jax
import optax

from zerojax import deepspeed_config, tracing
from zerojax.checkpoint import Checkpointer
from zerojax.config import MeshConfig, WatchConfig
from zerojax.config.checks import names_keywords, warn_user
from zerojax.config.loader import user_path
from zerojax.config.tree_types import Batch
from zerojax.data import abstract_global
from zerojax.deepspeed_engine.engine_absent import AbsentMethods
from zerojax.deepspeed_engine.engine_batches import as_arrays_of_batch, as_batch, rows_of
from zerojax.deepspeed_engine.engine_guard import Guard, close_at_exit
from zerojax.deepspeed_engine.engine_queries import EngineQueries
from zerojax.deepspeed_engine.engine_tags import (
    check_tag,
    client_state_of,
    find_tag,
    hold_tags,
    save_tagged,
)
from zerojax.deepspeed_engine.ported_run import PortedRun
from zerojax.forecasting.out_of_memory import explaining_memory
from zerojax.optim import Weights
from zerojax.placement import device_mesh as meshes
from zerojax.plan.make import Plan
from zerojax.plan.reasons import describe_offload
from zerojax.runtime.folder_lock import Hold
from zerojax.runtime.kept_programs import keep_programs
from zerojax.runtime.standstill import WAITING_FOR_DATA
from zerojax.step.host_budget import check_offload
from zerojax.training.checkpointing import end_state
from zerojax.training.metrics.stragglers import DATA, SAVE
from zerojax.training.reporting import Metrics
from zerojax.training.run_spec import RunSpec, plan_run, with_disk_folder
from zerojax.training.step_runner import StepRunner
from zerojax.training.train_arguments import LoopSettings

_DEFAULT_EVERY = 10
_AXES = "set mesh axes in the configuration: tensor_parallel.autotp_size and pipeline.stages"
_DATA = (
    "pass each batch to engine.train_batch(batch), or the micro-batches of a loader: "
    "engine.train_batch(data_iter=iter(loader))"
)
_OF_DEEPSPEED = {
    "model_parameters": "all parameters of the model are trained: leave it out; freeze='regex' "
    "names the parameters that are not trained",
    "training_data": _DATA,
    "collate_fn": _DATA,
    "lr_scheduler": "pass optimizer=zerojax.adamw(schedule), or set the section "
    "scheduler of the configuration",
    "mpu": _AXES,
    "mesh_param": _AXES,
    "distributed_port": "the launcher's environment sets the address; leave it out",
}
"""{keyword of DeepSpeed's `initialize` that is not supported: what to do instead}."""
_WHOLE = (
    "a checkpoint is always loaded completely; to start anew from trained weights, initialize "
    "an engine with the "
    "result of to_model()"
)
_NO_STATE = "there is no state before the first batch"
_OF_LOADING = dict.fromkeys(
    (
        "load_module_strict",
        "load_optimizer_states",
        "load_lr_scheduler_states",
        "load_module_only",
        "custom_load_fn",
    ),
    _WHOLE,
)


@names_keywords(elsewhere=_OF_DEEPSPEED)
def initialize(
    model: tracing.ModelLike,
    config: str | Path | Mapping[str, Any] | None = None,
    *,
    args: Any = None,
    config_params: str | Path | Mapping[str, Any] | None = None,
    dist_init_required: bool | None = None,
    loss: tracing.Loss | None = None,
    optimizer: optax.GradientTransformation | None = None,
    steps: int | None = None,
    example_batch: Batch = None,
    freeze: str | Sequence[str] = (),
    run_dir: str | Path | None = None,
    watch: WatchConfig | None = None,
    seed: int = 0,
) -> Engine:
    """Returns an engine for a training loop that was written for DeepSpeed.

    Joins the processes described by the environment, as `train` does. The run is planned at the
    first batch, or immediately if `example_batch` is passed. Before that, nothing is allocated on
    the devices.

    Args:
      model: an NNX module, a Linen module or a function, as `zerojax.train` takes it.
      config: path of a ds_config.json, its text, or its content as a dict. `zerojax deepspeed
        explain` shows how it is interpreted.
      args: alternative to `config`: an object with an attribute `deepspeed_config`, such as the
        result of `argparse`; its `local_rank` is not needed.
      config_params: older name of `config`.
      dist_init_required: has no effect, because processes are joined if necessary.
      loss: loss function as in `zerojax.train`, which may return own metrics (`engine.metrics`);
        None: the model's method `loss(batch)`.
      optimizer: an optax transformation or an `OptimizerConfig`, if the configuration has no
        optimizer. It includes the learning-rate schedule.
      steps: number of steps of the run, for "auto" values in the configuration.
      example_batch: a batch as for `train_batch`, made of arrays or `ShapeDtypeStruct`s.
      freeze: one or several regular expressions; parameters with matching names are not trained.
      run_dir: folder for metrics and the plan; None: the folder that the configuration's monitors
        name, if any.
      watch: time limits after which a process without progress is ended with code 79. They apply
        to calls of the engine, and to a step in progress between two calls.
      seed: seed of parameter initialization and dropout.

    Raises:
      ConfigError: a key of the configuration is invalid; the message has value, limit and remedy.
      ValueError, TypeError: an argument is invalid; raised before device memory is allocated.
    """
    run = PortedRun.of_call(locals())  # before any other name is set
    deepspeed_config.warn_of(run.translation)
    engine = Engine(run, watch=watch, seed=seed)
    if example_batch is not None:
        engine.prepare(example_batch)
    return engine


class Engine(EngineQueries, AbsentMethods):
    """Run whose steps the user's loop calls through DeepSpeed's methods. Created by
    `zerojax.initialize`.

    Attributes:
      translation: zerojax settings of the configuration, with a line per key.
      mesh: mesh of the devices.
      plan: plan of the run; None before the first batch.
      state: current train state; None before the first batch. It is donated to each step, so do not
        keep references to its arrays.
      global_steps: number of batches consumed, including those before a resume.
      metrics: metrics of the last step, still on the devices; {} before the first step.
    """

    def __init__(self, run: PortedRun, *, watch: WatchConfig | None, seed: int) -> None:
        self._mesh_settings = with_disk_folder(run.translation.mesh, run.folder)
        super().__init__(run.translation, meshes.make_mesh(self._mesh_settings))
        self._run, self._run_dir, self._seed = run, run.folder, seed
        self._source: Path | None = None
        self._holds: set[Hold] = set()  # locks of the folders into which this process saves
        self._guard = Guard(watch, run.folder)
        self._watch = watch
        self._known_skipped = 0  # in the last report
        close_at_exit(self)

    # --- stepping ---------------------------------------------------------------------------------

    @names_keywords()
    def train_batch(self, batch: Batch = None, *, data_iter: Iterator[Any] | None = None) -> Any:
        """Trains on one global batch: all micro-batches, forward, backward and update.

        Args:
          batch: tree of arrays [rows, ...]. Each process passes its own rows (`local_rows()`); a
            single process passes all `train_batch_size()` rows.
          data_iter: alternative to `batch`: an iterator, from which
            `gradient_accumulation_steps()` micro-batches are taken and joined.

        Returns:
          The mean loss over the global batch, float32 [] on the devices; `float` waits for it.

        Raises:
          ValueError, TypeError: the batch does not match the configuration.
          StopIteration: `data_iter` has no further micro-batch.
          FloatingPointError: loss or gradients were not finite in too many steps.
          PeerLostError: another process of the run has ended.
        """
        batch = self._take(batch, data_iter)
        runner = self._prepared(batch)
        with self._guard.supervising(), self._explaining(runner.plan):
            self.metrics = runner.step(batch)
            self._guard.begun(runner.num_steps, self.metrics["loss"])
            runner.follow(self.metrics, is_reported=runner.num_steps % self._report_every == 0)
        return self.metrics["loss"]

    @names_keywords()
    def eval_batch(self, batch: Batch = None, *, data_iter: Iterator[Any] | None = None) -> Any:
        """Returns the mean loss of a global batch in evaluation mode.

        Args:
          batch: tree of arrays [rows, ...], as in `train_batch`.
          data_iter: alternative to `batch`: an iterator of micro-batches, as in `train_batch`.
        """
        batch = self._take(batch, data_iter)
        runner = self._prepared(batch)
        with self._guard.supervising(), self._explaining(runner.plan):
            sums = runner.eval_step(batch)
            loss = sums["loss"] / sums["weight"]
            self._guard.follow(loss)
        return loss

    def prepare(self, example_batch: Batch) -> Plan:
        """Makes the plan for batches like `example_batch`, and creates or restores the state.

        `train_batch` and `eval_batch` call this with their first batch.
        """
        return self._prepared(example_batch).plan

    def _prepared(self, example_batch: Batch) -> StepRunner:
        example = as_arrays_of_batch(example_batch)
        if self._runner is None:
            self._settle_rows(example)
        self._check_rows(example)
        if self._runner is None:
            with self._guard.during("planning, and making the state", is_long=True):
                spec = self._spec_of(abstract_global(example, self.mesh))
                plan = plan_run(spec)
                cache = keep_programs()
                check_offload(plan)
                _warn_of_idle_offload(plan)
                runner = StepRunner(plan, spec, watchdog=self._guard.watchdog)
                with self._explaining(plan):
                    self._begin(runner)
                self._runner = runner
                if self._run_dir is not None:
                    runner.open_log(self._run.steps)
                for text in (*([] if cache is None else [cache]), *runner.take_notes()):
                    self._say(text)
        return self._runner

    def _begin(self, runner: StepRunner) -> None:
        """Creates a new state, or reads the state of the checkpoint that the user has loaded."""
        source, self._source = self._source, None
        self.metrics = {}
        if source is None:
            runner.begin()
            self._known_skipped = 0
            return
        with Checkpointer(source) as checkpointer:
            runner.restore_from(checkpointer, may_be_durable=False)
        assert runner.state is not None
        self._known_skipped = int(runner.state["skipped"])

    def reshard(self, mesh_config: MeshConfig | Mapping[str, Any]) -> Self:
        """Changes the ZeRO stage or the mesh between two steps. Batch, optimizer and counters stay
        the same.

        Args:
          mesh_config: a `MeshConfig`, or its fields as a dict, such as {"zero": 3}. Other fields
            get the defaults of `MeshConfig`, not the values of the ds_config.

        Raises:
          ValueError: there is no state yet, or the state is in durable offload files.
        """
        if self._runner is None or self._runner.held_state is None:
            raise ValueError(f"{_NO_STATE}; change the mesh in the configuration instead")
        if (disk := self._runner.held_state.get("disk")) and disk.store.is_durable:
            raise ValueError(
                "the state is in durable files (offload.durable), which are bound to one mesh; "
                "call save_checkpoint, "
                "initialize another engine with the new mesh, and call its load_checkpoint"
            )
        plan = self._runner.plan
        with self._guard.during("changing the mesh", is_long=True), self._explaining(plan):
            plan = self._runner.reshard(mesh_config).plan
            self.mesh, self._mesh_settings = meshes.make_mesh(plan.settings), plan.settings
            self.translation = dataclasses.replace(self.translation, mesh=plan.settings)
        return self

    def _take(self, batch: Batch, data_iter: Iterator[Any] | None) -> Any:
        parts = self.gradient_accumulation_steps()
        clock = (
            contextlib.nullcontext() if self._runner is None else self._runner.clock.during(DATA)
        )
        with clock, self._guard.during(WAITING_FOR_DATA):
            return as_batch(batch, data_iter, parts)

    def _settle_rows(self, example: Batch) -> None:
        """Resolves settings of the ds_config that depend on the rows of the first batch."""
        self._run = self._run.with_rows(self._rows_of(example))
        self.translation = self._run.translation
        self._num_rows = self.translation.train_batch_size

    def _rows_of(self, batch: Batch) -> int | None:
        return rows_of(abstract_global(batch, self.mesh))

    def _check_rows(self, batch: Batch) -> None:
        rows = self._rows_of(batch)
        if rows in (None, self._num_rows):
            return
        wanted, micro, parts = self.get_batch_info()
        low, high = self.local_rows()
        raise ValueError(
            f"the batch has {rows} rows over all processes, but train_batch_size is {wanted} "
            f"({micro} rows x {parts} micro-batches x {meshes.num_data_shards(self.mesh)} data "
            f"shards); pass {high - low} rows from each process"
        )

    def _spec_of(self, batch: Batch) -> RunSpec:
        """Returns the description of the run for global batches of the shapes of `batch`."""
        translation = self.translation
        return RunSpec(
            inputs=self._run.inputs(batch),
            mesh=self._mesh_settings,
            seed=self._seed,
            loop=LoopSettings(callbacks=(self._print_report,)),
            folder=self._run_dir,
            offload_folder=self._run_dir,
            log=None if self._run_dir is None else translation.log,
            watch=self._watch,
            settings_of=lambda plan: dict(translation.resolved),
            reasons=tuple(translation.reasons),
        )

    @property
    def _report_every(self) -> int:
        if self._run_dir is not None:
            return self.translation.log.report_every
        return self.translation.steps_per_print or _DEFAULT_EVERY

    def _print_report(self, runner: StepRunner, values: Metrics) -> None:
        """Prints the metrics of a step, or only that steps were skipped if `steps_per_print` is not
        set; nothing if a log prints metrics."""
        newly = int(values["num_skipped"]) - self._known_skipped
        self._known_skipped += newly
        if runner.has_log or jax.process_index() != 0:
            return
        if self.translation.steps_per_print is not None:
            print(_line(values, runner.plan.traced.metric_names), flush=True)
        elif newly:
            scale = f", loss scale {values['loss_scale']:g}" if "loss_scale" in values else ""
            print(
                f"step {int(values['step'])}: updates skipped since the last report because loss "
                f"or gradients were not finite: {newly} ({self._known_skipped} in all{scale})",
                flush=True,
            )

    def _say(self, text: str) -> None:
        """Writes a line to the run's log; without a log, process 0 prints it."""
        if self._runner is not None and self._runner.has_log:
            self._runner.say(text)
        elif jax.process_index() == 0:
            print(text, flush=True)

    def _explaining(self, plan: Plan) -> contextlib.AbstractContextManager[None]:
        """Adds the memory use of the plan to out-of-memory errors raised in a `with` block."""
        step = None
        if self._runner is not None:
            plan, step = self._runner.step_plan, self._runner.jitted_step
        found = lambda: (plan, self._held_state, self.global_steps, step)  # noqa: E731
        return explaining_memory(found, self._run_dir)

    @property
    def is_open(self) -> bool:
        """True from the first call that uses the devices until the engine is closed; an open engine
        is closed when the script ends."""
        return self._guard.is_open

    def close(self) -> None:
        """Reports the last steps, and closes files. May be called twice.

        Raises:
          FloatingPointError: loss or gradients were not finite in too many reports, or a step
            overflowed at the smallest loss scale. It is not raised after an earlier such error or a
            device error, because then nothing more is read from the devices.
        """
        self._close(is_broken=self._guard.is_broken)

    def _close(self, *, is_broken: bool) -> None:
        try:
            if self._runner is not None:
                with self._guard.during("waiting for the last step"):
                    try:
                        if not is_broken:
                            self._runner.finish_reports()
                    finally:
                        self._runner.close_log()
        finally:
            self._guard.close()
            end_state(self._held_state)
            for held in self._holds:
                held.release()
            if self._runner is not None:
                self._runner.wait_for_compilation()

    def destroy(self) -> None:
        """Closes the engine; DeepSpeed's name for `close`."""
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        # Other processes may not have reached this step.
        is_broken = self._guard.is_broken or jax.process_count() > 1
        try:
            self._close(is_broken=is_broken)
        except Exception as failure:
            error.add_note(f"Also: {failure}")

    # --- checkpoints ------------------------------------------------------------------------------

    @names_keywords(elsewhere={"exclude_frozen_parameters": "a checkpoint holds all parameters"})
    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        *,
        save_latest: bool = True,
    ) -> bool:
        """Saves parameters, optimizer state and counters; blocks until they are complete on disk.

        Every process must call it. The checkpoint can be loaded with any ZeRO stage, mesh and
        number of processes.

        Args:
          save_dir: folder that has a folder for each tag, and the file `latest`.
          tag: name of the checkpoint; None: "global_step" and the number of the step.
          client_state: JSON values that `load_checkpoint` returns; those of process 0 are saved.
          save_latest: True: `load_checkpoint` without a tag loads this checkpoint.

        Returns:
          True. In case of failure, for which DeepSpeed returns False, an error is raised.

        Raises:
          CheckpointError: nothing was saved, for example because another process saves there; or
            the checkpoint was saved, but the file `latest` was not written.
          TypeError: client_state contains other values than JSON values.
          ValueError: there is no state to save yet, or the tag is not a valid folder name.
        """
        tag = f"global_step{self.global_steps}" if tag is None else str(tag)
        check_tag(tag)
        if self._runner is None or self.state is None:
            raise ValueError(
                f"{_NO_STATE}; call save_checkpoint after that batch, or pass example_batch= to "
                "initialize"
            )
        what = f"saving step {self.global_steps}"
        plan = self._runner.plan
        with self._runner.clock.during(SAVE), self._guard.during(what, is_long=True):
            self._runner.wait()
            if (held := hold_tags(user_path(save_dir))) is not None:
                self._holds.add(held)
            save_tagged(
                user_path(save_dir),
                tag,
                plan,
                self.state,
                client_state=client_state or {},
                description=plan.as_dict(),
                make_latest=save_latest,
            )
        self._guard.saved(self.global_steps)
        return True

    @names_keywords(elsewhere=_OF_LOADING)
    def load_checkpoint(
        self, load_dir: str | Path, tag: str | None = None
    ) -> tuple[str | None, dict[str, Any]]:
        """Resumes from a checkpoint. If there was no batch yet, arrays are read at the first batch.

        Args:
          load_dir: folder that was passed to `save_checkpoint`.
          tag: name of the checkpoint; None: the latest checkpoint.

        Returns:
          (folder of the checkpoint, client state); (None, {}) with a warning if `tag` is None and
          nothing was saved.

        Raises:
          CheckpointError: the tag does not exist, or the checkpoint is damaged or of another model.
            The error about another model may be raised only at the first batch.
        """
        found = find_tag(user_path(load_dir), None if tag is None else str(tag))
        if found is None:
            return None, {}
        with self._guard.during("reading a checkpoint", is_long=True):
            with Checkpointer(found) as checkpointer:
                checkpointer.check_step()
                metadata = checkpointer.metadata(checkpointer.usable_step())
            self._source, self._loaded_step = found, metadata.step
            if self._runner is not None:
                with self._explaining(self._runner.plan):
                    self._begin(self._runner)
                for text in self._runner.take_notes():
                    self._say(text)
        self._guard.saved(metadata.step)
        return str(found), client_state_of(metadata.config)

    def to_model(self, *, weights: Weights = "trained") -> Any:
        """Returns the trained model in the user's form: `nnx.Module`, linen variables or a tree.

        Every process gets unsharded arrays, so the model must fit on one device.

        Args:
          weights: "trained", or "ema" for the averaged weights of optimizer=zerojax.with_ema.
        """
        if self._runner is None or self._runner.held_state is None:
            raise ValueError(_NO_STATE)
        return self._runner.to_model(weights=weights)


def _warn_of_idle_offload(plan: Plan) -> None:
    """Warns that offload moves nothing, because all shards are too small."""
    if plan.offload is not None and not plan.offload.leaves:
        for text in describe_offload(plan.settings, plan.offload):
            warn_user(text)


def _line(values: Metrics, own: Sequence[str]) -> str:
    rate = f", lr=[{values['learning_rate']:.6g}]" if "learning_rate" in values else ""
    return (
        f"step={int(values['step'])}, skipped={int(values['num_skipped'])}{rate}, "
        f"loss={values['loss']:.6g}, grad_norm={values['grad_norm']:.6g}"
        + "".join(f", {name}={values[name]:.6g}" for name in own)
    )
