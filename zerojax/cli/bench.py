"""`zerojax bench io PATH`: how fast the disk of PATH reads and writes buckets.

Knows the words of the command and its table; measuring is `zerojax.store.rates`.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

from zerojax.store.rates import measure_rates

_GB = 1e9
_MIB = 2**20


def run(args: argparse.Namespace) -> int:
    """Prints a line for each number of threads, and the best of them."""
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
            if not found:
                print(f"{folder}: GB/s (10^9 bytes), best of three passes over {args.size} MiB")
                print(f"{'threads':>7}  {'write':>7}  {'read':>7}  {'read + write':>12}")
            found.append(rates)
            print(
                f"{rates.num_threads:>7}  {rates.write / _GB:>7.2f}  {rates.read / _GB:>7.2f}  "
                f"{rates.both / _GB:>12.2f}",
                flush=True,
            )
    if not all(rates.is_direct for rates in found):
        print(
            "this file system refuses O_DIRECT: these are rates of the page cache as much as of a "
            "disk; another disk would tell more"
        )
    best = max(found, key=lambda rates: rates.both)
    plural = "" if best.num_threads == 1 else "s"
    print(f"best: {best.both / _GB:.2f} GB/s read + write, with {best.num_threads} thread{plural}")
    return 0
