"""Order of a sequence's tokens on the devices of a mesh axis.

Contiguous: device i of P holds the i-th of P parts. Zig-zag: device i holds chunks i and 2 P - 1 -
i of 2 P chunks, so that all devices have equally many visible keys under a causal mask
(arXiv:2407.21783, section 3.3.2).
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Order = Literal["contiguous", "zigzag"]


def parts_of(order: Order, devices: int) -> int:
    """Returns the number of equal parts into which an order divides a sequence."""
    return 2 * devices if order == "zigzag" else devices


def order_of_tokens(order: Order, tokens: int, devices: int) -> np.ndarray:
    """Returns the indices of tokens, int64 [tokens], in their order on the devices, device 0 first.

    Args:
      order: "contiguous" or "zigzag".
      tokens: number of tokens of the whole sequence, a multiple of `parts_of(order, devices)`.
      devices: number of devices of the axis.

    >>> order_of_tokens("zigzag", 8, 2).tolist()
    [0, 1, 6, 7, 2, 3, 4, 5]
    """
    if tokens % parts_of(order, devices):
        raise ValueError(
            f"{tokens} tokens are not divisible by {parts_of(order, devices)} parts; use "
            f"{nearest_lengths(order, tokens, devices)} tokens"
        )
    index = np.arange(tokens)
    if order == "contiguous":
        return index
    chunks = index.reshape(2 * devices, -1)
    pairs = [(i, 2 * devices - 1 - i) for i in range(devices)]
    return chunks[np.asarray(pairs)].reshape(-1)


def inverse_order(order: Order, tokens: int, devices: int) -> np.ndarray:
    """Returns the position of each token in the order on the devices, int64 [tokens].

    >>> there = order_of_tokens("zigzag", 8, 2)
    >>> there[inverse_order("zigzag", 8, 2)].tolist()
    [0, 1, 2, 3, 4, 5, 6, 7]
    """
    return np.argsort(order_of_tokens(order, tokens, devices))


def nearest_lengths(order: Order, tokens: int, devices: int) -> str:
    """Returns the possible sequence lengths next to `tokens`, as text: "992 or 1008"."""
    unit = parts_of(order, devices)
    below, above = tokens // unit * unit, -(-tokens // unit) * unit
    return f"{below} or {above}" if below else f"{above}"


def index_of_chunk(chunk: jax.Array | int, size: int) -> jax.Array:
    """Returns the indices of the tokens of one chunk of a sequence, int32 [1, size]."""
    return (chunk * size + jnp.arange(size, dtype=jnp.int32))[None]


def local_index(order: Order, tokens: int, axis: str) -> jax.Array:
    """Returns the indices, in the whole sequence, of this device's tokens: int32 [1, tokens].

    Must be called inside a `shard_map` that is manual over `axis`.

    Args:
      order: "contiguous" or "zigzag".
      tokens: number of tokens of this device.
      axis: mesh axis over which the sequence is split.
    """
    me, devices = lax.axis_index(axis), lax.axis_size(axis)
    if order == "contiguous":
        return index_of_chunk(me, tokens)
    chunks = (index_of_chunk(chunk, tokens // 2) for chunk in (me, 2 * devices - 1 - me))
    return jnp.concatenate(list(chunks), axis=1)
