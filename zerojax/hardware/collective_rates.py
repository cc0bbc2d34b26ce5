"""Measures collectives over all devices of all processes of a run, and checks their results.

Unlike `device_rates`, whose rates plans use, it times each call alone, as a step with one
collective would wait for it, and nothing is stored.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax.config.late_dataclasses import dataclass

MEASURED_BYTES = (2**20, 64 * 2**20)
"""Sizes of the measured arrays: one that is dominated by latency, one by bandwidth."""
PASSES = 10
_WARM_UP = 2
_AXIS = "all"
_DIFFERENT = 17

GATHER, REDUCE = "all-gather", "all-reduce"


@dataclass(frozen=True, kw_only=True)
class CollectiveTimes:
    """Times of one collective on this process.

    Attributes:
      kind: `GATHER` or `REDUCE`.
      num_bytes: size of the array that each device has afterwards.
      num_devices: number of devices that take part.
      seconds: median time of a call, from its start on this process until its result is there.
      longest: longest time of a call in seconds.
      is_right: whether the result on this process's devices has the expected values.
    """

    kind: str
    num_bytes: int
    num_devices: int
    seconds: float
    longest: float
    is_right: bool


def algorithm_bandwidth(num_bytes: int, seconds: float) -> float:
    """Returns bytes per second: the size of the result, divided by the time."""
    return num_bytes / seconds


def bus_bandwidth(kind: str, num_bytes: int, num_devices: int, seconds: float) -> float:
    """Returns the bytes per second that each device must send at least.

    In an all-gather a device sends its part to all others, which is (n - 1) / n of the result; in
    an all-reduce twice as much. So this number can be compared between numbers of devices, and with
    the rate of a link.

    Args:
      kind: `GATHER` or `REDUCE`.
      num_bytes: size of the result on one device.
      num_devices: n.
      seconds: time of a call.
    """
    share = (num_devices - 1) / num_devices * (2 if kind == REDUCE else 1)
    return share * algorithm_bandwidth(num_bytes, seconds)


def measure_collectives(
    sizes: Sequence[int] = MEASURED_BYTES,
    *,
    passes: int = PASSES,
    devices: Sequence[Any] | None = None,
    around: Callable[[str, int], Any] | None = None,
) -> Iterator[CollectiveTimes]:
    """Yields the times of an all-gather and an all-reduce of each size in float32.

    Every process must iterate equally far. Nothing is yielded for a single device.

    Args:
      sizes: numbers of bytes of the results.
      passes: number of timed calls; two more calls before them compile and connect.
      devices: devices that take part; None: all devices of all processes.
      around: function (kind, number of bytes) that returns a context manager, in which this
        collective is compiled, run and checked.
    """
    devices = jax.devices() if devices is None else devices
    if len(devices) < 2:
        return
    for num_bytes in sizes:
        for kind in (GATHER, REDUCE):
            if around is None:
                yield _measure(kind, num_bytes, devices, passes)
            else:
                with around(kind, num_bytes):
                    found = _measure(kind, num_bytes, devices, passes)
                yield found


def _measure(kind: str, num_bytes: int, devices: Sequence[Any], passes: int) -> CollectiveTimes:
    number = len(devices)
    mesh = Mesh(np.asarray(devices), (_AXIS,))
    row = max(num_bytes // 4 // (number if kind == GATHER else 1), 1)
    rows = np.broadcast_to(_values(number)[:, None], (number, row))  # takes no memory of its own
    x = jax.make_array_from_callback(
        rows.shape, NamedSharding(mesh, P(_AXIS)), lambda index: rows[index]
    )
    run = jax.jit(
        jax.shard_map(
            _gather if kind == GATHER else _reduce,
            mesh=mesh,
            in_specs=P(_AXIS),
            out_specs=P(),
            check_vma=False,
        )
    )
    for _ in range(_WARM_UP):
        jax.block_until_ready(run(x))
    times = []
    for _ in range(passes):
        began = time.perf_counter()
        result = jax.block_until_ready(run(x))
        times.append(time.perf_counter() - began)
    return CollectiveTimes(
        kind=kind,
        num_bytes=result.nbytes,
        num_devices=number,
        seconds=statistics.median(times),
        longest=max(times),
        is_right=all(
            bool((np.asarray(shard.data) == _expected(kind, number)).all())
            for shard in result.addressable_shards
        ),
    )


def _gather(x: jax.Array) -> jax.Array:
    return jax.lax.all_gather(x, _AXIS, tiled=True)


def _reduce(x: jax.Array) -> jax.Array:
    return jax.lax.psum(x, _AXIS)


def _values(number: int) -> np.ndarray:
    """Returns the value that fills each device's row; float32 holds also their sum exactly."""
    return np.arange(number, dtype=np.float32) % _DIFFERENT


def _expected(kind: str, number: int) -> np.ndarray:
    """Returns a column with the value of each row of the result."""
    values = _values(number)[:, None]
    return values if kind == GATHER else values.sum(0, keepdims=True)
