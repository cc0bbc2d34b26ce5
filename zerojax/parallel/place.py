"""Initial parameter values, transferred to their shards from arrays or files.

What lies in files is read one layer at a time, only what this process's devices hold, each part
once. On accelerators a layer goes into its place in the shard on the device, so the host never
holds more than a layer of one parameter; a CPU device takes the memory that is read into.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from zerojax.models.protocol import LazyArray
from zerojax.plan.abstract_state import LayerRows

Ranges = tuple[tuple[int, int], ...]

_ALIGNMENT = 64
"""Bytes; a CPU device takes memory that begins at a multiple without copying it."""


def place(
    value: np.ndarray | LazyArray, stored: jax.ShapeDtypeStruct, rows: LayerRows | None
) -> jax.Array:
    """An array in its stored shards, cast and padded; each device receives its own part only.

    Args:
      value: of the true shape.
      stored: how it is stored, with its sharding.
      rows: see `plan.abstract_state.LayerRows`.
    """
    if isinstance(value, LazyArray):
        return _place_lazy(value, stored, rows)
    if rows is not None:
        layers = np.asarray(rows.rows)
        in_order, value = value, np.zeros((len(layers), *value.shape[1:]), value.dtype)
        value[layers >= 0] = in_order[layers[layers >= 0]]
    widths = [(0, new - old) for new, old in zip(stored.shape, value.shape, strict=True)]
    padded = np.pad(value, widths) if value.shape != stored.shape else value
    cast = padded.astype(stored.dtype, copy=False)
    return jax.make_array_from_callback(stored.shape, stored.sharding, lambda index: cast[index])


def _place_lazy(
    value: LazyArray, stored: jax.ShapeDtypeStruct, rows: LayerRows | None
) -> jax.Array:
    placed: list[jax.Array] = []
    for shard, devices in _devices_of_shards(stored).items():
        blocks = _blocks(value, shard, rows)
        if devices[0].platform == "cpu":
            placed += _on_cpu(blocks, shard, stored.dtype, devices)
        else:
            placed += fill_on_devices(blocks, shard, stored.dtype, devices)
    return jax.make_array_from_single_device_arrays(stored.shape, stored.sharding, placed)


def _devices_of_shards(stored: jax.ShapeDtypeStruct) -> Mapping[Ranges, list[Any]]:
    """The devices of this process that hold each part."""
    found: dict[Ranges, list[Any]] = {}
    places = stored.sharding.addressable_devices_indices_map(stored.shape)
    for device, index in places.items():
        assert index is not None
        sizes = zip(index, stored.shape, strict=True)
        shard = tuple(part.indices(size)[:2] for part, size in sizes)
        found.setdefault(shard, []).append(device)
    return found


def _blocks(
    value: LazyArray, shard: Ranges, rows: LayerRows | None
) -> Iterator[tuple[int, np.ndarray]]:
    """(row within the shard, values from there on) of what is no padding."""
    inside = [
        (start, min(stop, size)) for (start, stop), size in zip(shard, value.shape, strict=True)
    ]
    if rows is not None:
        inside[0] = shard[0]
    if any(stop <= start for start, stop in inside):
        return
    if not value.is_stacked:
        assert rows is None, "a pipeline's parameters are stacks"
        yield 0, value.read(inside)
        return
    for row in range(*inside[0]):
        layer = row if rows is None else rows.rows[row]
        if layer >= 0:
            yield row - shard[0][0], value.read([(layer, layer + 1), *inside[1:]])


def _shape_of(shard: Ranges) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in shard)


def _on_cpu(
    blocks: Iterator[tuple[int, np.ndarray]], shard: Ranges, dtype: Any, devices: list[Any]
) -> list[jax.Array]:
    """The part on each device, in memory of its own: the next step writes over it."""
    shape = _shape_of(shard)
    buffers = [_aligned_zeros(shape, np.dtype(dtype)) for _ in devices]
    for row, block in blocks:
        for buffer in buffers:
            index = (slice(row, row + block.shape[0]), *map(slice, block.shape[1:]))
            buffer[index if shape else ...] = block
    return [jax.device_put(buffer, device) for buffer, device in zip(buffers, devices, strict=True)]


def _aligned_zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    memory = np.zeros(count + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + count].view(dtype).reshape(shape)


def fill_on_devices(
    blocks: Iterator[tuple[int, np.ndarray]], shard: Ranges, dtype: Any, devices: list[Any]
) -> list[jax.Array]:
    """The part on each device, put together there."""
    shape = _shape_of(shard)
    filled = [_zeros(shape, np.dtype(dtype), device) for device in devices]
    for row, block in blocks:
        for number, device in enumerate(devices):
            there = jax.device_put(block, device)
            filled[number] = _fill(filled[number], there, np.int32(row))
        jax.block_until_ready(filled)  # the host's memory of this block is free again
    return filled


def _zeros(shape: tuple[int, ...], dtype: np.dtype, device: Any) -> jax.Array:
    sharding = jax.sharding.SingleDeviceSharding(device)
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)()


@functools.partial(jax.jit, donate_argnums=0)
def _fill(shard: jax.Array, block: jax.Array, row: jax.Array) -> jax.Array:
    """The shard with a block in its rows from `row` on, in place."""
    start = [row, *[jnp.int32(0)] * (shard.ndim - 1)] if shard.ndim else []
    return lax.dynamic_update_slice(shard, block.astype(shard.dtype), start)
