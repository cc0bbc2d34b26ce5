"""Attention over a sequence that is split over devices: Ulysses, all-gather, ring.

All functions are called inside a `shard_map` that is manual over the axis, and compute the same
result as attention over the whole sequence. Ulysses and all-gather work with any implementation of
attention.
"""

from __future__ import annotations

from typing import Literal, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from zerojax.operators.context.order import Order, local_index, order_of_tokens

Way = Literal["ulysses", "ring", "allgather"]
WAYS: tuple[Way, ...] = ("ulysses", "ring", "allgather")
ORDERS: dict[Way, Order] = {"ulysses": "contiguous", "ring": "zigzag", "allgather": "contiguous"}
"""Order of the tokens of a sequence for each method."""
Pair = tuple[jax.Array, jax.Array]


class Attend(Protocol):
    """Attention over whole sequences: `zerojax.attention` with all other options bound."""

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        *,
        segments: Pair | None,
        positions: Pair | None,
    ) -> jax.Array: ...


def kv_repeats(heads: int, kv_heads: int, devices: int) -> int | None:
    """Returns how often Ulysses repeats each key/value head; None if devices do not divide heads.

    This is the smallest number for which the repeated heads are divisible by the devices, and
    divide the number of query heads.

    >>> kv_repeats(32, 8, 8), kv_repeats(32, 2, 8), kv_repeats(12, 3, 4), kv_repeats(12, 3, 8)
    (1, 4, 4, None)
    """
    if heads % devices:
        return None
    repeats = range(1, heads // kv_heads + 1)
    fits = (r for r in repeats if kv_heads * r % devices == 0 and heads % (kv_heads * r) == 0)
    # The last number always fits: it repeats heads to one for each query head.
    return next(fits)


def ulysses_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    axis: str,
    attend: Attend,
    segments: Pair | None = None,
    positions: Pair | None = None,
) -> jax.Array:
    """Computes attention with each device holding some heads over all tokens (arXiv:2309.14509).

    An all-to-all exchanges tokens for heads, and a second one reverses it. If the number of
    key/value heads is not divisible by the devices, each head is repeated `kv_repeats` times before
    it is sent. If the key/value heads divide the devices, this sends no extra bytes, because each
    device needs one whole head.

    Args:
      query: [batch, tokens of this device, heads, head_dim]; heads are divisible by the devices.
      key, value: [batch, tokens of this device, kv_heads, head_dim].
      axis: mesh axis over which the sequence is split, in contiguous order.
      attend: attention over whole sequences.
      segments, positions: pairs of integers [batch, tokens of this device], for queries and keys.

    Raises:
      ValueError: the number of heads is not divisible by the devices.
    """
    devices = lax.axis_size(axis)
    heads, kv_heads = query.shape[2], key.shape[2]
    repeats = kv_repeats(heads, kv_heads, devices)
    if repeats is None:
        raise ValueError(
            f"{heads} heads are not divisible by {devices} devices; use "
            "context_parallel='ring' or 'allgather'"
        )
    if repeats > 1:
        key, value = (jnp.repeat(x, repeats, axis=2) for x in (key, value))
    parts = (
        lax.all_to_all(x, axis, split_axis=2, concat_axis=1, tiled=True)
        for x in (query, key, value)
    )
    segments, positions = (_gather_both(pair, axis) for pair in (segments, positions))
    out = attend(*parts, segments=segments, positions=positions)
    return lax.all_to_all(out, axis, split_axis=1, concat_axis=2, tiled=True)


def allgather_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    axis: str,
    attend: Attend,
    order: Order = "contiguous",
    segments: Pair | None = None,
    positions: Pair | None = None,
) -> jax.Array:
    """Computes attention of this device's queries to gathered keys and values (arXiv:2407.21783).

    The gradients of keys and values are reduce-scattered.

    Args:
      query: [batch, tokens of this device, heads, head_dim].
      key, value: [batch, tokens of this device, kv_heads, head_dim].
      axis: mesh axis over which the sequence is split.
      attend: attention over whole sequences.
      order: order of the tokens on the axis.
      segments, positions: pairs of integers [batch, tokens of this device], for queries and keys.
        Without positions, `attend` gets the tokens' indices in the whole sequence.
    """
    key, value = (_gather(x, axis) for x in (key, value))
    if segments is not None:
        segments = segments[0], _gather(segments[1], axis)
    if positions is not None:
        positions = positions[0], _gather(positions[1], axis)
    # `attend` would number this device's queries from 0, and a causal mask would hide keys.
    else:
        of_keys = order_of_tokens(order, key.shape[1], lax.axis_size(axis))
        index = local_index(order, query.shape[1], axis), jnp.asarray(of_keys, jnp.int32)[None]
        shapes = (query.shape[:2], key.shape[:2])
        at_query, at_key = map(jnp.broadcast_to, index, shapes)
        positions = at_query, at_key
    return attend(query, key, value, segments=segments, positions=positions)


def _gather(array: jax.Array, axis: str) -> jax.Array:
    """Gathers [batch, tokens of this device, ...] -> [batch, tokens of all devices, ...]."""
    return lax.all_gather(array, axis, axis=1, tiled=True)


def _gather_both(pair: Pair | None, axis: str) -> Pair | None:
    if pair is None:
        return None
    if pair[0] is pair[1]:
        whole = _gather(pair[0], axis)
        return whole, whole
    return _gather(pair[0], axis), _gather(pair[1], axis)
