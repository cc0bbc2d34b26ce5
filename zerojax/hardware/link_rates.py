"""Measured bandwidth between an accelerator's memory and pinned host memory."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from zerojax.config.mesh import HOST_KIND

SIZES = (16 * 2**20, 128 * 2**20, 1024 * 2**20)
"""Bytes of one array: a slice of a small layer, of a large one, and what the link does at best."""
MISSING = "this device offers no pinned host memory, so nothing can be offloaded to it"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinkRates:
    """What the link did with one array each way, bytes per second; the best of some passes.

    Attributes:
      num_bytes: of the array.
      to_device: from pinned host memory; to_host: to it.
      both: both directions at once, their bytes together.
    """

    num_bytes: int
    to_device: float
    to_host: float
    both: float


def has_pinned_host(device: Any) -> bool:
    """Whether a device reaches pinned host memory."""
    return HOST_KIND in {memory.kind for memory in device.addressable_memories()}


def shares_host_memory(device: Any) -> bool:
    """Whether its memory is the host's own, so that nothing crosses a link."""
    return device.platform == "cpu"


def measure_link(*, num_bytes: int = 2**30, repeats: int = 5, device: Any = None) -> LinkRates:
    """Copies an array of `num_bytes` between a device and pinned host memory.

    Args:
      num_bytes: of each array; three of them are on the device and two in host memory at a time.
      repeats: passes of which the best counts; one before them is not timed, since it makes the
        host's pages.
      device: None takes the first one of this process.

    Raises:
      RuntimeError: the device has no pinned host memory.
    """
    device = jax.local_devices()[0] if device is None else device
    if not has_pinned_host(device):
        raise RuntimeError(f"{device}: {MISSING}")
    near = SingleDeviceSharding(device, memory_kind="device")
    far = SingleDeviceSharding(device, memory_kind=HOST_KIND)
    number = max(num_bytes // 4, 1)
    inside = jax.device_put(jnp.zeros(number, jnp.float32), near)
    outside = jax.device_put(inside, far)
    jax.block_until_ready((inside, outside))

    def to_device() -> Sequence[jax.Array]:
        return [jax.device_put(outside, near)]

    def to_host() -> Sequence[jax.Array]:
        return [jax.device_put(inside, far)]

    def both() -> Sequence[jax.Array]:
        return [*to_device(), *to_host()]

    moved = inside.nbytes
    return LinkRates(
        num_bytes=moved,
        to_device=moved / _best_seconds(to_device, repeats),
        to_host=moved / _best_seconds(to_host, repeats),
        both=2 * moved / _best_seconds(both, repeats),
    )


def _best_seconds(move: Callable[[], Sequence[jax.Array]], repeats: int) -> float:
    """The least time from the call to arrays that are there; what came is freed in between."""
    jax.block_until_ready(move())
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(move())
        best = min(best, time.perf_counter() - start)
    return best
