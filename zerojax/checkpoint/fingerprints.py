"""Fingerprints (two checksums per array) of a state, computed on the devices that hold it.

Every device sums its own shard in a program without communication, so this program can run while a
training step waits. The host adds the results of the devices.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from zerojax.checkpoint import fingerprint_math
from zerojax.checkpoint.fingerprint_math import Shape, Sums
from zerojax.checkpoint.store.boxes import Box

Parts = dict[str, dict[int, Sums]]
"""{array name: {device id: sums of the shard on that device}}."""


class PendingFingerprints:
    """Fingerprints of shards that the devices are still computing; the arrays may already be
    donated."""

    def __init__(self, leaves: Mapping[str, jax.Array]) -> None:
        """Starts the computation; returns immediately, except for arrays in host memory."""
        self._sums = {name: _start(leaf) for name, leaf in leaves.items()}

    def result(self) -> Parts:
        """Waits for the fingerprints of the shards on this process's devices, and returns them."""
        return {name: _by_device(sums) for name, sums in self._sums.items()}


def whole(leaf: jax.Array | jax.ShapeDtypeStruct, parts: Mapping[int, Sums]) -> Sums:
    """Returns the fingerprint of a whole array, computed from the fingerprints of its shards.

    Args:
      leaf: any object with the shape and the sharding of the array.
      parts: {device id: fingerprint of its shard}, for all devices of the array.
    """
    found: dict[Box, Sums] = {}
    for device, box in _boxes(leaf.sharding, leaf.shape).items():
        # Copies of one part count once.
        found.setdefault(box, parts[device])
    return fingerprint_math.add(*found.values())


def differing_copies(
    leaf: jax.Array | jax.ShapeDtypeStruct, parts: Mapping[int, Sums]
) -> tuple[int, int] | None:
    """Returns the ids of two devices whose copies of the same part of an array differ, or None."""
    first: dict[Box, int] = {}
    for device, box in _boxes(leaf.sharding, leaf.shape).items():
        other = first.setdefault(box, device)
        if parts[device] != parts[other]:
            return other, device
    return None


def _start(leaf: jax.Array) -> jax.Array | dict[int, Sums]:
    sharding = leaf.sharding
    if isinstance(sharding, NamedSharding | SingleDeviceSharding) and _on_device(sharding):
        return _program(sharding, leaf.shape)(leaf)
    boxes = _boxes(sharding, leaf.shape)
    return {
        shard.device.id: fingerprint_math.of_part(
            np.asarray(shard.data), boxes[shard.device.id][0], leaf.shape
        )
        for shard in leaf.addressable_shards
    }


def _by_device(sums: jax.Array | dict[int, Sums]) -> dict[int, Sums]:
    if isinstance(sums, dict):
        return sums
    found = {}
    for shard in sums.addressable_shards:
        first, second = np.asarray(shard.data).ravel()
        found[shard.device.id] = int(first), int(second)
    return found


def _on_device(sharding: Sharding) -> bool:
    device = next(iter(sharding.addressable_devices))
    return sharding.memory_kind in (None, device.default_memory().kind)


@functools.lru_cache(maxsize=4096)
def _program(sharding: NamedSharding | SingleDeviceSharding, shape: Shape) -> Any:
    """Builds a jitted function that fingerprints the shards of an array. It returns uint32
    [devices, 2], one row per device."""
    on_cpu = next(iter(sharding.device_set)).platform == "cpu"
    if isinstance(sharding, SingleDeviceSharding):
        return jax.jit(
            lambda x: fingerprint_math.traced(x, (0,) * x.ndim, shape, on_cpu=on_cpu)[None]
        )
    spec = sharding.spec

    def sum_shard(x: jax.Array) -> jax.Array:
        start: list[Any] = [0] * x.ndim
        for dim, axes in enumerate(spec):
            if axes:
                # 32 bits, like all positions.
                start[dim] = jax.lax.axis_index(axes).astype(jnp.uint32) * np.uint32(x.shape[dim])
        return fingerprint_math.traced(x, start, shape, on_cpu=on_cpu)[None]

    return jax.jit(
        jax.shard_map(
            sum_shard,
            mesh=sharding.mesh,
            in_specs=(spec,),
            out_specs=P(sharding.mesh.axis_names),
            check_vma=False,
        )
    )


@functools.lru_cache(maxsize=4096)
def _boxes(sharding: Sharding, shape: Shape) -> dict[int, Box]:
    """Returns {device id: its part of the array}, for the devices of all processes."""
    return {
        device.id: _box(index, shape)
        for device, index in sharding.devices_indices_map(shape).items()
        if index is not None
    }


def _box(index: tuple[slice, ...], shape: Shape) -> Box:
    ranges = [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]
    return tuple(low for low, _ in ranges), tuple(high - low for low, high in ranges)
