"""Rounds float32 to bfloat16 stochastically, with random bits from a counter.

Every function works on whole arrays and on a block inside a kernel, so constants are written as
whole blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Bits = Callable[[int], Any]
"""Function from a stream's number 0, 1, 2, ... to a uint32 block of numbers below 2^16. Streams are
independent."""


def seed_of(key: jax.Array) -> jax.Array:
    """Returns a kernel's seed for random bits, uint32 [2], from a key of `jax.random`.

    One seed gives every element of an array its own bits, but gives every array the same bits. Fold
    the index of the leaf, the step and, under `shard_map`, the shard into the key.
    """
    return jax.random.bits(key, (2,), jnp.uint32)


def bits_at(index: jax.Array, seed: tuple[jax.Array, jax.Array]) -> Bits:
    """Returns a function from a stream's number to random bits of each element.

    Args:
      index: uint32 block, position of each element in its leaf, modulo 2^32.
      seed: two words of `seed_of`, each a block of the shape of `index` or a scalar.
    """
    words: dict[int, Any] = {}

    def word(number: int) -> Any:
        if number not in words:
            if number == 0:
                words[0] = _mix(_mix(index ^ seed[0]) + seed[1])
            else:
                words[number] = _mix(word(number - 1) + _like(index, 0x9E3779B9))
        return words[number]

    def stream(number: int) -> Any:
        # Two streams share a word: a draw needs only 16 bits.
        drawn = word(number // 2)
        return drawn >> _like(index, 16) if number % 2 else drawn & _like(index, 0xFFFF)

    return stream


def round_to_bfloat16(x: jax.Array, bits: jax.Array) -> Any:
    """Rounds float32 stochastically to bfloat16 values (as float32) whose mean is `x`.

    Args:
      x: float32; values that bfloat16 represents exactly, infinities and NaN are unchanged.
      bits: random bits, uint32 below 2^16.
    """
    raw = lax.bitcast_convert_type(x, jnp.uint32)
    # A bfloat16 is the upper half of a float32; a carry out of the lower half rounds it up.
    kept = (raw + bits) & _like(raw, 0xFFFF0000)
    rounded = lax.bitcast_convert_type(kept, jnp.float32)
    # The mask could turn a NaN into an infinity, and a carry could turn it into -0.
    return jnp.where(jnp.abs(x) < jnp.full_like(x, jnp.inf), rounded, x)


def _mix(x: jax.Array) -> Any:
    """Applies MurmurHash3's finaliser, a bijection of uint32: every bit affects all others."""
    x = x ^ (x >> _like(x, 16))
    x = x * _like(x, 0x85EBCA6B)
    x = x ^ (x >> _like(x, 13))
    x = x * _like(x, 0xC2B2AE35)
    return x ^ (x >> _like(x, 16))


def _like(x: jax.Array, value: int) -> Any:
    return jnp.full_like(x, value, dtype=jnp.uint32)
