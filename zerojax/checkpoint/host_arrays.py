"""Global arrays from per-device host arrays, without two devices sharing memory.

A CPU device takes aligned NumPy memory as it is, without a copy (JAX 0.10 and 0.12). Devices with
copies of one shard would then have one memory, and a step that is given these arrays to write over
would write over each other's. `jax.device_put` and `jax.make_array_from_callback` do that.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np

Index = tuple[slice, ...]


def array_of_parts(
    shape: tuple[int, ...], sharding: jax.sharding.Sharding, part: Callable[[Index], np.ndarray]
) -> jax.Array:
    """A global array; every process gives the parts of its own devices.

    Args:
      shape: of the whole array.
      sharding: of the result.
      part: index of a device's part -> its values, in memory that nobody else has. Called once for
        each device of this process, one after the other.
    """
    kind = sharding.memory_kind
    placed = [
        jax.device_put(part(index), jax.sharding.SingleDeviceSharding(device, memory_kind=kind))
        for device, index in sharding.addressable_devices_indices_map(shape).items()
        if index is not None
    ]
    return jax.make_array_from_single_device_arrays(shape, sharding, placed)


def with_own_memory(array: jax.Array) -> jax.Array:
    """The array, copied where devices of this process have one memory in common."""
    shards = array.addressable_shards
    if len(shards) < 2 or shards[0].device.platform != "cpu":
        return array
    if len({shard.data.unsafe_buffer_pointer() for shard in shards}) == len(shards):
        return array
    values = {shard.device: shard.data for shard in shards}
    kind = array.sharding.memory_kind
    placed = [
        jax.device_put(
            np.array(data, copy=True),
            jax.sharding.SingleDeviceSharding(device, memory_kind=kind),
        )
        for device, data in values.items()
    ]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, placed)
