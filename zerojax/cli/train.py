"""`zerojax train`: settings of a run, validated before JAX starts.

The run itself is `zerojax.cli.training`.
"""

from __future__ import annotations

import argparse
import importlib
import shlex
from pathlib import Path

import yaml

from zerojax.cli.devices import allow_pinned_memory, use_cpu_devices
from zerojax.cli.invocation import command_name
from zerojax.config import RunConfig, load, to_dict
from zerojax.config.display import show
from zerojax.runtime.host_memory import keep_freed_memory


def split_words(config: str | None, overrides: list[str]) -> tuple[str | None, list[str]]:
    """CONFIG may be left out: a first word with `=` in it that is no file is an override."""
    if config is not None and "=" in config and not Path(config).exists():
        return None, [config, *overrides]
    return config, overrides


def run(args: argparse.Namespace) -> int:
    """Reads the settings, then trains or prints them."""
    path, overrides = split_words(args.config, args.overrides)
    config = load(RunConfig, path, overrides)
    if args.print_config:
        show(yaml.safe_dump(to_dict(config), sort_keys=False), end="")
        return 0
    if config.cpu_devices is not None:
        use_cpu_devices(config.cpu_devices)
        keep_freed_memory()
    allow_pinned_memory(config.mesh.offload)
    words = shlex.join(["train", *([path] if path else []), *overrides])
    command = f"{command_name()} {words}"
    return importlib.import_module("zerojax.cli.training").train(config, command)
