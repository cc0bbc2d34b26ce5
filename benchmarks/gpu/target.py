"""Part "target": the GPU's own description for the compiler, compared with zerojax's.

Differences limit the accuracy of a forecast for this GPU that another machine makes.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import jaxlib.xla_client as xla_client

from benchmarks.machine import load_average
from benchmarks.recording import Goal, Record, parse_arguments, write_record
from zerojax.hardware.gpus import find_gpu, target_text

# Fields that determine tiling, memory and schedules; names and versions may differ.
DECISIVE = (
    "core_count",
    "shared_memory_per_block_optin",
    "shared_memory_per_core",
    "registers_per_core_limit",
    "registers_per_block_limit",
    "threads_per_core_limit",
    "l2_cache_size",
    "memory_bandwidth",
    "device_memory_size",
    "clock_rate_ghz",
    "major",
    "minor",
)
TOLERANCE = 0.01


def main(argv: list[str] | None = None) -> None:
    """Compares and writes the record."""
    arguments = parse_arguments(__doc__ or "", argv)
    load_before = load_average()
    device = jax.devices()[0]
    write_record(measure(device), arguments, load_before, device_kind=device.device_kind)


def measure(device: Any) -> Record:
    """Returns one row per field of either description."""
    if device.platform not in ("gpu", "cuda"):
        note = f"{device.platform}: there is no GPU description to compare"
        return Record(name="target", rows=[], notes=[note])
    own_text = xla_client.get_topology_for_devices([device]).target_config
    own = read_fields(own_text)
    shipped = read_fields(target_text(find_gpu(device.device_kind)))
    rows = [
        {"field": name, "device": own.get(name), "shipped": shipped.get(name)}
        for name in sorted(own.keys() | shipped.keys())
        if own.get(name) != shipped.get(name) or name in DECISIVE
    ]
    off = [name for name in DECISIVE if _differ(own.get(name), shipped.get(name))]
    goal = Goal(name="decisive fields that differ by more than 1 %", value=len(off), limit=0)
    return Record(
        name="target", rows=rows, goals=[goal], notes=[f"differ: {', '.join(off)}"] * bool(off)
    )


def read_fields(text: str) -> dict[str, str]:
    """Returns simple fields of a text proto by name; for a repeated name, the first.

    >>> read_fields('info { core_count: 132 name: "H200" }')
    {'core_count': '132', 'name': 'H200'}
    """
    found: dict[str, str] = {}
    for name, quoted, plain in re.findall(r'(\w+):\s*(?:"([^"]*)"|([^\s}]+))', text):
        found.setdefault(name, quoted or plain)
    return found


def _differ(one: str | None, other: str | None) -> bool:
    if one is None or other is None:
        return (one or "0") != (other or "0")
    try:
        a, b = float(one), float(other)
    except ValueError:
        return one != other
    return abs(a - b) > TOLERANCE * max(abs(a), abs(b))


if __name__ == "__main__":
    main()
