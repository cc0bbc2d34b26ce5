"""`zerojax profile`: settings of a short measured run, validated before JAX starts.

The run and its page are `zerojax.cli.profiling`.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
from pathlib import Path

from zerojax.cli.devices import allow_pinned_memory, use_cpu_devices
from zerojax.cli.train import split_words
from zerojax.config import RunConfig, load
from zerojax.runtime.host_memory import keep_freed_memory

NEVER = 1_000_000_000


def run(args: argparse.Namespace) -> int:
    """Reads the settings, then measures.

    Raises:
      ValueError: a setting or number that cannot be.
    """
    path, overrides = split_words(args.config, args.overrides)
    config = load(RunConfig, path, overrides)
    if args.steps < 2:
        raise ValueError(f"--steps {args.steps}: at least 2 are needed to tell one from another")
    config = measured(config, args.steps, free_folder(args.out, config), save=not args.no_save)
    if config.cpu_devices is not None:
        use_cpu_devices(config.cpu_devices)
        keep_freed_memory()
    allow_pinned_memory(config.mesh.offload)
    module = importlib.import_module("zerojax.cli.profiling")
    return module.profile(config, args.steps, as_json=args.json)


def free_folder(out: str | None, config: RunConfig) -> Path:
    """A folder that is not there yet, so that nothing is resumed.

    Raises:
      ValueError: the one that was asked for is there.
    """
    if out is not None:
        if Path(out).exists():
            raise ValueError(f"--out {out} is there already; name a folder that is not")
        return Path(out)
    first = Path(config.run_dir) / "profile"
    return next(
        path
        for number in range(1, NEVER)
        if not (path := first if number == 1 else first.with_name(f"profile-{number}")).exists()
    )


def measured(config: RunConfig, steps: int, folder: Path, *, save: bool) -> RunConfig:
    """The same run, short: steps to warm up, as many that are measured, as many that are traced."""
    total = 3 * steps
    warmup = config.optimizer.warmup_steps
    offload = config.mesh.offload
    if offload.on_disk:  # the run's own files are its state: others, on the same disk
        own = None if offload.folder is None else str(Path(offload.folder) / folder.name)
        offload = dataclasses.replace(offload, folder=own, durable=False)
    return dataclasses.replace(
        config,
        mesh=dataclasses.replace(config.mesh, offload=offload),
        steps=total,
        run_dir=str(folder),
        eval_every=None,
        data=dataclasses.replace(config.data, validation_fraction=0.0),
        optimizer=dataclasses.replace(
            config.optimizer, warmup_steps=None if warmup is None else min(warmup, total)
        ),
        checkpoint=dataclasses.replace(
            config.checkpoint, path=None, every=NEVER, save_on_exit=save
        ),
        log=dataclasses.replace(
            config.log,
            every=steps,
            profile=(2 * steps + 1, total),
            console="quiet",
            tensorboard=False,
            wandb=None,
        ),
    )
