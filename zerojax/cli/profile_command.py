"""`zerojax profile`: measures a short run and prints its report."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerojax.cli.arguments import add_command, add_settings, is_python, split_words
from zerojax.cli.jax_environment import (
    allow_pinned_memory,
    run_one_program_at_a_time,
    use_cpu_devices,
)
from zerojax.config import (
    CheckpointConfig,
    LogConfig,
    MeshConfig,
    OffloadConfig,
    OptimizerConfig,
    RunConfig,
    load,
)
from zerojax.config.display import show
from zerojax.config.features import FEATURES
from zerojax.config.loader import user_path
from zerojax.runtime.user_files import replace_text

if TYPE_CHECKING:
    from zerojax.forecasting.profiling import StepProfile
    from zerojax.training.run_spec import RunSpec
    from zerojax.training.trainer import Trainer


NEVER = 1_000_000_000

_HELP = """\
Runs the training step of `zerojax train CONFIG.yaml KEY=VALUE ...`: N warm-up steps, N that are
measured, N that are traced; then one save. Prints the time per step and its parts, the
operations that take most of a device's time, and the FLOPs of every parameter.

examples:
  zerojax profile configs/tiny_shakespeare.yaml
  zerojax profile configs/tiny_shakespeare.yaml zero=3 --steps 10 --out runs/looked_at
  zerojax profile configs/tiny_shakespeare.yaml --json
  zerojax profile configs/tiny_shakespeare.yaml --start
  zerojax profile train.py

--start runs one step and prints the seconds of each phase until its end: imports, data, planning,
the initial state, the training step; and in each phase the seconds of tracing, lowering,
compiling, and reading the compilation cache.

To trace steps 100 to 103 of a long run: zerojax train CONFIG.yaml log.profile=[100,103]"""


def add(commands) -> None:
    """Adds the command `zerojax profile` to the parser."""
    parser = add_command(
        commands, "profile", run, "measure a few training steps, by operation", _HELP
    )
    add_settings(parser)
    parser.option("--steps N", "steps to measure (%(default)s)", default=5)
    parser.option("--out DIR", "new folder for the trace and the numbers (RUN_DIR/profile)")
    parser.switch("--no-save", "do not time a save of the state")
    parser.switch("--start", "measure the start of the run instead: one step, by phase")
    parser.switch("--json", "print every number as JSON")


def run(args: argparse.Namespace) -> int:
    """Runs `zerojax profile`: reads the settings, then measures a short run.

    Raises:
      ValueError: a setting or a number is invalid.
    """
    path, overrides = split_words(args.config, args.overrides)
    if is_python(path):
        return _of_script(path, overrides, args)
    config = load(RunConfig, path, overrides)
    if args.steps < 2:
        raise ValueError(f"--steps {args.steps} is below 2, but steps are compared; use more")
    if args.start and args.out is not None:
        raise ValueError(f"--out {args.out}: --start writes no files; leave out --out or --start")
    if not args.start:
        _check_one_program(config.mesh.offload)
    folder = free_folder(args.out, config.run_dir, config.mesh.offload)
    if config.cpu_devices is not None:
        use_cpu_devices(config.cpu_devices)
    allow_pinned_memory(config.mesh.offload)
    if args.start:
        return profile_start(config, folder, as_json=args.json)
    return profile(config, folder, args.steps, save=not args.no_save, as_json=args.json)


def _check_one_program(offload: OffloadConfig) -> None:
    if offload.params == "nvme":
        raise ValueError(
            "zerojax profile reads the trace of one compiled program, but with "
            "offload.params=nvme a step "
            "consists of several; profile with offload.params: host, or take a trace with "
            "log.profile"
        )


def _of_script(path: str | None, overrides: list[str], args: argparse.Namespace) -> int:
    """Profiles the run of a script's call of `zerojax.train`."""
    if args.start:
        raise ValueError(
            f"--start measures the start of a run file, which zerojax runs from its first line; "
            f"{path} is a script: measure it by `python -X importtime {path}`, or leave out --start"
        )
    from zerojax.cli.script_runs import spec_of_script

    assert path is not None
    spec = spec_of_script(path, overrides, command="profile")
    offload = _offload_of(spec)
    _check_one_program(offload)
    run_dir = "runs/default" if spec.folder is None else str(spec.folder)
    folder = free_folder(args.out, run_dir, offload)
    return _profile(spec, folder, args.steps, save=not args.no_save, as_json=args.json)


