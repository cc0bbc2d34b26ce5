"""Opens a run's log and checkpoints, resumes it, trains it and closes it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from zerojax.checkpoint import Checkpointer, CheckpointError
from zerojax.checkpoint.arrays import check_storable
from zerojax.checkpoint.base_weights import BaseWeights
from zerojax.config import (
    CheckpointConfig,
    LogConfig,
    MeshConfig,
    MixturePart,
    WatchConfig,
    as_mesh_config,
)
from zerojax.config.loader import user_path
from zerojax.data import Feed, RowSource, local_rows_of_mesh, save_tokenizer
from zerojax.data.tokenizer import TEMPLATE_FILE
from zerojax.forecasting.out_of_memory import explaining_memory
from zerojax.hardware import local_devices
from zerojax.models.losses import loss_unit
from zerojax.plan.counts import model_flops
from zerojax.plan.host_budget import check_offload
from zerojax.plan.make import Plan
from zerojax.runtime.kept_programs import keep_programs
from zerojax.runtime.redaction import redact
from zerojax.runtime.start_clock import phase
from zerojax.runtime.user_files import not_for_everybody, replace_text
from zerojax.runtime.watchdog import Watchdog
from zerojax.tracing.trees import flatten_names, num_bytes
from zerojax.training.checkpointing import base_of, end_state
from zerojax.training.evaluation import check_evaluation_mode
from zerojax.training.metrics import RunLog
from zerojax.training.process_agreement import check_same_run, describe_run
from zerojax.training.run_record import RECORD_FILE, RunNotes, record_of, write_record
from zerojax.training.train_arguments import LoopSettings
from zerojax.training.trainer import Trainer
from zerojax.training.validation import check_before_run
from zerojax.zoo.hugging_face import UnsupportedError, describe_model

CONFIG_FILE, TOKENIZER_FILE, CHECKPOINT_FOLDER = "config.json", "tokenizer.json", "checkpoints"
OFFLOAD_FOLDER = "offload"
DESCRIPTION_FILE = "hugging_face.json"
"""Model description for exporting to Hugging Face; written for architectures known there."""
PLANNING = "planning: tracing the model and its loss ..."
SLOW_SECONDS = 5.0
"""Time after which a slow phase of a run prints what it is doing."""
ALONE_SECONDS = 20.0
"""Maximum wait for a save in flight when one of several processes fails. The process's own part
takes no longer than that; waiting for the part of a process that has ended is pointless."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunFiles:
    """The files that a run writes, their folders and their content.

    Attributes:
      notes: content of the record that `zerojax.load_run` needs; None: no record is written.
    """

    folder: Path | None
    log: LogConfig
    watch: WatchConfig
    checkpoint: CheckpointConfig | None
    config: dict[str, Any]
    reasons: Sequence[str]
    steps: int | None
    tokens_per_step: int | None
    notes: RunNotes | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A planned run with open checkpoints; no arrays exist yet.

    Attributes:
      replan: makes the plan for another mesh, for a checkpoint that was saved on one.
      checkpointer: None if the run has no checkpoints.
      base: frozen weights that the checkpoints leave out.
    """

    files: RunFiles
    plan: Plan
    replan: Callable[[Any], Plan]
    loop_settings: LoopSettings
    feed: Feed
    seed: int
    validation: Any
    checkpointer: Checkpointer | None
    base: BaseWeights | None = None


@not_for_everybody()
def open_run(
    files: RunFiles,
    plan: Plan,
    *,
    replan: Callable[[Any], Plan],
    loop_settings: LoopSettings,
    feed: Feed,
    seed: int,
    validation: Any,
) -> Run:
    """Checks offload and validation data, and opens the checkpoints; call `fit` next.

    Raises:
      ValueError, CheckpointError: before any array is on a device; also if the processes of a
        group are about to start different runs.
    """
    if (said := keep_programs()) is not None:
        files = dataclasses.replace(files, reasons=(*files.reasons, said))
    check_offload(plan)
    if jax.process_count() > 1:
        together = {
            "log_every": loop_settings.log_every,
            "eval_every": loop_settings.eval_every,
            "eval_batches": loop_settings.eval_batches,
            "validation": "no" if validation is None else "yes",
            "checkpoints": "no" if files.checkpoint is None else "yes",
            "save_every": loop_settings.save_every,
            "save_on_exit": loop_settings.save_on_exit,
        }
        check_same_run(describe_run(plan, feed, seed=seed, steps=files.steps, loop=together))
    if validation is not None:
        check_evaluation_mode(plan)
    check_before_run(plan, validation)
    base = None
    if files.checkpoint is not None and files.checkpoint.path is not None:
        base, said = base_of(plan, files.checkpoint.frozen)
        reasons = (*files.reasons, *(() if said is None else (said,)))
        files = dataclasses.replace(files, reasons=reasons)
    return Run(
        files=files,
        plan=plan,
        replan=replan,
        loop_settings=loop_settings,
        feed=feed,
        seed=seed,
        validation=validation,
        checkpointer=_open_checkpoints(files, plan, base),
        base=base,
    )


@not_for_everybody()
def fit(run: Run) -> Trainer:
    """Creates or restores the state, trains to the end, and closes the run after an error."""
    files, checkpointer, trainer = run.files, run.checkpointer, None
    watchdog = Watchdog(
        files.watch,
        folder=files.folder,
        process=jax.process_index(),
        processes=jax.process_count(),
        resume_hint=run.loop_settings.resume_hint,
    )
    with watchdog:
        try:
            with explaining_memory(lambda: _under_way(run.plan, trainer), files.folder):
                with (
                    print_if_slow(files.log, "preparing the initial state ..."),
                    phase("initial state"),
                ):
                    trainer = Trainer(
                        run.plan,
                        replan=run.replan,
                        seed=run.seed,
                        loop_settings=run.loop_settings,
                        open_log=functools.partial(open_log, files),
                        checkpointer=checkpointer,
                        config=redact(files.config),
                        validation=run.validation,
                        watchdog=watchdog,
                        base=run.base,
                    )
                with phase("training step"):
                    trainer.fit(run.feed, files.steps)
                if checkpointer is not None:
                    with watchdog.during("waiting for the last checkpoint", is_long=True):
                        checkpointer.wait()
        except BaseException as error:
            if checkpointer is not None and (failure := _close_after(checkpointer)):
                error.add_note(f"Also: {failure}")
            if trainer is not None:  # after the save in flight, which may read the state's files
                end_state(trainer.state)
            raise
    return trainer


@contextlib.contextmanager
def print_if_slow(log: LogConfig | None, text: str) -> Iterator[None]:
    """Prints `text` if the block takes longer than `SLOW_SECONDS`, before the log is open.

    Prints on process 0 only, and nothing if the console is quiet.

    Args:
      log: settings of the run's log; None means the defaults.
      text: such as "planning ...".
    """
    is_quiet = log is not None and log.console == "quiet"
    if is_quiet or jax.process_index() != 0:
        yield
        return
    timer = threading.Timer(SLOW_SECONDS, lambda: print(text, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _under_way(plan: Plan, trainer: Trainer | None) -> tuple[Plan, Any, int, Any]:
    """Returns (plan, state, batches consumed, jitted step) of a run that may not have started."""
    if trainer is None:
        return plan, None, 0, None
    return trainer.plan, trainer.state, trainer.num_steps, trainer.jitted_step


def _close_after(checkpointer: Checkpointer) -> str | None:
    """Closes the checkpoints after an error and returns what failed in the last save, if any.

    With several processes, it does not wait for the others, which may not know of the error.
    """
    if jax.process_count() > 1:
        return checkpointer.finish_alone(ALONE_SECONDS)
    try:
        checkpointer.close()
    except CheckpointError as failure:
        return str(failure)
    return None


def with_disk_folder(mesh_config: Any, folder: Path | None) -> Any:
    """Returns mesh options whose disk offload uses the run's folder unless they name another.

    Args:
      mesh_config: as in `zerojax.train`.
      folder: of the run; None if it has none.
    """
    if folder is None or not isinstance(mesh_config, MeshConfig | Mapping):
        return mesh_config
    settings = as_mesh_config(mesh_config)
    if not settings.offload.on_disk or settings.offload.folder is not None:
        return settings
    offload = dataclasses.replace(settings.offload, folder=str(folder / OFFLOAD_FOLDER))
    return dataclasses.replace(settings, offload=offload)


def _open_checkpoints(run: RunFiles, plan: Plan, base: BaseWeights | None) -> Checkpointer | None:
    if run.checkpoint is None or run.checkpoint.path is None:
        return None
    named = flatten_names(plan.abstract_canonical)
    check_storable(named)
    checkpointer = Checkpointer(
        run.checkpoint.path,
        keep=run.checkpoint.keep,
        asynchronous=run.checkpoint.asynchronous,
        fingerprints=run.checkpoint.fingerprints,
    )
    left = () if base is None else base.arrays
    checkpointer.check_writable(num_bytes({n: x for n, x in named.items() if n not in left}))
    return checkpointer


def open_log(run: RunFiles, plan: Plan, start_step: int, steps: int | None = None) -> RunLog:
    """Opens the log of a run that continues after `start_step`, and logs the plan.

    Args:
      run: its files, and the reasons for defaults that are not part of the plan.
      plan: the current plan.
      start_step: batches consumed.
      steps: of the whole run; None: the number that the run was started with.
    """
    total = steps or run.steps or 0
    log = RunLog(
        run.folder,
        run.log,
        total_steps=max(total, start_step) if total else 0,
        tokens_per_step=run.tokens_per_step,
        loss_unit=loss_unit(plan.loss),
        flops_per_step=model_flops(plan),
        num_devices=plan.mesh.size,
        device_kind=local_devices.device_kind(),
        precision="fp32" if plan.precision.compute_dtype == jnp.float32 else "bf16",
        read_memory=local_devices.device_memory,
        process_index=jax.process_index(),
    )
    reasons = *run.reasons, *plan.reasons
    summary = plan.describe(), reasons, plan.table(), plan.as_dict(), run.config
    saves = run.checkpoint is not None and run.checkpoint.path is not None
    log.start(*summary, start_step=start_step, is_new=not saves and start_step == 0)
    if run.folder is not None and jax.process_index() == 0:
        _describe_model(run.folder, plan)
        if run.notes is not None:
            write_record(run.folder, record_of(plan, run.notes))
            if run.notes.tokenizer is not None:
                save_tokenizer(run.notes.tokenizer, run.folder / TOKENIZER_FILE)
            if run.notes.template is not None:
                replace_text(run.folder / TEMPLATE_FILE, run.notes.template)
        log.keep_files((DESCRIPTION_FILE, RECORD_FILE, TOKENIZER_FILE, TEMPLATE_FILE))
    return log


def _describe_model(folder: Path, plan: Plan) -> None:
    try:
        text = json.dumps(describe_model(plan.model).to_dict(), indent=1)
    except UnsupportedError:
        return
    replace_text(folder / DESCRIPTION_FILE, text + "\n")


def absolute(path: str | Path | None) -> str | None:
    """Returns the absolute path, valid in any working directory; None stays None."""
    return None if path is None else str(user_path(path).absolute())


def absolute_parts(parts: Sequence[MixturePart]) -> tuple[MixturePart, ...]:
    """Returns the parts of a mixture with absolute paths."""
    return tuple(dataclasses.replace(part, path=str(absolute(part.path))) for part in parts)


def external_checkpoints(checkpoints: str | None, folder: Path | None) -> str | None:
    """Returns the absolute path of a run's checkpoints; None if they are in its folder."""
    if checkpoints is None or folder is None:
        return None
    path = Path(checkpoints).absolute()
    return None if path == (folder / CHECKPOINT_FOLDER).absolute() else str(path)


def rows_of_process(batches: Any, mesh: Mesh | AbstractMesh) -> tuple[int, int] | None:
    """Returns the range of rows of a text batch that this process reads; None for others.

    Processes that hold different stages of one pipeline read the same rows.
    """
    if not isinstance(batches, RowSource) or jax.process_count() == 1:
        return None
    return local_rows_of_mesh(mesh, batches.global_batch_size)
