"""The order in which tokens of a sequence lie on the devices of an axis.

Contiguous: device i of P holds the i-th part of P. Zig-zag: of 2 P chunks device i holds chunks i
and 2 P - 1 - i, so that under a causal mask all devices have equally many keys to see
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
    """Into how many equal parts a sequence is cut."""
    return 2 * devices if order == "zigzag" else devices


def order_of_tokens(order: Order, tokens: int, devices: int) -> np.ndarray:
    """int64 [tokens]: the indices of tokens as they lie, the first device's first.

    Args:
      tokens: of the whole sequence, a multiple of `parts_of(order, devices)`.

    >>> order_of_tokens("zigzag", 8, 2).tolist()
    [0, 1, 6, 7, 2, 3, 4, 5]
    """
    if tokens % parts_of(order, devices):
        raise ValueError(
            f"{tokens} tokens do not divide into {parts_of(order, devices)} parts; use "
            f"{nearest_lengths(order, tokens, devices)}"
        )
    index = np.arange(tokens)
    if order == "contiguous":
        return index
    chunks = index.reshape(2 * devices, -1)
    pairs = [(i, 2 * devices - 1 - i) for i in range(devices)]
    return chunks[np.asarray(pairs)].reshape(-1)


def inverse_order(order: Order, tokens: int, devices: int) -> np.ndarray:
    """int64 [tokens]: where each token of the sequence lies.

    >>> there = order_of_tokens("zigzag", 8, 2)
    >>> there[inverse_order("zigzag", 8, 2)].tolist()
    [0, 1, 2, 3, 4, 5, 6, 7]
    """
    return np.argsort(order_of_tokens(order, tokens, devices))


def nearest_lengths(order: Order, tokens: int, devices: int) -> str:
    """The lengths next to `tokens` that can be cut, for people: "992 or 1008"."""
    unit = parts_of(order, devices)
    below, above = tokens // unit * unit, -(-tokens // unit) * unit
    return f"{below} or {above}" if below else f"{above}"


def index_of_chunk(chunk: jax.Array | int, size: int) -> jax.Array:
    """int32 [1, size]: the indices of the tokens of one chunk of a sequence."""
    return (chunk * size + jnp.arange(size, dtype=jnp.int32))[None]


def local_index(order: Order, tokens: int, axis: str) -> jax.Array:
    """int32 [1, tokens]: the indices, in the whole sequence, of the tokens of this device.

    Inside a `shard_map` that is manual over `axis`.

    Args:
      tokens: of this device.
    """
    me, devices = lax.axis_index(axis), lax.axis_size(axis)
    if order == "contiguous":
        return index_of_chunk(me, tokens)
    chunks = (index_of_chunk(chunk, tokens // 2) for chunk in (me, 2 * devices - 1 - me))
    return jnp.concatenate(list(chunks), axis=1)
