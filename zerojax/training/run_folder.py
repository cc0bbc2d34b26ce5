"""Opens the log of a run, and writes files into the run folder that describe the run."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp

from zerojax.data import save_tokenizer
from zerojax.data.tokenizer import TEMPLATE_FILE
from zerojax.hardware import local_devices
from zerojax.models.losses import loss_unit
from zerojax.plan.counts import model_flops, tokens_per_step
from zerojax.plan.make import Plan
from zerojax.runtime.user_files import replace_text
from zerojax.training.metrics import RunLog
from zerojax.training.run_record import RECORD_FILE, record_of, write_record
from zerojax.training.run_spec import RunSpec
from zerojax.training.step_programs import CountedWork
from zerojax.zoo.hugging_face import UnsupportedError, describe_model

CONFIG_FILE, TOKENIZER_FILE = "config.json", "tokenizer.json"
DESCRIPTION_FILE = "hugging_face.json"
"""File that describes the model for an export to Hugging Face; written if that format has it."""


def open_log(spec: RunSpec, plan: Plan, start_step: int, steps: int | None = None) -> RunLog | None:
    """Opens the log of a run that continues after `start_step`, and logs the plan.

    Args:
      spec: description of the run.
      plan: current plan of the run.
      start_step: number of batches consumed.
      steps: number of steps of the whole run; None: the number in `spec`.

    Returns:
      The log; None if the run has no log.
    """
    if spec.log is None:
        return None
    total = steps or spec.steps or 0
    log = RunLog(
        spec.folder,
        spec.log,
        total_steps=max(total, start_step) if total else 0,
        tokens_per_step=None if plan.ladder else tokens_per_step(plan),
        work=CountedWork(plan) if plan.ladder else None,
        loss_unit=loss_unit(plan.loss),
        flops_per_step=None if plan.ladder else model_flops(plan),
        num_devices=plan.mesh.size,
        device_kind=local_devices.device_kind(),
        precision="fp32" if plan.precision.compute_dtype == jnp.float32 else "bf16",
        read_memory=local_devices.device_memory,
        process_index=jax.process_index(),
    )
    reasons = *spec.reasons, *plan.reasons
    summary = plan.describe(), reasons, plan.table(), plan.as_dict(), spec.settings_of(plan)
    is_new = spec.checkpoints is None and start_step == 0
    log.start(*summary, start_step=start_step, is_new=is_new)
    if spec.folder is not None and jax.process_index() == 0:
        _write_description(spec.folder, plan)
        _write_notes(spec, plan, spec.folder)
        log.keep_files((DESCRIPTION_FILE, RECORD_FILE, TOKENIZER_FILE, TEMPLATE_FILE))
    return log


def _write_description(folder: Path, plan: Plan) -> None:
    try:
        text = json.dumps(describe_model(plan.model).to_dict(), indent=1)
    except UnsupportedError:
        return
    replace_text(folder / DESCRIPTION_FILE, text + "\n")


def _write_notes(spec: RunSpec, plan: Plan, folder: Path) -> None:
    """Writes the files that `zerojax.load_run` reads: record, tokenizer and chat template."""
    notes = spec.notes
    if notes is None:
        return
    write_record(folder, record_of(plan, notes))
    if notes.tokenizer is not None:
        save_tokenizer(notes.tokenizer, folder / TOKENIZER_FILE)
    if notes.template is not None:
        replace_text(folder / TEMPLATE_FILE, notes.template)