def _offload_of(spec: RunSpec) -> OffloadConfig:
    return spec.mesh.offload if isinstance(spec.mesh, MeshConfig) else OffloadConfig()


def measured_run(spec: RunSpec, steps: int, folder: Path, *, save: bool, **log: Any) -> RunSpec:
    """Returns a shorter run to measure, which changes no file of the run itself.

    Args:
      spec: the run.
      steps: number of steps of the shorter run.
      folder: its new folder.
      save: whether it saves its state at the end.
      **log: settings of its log.
    """
    optimizer, mesh = spec.inputs.optimizer, spec.mesh
    if isinstance(optimizer, OptimizerConfig):
        warmup = optimizer.warmup_steps
        optimizer = dataclasses.replace(
            optimizer,
            warmup_steps=None if warmup is None else min(warmup, steps),
            warmup_tokens=None,
        )
    if isinstance(mesh, MeshConfig):
        offload = dataclasses.replace(
            mesh.offload,
            folder=mesh.offload.folder and disk_folder(mesh.offload, folder),
            # An update in the backward pass needs the second generation of the files.
            durable=mesh.offload.durable and mesh.offload.update_in_backward,
        )
        mesh = dataclasses.replace(mesh, offload=offload)
    features = spec.inputs.features.replaced(*(kind() for kind in FEATURES if kind.regroups))
    log = {"console": "quiet", "tensorboard": False, "wandb": None, "profile": (), **log}
    return dataclasses.replace(
        spec,
        inputs=dataclasses.replace(
            spec.inputs, steps=steps, optimizer=optimizer, features=features
        ),
        mesh=mesh,
        validation=None,
        loop=dataclasses.replace(
            spec.loop,
            log_every=log["every"],
            eval_every=None,
            save_every=NEVER,
            save_on_exit=save,
            callbacks=(),
        ),
        folder=folder,
        offload_folder=folder,
        log=dataclasses.replace(spec.log or LogConfig(), **log),
        checkpoint=dataclasses.replace(
            spec.checkpoint or CheckpointConfig(),
            path=str(folder / "checkpoints"),
            every=NEVER,
            save_on_exit=save,
        ),
    )


def disk_folder(offload: OffloadConfig, folder: Path) -> str:
    """Returns the folder for state on the disk of a measured run: a new one in
    `mesh.offload.folder`, or in the folder of the measured run."""
    return str(folder / "offload" if offload.folder is None else Path(offload.folder) / folder.name)


def free_folder(out: str | None, run_dir: str, offload: OffloadConfig) -> Path:
    """Returns a folder for the measured run that does not exist yet, so that nothing is resumed.

    Args:
      out: the requested folder; None: a folder in `run_dir`.
      run_dir: folder of the run.
      offload: settings of the run.

    Raises:
      ValueError: the requested folder exists.
    """

    def is_taken(path: Path) -> bool:
        # State on the disk gets a folder of the same name, which is deleted afterwards.
        return any(map(os.path.lexists, [path, disk_folder(offload, path)]))

    if out is not None:
        if is_taken(user_path(out)):
            raise ValueError(
                f"--out {out} exists already, there or in mesh.offload.folder; name a new folder"
            )
        return user_path(out)
    first = Path(run_dir) / "profile"
    return next(
        path
        for number in range(1, NEVER)
        if not is_taken(path := first if number == 1 else first.with_name(f"profile-{number}"))
    )


def profile(config: RunConfig, folder: Path, steps: int, *, save: bool, as_json: bool) -> int:
    """Trains a run of `config` in `folder`, and prints the profile page."""
    from zerojax.runtime.distributed import join_processes
    from zerojax.training.run_file import spec_on_devices

    if config.cpu_devices is not None:
        run_one_program_at_a_time()
    join_processes()
    return _profile(spec_on_devices(config), folder, steps, save=save, as_json=as_json)


def _profile(spec: RunSpec, folder: Path, steps: int, *, save: bool, as_json: bool) -> int:
    """Trains `steps` warm-up steps, as many measured steps and as many traced steps, and prints the
    profile page."""
    total, disk = 3 * steps, disk_folder(_offload_of(spec), folder)
    traced = (2 * steps + 1, total)
    spec = measured_run(spec, total, folder, save=save, every=steps, profile=traced)
    show(f"running {total} steps, the last {steps} of them traced ...", file=sys.stderr)
    trainer = _train(spec)
    shutil.rmtree(disk, ignore_errors=True)
    return _page_of(trainer, folder, steps, as_json=as_json)


