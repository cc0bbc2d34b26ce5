"""Conversion of state arrays between shapes, row orders and shardings."""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax.sharding import NamedSharding

from zerojax.abstract_state import LayerRows, fit


def convert(tree: Any, abstract: Any, rows: Any = None, *, to_rows: bool = False) -> Any:
    """`tree` with `abstract`'s shapes (cut, or padded with zeros) and shardings.

    Everything that has to change on one set of devices changes in one program: on CPU several
    programs with collectives that do not wait for each other can block each other for good.

    Args:
      rows: `LayerRows` of the leaves whose rows change places, None for the others; or just None.
      to_rows: from layers in order to rows, or back.
    """
    leaves, structure = jax.tree.flatten(tree)
    targets = structure.flatten_up_to(abstract)
    moves = [None] * len(leaves) if rows is None else structure.flatten_up_to(rows)
    changing, result = [], list(leaves)
    for index, (leaf, target, move) in enumerate(zip(leaves, targets, moves, strict=True)):
        if not isinstance(leaf, jax.Array):  # see `offload.disk_saving`
            result[index] = target if isinstance(leaf, jax.ShapeDtypeStruct) else leaf
            continue
        lies: Any = leaf.sharding
        same = leaf.shape == target.shape and lies == target.sharding
        if same and move is None:
            continue
        moved = _devices(lies) != _devices(target.sharding)
        if moved or (move is None and _same_shards(leaf, target)):
            # Between sets of devices, or between the memories of one: one after the other, since
            # JAX 0.10 does not do both at once.
            kind = target.sharding.memory_kind
            if leaf.sharding.memory_kind != kind:
                leaf = jax.device_put(leaf, leaf.sharding.with_memory_kind(kind))
            result[index] = jax.device_put(leaf, target.sharding)
        else:
            changing.append(index)
    if changing:
        wanted = tuple((targets[i].shape, targets[i].sharding, moves[i]) for i in changing)
        change = _resizer(wanted, to_rows)
        for index, leaf in zip(changing, change([leaves[i] for i in changing]), strict=True):
            result[index] = leaf
    return structure.unflatten(result)


def _same_shards(leaf: Any, target: Any) -> bool:
    """Whether two arrays on the same devices differ in no more than the memory that they lie in."""
    return leaf.shape == target.shape and leaf.sharding.spec == target.sharding.spec


def _devices(sharding: NamedSharding) -> list[jax.Device]:
    """The devices of a sharding in the order of its mesh."""
    return list(sharding.mesh.devices.flat)


@functools.lru_cache(maxsize=16)
def _resizer(
    wanted: tuple[tuple[tuple[int, ...], NamedSharding, LayerRows | None], ...], to_rows: bool
) -> Any:
    """A jitted function of arrays that gives them new shapes and shardings."""

    def resize(arrays: list[jax.Array]) -> list[jax.Array]:
        return [
            fit(jax.device_put(x, jax.memory.Space.Device), shape, rows, to_rows=to_rows)
            for x, (shape, _, rows) in zip(arrays, wanted, strict=True)
        ]

    return jax.jit(resize, out_shardings=[sharding for _, sharding, _ in wanted])
