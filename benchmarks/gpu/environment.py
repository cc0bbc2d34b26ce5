"""Part "environment": the GPU, its driver, versions, and the rates of a matrix product and a copy.

MFU is given relative to the measured rate of the product and to the published peak.
"""

from __future__ import annotations

import shutil
import subprocess
from importlib import metadata
from typing import Any

import jax

from benchmarks.machine import installed_versions, load_average
from benchmarks.recording import Record, parse_arguments, write_record
from zerojax.hardware.device_rates import (
    COPY_BYTES,
    PRODUCT_SIZE,
    REPEATS,
    SMALL_BYTES,
    SMALL_SIZE,
    measure_copy,
    measure_product,
)
from zerojax.training.metrics.runlog import find_peak

QUERY = "name,driver_version,memory.total,clocks.max.sm,clocks.max.memory,power.limit"


def main(argv: list[str] | None = None) -> None:
    """Runs the benchmark and writes its record."""
    arguments = parse_arguments(__doc__ or "", argv)
    load_before = load_average()
    device = jax.devices()[0]
    rows = [_matmul_row(arguments.smoke), _copy_row(arguments.smoke)]
    peak = find_peak(device.device_kind)
    if peak is not None and peak.bf16:
        rows[0]["of_peak"] = rows[0]["TFLOP/s"] / peak.bf16
    stats = device.memory_stats() or {}
    versions = ", ".join(f"{name} {version}" for name, version in installed_versions().items())
    write_record(
        Record(name="environment", rows=rows, notes=[f"device: {device.device_kind}", versions]),
        arguments,
        load_before,
        device_kind=device.device_kind,
        num_devices=jax.device_count(),
        memory_limit_bytes=stats.get("bytes_limit"),
        nvidia_smi=_nvidia_smi(),
        libraries=_libraries(),
    )


def _matmul_row(smoke: bool) -> dict[str, Any]:
    size = SMALL_SIZE if smoke else PRODUCT_SIZE
    rate = measure_product(size, repeats=2 if smoke else REPEATS)
    return {"what": f"bf16 product of {size}", "TFLOP/s": rate / 1e12}


def _copy_row(smoke: bool) -> dict[str, Any]:
    size = SMALL_BYTES if smoke else COPY_BYTES
    rate = measure_copy(size, repeats=2 if smoke else REPEATS)
    return {"what": f"read and write {size} bytes", "TB/s": rate / 1e12}


def _libraries() -> dict[str, str]:
    """Returns the versions of NVIDIA's libraries that are installed as packages."""
    found = {}
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"] or ""
        if name.startswith(("nvidia-", "jax-cuda")):
            found[name] = distribution.version
    return dict(sorted(found.items()))


def _nvidia_smi() -> dict[str, str] | None:
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        return {"error": (result.stdout + result.stderr).strip()}
    first = result.stdout.strip().splitlines()[0]
    return dict(zip(QUERY.split(","), map(str.strip, first.split(",")), strict=True))


if __name__ == "__main__":
    main()
