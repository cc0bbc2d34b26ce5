"""`zerojax check`: checks that a model trains the same on any number of devices, and reports."""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import sys

from zerojax.cli.arguments import add_command
from zerojax.cli.jax_environment import (
    run_one_program_at_a_time,
    use_cpu_devices,
    use_the_cpu_alone,
)
from zerojax.cli.progress import Progress
from zerojax.cli.script_process import run_in_child, until_training
from zerojax.config.checks import MAX_CPU_DEVICES
from zerojax.config.display import show
from zerojax.config.loader import user_path
from zerojax.runtime.shutdown import DIFFERS, OK

TIME_LIMIT = 300
"""Default maximum time in seconds until a script starts to train; scripts first read data sets and
build tokenizers."""
LONGEST = 86_400

_HELP = """\
Takes a few steps of TARGET's model in float32 in plain JAX and with zerojax, on one device and on N
virtual CPU devices, at ZeRO stages 0 to 3, with one and two microbatches, and compares losses,
gradients, parameters and state. Where they differ it names the reason, your line and the remedy.

TARGET is one of
  train.py          a script, run up to its first zerojax.train, make_plan or engine step
  train.py:parts    a function (or dict) of a script or module: the arguments of zerojax.check, as
                    in {"model": ..., "batch": ..., "loss": ..., "optimizer": ...}
  package.file:parts
  CONFIG.yaml       a run file, with KEY=VALUE overrides: model.num_layers=2

A script runs in a separate process, and has --time-limit seconds until it reaches its training.

examples:
  zerojax check configs/tiny_shakespeare.yaml model.num_layers=2
  zerojax check train.py --devices 2 --json

exit codes: 0 all runs agree, 1 the check failed, 2 the input was wrong, or the script failed before
its training, 4 runs differ or the model is refused.
In Python: zerojax.check(model, batch, loss=..., optimizer=...)."""

MAX_STEPS = 1000
"""Largest number of steps of each run of a check; all their batches are in memory."""


def add(commands) -> None:
    """Adds the command `zerojax check` to the parser."""
    parser = add_command(
        commands, "check", run, "check that a model trains equally on any number of devices", _HELP
    )
    parser.add_argument("target", metavar="TARGET", help="script, script:NAME or run file")
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="settings of a run file")
    parser.option("--devices N", "virtual devices (%(default)s)", default=4)
    parser.option("--steps N", "training steps of each compared run (%(default)s)", default=3)
    parser.switch("--thorough", "compare every ZeRO stage with one and with two microbatches")
    parser.switch(
        "--strict", "count effects of dropout and of batch statistics as differences, too"
    )
    parser.option(
        "--time-limit SECONDS",
        f"maximum time until a script starts to train ({TIME_LIMIT})",
        type=int,
    )
    parser.switch("--json", "print the result as JSON")
    parser.add_argument("--notes", help=argparse.SUPPRESS)  # file of the child, read by its parent


def run(args: argparse.Namespace) -> int:
    """Runs `zerojax check` on virtual CPU devices; scripts and functions run in a child process.

    Returns:
      Exit code: 0 if all runs agree, 4 if they differ; for a child process its exit code.

    Raises:
      ValueError: the target or a number is invalid.
      FileNotFoundError: the target file does not exist.
    """
    target, _, name = args.target.partition(":")
    is_file = target.endswith((".py", ".yaml", ".yml"))
    if is_file and not user_path(target).is_file():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), target)
    is_run_file = target.endswith((".yaml", ".yml"))
    if args.overrides and not is_run_file:
        raise ValueError(
            f"{args.overrides[0]}: KEY=VALUE changes settings of a run file, but {args.target} is "
            "not one; leave KEY=VALUE out"
        )
    if not is_file and not name:
        raise ValueError(
            f"{args.target}: give a script (train.py), a function (train.py:parts, "
            "package.file:parts) or a run file (CONFIG.yaml)"
        )
    if args.devices < 2:
        raise ValueError(f"--devices {args.devices}: at least 2 are needed to compare")
    if args.steps < 1:
        raise ValueError(f"--steps {args.steps}: at least 1 is needed")
    limits = {"--devices": (args.devices, MAX_CPU_DEVICES), "--steps": (args.steps, MAX_STEPS)}
    for option, (number, most) in limits.items():
        if number > most:
            raise ValueError(f"{option} {number} is above the limit of {most}; use fewer")
    if args.time_limit is not None and is_run_file:
        raise ValueError(f"--time-limit {args.time_limit} limits scripts; {target} is not one")
    limit = TIME_LIMIT if args.time_limit is None else args.time_limit
    if not 1 <= limit <= LONGEST:
        raise ValueError(f"--time-limit {limit}: give seconds from 1 to {LONGEST}")
    if not is_run_file and args.notes is None:
        return run_in_child(_command(args), args.target, limit)
    _start_on_the_cpu(args.devices)
    return check(args, target, name, limit)


def _command(args: argparse.Namespace) -> list[str]:
    """Returns the command line of `zerojax check` for the child process, without the name of the
    file through which the child reports to this process."""
    numbers = {"devices": args.devices, "steps": args.steps, "time-limit": args.time_limit}
    options = [f"--{name}={number}" for name, number in numbers.items() if number is not None]
    flags = [f"--{name}" for name in ("thorough", "strict", "json") if getattr(args, name)]
    # -P: the child searches the folders that `run_in_child` sets, and not also its working folder.
    python = [sys.executable, "-P", "-m", "zerojax"]
    return [*python, "check", *options, *flags, args.target, "--notes"]


def _start_on_the_cpu(devices: int) -> None:
    use_the_cpu_alone()
    os.environ["ZEROJAX_NUM_PROCESSES"] = "1"  # a script that sets up several would wait for them
    # The programs run only a few steps, so compiling takes most of the time.
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    if "jax" not in sys.modules:
        use_cpu_devices(devices)


def check(args: argparse.Namespace, target: str, name: str, limit: float) -> int:
    """Checks the model of a target of `zerojax check` and prints the result.

    Args:
      args: parsed arguments of the command.
      target, name: TARGET before and after its colon; `name` may be "".
      limit: maximum seconds until the target provides a model to check.

    Returns:
      Exit code: 0 if all runs agree, 4 if they differ.
    """
    import jax

    from zerojax.cli.check_targets import read_target
    from zerojax.cli.script_errors import told_as_the_scripts
    from zerojax.equality import check_here, make_request

    run_one_program_at_a_time()
    options = {"steps": args.steps, "thorough": args.thorough, "strict": args.strict}
    # Keeps the script's own output apart from the result.
    with until_training(args.notes, limit), contextlib.redirect_stdout(sys.stderr):
        parts = read_target(target, name, overrides=args.overrides, steps=args.steps)
        devices = min(args.devices, len(jax.devices("cpu")))
        with told_as_the_scripts(args.target):  # a function may make its batches
            request = make_request(**parts, devices=devices, **options)
    with Progress(quiet=args.json) as progress:
        result = check_here(request, progress)
    show(json.dumps(result.as_dict(), indent=2) if args.json else result.table())
    return OK if result.agrees else DIFFERS
