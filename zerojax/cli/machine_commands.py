"""`zerojax env` and `zerojax bench`: show packages and devices, and measure bandwidths."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import platform
import shutil
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zerojax
from zerojax.cli.arguments import add_command
from zerojax.config.display import printable, show
from zerojax.config.loader import user_path
from zerojax.runtime.memory import PINNED_LIMIT, least_room
from zerojax.runtime.plugin_errors import hidden_plugin_errors
from zerojax.runtime.redaction import redact

if TYPE_CHECKING:
    from zerojax.checkpoint.store.rates import DiskRates
    from zerojax.hardware.local_devices import LinkRates

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
_GB = 1e9
_MIB = 2**20
REMARK = "device memory is host memory here: this is the rate of a memory copy, not of a bus"

_BENCH_IO = """\
Writes and reads a file below PATH without the page cache, with 1 to 8 concurrent transfers, by the
code that also offloads state to a disk; then removes the file.

`zerojax plan` uses the best rate for offload to this disk.

examples:
  zerojax bench io runs
  zerojax bench io /mnt/nvme --size 8192"""

_BENCH_LINK = """\
Copies arrays between the first accelerator and pinned host memory: one
direction, the other, and both at once.
`zerojax plan` uses the best rate for offload on such a card.

examples:
  zerojax bench link
  zerojax bench link --size 2048 --json"""


def add_env(commands) -> None:
    """Adds the command `zerojax env` to the parser."""
    parser = add_command(
        commands, "env", show_environment, "show versions, devices, memory and missing packages"
    )
    parser.add_argument("--json", action="store_true", help="print it as JSON")


def add_bench(commands) -> None:
    """Adds the command `zerojax bench` to the parser, with its two sub-commands."""
    bench = commands.add_parser(
        "bench", help="measure this machine", description="Measure this machine."
    )
    inner = bench.add_subparsers(metavar="COMMAND", required=True)
    parser = add_command(inner, "io", bench_io, "measure the bandwidth of a disk", _BENCH_IO)
    parser.add_argument("path", metavar="PATH", help="folder on the disk to measure")
    parser.add_argument(
        "--size", type=int, default=1024, metavar="MIB", help="bytes to write (%(default)s MiB)"
    )
    parser.add_argument("--json", action="store_true", help="print every number as JSON")
    parser = add_command(
        inner, "link", bench_link, "measure the bandwidth between host and device", _BENCH_LINK
    )
    parser.add_argument(
        "--size", type=int, metavar="MIB", help="size of an array (16, 128 and 1024)"
    )
    parser.add_argument("--json", action="store_true", help="print every number as JSON")


# --- env ------------------------------------------------------------------------------------------


def show_environment(args: argparse.Namespace) -> int:
    """Runs `zerojax env`: prints a table, or JSON. Facts that cannot be determined are left out."""
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


def describe_devices() -> tuple[list[dict[str, Any]], str | None]:
    """Returns JAX's devices, grouped by kind, and the error message if JAX could not start."""
    import jax

    from zerojax.hardware.local_devices import has_pinned_host

    try:
        devices = jax.devices()
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


# --- bench ----------------------------------------------------------------------------------------


def bench_io(args: argparse.Namespace) -> int:
    """Runs `zerojax bench io`: prints the rates for each number of threads and the best, or all as
    JSON."""
    from zerojax.checkpoint.store.rates import measure_rates
    from zerojax.hardware.machine_rates import MeasuredDisk, disk_name, keep_rates

    folder = user_path(args.path)
    if not folder.exists():
        raise FileNotFoundError(f"{folder}: no such folder; name one on the disk to be measured")
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder}: not a folder; name one on the disk to be measured")
    if args.size < 1:
        raise ValueError(f"--size {args.size} is below 1 MiB; use 1 or more")
    found = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*O_DIRECT")  # reported once, after the passes
        for rates in measure_rates(folder, num_bytes=args.size * _MIB):
            if not args.json:
                _print_disk(rates, folder, args.size, is_first=not found)
            found.append(rates)
    best = max(found, key=lambda rates: rates.both)
    disk = MeasuredDisk(disk=disk_name(folder), write=best.write, read=best.read, both=best.both)
    kept = keep_rates(disk) if best.is_direct else None
    if args.json:
        show(json.dumps(_disk_dict(folder, found, best, disk.disk, kept), indent=2))
        return 0
    if not best.is_direct:
        show(
            "this file system refuses O_DIRECT: the rates include the page cache; measure another "
            "disk for its own rates"
        )
    plural = "" if best.num_threads == 1 else "s"
    show(f"best: {best.both / _GB:.2f} GB/s read + write, with {best.num_threads} thread{plural}")
    if kept is not None:
        show(f"stored for `zerojax plan`: {disk.disk}, in {kept}")
    return 0


