"""`zerojax tune`: measures which kernels are faster on the GPUs of a run file."""

from __future__ import annotations

import argparse

from zerojax.cli.arguments import add_command, add_settings, split_words
from zerojax.cli.jax_environment import allow_pinned_memory, use_cpu_devices
from zerojax.config import RunConfig, load
from zerojax.config.display import show
from zerojax.runtime.redaction import redact

_HELP = """\
Checks the kernels of the update and of gradient statistics against XLA's results, on arrays of the
run's sizes, and times both in turns, whatever an earlier measurement said. The faster one is kept
in the user's cache, where the next run on such GPUs finds it. No data are read, nothing is trained.

A run with kernels=auto and tune=auto does this by itself where no answer is kept.

examples:
  zerojax tune configs/llama_7b_zero3_8xh100.yaml
  zerojax tune configs/llama_8b_zero3_8xh100.yaml optimizer.name=lion"""


def add(commands) -> None:
    """Declares the command."""
    parser = add_command(
        commands, "tune", run, "measure which kernels are faster on these GPUs", _HELP
    )
    add_settings(parser)


def run(args: argparse.Namespace) -> int:
    """Plans the run on the devices that are here, measures, and prints what was chosen.

    Raises:
      ValueError: nothing can be measured here, or the settings leave nothing to be measured.
    """
    path, overrides = split_words(args.config, args.overrides)
    config = load(RunConfig, path, overrides)
    if config.cpu_devices is not None:
        use_cpu_devices(config.cpu_devices)
    allow_pinned_memory(config.mesh.offload)

    import jax

    from zerojax.runtime.distributed import join_processes
    from zerojax.training.run_file import plan_from_config
    from zerojax.training.tuning import tune, why_not_measured

    join_processes()
    plan = plan_from_config(config, jax.device_count(), is_here=True)
    if why := why_not_measured(plan):
        raise ValueError(f"nothing to measure: {why}")
    tuned = tune(plan, again=True)
    if jax.process_index() == 0:
        show(redact(tuned.describe()))
        for what, chosen in tuned.program.kernels.items():
            show(f"  {what}: {chosen.implementation} ({chosen.reason})")
    return 0