def _train(spec: RunSpec) -> Trainer:
    from zerojax.training.run_file import make_folder
    from zerojax.training.run_lifecycle import fit, open_run
    from zerojax.training.run_spec import plan_run

    plan = plan_run(spec)
    assert spec.folder is not None
    make_folder(spec.folder)
    trainer = fit(open_run(spec, plan))
    trainer.close()
    return trainer


def _page_of(trainer: Trainer, folder: Path, steps: int, *, as_json: bool) -> int:
    import jax

    from zerojax.forecasting.profiling import draw, profile_dict

    if jax.process_index() != 0:
        return 0
    page = measure(trainer, folder, steps)
    # These files were written only to measure the time of a save.
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    replace_text(folder / "profile.json", json.dumps(profile_dict(page), indent=2) + "\n")
    show(json.dumps(profile_dict(page), indent=2) if as_json else draw(page))
    return 0


def profile_start(config: RunConfig, folder: Path, *, as_json: bool) -> int:
    """Trains one step with `config`, and prints the seconds spent in each phase of the start.

    Args:
      config: settings of the run.
      folder: a folder that does not exist; with `offload.folder`, state on the disk gets a folder
        of this name in it.
      as_json: True: print JSON.
    """
    import jax

    from zerojax.runtime.distributed import join_processes
    from zerojax.runtime.start_clock import measure_start
    from zerojax.training.run_file import spec_on_devices

    with tempfile.TemporaryDirectory(prefix="zerojax-start-") as parent, measure_start() as clock:
        folder = Path(parent) / folder.name
        if config.cpu_devices is not None:
            run_one_program_at_a_time()
        join_processes()
        _train(measured_run(spec_on_devices(config), 1, folder, save=False, every=1))
        shutil.rmtree(disk_folder(config.mesh.offload, folder), ignore_errors=True)
    phases = clock.stop()
    if jax.process_index() != 0:
        return 0
    if as_json:
        show(json.dumps([dataclasses.asdict(one) for one in phases], indent=2))
        return 0
    kinds = ("traced", "lowered", "compiled", "read")
    show(f"{'':15}" + "".join(f"{name:>10}" for name in ("seconds", *kinds)))
    for one in phases:
        parts = [f"{one.by_kind[kind]:.2f}" if kind in one.by_kind else "" for kind in kinds]
        show(f"{one.name:15}{one.seconds:10.2f}" + "".join(f"{part:>10}" for part in parts))
    show(f"{'total':15}{sum(one.seconds for one in phases):10.2f}")
    return 0


def measure(trainer: Trainer, folder: Path, steps: int) -> StepProfile:
    """Builds the profile of a finished run from the run's files and its compiled step."""
    from zerojax.forecasting import profiling
    from zerojax.forecasting.hlo.program import read_program
    from zerojax.tracing.flops import count_program_flops
    from zerojax.training.metrics import read_metrics
    from zerojax.training.metrics.stragglers import ACTIVITIES

    metrics = read_metrics(folder)
    plan, start = trainer.step_plan, metrics.starts[-1]
    # The report of the measured steps, which lie between warm-up and trace.
    record = next(row for row in metrics.train if row["step"] == 2 * steps)
    lowered = trainer.jitted_step.lower(plan.abstract_state, plan.abstract_batch)
    trace = profiling.newest_trace(folder)
    text = lowered.compile().as_text()
    name = text.split(maxsplit=2)[1].rstrip(",")  # "HloModule jit_step, is_scheduled=true, ..."
    ops = [] if trace is None else [op for op in profiling.read_trace(trace) if op.module == name]
    ops = profiling.with_programs(ops, read_program(text))
    spent = {name: record[f"spent_{name}"] for name in ACTIVITIES}
    tokens, seconds = start["tokens_per_step"], record["step_seconds"]
    saves = [end["spent_save"] for end in metrics.ends if end["spent_save"] > 0]
    traced = trainer.jitted_step.trace(plan.abstract_state, plan.abstract_batch)
    return profiling.StepProfile(
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
        flops=profiling.flops_by_parameter(plan, trainer.jitted_step),
        counted_flops=count_program_flops(traced.jaxpr),
        trace=trace,
    )
