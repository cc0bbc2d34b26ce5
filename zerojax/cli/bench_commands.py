"""`zerojax bench`: measures disks, links and devices of this machine, and stores the rates for
plans."""

from __future__ import annotations

import argparse
import dataclasses
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from zerojax.cli.arguments import add_command
from zerojax.config.display import show
from zerojax.config.loader import user_path

if TYPE_CHECKING:
    from zerojax.checkpoint.store.rates import DiskRates
    from zerojax.hardware.gpus import Gpu
    from zerojax.hardware.local_devices import LinkRates

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

_BENCH_DEVICE = """\
Measures the first accelerator of this machine: a product of two matrices in bfloat16, and a copy
in device memory; with several accelerators also an all-gather among them.
`zerojax plan` uses these rates for the expected time of a step on such a card.

examples:
  zerojax bench device
  zerojax bench device --json"""


def add_bench(commands) -> None:
    """Adds the command `zerojax bench` to the parser, with its sub-commands."""
    bench = commands.add_parser(
        "bench", help="measure this machine", description="Measure this machine."
    )
    inner = bench.add_subparsers(metavar="COMMAND", required=True)
    parser = add_command(inner, "io", bench_io, "measure the bandwidth of a disk", _BENCH_IO)
    parser.add_argument("path", metavar="PATH", help="folder on the disk to measure")
    parser.option("--size MIB", "bytes to write (%(default)s MiB)", default=1024)
    parser.switch("--json", "print every number as JSON")
    parser = add_command(
        inner, "link", bench_link, "measure the bandwidth between host and device", _BENCH_LINK
    )
    parser.option("--size MIB", "size of an array (16, 128 and 1024)", type=int)
    parser.switch("--json", "print every number as JSON")
    parser = add_command(
        inner,
        "device",
        bench_device,
        "measure matrix products, device memory and links between devices",
        _BENCH_DEVICE,
    )
    parser.switch("--json", "print every number as JSON")


def bench_io(args: argparse.Namespace) -> int:
    """Runs `zerojax bench io`: prints the rates for each number of threads and the best, or all as
    JSON. Stores the best for plans, unless the file system refuses O_DIRECT."""
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
    """Runs `zerojax bench link`: prints the rates for each size, or all as JSON. Stores the best
    for plans, unless host and device share one memory."""
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


def bench_device(args: argparse.Namespace) -> int:
    """Runs `zerojax bench device`: prints each rate and its share of the published one, or all as
    JSON. Stores the rates for plans, or says why not."""
    import jax

    from zerojax.hardware import device_rates
    from zerojax.hardware.gpus import gpu_of_device

    device = jax.local_devices()[0]
    peers = [one for one in jax.local_devices() if one.device_kind == device.device_kind]
    sizes = device_rates.sizes_for(device)
    rates = {
        "product_tflops": device_rates.measure_product(sizes.product, device) / 1e12,
        "copy_gb_per_s": device_rates.measure_copy(sizes.copied, device) / _GB,
    }
    between = device_rates.measure_gather(sizes.gathered, peers)
    if between is not None:
        rates["node_gb_per_s"] = between / _GB
    card = gpu_of_device(device.device_kind)
    kept, why = _keep_device(device.device_kind, rates, card)
    if args.json:
        values = {
            "device_kind": device.device_kind,
            "num_devices": len(peers),
            "sizes": dataclasses.asdict(sizes),
            "rates": rates,
            "kept": None if kept is None else str(kept),
            "why_not_kept": why,
        }
        show(json.dumps(values, indent=2))
        return 0
    show(f"{device.device_kind}: mean of {device_rates.REPEATS} passes, median of three series")
    what = {
        "product_tflops": ("TFLOP/s", f"product of {sizes.product} x {sizes.product} in bfloat16"),
        "copy_gb_per_s": ("GB/s", f"{sizes.copied / _MIB:g} MiB read and written"),
        "node_gb_per_s": (
            "GB/s",
            f"sent by each of {len(peers)} devices in an all-gather of "
            f"{sizes.gathered / _MIB:g} MiB",
        ),
    }
    for key, rate in rates.items():
        unit, words = what[key]
        show(f"  {rate:>9.4g} {unit:<7}  {words}{_share(key, rate, card)}")
    if kept is not None:
        show(f"stored for `zerojax plan`: {device.device_kind}, in {kept}")
    elif why is not None:
        show(f"not stored: {why}")
    return 0


def _share(key: str, rate: float, card: Gpu | None) -> str:
    """Returns a phrase with the share of the published rate; "" if nothing is published."""
    from zerojax.hardware.gpus.card import published_rate

    published = None if card is None else published_rate(card, key)
    return f", {rate / published[1]:.2f} of the published rate" if published else ""


def _keep_device(
    device_kind: str, rates: dict[str, float], card: Gpu | None
) -> tuple[Path | None, str | None]:
    """Stores measured rates of a device.

    Args:
      device_kind: name that the driver reports.
      rates: {key of a card's section `measured`: rate}.
      card: its card; None if there is none.

    Returns:
      (path of the file, reason why nothing was stored); one of them is None. Both are if the cache
      is switched off or cannot be written.
    """
    from zerojax.hardware.gpus.card import CardError, check_measured
    from zerojax.hardware.machine_rates import MeasuredDevice, MeasuredNode, keep_rates

    if card is None:
        return None, f"no card describes {device_kind}, so no plan would use these rates"
    try:
        for key, rate in rates.items():
            check_measured(card, key, rate)
    except CardError as error:
        return None, str(error)
    kept = keep_rates(
        MeasuredDevice(
            device_kind=device_kind,
            product_flops=rates["product_tflops"] * 1e12,
            copy_bandwidth=rates["copy_gb_per_s"] * _GB,
        )
    )
    if "node_gb_per_s" in rates:
        bandwidth = rates["node_gb_per_s"] * _GB
        keep_rates(MeasuredNode(device_kind=device_kind, bandwidth=bandwidth))
    return kept, None
