"""Part "environment": the GPU, its driver, versions, and the rates of a matrix product and a copy.

MFU is given relative to the measured rate of the product and to the published peak.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.machine import installed_versions, load_average
from benchmarks.recording import Record, parse_arguments, write_record
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
    """Times a bf16 product of random matrices; zeros need less power and would be faster."""
    size = 256 if smoke else 8192
    keys = jax.random.split(jax.random.key(0), 2)
    left, right = (jax.random.normal(key, (size, size), jnp.bfloat16) for key in keys)
    product = jax.jit(lambda a, b: a @ b)
    seconds = _seconds_of(lambda: product(left, right), 2 if smoke else 20)
    return {"what": f"bf16 product of {size}", "TFLOP/s": 2 * size**3 / seconds / 1e12}


def _copy_row(smoke: bool) -> dict[str, Any]:
    """Times a copy of a float32 array, which reads and writes it once."""
    count = (1 << 16) if smoke else (1 << 30)
    x = jnp.arange(count, dtype=jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    seconds = _seconds_of(lambda: copy(x), 2 if smoke else 20)
    return {"what": f"read and write {4 * count} bytes", "TB/s": 8 * count / seconds / 1e12}


def _seconds_of(run: Callable[[], Any], repeats: int) -> float:
    """Returns seconds per call: median of three series of `repeats` calls that wait at the end."""
    for _ in range(3):
        jax.block_until_ready(run())
    stretches = []
    for _ in range(3):
        began = time.perf_counter()
        for _ in range(repeats):
            result = run()
        jax.block_until_ready(result)
        stretches.append((time.perf_counter() - began) / repeats)
    return statistics.median(stretches)


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
