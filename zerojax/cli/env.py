"""`zerojax env`: versions, devices and missing packages of this machine.

Nothing that is missing makes it fail.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import sys
from pathlib import Path
from typing import Any

import jax

import zerojax
from zerojax.config.display import show
from zerojax.hardware import compile_client
from zerojax.hardware.link_rates import has_pinned_host
from zerojax.runtime.redaction import redact
from zerojax.runtime.system_memory import PINNED_LIMIT, least_room

REQUIRED = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
OPTIONAL = {
    "tokenizers": ("byte-pair vocabularies (tokenizer=bpe:2048)", "pip install tokenizers"),
    "tensorboard": ("looking at the event files of a run", "pip install tensorboard"),
    "wandb": ("log.wandb=PROJECT", "pip install wandb"),
    "jax-cuda13-plugin": ("NVIDIA GPUs", "pip install 'zerojax[cuda]'"),
    "nvidia-cuda-nvcc": (
        "compiling for GPUs that this machine does not have (zerojax plan)",
        "pip install 'zerojax[plan]'",
    ),
}
VARIABLES = (
    "JAX_PLATFORMS",
    "JAX_NUM_CPU_DEVICES",
    "XLA_FLAGS",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    PINNED_LIMIT,
)
GIB = 2**30


def version_of(package: str) -> str | None:
    """Installed version; None when it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def describe_host() -> dict[str, Any]:
    """Cores this process may use, memory and free disk, in bytes."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    room = least_room()
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "memory_bytes": pages,
        "free_memory_bytes": None if room is None else room.free,
        "memory_limit": None if room is None else room.source,
        "free_disk_bytes": shutil.disk_usage(Path.cwd()).free,
    }


def describe_devices() -> tuple[list[dict[str, Any]], str | None]:
    """What JAX starts with, grouped by kind, and why it could not start."""
    try:
        devices = jax.devices()
    except RuntimeError as error:
        return [], str(error).splitlines()[0]
    except AssertionError:  # what JAX 0.10 says about a platform it has no plugin for
        platforms = os.environ.get("JAX_PLATFORMS")
        return [], f"JAX_PLATFORMS={platforms} names nothing that is installed here; unset it"
    groups: dict[str, dict[str, Any]] = {}
    for device in devices:
        stats = device.memory_stats() or {}
        group = groups.setdefault(
            device.device_kind,
            {
                "kind": device.device_kind,
                "platform": device.platform,
                "number": 0,
                "memory_bytes": stats.get("bytes_limit"),
                "pinned_host": has_pinned_host(device),
            },
        )
        group["number"] += 1
    return list(groups.values()), None


def find_advice(devices: list[dict[str, Any]], failure: str | None) -> list[str]:
    """One line for everything that could be better, with what to do."""
    advice = []
    if failure:
        advice.append(f"JAX could not start its devices: {failure}")
    has_gpu = any(device["platform"] in ("gpu", "cuda") for device in devices)
    if Path("/dev/nvidiactl").exists() and not has_gpu:
        advice.append(
            "there is an NVIDIA GPU but JAX does not use it: pip install 'zerojax[cuda]'"
            + (", and unset JAX_PLATFORMS" if os.environ.get("JAX_PLATFORMS") else "")
        )
    if not has_gpu:
        advice.append("training runs on the CPU; cpu_devices=8 makes 8 virtual devices of it")
    if sys.version_info < (3, 12):
        advice.append("Python 3.12 or newer would bring a newer JAX")
    return advice


def collect() -> dict[str, Any]:
    """Everything that `zerojax env` shows, as JSON-able values."""
    devices, failure = describe_devices()
    return {
        "zerojax": zerojax.__version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "packages": {name: version_of(name) for name in REQUIRED},
        "host": describe_host(),
        "devices": devices,
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "optional": {name: version_of(name) for name in OPTIONAL},
        "plan": compile_client.missing() or f"compiles with {compile_client.compiler_version()}",
        "advice": find_advice(devices, failure),
    }


def format_table(facts: dict[str, Any]) -> str:
    """The facts for people, two columns."""
    host = facts["host"]
    rows = [("zerojax", facts["zerojax"]), ("python", facts["python"])]
    rows += [(name, version or "MISSING") for name, version in facts["packages"].items()]
    rows.append(("system", host["system"]))
    rows.append(
        (
            "host",
            f"{host['cores']} cores, {host['memory_bytes'] / GIB:.0f} GiB memory, "
            f"{host['free_disk_bytes'] / GIB:.0f} GiB of disk free here",
        )
    )
    if host["free_memory_bytes"] is not None:
        free = f"{host['free_memory_bytes'] / GIB:.0f} GiB, by {host['memory_limit']}"
        rows.append(("free memory", free))
    for device in facts["devices"] or [None]:
        rows.append(("devices", _format_device(device) if device else "none"))
    rows += list(facts["variables"].items())
    for name, version in facts["optional"].items():
        purpose, command = OPTIONAL[name]
        rows.append((name, version or f"not installed; for {purpose}: {command}"))
    rows.append(("zerojax plan", facts["plan"]))
    width = max(len(name) for name, _ in rows) + 2
    lines = [f"{name:<{width}}{text}" for name, text in rows]
    return "\n".join(lines + [f"* {line}" for line in facts["advice"]])


def _format_device(device: dict[str, Any]) -> str:
    memory = device["memory_bytes"]
    each = f", {memory / GIB:.0f} GiB each" if memory else ""
    pinned = ", pinned host memory" if device["pinned_host"] else ", no pinned host memory"
    return f"{device['number']} x {device['kind']} ({device['platform']}{each}{pinned})"


def run(args: argparse.Namespace) -> int:
    """Prints the table, or the facts as JSON."""
    facts = redact(collect())
    show(json.dumps(facts, indent=2) if args.json else format_table(facts))
    return 0
