"""`zerojax check`: proof that a model trains the same on any devices, and its report."""

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
from zerojax.config.checks import MAX_CPU_DEVICES
from zerojax.config.display import show
from zerojax.config.loader import user_path
from zerojax.runtime.memory import keep_freed_memory
from zerojax.runtime.shutdown import DIFFERS, OK

_HELP = """\
Takes a few steps of TARGET's model in float32 in plain JAX and with zerojax, on one device and on N
virtual CPU devices, at ZeRO stages 0 to 3, with one and two microbatches, and compares losses,
gradients, parameters and state. Where they differ it names the reason, your line and the remedy.

TARGET is one of
  train.py          a script, run up to its first zerojax.train, make_plan or engine step
  train.py:parts    a function (or dict) of a script or module: the arguments of zerojax.check, as
                    in {"model": ..., "batch": ..., "loss": ..., "optimizer": ...}
  package.file:parts
  CONFIG.yaml       a run file, with KEY=VALUE laid over it: model.num_layers=2

examples:
  zerojax check configs/tiny_shakespeare.yaml model.num_layers=2
  zerojax check train.py --devices 2 --json

exit codes: 0 all runs agree, 1 the check failed, 2 the input was wrong, 4 runs differ or the model
is refused. In Python: zerojax.check(model, batch, loss=..., optimizer=...)."""

MAX_STEPS = 1000
"""Of each run: all their batches are in memory."""


def add(commands) -> None:
    """Declares the command."""
    parser = add_command(
        commands, "check", run, "prove that a model trains the same on any devices", _HELP
    )
    parser.add_argument("target", metavar="TARGET", help="script, script:NAME or run file")
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="settings of a run file")
    parser.add_argument(
        "--devices", type=int, default=4, metavar="N", help="virtual devices (%(default)s)"
    )
    parser.add_argument(
        "--steps", type=int, default=3, metavar="N", help="steps of each run (%(default)s)"
    )
    parser.add_argument(
        "--thorough", action="store_true", help="every stage with each number of microbatches"
    )
    parser.add_argument(
        "--strict", action="store_true", help="dropout and batch statistics count as differences"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    """Starts JAX with virtual CPU devices, then checks.

    Returns:
      0 all agree, 4 they do not.

    Raises:
      ValueError: a target or a number that cannot be. FileNotFoundError: no such file.
    """
    target, _, name = args.target.partition(":")
    is_file = target.endswith((".py", ".yaml", ".yml"))
    if is_file and not user_path(target).is_file():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), target)
    if args.overrides and not target.endswith((".yaml", ".yml")):
        raise ValueError(
            f"{args.overrides[0]}: KEY=VALUE changes a run file, and {args.target} is none"
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
            raise ValueError(f"{option} {number} is above {most}, the most that are run; use fewer")
    _start_on_the_cpu(args.devices)
    return check(args, target, name)


def _start_on_the_cpu(devices: int) -> None:
    use_the_cpu_alone()
    os.environ["ZEROJAX_NUM_PROCESSES"] = "1"  # what a script joins would wait for the others
    # Programs that are compiled for three steps: compiling is most of the time.
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    if "jax" not in sys.modules:
        use_cpu_devices(devices)
    keep_freed_memory()


def check(args: argparse.Namespace, target: str, name: str) -> int:
    """Checks the model of a target and prints the result.

    Returns:
      0 all agree, 4 they do not.
    """
    import jax

    from zerojax.cli.check_targets import read_target
    from zerojax.training.equality import check_here, make_request

    run_one_program_at_a_time()
    with contextlib.redirect_stdout(sys.stderr):  # what a script prints is not the result
        parts = read_target(target, name, overrides=args.overrides, steps=args.steps)
    devices = min(args.devices, len(jax.devices("cpu")))
    options = {"steps": args.steps, "thorough": args.thorough, "strict": args.strict}
    request = make_request(**parts, devices=devices, **options)
    with Progress(quiet=args.json) as progress:
        result = check_here(request, progress)
    show(json.dumps(result.as_dict(), indent=2) if args.json else result.table())
    return OK if result.agrees else DIFFERS
