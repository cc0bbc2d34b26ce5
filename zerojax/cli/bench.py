"""`zerojax bench io PATH`: read and write bandwidth of a disk."""

from __future__ import annotations

import argparse
import dataclasses
import json
import warnings
from collections.abc import Sequence
from pathlib import Path

from zerojax.checkpoint.store.rates import Rates, measure_rates
from zerojax.config.display import show
from zerojax.hardware.machine_rates import MeasuredDisk, disk_name, keep

_GB = 1e9
_MIB = 2**20


def run(args: argparse.Namespace) -> int:
    """Prints a line for each number of threads, and the best of them; or all as JSON."""
    folder = Path(args.path)
    if not folder.exists():
        raise FileNotFoundError(f"{folder}: no such folder; name one on the disk to be measured")
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder}: not a folder; name one on the disk to be measured")
    if args.size < 1:
        raise ValueError(f"--size {args.size}: at least 1 MiB is needed")
    found = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*refuses O_DIRECT")  # said below, once
        for rates in measure_rates(folder, num_bytes=args.size * _MIB):
            if not args.json:
                _print_row(rates, folder, args.size, is_first=not found)
            found.append(rates)
    best = max(found, key=lambda rates: rates.both)
    disk = MeasuredDisk(disk=disk_name(folder), write=best.write, read=best.read, both=best.both)
    kept = keep(disk) if best.is_direct else None
    if args.json:
        show(json.dumps(_as_dict(folder, found, best, disk.disk, kept), indent=2))
        return 0
    if not best.is_direct:
        show(
            "this file system refuses O_DIRECT: these are rates of the page cache as much as of a "
            "disk; another disk would tell more"
        )
    plural = "" if best.num_threads == 1 else "s"
    show(f"best: {best.both / _GB:.2f} GB/s read + write, with {best.num_threads} thread{plural}")
    if kept is not None:
        show(f"kept for plans: {disk.disk}, in {kept}")
    return 0


def _print_row(rates: Rates, folder: Path, size: int, *, is_first: bool) -> None:
    if is_first:
        show(f"{folder}: GB/s (10^9 bytes), best of three passes over {size} MiB")
        show(f"{'threads':>7}  {'write':>7}  {'read':>7}  {'read + write':>12}")
    show(
        f"{rates.num_threads:>7}  {rates.write / _GB:>7.2f}  {rates.read / _GB:>7.2f}  "
        f"{rates.both / _GB:>12.2f}",
        flush=True,
    )


def _as_dict(
    folder: Path, found: Sequence[Rates], best: Rates, disk: str, kept: Path | None
) -> dict[str, object]:
    """Rates in bytes per second."""
    return {
        "folder": str(folder),
        "disk": disk,
        "is_direct": best.is_direct,
        "rates": [dataclasses.asdict(rates) for rates in found],
        "best": dataclasses.asdict(best),
        "kept": None if kept is None else str(kept),
    }
