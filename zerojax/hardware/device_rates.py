"""Measures rates of this machine's devices: matrix products, device memory, and links between
devices.

Each rate is that of one large kernel or collective, which whole training steps come near
(`hardware.gpus.achieved`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax.config.late_dataclasses import dataclass

PRODUCT_SIZE, COPY_BYTES, GATHER_BYTES = 8192, 2**32, 2**30
SMALL_SIZE, SMALL_BYTES = 256, 2**18
"""Sizes for a CPU, whose rates no plan uses."""
REPEATS = 20


@dataclass(frozen=True, kw_only=True)
class DeviceSizes:
    """Sizes of what is measured.

    Attributes:
      product: number of rows and columns of the square matrices of a product.
      copied: number of bytes of the array that is read, and of the array that is written.
      gathered: number of bytes of the array that each device has after an all-gather.
    """

    product: int = PRODUCT_SIZE
    copied: int = COPY_BYTES
    gathered: int = GATHER_BYTES


def sizes_for(device: jax.Device) -> DeviceSizes:
    """Returns sizes that take at most half of a device's free memory; small ones for a CPU or a
    device that does not report its memory."""
    stats = device.memory_stats() or {}
    if device.platform == "cpu" or "bytes_limit" not in stats:
        return DeviceSizes(product=SMALL_SIZE, copied=SMALL_BYTES, gathered=SMALL_BYTES)
    free = (stats["bytes_limit"] - stats.get("bytes_in_use", 0)) // 2
    sizes = DeviceSizes()
    # Two results can be in memory at the same time: the earlier one and the one being computed.
    return DeviceSizes(
        product=_halved(sizes.product, lambda size: 4 * 2 * size * size <= free),
        copied=_halved(sizes.copied, lambda size: 3 * size <= free),
        gathered=_halved(sizes.gathered, lambda size: 3 * size <= free),
    )


def _halved(size: int, fits: Callable[[int], bool]) -> int:
    while size > 1 and not fits(size):
        size //= 2
    return size


def measure_product(
    size: int, device: jax.Device | None = None, *, repeats: int = REPEATS
) -> float:
    """Measures the FLOP per second of a product of random matrices [size, size] in bfloat16.

    Args:
      size: number of rows and columns.
      device: the device; None: the first device of this process.
      repeats: number of products in each of three series.
    """
    with jax.default_device(device):
        # Products of zeros need less power and would be faster.
        keys = jax.random.split(jax.random.key(0), 2)
        left, right = (jax.random.normal(key, (size, size), jnp.bfloat16) for key in keys)
    product = jax.jit(lambda a, b: a @ b)
    return 2 * size**3 / _seconds_of(lambda: product(left, right), repeats)


def measure_copy(
    num_bytes: int, device: jax.Device | None = None, *, repeats: int = REPEATS
) -> float:
    """Measures the bandwidth of device memory in bytes per second: float32 values are read, added
    to and written; both directions count.

    Args:
      num_bytes: size of the array; as many bytes are written.
      device: the device; None: the first device of this process.
      repeats: number of copies in each of three series.
    """
    with jax.default_device(device):
        x = jnp.arange(max(num_bytes // 4, 1), dtype=jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    return 2 * x.nbytes / _seconds_of(lambda: copy(x), repeats)


def measure_gather(
    num_bytes: int, devices: Sequence[Any], *, repeats: int = REPEATS
) -> float | None:
    """Measures the bandwidth between devices in bytes per second and direction, by an all-gather.

    A device counts as sending what it sends in a ring, as in the plan: all parts but one.

    Args:
      num_bytes: size of the array that each device has afterwards.
      devices: the devices of one machine.
      repeats: number of all-gathers in each of three series.

    Returns:
      The bandwidth of one device; None for a single device.
    """
    number = len(devices)
    if number < 2:
        return None
    mesh = Mesh(np.asarray(devices), ("data",))
    parts, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    each = max(num_bytes // (4 * number), 1)
    x = jax.device_put(jnp.zeros(each * number, jnp.float32), parts)
    gather = jax.jit(lambda x: x, out_shardings=whole)
    sent = (number - 1) * 4 * each
    return sent / _seconds_of(lambda: gather(x), repeats)


def _seconds_of(run: Callable[[], Any], repeats: int) -> float:
    """Returns seconds per call: median of three series of `repeats` calls that wait at the end."""
    for _ in range(3):
        jax.block_until_ready(run())
    stretches = []
    for _ in range(3):
        began = time.perf_counter()
        for _ in range(repeats - 1):
            run()
        jax.block_until_ready(run())  # a device runs them one after the other
        stretches.append((time.perf_counter() - began) / repeats)
    return statistics.median(stretches)
