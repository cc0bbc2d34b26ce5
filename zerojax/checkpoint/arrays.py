"""Stores named arrays with Orbax, and restores them with any sharding into separate memory.

No other module imports Orbax. Arrays are stored as one flat `{name: array}`, so a checkpoint does
not depend on container types, and any part of it can be read alone.

On CPU, `jax.device_put` and `jax.make_array_from_callback` use aligned NumPy memory without a copy
(JAX 0.10 and 0.12). Several CPU devices that hold copies of one shard would then share its memory,
and a step that receives these arrays as donated buffers would overwrite all copies.
`array_of_parts` and `with_own_memory` give every device its own memory.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from zerojax.checkpoint import packs
from zerojax.config.tree_types import Tree
from zerojax.tracing.trees import flatten_names

_ITEM = "state"

LAYER_BYTES = 512 << 10
"""Smallest size in bytes of one layer (one index of an array's first dimension) that is stored as
a chunk of its own. TensorStore reads whole chunks, so such a layer can be read without the others.
"""
Index = tuple[slice, ...]


_NOT_STORED = {"uint2": "uint8", "uint4": "uint8", "float8_e4m3": "float8_e4m3fn"}
"""{dtype that TensorStore's zarr3 driver cannot store: dtype that the error message recommends}."""


def check_storable(leaves: Mapping[str, Any]) -> None:
    """Raises if an array has a dtype that checkpoints cannot store.

    Args:
      leaves: {name: array or `ShapeDtypeStruct`}.

    Raises:
      TypeError: an array has an unsupported dtype. The message names a supported dtype.
    """
    for name, leaf in leaves.items():
        if (other := _NOT_STORED.get(str(leaf.dtype))) is not None:
            raise TypeError(
                f"{name!r} of the state is {leaf.dtype}, which checkpoints cannot store; use "
                f"{other}"
            )


def named_arrays(state: Tree) -> dict[str, jax.Array]:
    """Returns `{name: array}` of a state, after checking that every leaf can be stored.

    Raises:
      TypeError: the state has no leaf, or a leaf is not a live `jax.Array` of plain numbers.
    """
    leaves = flatten_names(state)
    if not leaves:
        raise TypeError(
            "the state has no arrays, so there is nothing to save; pass a tree of jax.Array"
        )
    for name, leaf in leaves.items():
        if not isinstance(leaf, jax.Array):
            raise TypeError(
                f"{name!r} of the state is a {type(leaf).__name__}; a checkpoint stores jax.Array;"
                " use jnp.asarray"
            )
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise TypeError(
                f"{name!r} of the state is a typed key ({leaf.dtype}); store"
                " jax.random.key_data(key)"
            )
        if leaf.is_deleted():
            raise TypeError(
                f"{name!r} of the state was donated to a computation, which freed its memory; "
                "save the state that the computation returned"
            )
    check_storable(leaves)
    return leaves


class Write(Protocol):
    """Handle of a write of arrays that continues in the background."""

    def result(self) -> None:
        """Waits until the arrays are on disk; raises the error if the write failed."""


def start_write(folder: Path, arrays: Mapping[str, jax.Array]) -> Write:
    """Starts to write arrays into `folder`, which must not exist yet.

    Arrays without elements are not written: `read` creates them from shape and dtype. Small arrays
    are stored in packs (`checkpoint.packs`: many small arrays stacked into one), and the table of
    the packs is written next to `folder`. The devices first copy the small arrays, at most
    `packs.DEVICE_BYTES` on each.

    Every process must call this function. It returns once the arrays may be donated. An accelerator
    has then copied them to the host. On CPU, Orbax holds a reference to the buffers, and the
    runtime gives a donating computation other memory (tested).
    """
    orbax, context = _orbax()
    written, table = packs.stack({name: x for name, x in arrays.items() if x.size})
    # Before any array: processes that wait for a save take a missing table as the sign that process
    # 0 has cancelled it (`checkpoint.saving`).
    if jax.process_index() == 0:
        table.save(folder.parent)
    options = context.array_options.saving
    # Large layers become chunks of their own, which can be read alone (README.md, 2026-11-22).
    options.scoped_storage_options_creator = lambda _, leaf: (
        options.StorageOptions(shard_axes=(0,)) if _in_layers(leaf) else None
    )
    with context:
        return orbax.save_async(folder, written, checkpointable_name=_ITEM)


def _in_layers(leaf: jax.Array) -> bool:
    shape = leaf.sharding.shard_shape(leaf.shape)
    return len(shape) > 1 and math.prod(shape[1:]) * leaf.dtype.itemsize >= LAYER_BYTES


def read(folder: Path, abstract: Mapping[str, Any], *, subset: bool) -> dict[str, jax.Array]:
    """Reads the arrays named in `abstract`, with its shardings. Every process must call it.

    Args:
      folder: folder that `start_write` wrote.
      abstract: {name: `ShapeDtypeStruct` with a sharding}.
      subset: True: the folder may hold arrays that `abstract` does not name; they are not read.
    """
    orbax, context = _orbax()
    context.pytree_options.loading.partial_load = subset
    stored = {name: leaf for name, leaf in abstract.items() if math.prod(leaf.shape)}
    with context:
        found = orbax.load(folder, stored, checkpointable_name=_ITEM) if stored else {}
    result = {name: with_own_memory(array) for name, array in found.items()}
    return result | {n: _empty(leaf) for n, leaf in abstract.items() if n not in stored}


def _empty(leaf: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
    """Returns an array without elements that has the shape, dtype and sharding of `leaf`."""
    shape = leaf.sharding.shard_shape(leaf.shape)
    return array_of_parts(leaf.shape, leaf.sharding, lambda _: np.empty(shape, leaf.dtype))


def read_on_host(folder: Path, name: str, leaf: jax.Array | jax.ShapeDtypeStruct) -> np.ndarray:
    """Reads one whole array into the host memory of every process. Every process must call it.

    Args:
      folder: folder that `start_write` wrote.
      name: name of the array.
      leaf: any object with the shape and dtype of the array.
    """
    if not math.prod(leaf.shape):
        return np.empty(leaf.shape, leaf.dtype)
    orbax, context = _orbax()
    context.pytree_options.loading.partial_load = True
    with context:
        like = {name: np.empty(leaf.shape, leaf.dtype)}
        return orbax.load(folder, like, checkpointable_name=_ITEM)[name]


def open_layers(folder: Path, name: str) -> Callable[[int], np.ndarray] | None:
    """Returns a function that reads one layer of a stored array: one index of its first dimension.

    A single process may call it.

    Args:
      folder: folder that `start_write` wrote.
      name: name of the array.

    Returns:
      A function from the index of a layer to its values. None if Orbax's files do not hold the
      array under its name, if it has fewer than two dimensions, or if a chunk of the stored array
      holds several layers: reading one layer would then cost as much as reading the whole array.
    """
    # Imported here because the import is slow and only exports need it.
    import tensorstore

    kvstore = {"driver": "ocdbt", "base": f"file://{folder / _ITEM}/", "path": f"{name}/"}
    try:
        array = tensorstore.open({"driver": "zarr3", "kvstore": kvstore}, open=True).result()
    except ValueError:  # NOT_FOUND: stored elsewhere, or written by an older Orbax
        return None
    chunk = array.chunk_layout.read_chunk.shape
    if array.ndim < 2 or chunk is None or chunk[0] != 1:
        return None
    return lambda index: array[index].read().result()


def _not_from_orbax(record: logging.LogRecord) -> bool:
    """Returns False for log records of Orbax, so that a logger drops them.

    Orbax raises an error for every failure and also logs a long traceback. zerojax reports the
    raised error in one sentence, so the traceback is dropped.
    `logging.getLogger("zerojax").setLevel("DEBUG")` shows the records.
    """
    if "/orbax/checkpoint/" not in record.pathname + record.getMessage():
        return True
    return logging.getLogger("zerojax").isEnabledFor(logging.DEBUG)


def _orbax() -> tuple[Any, Any]:
    """Returns the Orbax v1 module and a new Orbax context with the options of zerojax.

    The import takes longer than a second, so it is done here and not at the top of the module: runs
    without checkpoints and `zerojax --help` do not need it.
    """
    from orbax.checkpoint import v1 as orbax

    for name in ("absl", "asyncio"):  # asyncio logs tasks that Orbax leaves after a failure
        logging.getLogger(name).addFilter(_not_from_orbax)  # adds the same filter only once
    context = orbax.Context()
    # float32 masters and moments are close to random bits: compression saves 7 % of the bytes and
    # costs 4.7 times the processor time (README.md, 2026-11-21).
    context.array_options.saving.use_compression = False
    # Orbax measures its timeout with the wall clock. If the clock is set forward by more than the
    # default of 1200 s, the save fails (seen). The watchdog handles a save that hangs.
    context.async_options.timeout_secs = 10**9
    return orbax, context


def array_of_parts(
    shape: tuple[int, ...], sharding: jax.sharding.Sharding, part: Callable[[Index], np.ndarray]
) -> jax.Array:
    """Builds a global array from parts; every process provides the parts for its own devices.

    Args:
      shape: shape of the global array.
      sharding: sharding of the global array.
      part: function from a device's index in the array to the values there, in memory that nothing
        else uses. It is called once for each device of this process, one after the other.
    """
    kind = sharding.memory_kind
    placed = [
        jax.device_put(part(index), jax.sharding.SingleDeviceSharding(device, memory_kind=kind))
        for device, index in sharding.addressable_devices_indices_map(shape).items()
        if index is not None
    ]
    return jax.make_array_from_single_device_arrays(shape, sharding, placed)


def with_own_memory(array: jax.Array) -> jax.Array:
    """Returns the array, copied if devices of this process share memory for it."""
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
