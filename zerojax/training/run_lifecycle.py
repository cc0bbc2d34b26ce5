"""Opens the checkpoints of a planned run, resumes the run, trains it and closes it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax

from zerojax.checkpoint import Checkpointer, CheckpointError
from zerojax.checkpoint.arrays import check_storable
from zerojax.checkpoint.base_weights import BaseWeights
from zerojax.checkpoint.folders import list_steps
from zerojax.config import SamplesConfig, WatchConfig
from zerojax.config.display import quoted
from zerojax.config.late_dataclasses import dataclass
from zerojax.config.loader import to_dict, user_path
from zerojax.forecasting.out_of_memory import explaining_memory
from zerojax.plan.make import Plan
from zerojax.runtime.kept_programs import keep_programs
from zerojax.runtime.start_clock import phase
from zerojax.runtime.user_files import not_for_everybody
from zerojax.runtime.watchdog import Watchdog
from zerojax.step.host_budget import check_offload
from zerojax.tracing.source_lines import line_of_user
from zerojax.tracing.trees import flatten_names, num_bytes
from zerojax.training.checkpointing import base_of, end_state
from zerojax.training.evaluation import check_evaluation_mode
from zerojax.training.process_agreement import check_regrouping, check_same_run, describe_run
from zerojax.training.run_spec import CHECKPOINT_FOLDER, RunSpec, print_if_slow
from zerojax.training.trainer import Trainer
from zerojax.training.validation import check_before_run, describe_limit

ALONE_SECONDS = 20.0
"""Maximum seconds to wait for a save in progress when one of several processes fails. The process's
own part takes no longer. Waiting for the part of a process that has ended is useless."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A planned run with open checkpoints; no arrays exist yet.

    Attributes:
      spec: description of the run.
      plan: plan of the run.
      checkpointer: checkpointer of the run; None if the run has no checkpoints.
      base: frozen weights that the checkpoints do not store.
    """

    spec: RunSpec
    plan: Plan
    checkpointer: Checkpointer | None
    base: BaseWeights | None = None


@not_for_everybody()
def open_run(spec: RunSpec, plan: Plan) -> Run:
    """Checks offload and validation data, and opens the checkpoints; the caller calls `fit` next.

    Raises:
      ValueError, CheckpointError: a check failed, or the processes of a group are about to start
        different runs. Raised before any array is on a device.
    """
    reasons = [*spec.reasons]
    if (cache := keep_programs()) is not None:
        reasons.append(cache)
    check_offload(plan)
    if spec.feed is not None:
        check_regrouping(spec.feed, plan.inputs.features)
    if jax.process_count() > 1:
        assert spec.feed is not None
        check_same_run(
            describe_run(
                plan, spec.feed, seed=spec.seed, steps=spec.steps, loop=_common_settings(spec)
            ),
            plan.traced.forward,
        )
    if spec.validation is not None:
        check_evaluation_mode(plan)
    check_before_run(plan, spec.validation, spec.loop.eval_batches)
    if (limit := describe_limit(spec.validation, spec.loop.eval_batches)) is not None:
        reasons.append(limit)
    base = None
    if spec.checkpoint is not None and spec.checkpoint.path is not None:
        base, frozen = base_of(plan, spec.checkpoint.frozen)
        if frozen is not None:
            reasons.append(frozen)
    return Run(
        spec=dataclasses.replace(spec, reasons=tuple(reasons)),
        plan=plan,
        checkpointer=_open_checkpoints(spec, plan, base),
        base=base,
    )


def _common_settings(spec: RunSpec) -> dict[str, Any]:
    """Returns {name: value} of the loop settings that must be equal in all processes."""
    samples = SamplesConfig() if spec.log is None else spec.log.samples
    return {
        "log_every": spec.loop.log_every,
        "eval_every": spec.loop.eval_every,
        "eval_batches": spec.loop.eval_batches,
        "validation": "no" if spec.validation is None else "yes",
        "checkpoints": "no" if spec.checkpoint is None else "yes",
        "save_every": spec.loop.save_every,
        "save_on_exit": spec.loop.save_on_exit,
        "log.samples": json.dumps(to_dict(samples)),
    }


@not_for_everybody()
def fit(run: Run, until: int | None = None) -> Trainer:
    """Creates or restores the state, trains to the end, and closes the run if an error occurs.

    Args:
      run: run to train.
      until: number of steps at which to end before the run's own end; None: the run's own end.
    """
    spec, checkpointer, trainer = run.spec, run.checkpointer, None
    watchdog = Watchdog(
        spec.watch or WatchConfig(),
        folder=spec.folder,
        process=jax.process_index(),
        processes=jax.process_count(),
        resume_hint=spec.loop.resume_hint,
        line=line_of_user,
    )
    with watchdog:
        try:
            with explaining_memory(lambda: _under_way(run.plan, trainer), spec.folder):
                with (
                    print_if_slow(spec.log, "preparing the initial state ..."),
                    phase("initial state"),
                ):
                    trainer = Trainer(
                        run.plan, spec, checkpointer=checkpointer, watchdog=watchdog, base=run.base
                    )
                with phase("training step"):
                    trainer.fit(spec.feed, spec.steps if until is None else until)
                if checkpointer is not None:
                    with watchdog.during("waiting for the last checkpoint", is_long=True):
                        checkpointer.wait()
        except BaseException as error:
            if checkpointer is not None and (failure := _close_after(checkpointer)):
                error.add_note(f"Also: {failure}")
            if trainer is not None:  # after the save in progress, which may read the state's files
                end_state(trainer.held_state)
            raise
    return trainer


def _under_way(plan: Plan, trainer: Trainer | None) -> tuple[Plan, Any, int, Any]:
    """Returns (plan, state, batches consumed, jitted step) for the report about out-of-memory
    errors.

    State and step are None if there is no trainer yet.
    """
    if trainer is None:
        return plan, None, 0, None
    return trainer.step_plan, trainer.held_state, trainer.num_steps, trainer.jitted_step


def _close_after(checkpointer: Checkpointer) -> str | None:
    """Closes the checkpoints after an error; returns what failed in the last save, or None.

    With several processes, it does not wait for other processes, which may not know of the error.
    """
    if jax.process_count() > 1:
        return checkpointer.finish_alone(ALONE_SECONDS)
    try:
        checkpointer.close()
    except CheckpointError as failure:
        return str(failure)
    return None


def _open_checkpoints(spec: RunSpec, plan: Plan, base: BaseWeights | None) -> Checkpointer | None:
    if spec.checkpoint is None or spec.checkpoint.path is None:
        return None
    _check_is_no_run_folder(user_path(spec.checkpoint.path))
    named = flatten_names(plan.abstract_portable)
    check_storable(named)
    checkpointer = Checkpointer(
        spec.checkpoint.path,
        keep=spec.checkpoint.keep,
        asynchronous=spec.checkpoint.asynchronous,
        fingerprints=spec.checkpoint.fingerprints,
    )
    left = () if base is None else base.arrays
    checkpointer.check_writable(num_bytes({n: x for n, x in named.items() if n not in left}))
    return checkpointer


def _check_is_no_run_folder(path: Path) -> None:
    """Raises if `path` is the folder of a run, because the run would start anew there."""
    inside = path / CHECKPOINT_FOLDER
    if inside.is_dir() and list_steps(inside) and not list_steps(path):
        raise ValueError(
            f"checkpoint.path={quoted(str(path))} is the folder of a run; set checkpoint.path to "
            f"{CHECKPOINT_FOLDER!r} in it, or omit it and set run_dir to the run's folder"
        )