def _print_disk(rates: DiskRates, folder: Path, size: int, *, is_first: bool) -> None:
    if is_first:
        show(f"{folder}: GB/s (10^9 bytes), best of three passes over {size} MiB")
        show(f"{'threads':>7}  {'write':>7}  {'read':>7}  {'read + write':>12}")
    show(
        f"{rates.num_threads:>7}  {rates.write / _GB:>7.2f}  {rates.read / _GB:>7.2f}  "
        f"{rates.both / _GB:>12.2f}",
        flush=True,
    )


def _disk_dict(
    folder: Path, found: Sequence[DiskRates], best: DiskRates, disk: str, kept: Path | None
) -> dict[str, object]:
    """Returns the measured rates of a disk, in bytes per second, as a JSON-compatible
    dictionary."""
    return {
        "folder": str(folder),
        "disk": disk,
        "is_direct": best.is_direct,
        "rates": [dataclasses.asdict(rates) for rates in found],
        "best": dataclasses.asdict(best),
        "kept": None if kept is None else str(kept),
    }


def bench_link(args: argparse.Namespace) -> int:
    """Runs `zerojax bench link`: prints the rates for each size and the stored result, or all as
    JSON."""
    import jax

    from zerojax.hardware.local_devices import SIZES, measure_link, shares_host_memory
    from zerojax.hardware.machine_rates import MeasuredLink, keep_rates

    if args.size is not None and args.size < 1:
        raise ValueError(f"--size {args.size} is below 1 MiB; use 1 or more")
    device = jax.local_devices()[0]
    is_one_memory = shares_host_memory(device)
    sizes = SIZES if args.size is None else (args.size * _MIB,)
    found = []
    for num_bytes in sizes:
        rates = measure_link(num_bytes=num_bytes, device=device)
        if not args.json:
            _print_link(rates, device.device_kind, is_first=not found)
        found.append(rates)
    best = max(found, key=lambda rates: rates.both)
    measured = MeasuredLink(
        device_kind=device.device_kind,
        to_device=best.to_device,
        to_host=best.to_host,
        both=best.both,
    )
    kept = None if is_one_memory else keep_rates(measured)
    if args.json:
        values = {
            "device_kind": device.device_kind,
            "is_one_memory": is_one_memory,
            "rates": [dataclasses.asdict(rates) for rates in found],
            "best": dataclasses.asdict(best),
            "kept": None if kept is None else str(kept),
        }
        show(json.dumps(values, indent=2))
        return 0
    if is_one_memory:
        show(REMARK)
    if kept is not None:
        show(f"stored for `zerojax plan`: {device.device_kind}, in {kept}")
    return 0


def _print_link(rates: LinkRates, device_kind: str, *, is_first: bool) -> None:
    if is_first:
        show(f"{device_kind} and pinned host memory: GB/s (10^9 bytes), best of five passes")
        show(f"{'MiB':>7}  {'to device':>9}  {'to host':>9}  {'both at once':>12}")
    show(
        f"{rates.num_bytes / _MIB:>7.0f}  {rates.to_device / _GB:>9.2f}  "
        f"{rates.to_host / _GB:>9.2f}  {rates.both / _GB:>12.2f}",
        flush=True,
    )
