"""`zerojax plan`: settings, GPU and number of devices, validated before JAX starts.

The planning itself is `zerojax.cli.planning`.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys

from zerojax.cli.train import split_words
from zerojax.config import RunConfig, load
from zerojax.hardware.gpus import find_gpu


def run(args: argparse.Namespace) -> int:
    """Reads the settings, then plans.

    Raises:
      ValueError: a setting, card or number that cannot be.
    """
    path, overrides = split_words(args.config, args.overrides)
    config = load(RunConfig, path, overrides)
    devices = args.devices
    if devices is None and args.parameter is not None:
        devices = config.cpu_devices
    missing = [
        option
        for option, value in (("--gpu", args.gpu or args.parameter), ("--devices", devices))
        if value is None
    ]
    if missing:
        raise ValueError(
            f"required: {', '.join(missing)}; an example is --gpu h100 --devices 8, or --devices 8 "
            "--parameter NAME"
        )
    if devices < 1:
        raise ValueError(f"--devices {devices}: at least 1 GPU is needed")
    if args.parameter is not None:
        _start_on_the_cpu()
        planning = importlib.import_module("zerojax.cli.planning")
        return planning.explain(config, devices, args.parameter)
    gpu = find_gpu(args.gpu)
    if args.budget <= 0:
        raise ValueError(f"--budget {args.budget:g}: give seconds above 0, such as 300")
    if args.search and args.no_compile:
        raise ValueError(
            "--search needs the compiler to know what fits, and --no-compile forbids it; "
            "leave out one of them"
        )
    _start_on_the_cpu()
    return importlib.import_module("zerojax.cli.planning").plan(
        config,
        gpu,
        devices,
        as_json=args.json,
        no_compile=args.no_compile,
        fast=args.fast,
        budget=args.budget if args.search else None,
        words=[*([path] if path else []), *overrides],
    )


def _start_on_the_cpu() -> None:
    """Nothing is run on an accelerator, so none has to be free, nor to work."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA's remarks on memory: the page says it
    if "jax" in sys.modules:
        sys.modules["jax"].config.update("jax_platforms", "cpu")
