"""`zerojax tune`: measures which kernels are faster on the GPUs of a run file."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from zerojax.cli.arguments import add_command, add_settings, is_python, split_words
from zerojax.cli.jax_environment import allow_pinned_memory, use_cpu_devices
from zerojax.cli.tune_search import BEST, RunWords, check_options, tune_by_search
from zerojax.config import RunConfig, WatchConfig, load
from zerojax.config.display import show
from zerojax.runtime.redaction import redact

if TYPE_CHECKING:
    from zerojax.plan.make import Plan
    from zerojax.training.tuning import TimedStep

MARGIN = 0.97
"""Maximum time of a setting, as a share of the planned step's time, for which it is advised."""

_HELP = """\
Compares kernels of the update and of gradient statistics with XLA's results, implementations
of attention with each other, and several slice sizes of offloaded state, on arrays of the
run's sizes, and times them alternately, regardless of earlier measurements. The faster choice is
stored in the user's cache; later runs on the same kind of GPU use it. A run with tune=auto does
this automatically, in about ten seconds, for choices not stored yet; this command takes longer.

Then times whole steps on a batch of zeros: as planned, with the other kernels, and with other
buckets (allgather_bucket_size, reduce_bucket_size). A faster variant is printed as a setting
to write into the run file; no run uses it automatically. No data are read, and no state is saved.

--search begins with `zerojax plan --search` for these devices, times the best plans it finds and
the run's own for some steps each, and with --out writes the fastest as a run file.

examples:
  zerojax tune configs/llama_8b_zero3_8xh100.yaml
  zerojax tune configs/llama_8b_zero3_8xh100.yaml optimizer.name=lion
  zerojax tune configs/llama_8b_zero3_8xh100.yaml --no-steps
  zerojax tune train.py
  zerojax tune configs/llama_8b_zero3_8xh100.yaml --search --out fastest.yaml"""


def add(commands) -> None:
    """Adds the command `zerojax tune` to the parser."""
    parser = add_command(
        commands, "tune", run, "measure which kernels are faster on these GPUs", _HELP
    )
    add_settings(parser)
    parser.switch("--no-steps", "skip whole steps, which take minutes")
    parser.switch("--search", "search for plans and time the best, not kernels")
    parser.option("--best N", f"plans of the search to time ({BEST})", type=int)
    parser.option("--gpu NAME", "GPU to plan for (this machine's)")
    parser.option(
        "--budget SECONDS", "time limit of the search (%(default)g)", type=float, default=300.0
    )
    parser.option("--out FILE", "run file to write, with the fastest plan")


def run(args: argparse.Namespace) -> int:
    """Runs `zerojax tune`: plans the run on this machine's devices, measures, and prints the
    choices.

    Raises:
      ValueError: this machine cannot measure, or the settings leave nothing to measure.
    """
    path, overrides = split_words(args.config, args.overrides)
    check_options(args)
    if is_python(path) and args.search:
        raise ValueError(
            f"--search writes settings into a run file, and {path} is a script; search with "
            "zerojax plan SCRIPT --search, or write a run file"
        )
    plan_here = _script_here if is_python(path) else _file_here
    plan, watch = plan_here(path, overrides, args)

    import jax

    from zerojax.training.tuning import (
        SLICES,
        time_steps,
        tune,
        variants_of,
        why_not_measured,
    )

    if plan is None:
        return tune_by_search(args, RunWords(path, overrides))
    if why := why_not_measured(plan):
        raise ValueError(f"nothing to measure: {why}")
    tuned = tune(plan, again=True, watch=watch)
    is_first = jax.process_index() == 0
    if is_first:
        show(redact(tuned.describe()))
        for what, chosen in tuned.program.kernels.items():
            show(f"  {what}: {chosen.implementation} ({chosen.reason})")
        for reason in tuned.reasons:
            if reason.startswith(SLICES):
                show(f"  {reason}")
    if args.no_steps:
        return 0
    timed = []
    for step in time_steps(variants_of(tuned)):
        timed.append(step)
        if is_first:
            show(redact(_row(step, timed[0])))
    if is_first:
        show(_advice(timed))
    return 0


def _file_here(
    path: str | None, overrides: list[str], args: argparse.Namespace
) -> tuple[Plan | None, WatchConfig | None]:
    """Returns (plan of a run file on this machine's devices, or None to search; its watchdog)."""
    config = load(RunConfig, path, overrides)
    if config.cpu_devices is not None:
        use_cpu_devices(config.cpu_devices)
    allow_pinned_memory(config.mesh.offload)
    import jax

    from zerojax.runtime.distributed import join_processes
    from zerojax.training.run_file import plan_from_config

    join_processes()
    if args.search:
        return None, config.watch
    return plan_from_config(config, jax.device_count(), is_here=True), config.watch


def _script_here(
    path: str | None, overrides: list[str], args: argparse.Namespace
) -> tuple[Plan | None, WatchConfig | None]:
    """Returns (plan of a script's call of train on this machine's devices, its watchdog)."""
    from zerojax.cli.script_runs import spec_of_script
    from zerojax.training.run_spec import plan_untuned

    assert path is not None
    spec = spec_of_script(path, overrides, command="tune")
    return plan_untuned(spec), spec.watch


def _row(step: TimedStep, planned: TimedStep) -> str:
    if not math.isfinite(step.seconds):
        return f"  {step.name}: not timed ({step.failure or 'it failed on another process'})"
    line = f"  {step.name}: {1e3 * step.seconds:.4g} ms a step"
    if step is planned or not math.isfinite(planned.seconds):
        return line
    return f"{line}, {planned.seconds / step.seconds:.3f} times as fast"


def _advice(timed: Sequence[TimedStep]) -> str:
    """Returns the closing advice: the setting that beats the plan's by more than the measurement
    noise, or that no setting does."""
    planned, best = timed[0], min(timed, key=lambda step: step.seconds)
    if best is planned or best.seconds > MARGIN * planned.seconds:
        return f"no setting is faster by {1 - MARGIN:.0%}; leave the run file as it is"
    return f"write {best.name} into the run file"
