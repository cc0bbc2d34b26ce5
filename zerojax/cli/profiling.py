"""`zerojax profile` after its settings are read: a short run and its report."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import jax

from zerojax.cli.devices import run_one_program_at_a_time
from zerojax.config import RunConfig
from zerojax.config.display import show
from zerojax.forecasting.hlo.program import read_program
from zerojax.forecasting.profiling import (
    StepProfile,
    draw,
    flops_by_parameter,
    newest_trace,
    profile_dict,
    read_trace,
    with_programs,
)
from zerojax.models.flops import count_program_flops
from zerojax.runtime.distributed import join_processes
from zerojax.training.metrics import read_metrics
from zerojax.training.metrics.stopwatch import ACTIVITIES
from zerojax.training.run import OFFLOAD_FOLDER
from zerojax.training.run_file import run_from_config


def profile(config: RunConfig, steps: int, *, as_json: bool) -> int:
    """Runs `config`, of which a third of the steps is traced, and prints the page."""
    if config.cpu_devices is not None:
        run_one_program_at_a_time()
    join_processes()
    show(f"running {config.steps} steps, the last {steps} of them traced ...", file=sys.stderr)
    trainer = run_from_config(config)
    trainer.close()
    folder = Path(config.run_dir)
    offload = config.mesh.offload
    if offload.on_disk:
        shutil.rmtree(offload.folder or folder / OFFLOAD_FOLDER, ignore_errors=True)
    if jax.process_index() != 0:
        return 0
    page = measure(trainer, folder, steps)
    # What was written was written to be timed.
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    (folder / "profile.json").write_text(json.dumps(profile_dict(page), indent=2) + "\n")
    show(json.dumps(profile_dict(page), indent=2) if as_json else draw(page))
    return 0


def measure(trainer: Any, folder: Path, steps: int) -> StepProfile:
    """The profile of a run that is over, from its files and its compiled step."""
    metrics = read_metrics(folder)
    plan, start = trainer.plan, metrics.starts[-1]
    record = next(row for row in metrics.train if row["step"] == 2 * steps)
    lowered = trainer.jitted_step.lower(plan.abstract_state, plan.abstract_batch)
    trace = newest_trace(folder)
    text = lowered.compile().as_text()
    name = text.split(maxsplit=2)[1].rstrip(",")  # "HloModule jit_step, is_scheduled=true, ..."
    ops = [] if trace is None else [op for op in read_trace(trace) if op.module == name]
    ops = with_programs(ops, read_program(text))
    spent = {name: record[f"spent_{name}"] for name in ACTIVITIES}
    tokens, seconds = start["tokens_per_step"], record["step_seconds"]
    saves = [end["spent_save"] for end in metrics.ends if end["spent_save"] > 0]
    traced = trainer.jitted_step.trace(plan.abstract_state, plan.abstract_batch)
    return StepProfile(
        steps=steps,
        devices=start["num_devices"],
        device_kind=start["device_kind"],
        step_seconds=seconds,
        spent=spent,
        save_seconds=saves[-1] if saves else None,
        tokens_per_second=None if tokens is None else tokens / seconds,
        tflops=record.get("tflops_per_device"),
        mfu=record.get("mfu"),
        memory={key: record.get(f"memory_{key}") for key in ("peak", "limit", "source")},
        ops=ops,
        traced_steps=steps,
        traced_devices=max((op.devices for op in ops), default=1),
        flops=flops_by_parameter(plan, trainer.jitted_step),
        counted_flops=count_program_flops(traced.jaxpr),
        trace=trace,
    )
