"""`zerojax check`: arguments, validated before JAX starts.

The check is `zerojax.cli.checking`.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import sys
from pathlib import Path

from zerojax.cli.devices import use_cpu_devices
from zerojax.runtime.host_memory import keep_freed_memory


def run(args: argparse.Namespace) -> int:
    """Starts JAX with virtual CPU devices, then checks.

    Raises:
      ValueError: a target or a number that cannot be. FileNotFoundError: no such file.
    """
    target, _, name = args.target.partition(":")
    is_file = target.endswith((".py", ".yaml", ".yml"))
    if is_file and not Path(target).is_file():
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
    _start_on_the_cpu(args.devices)
    return importlib.import_module("zerojax.cli.checking").run(args, target, name)


def _start_on_the_cpu(devices: int) -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["ZEROJAX_NUM_PROCESSES"] = "1"  # what a script joins would wait for the others
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    # Programs that are compiled for three steps: compiling is most of the time.
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    if "jax" not in sys.modules:
        use_cpu_devices(devices)
    keep_freed_memory()
