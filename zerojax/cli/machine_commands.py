"""`zerojax env`: shows versions, devices, memory and missing packages.

`cluster_report` implements `zerojax env --cluster`.
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

import zerojax
from zerojax.cli import cluster_report
from zerojax.cli.arguments import add_command
from zerojax.config.display import printable, show
from zerojax.runtime.memory import PINNED_LIMIT, least_room
from zerojax.runtime.plugin_errors import hidden_plugin_errors
from zerojax.runtime.redaction import redact

REQUIRED = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
OPTIONAL = {
    "tokenizers": ("byte-pair vocabularies (tokenizer=bpe:2048)", "pip install tokenizers"),
    "tensorboard": ("viewing the event files of a run", "pip install tensorboard"),
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


def add_env(commands) -> None:
    """Adds the command `zerojax env` to the parser."""
    parser = add_command(
        commands,
        "env",
        show_environment,
        "show versions, devices, memory and missing packages",
        cluster_report.HELP,
    )
    parser.switch("--json", "print it as JSON")
    cluster_report.add_options(parser)


def show_environment(args: argparse.Namespace) -> int:
    """Runs `zerojax env`: prints a table, or JSON. Facts that cannot be determined are left out."""
    cluster_report.check_options(args)
    if args.cluster:
        return cluster_report.show_cluster(args, lambda: describe_devices(is_local=True))
    facts = redact(collect())
    show(json.dumps(facts, indent=2) if args.json else format_table(facts))
    return 0


def collect() -> dict[str, Any]:
    """Collects all facts that `zerojax env` shows, as JSON-compatible values."""
    from zerojax.hardware import compile_client

    devices, failure = describe_devices()
    return {
        "zerojax": zerojax.__version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "packages": {name: version_of(name) for name in REQUIRED},
        "host": describe_host(),
        "devices": devices,
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "optional": {name: version_of(name) for name in OPTIONAL},
        "kernels": describe_kernels(),
        "plan": compile_client.missing() or f"compiles with {compile_client.compiler_version()}",
        "hidden": hidden_plugin_errors(),
        "advice": find_advice(devices, failure),
    }


def version_of(package: str) -> str | None:
    """Returns the installed version of a package, or None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def describe_host() -> dict[str, Any]:
    """Returns the cores that this process may use, and the host's memory and free disk,
    in bytes."""
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


def describe_devices(*, is_local: bool = False) -> tuple[list[dict[str, Any]], str | None]:
    """Returns JAX's devices, grouped by kind, and the error message if JAX could not start.

    Args:
      is_local: whether only the devices of this process count, not those of its whole run.
    """
    import jax

    from zerojax.hardware.local_devices import has_pinned_host

    try:
        devices = jax.local_devices() if is_local else jax.devices()
    except RuntimeError as error:
        return [], str(error).splitlines()[0]
    except AssertionError:  # raised by JAX 0.10 for a platform without a plugin
        platforms = os.environ.get("JAX_PLATFORMS")
        return [], f"JAX_PLATFORMS={platforms} names no installed platform; unset it"
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


def describe_kernels() -> list[dict[str, Any]]:
    """Returns the GPU kernel timings in this user's cache, and the kernels that failed and are
    therefore not tried again."""
    from zerojax.training.tuning import KeptChoices

    kept = KeptChoices.of_user()
    rows = [
        {
            **_of_key(key),
            "choice": one.choice,
            "seconds": one.seconds,
            "other_seconds": one.other_seconds,
            "date": one.date,
        }
        for key, one in kept.all()
        if _has_names(key)
    ]
    return rows + [{**_of_key(key), "choice": None} for key in kept.tried() if _has_names(key)]


def _has_names(key: dict[str, Any]) -> bool:
    """Returns whether a cached timing has all fields that are shown; the cache file may come from
    another version of zerojax."""
    ways = key.get("ways")
    texts = [key.get("what"), key.get("device"), *(ways if isinstance(ways, list) else [])]
    numbers = [key.get("devices"), key.get("elements")]
    return (
        len(texts) == 4
        and all(isinstance(x, str) for x in texts)
        and all(isinstance(x, int) for x in numbers)
    )


def _of_key(key: dict[str, Any]) -> dict[str, Any]:
    names = ("what", "device", "devices", "driver", "elements", "versions", "ways")
    return {name: key.get(name) for name in names}


def find_advice(devices: list[dict[str, Any]], failure: str | None) -> list[str]:
    """Returns the advice printed at the end, such as a missing GPU package or virtual devices."""
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
        advice.append("with Python 3.12 or newer, a newer JAX could be installed")
    return advice


def format_table(facts: dict[str, Any]) -> str:
    """Formats the facts of `zerojax env` as two columns of text."""
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
    rows += [("kernels", _format_kernel(row)) for row in facts["kernels"]]
    rows.append(("zerojax plan", facts["plan"]))
    width = max(len(name) for name, _ in rows) + 2
    lines = [f"{name:<{width}}{printable(text)}" for name, text in rows]
    hidden = [f"* no GPU here, so JAX's error is hidden: {line}" for line in facts["hidden"]]
    return "\n".join(lines + hidden + [f"* {line}" for line in facts["advice"]])


def _format_kernel(row: dict[str, Any]) -> str:
    where = f"{row['what']} on {row['devices']} x {row['device']}"
    if row["choice"] is None:
        return (
            f"{where}: not used, because it failed in or ended an earlier start; zerojax tune "
            "tries it again"
        )
    ratio = row["seconds"] / row["other_seconds"]
    reference, other = row["ways"]
    return (
        f"{where}, {row['elements']:,} elements: {row['choice']}; {other} is {ratio:.2f} times as "
        f"fast as {reference} (measured {row['date']})"
    )


def _format_device(device: dict[str, Any]) -> str:
    memory = device["memory_bytes"]
    each = f", {memory / GIB:.0f} GiB each" if memory else ""
    pinned = ", pinned host memory" if device["pinned_host"] else ", no pinned host memory"
    return f"{device['number']} x {device['kind']} ({device['platform']}{each}{pinned})"
