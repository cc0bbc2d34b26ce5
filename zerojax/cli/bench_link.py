"""`zerojax bench link`: bandwidth between this machine's accelerator and its host."""

from __future__ import annotations

import argparse
import dataclasses
import json

import jax

from zerojax.config.display import show
from zerojax.hardware.link_rates import SIZES, LinkRates, measure_link, shares_host_memory
from zerojax.hardware.machine_rates import MeasuredLink, keep

_GB = 1e9
_MIB = 2**20
REMARK = "host and device memory are one memory here, so this is how fast it is copied, not a link"


def run(args: argparse.Namespace) -> int:
    """Prints a line for each size, and what is kept of them; or all as JSON."""
    if args.size is not None and args.size < 1:
        raise ValueError(f"--size {args.size}: at least 1 MiB is needed")
    device = jax.local_devices()[0]
    is_one_memory = shares_host_memory(device)
    sizes = SIZES if args.size is None else (args.size * _MIB,)
    found = []
    for num_bytes in sizes:
        rates = measure_link(num_bytes=num_bytes, device=device)
        if not args.json:
            _print_row(rates, device.device_kind, is_first=not found)
        found.append(rates)
    best = max(found, key=lambda rates: rates.both)
    measured = MeasuredLink(
        device_kind=device.device_kind,
        to_device=best.to_device,
        to_host=best.to_host,
        both=best.both,
    )
    kept = None if is_one_memory else keep(measured)
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
        show(f"kept for plans: {device.device_kind}, in {kept}")
    return 0


def _print_row(rates: LinkRates, device_kind: str, *, is_first: bool) -> None:
    if is_first:
        show(f"{device_kind} and pinned host memory: GB/s (10^9 bytes), best of five passes")
        show(f"{'MiB':>7}  {'to device':>9}  {'to host':>9}  {'both at once':>12}")
    show(
        f"{rates.num_bytes / _MIB:>7.0f}  {rates.to_device / _GB:>9.2f}  "
        f"{rates.to_host / _GB:>9.2f}  {rates.both / _GB:>12.2f}",
        flush=True,
    )
