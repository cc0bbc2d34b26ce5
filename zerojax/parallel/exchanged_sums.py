"""Sums of gradients by collective permutes, in place of a reduce-scatter."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from zerojax.parallel.deterministic_sums import TreeOrder, tree_sum
from zerojax.plan.mesh import DATA_AXES

Arrays = dict[str, Any]

MAX_PERMUTES = 3
"""Most permutes in which CPU processes exchange gradients; with more shards it is one all-to-all,
since every permute is in the program once per bucket."""


class Cut(Protocol):
    """What is known of an array that is cut; see `zerojax.parallel.collectives.LeafCollectives`."""

    @property
    def num_shards(self) -> int: ...
    @property
    def over(self) -> tuple[str, ...]: ...

    def piece(self, whole: jax.Array, index: jax.Array) -> jax.Array: ...
    def split_rows(self, whole: jax.Array) -> jax.Array: ...
    def shard_shape(self, whole_shape: Sequence[int]) -> tuple[int, ...]: ...


def exchange_pieces(wholes: Arrays, leaves: Mapping[str, Cut]) -> Arrays:
    """This device's shards of the sums of wholes, without a reduce-scatter; the same bytes.

    For CPU processes: gloo's reduce-scatter sends from a buffer that it already overwrites, so that
    pieces are wrong now and then (https://github.com/jax-ml/jax/issues/40830; seen with jax 0.10.2
    and 0.11.2), and for 14 MB between two processes it takes 14 ms of CPU time, an all-to-all 5 and
    permutes 3.

    Args:
      wholes: {name: whole value}, all of one dtype and over the same axes.
    """
    first = leaves[next(iter(wholes))]
    size, over = first.num_shards, first.over
    if size > MAX_PERMUTES + 1:
        return _exchange_at_once(wholes, leaves)
    rank = lax.axis_index(over)
    sums = {name: leaves[name].piece(whole, rank) for name, whole in wholes.items()}
    # In each round every device sends to the one so many places after it what that one owns.
    for shift in range(1, size):
        owner = lax.rem(rank + shift, size)
        pieces = [leaves[name].piece(whole, owner).reshape(-1) for name, whole in wholes.items()]
        around = [(sender, (sender + shift) % size) for sender in range(size)]
        received = lax.ppermute(jnp.concatenate(pieces), over, around)
        parts = cut_flat(received, {name: total.shape for name, total in sums.items()})
        sums = {name: total + parts[name] for name, total in sums.items()}
    return sums


def _exchange_at_once(wholes: Arrays, leaves: Mapping[str, Cut]) -> Arrays:
    rows = [leaves[name].split_rows(whole) for name, whole in wholes.items()]
    received = lax.all_to_all(jnp.concatenate(rows, axis=1), leaves[next(iter(wholes))].over, 0, 0)
    shapes = {name: leaves[name].shard_shape(whole.shape) for name, whole in wholes.items()}
    return cut_flat(jnp.sum(received, axis=0), shapes)


def cut_flat(flat: jax.Array, shapes: Mapping[str, Sequence[int]]) -> Arrays:
    """Arrays of these shapes from their elements, one after the other."""
    result, start = {}, 0
    for name, shape in shapes.items():
        size = math.prod(shape)
        result[name] = lax.slice_in_dim(flat, start, start + size).reshape(shape)
        start += size
    return result


def exchange_in_tree(
    wholes: Arrays, leaves: Mapping[str, Cut], order: TreeOrder, wire_dtype: Any
) -> Arrays:
    """The same sums in float32, added up in a fixed order: one all-to-all, the same bytes.

    Args:
      wholes: {name: whole value, any float dtype}, all over the same axes.
      order: which bit of the device's number is combined first.
      wire_dtype: in which pieces travel; sums are float32.
    """
    rows = [leaves[name].split_rows(whole.astype(wire_dtype)) for name, whole in wholes.items()]
    over = leaves[next(iter(wholes))].over
    received = lax.all_to_all(jnp.concatenate(rows, axis=1), over, 0, 0)
    shapes = {name: leaves[name].shard_shape(whole.shape) for name, whole in wholes.items()}
    return cut_flat(tree_sum(received.astype(jnp.float32), order), shapes)


def sum_in_tree(
    values: Arrays,
    order: TreeOrder,
    wire_dtype: Any = jnp.float32,
    over: tuple[str, ...] = DATA_AXES,
) -> Arrays:
    """Sums in float32 over mesh axes of values that every device has whole, in a fixed order.

    Every device adds up one part of all of them: an all-to-all and an all-gather, in place of an
    all-reduce, whose order depends on the number of devices.

    Args:
      values, order, wire_dtype: as in `exchange_in_tree`; what is gathered travels in float32.
      over: the mesh axes to sum over.
    """
    if not values:
        return {}
    size = math.prod(lax.axis_size(axis) for axis in over)
    flat = jnp.concatenate([x.reshape(-1).astype(wire_dtype) for x in values.values()])
    padded = jnp.pad(flat, (0, -flat.size % size))
    received = lax.all_to_all(padded.reshape(size, -1), over, 0, 0)
    summed = tree_sum(received.astype(jnp.float32), order)
    whole = lax.all_gather(summed, over, tiled=True)
    return cut_flat(whole, {name: value.shape for name, value in values.items()})
