"""Fingerprint of an array: two 32-bit sums that detect changed bits under any sharding.

Element i with bits b contributes m = mix(b xor key(i)), where `mix` is a bijection of 32-bit words.
A 64-bit element counts as two words. The first sum adds m, the second adds m times an odd weight of
i, both modulo 2^32. Sums of disjoint parts can be added, so the fingerprint of an array is the same
whether it is computed from shards, from slices in a file, or from the whole array.

Proof: xor and `mix` are bijections, so a change within one word changes its m. The first sum then
differs by a value that is not 0 modulo 2^32, and so does the second, because an odd weight has an
inverse. So every flip of a single bit is detected. Random damage to several words is missed in
about one case in 2^59: the first sums agree in one of 2^32, and then the second in about one of
2^27 if just two words differ, more rarely otherwise. Elements that swap places count as damage.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

Shape = tuple[int, ...]
Sums = tuple[int, int]
ZERO: Sums = (0, 0)

_MASK = 0xFFFFFFFF
_KEY = 0x9E3779B1  # odd: elements whose numbers differ modulo 2^32 have different keys
_CHUNK = 1 << 15  # elements: intermediate values stay in a core's cache
_FOUR_BITS = (ml_dtypes.int4, ml_dtypes.uint4, ml_dtypes.float4_e2m1fn)
_TWO_BITS = (ml_dtypes.int2, ml_dtypes.uint2)


def add(*sums: Sums) -> Sums:
    """Adds the fingerprints of disjoint parts to the fingerprint of their union."""
    return sum(one[0] for one in sums) & _MASK, sum(one[1] for one in sums) & _MASK


def as_text(sums: Sums) -> str:
    """Formats sums as 16 hexadecimal digits.

    >>> as_text((1, 255))
    '00000001000000ff'
    """
    return f"{sums[0]:08x}{sums[1]:08x}"


def of_array(values: np.ndarray) -> Sums:
    """Returns the fingerprint of a whole array in host memory."""
    return of_part(values, (0,) * values.ndim, values.shape)


def of_part(values: np.ndarray, start: Sequence[int], shape: Shape) -> Sums:
    """Returns the fingerprint of a part of an array in host memory, using a buffer of fixed size.

    Args:
      values: values of the part, which is a box (rectangular part) of the array.
      start: index of the part's first element in each dimension of the array.
      shape: shape of the whole array.
    """
    words = _num_words(values.dtype)
    # The words of an element count as one more dimension, the last.
    keys, weights = _factors((*shape, words))
    first = second = 0
    for index, begin in _chunks(values.shape):
        at = [zero + offset for zero, offset in zip(start, begin, strict=True)]
        bits = _bits(values[index], words)
        mixed = _mix(bits ^ _positions(bits.shape, [*at, 0], keys))
        # A chunk has so few words that their sum fits into 64 bits.
        first += int(mixed.sum(dtype=np.uint64))
        mixed *= _positions(bits.shape, [*at, 0], weights) + np.uint32(1)
        second += int(mixed.sum(dtype=np.uint64))
    return first & _MASK, second & _MASK


def traced(
    values: jax.Array, start: Sequence[Any], shape: Shape, *, on_cpu: bool = True
) -> jax.Array:
    """Computes the fingerprint of a part of an array inside a traced function, in one pass.

    Args:
      values: values of the part.
      start: index of the part's first element in each dimension of the array; may be traced.
      shape: shape of the whole array.
      on_cpu: True if the function is compiled for CPUs.

    Returns:
      The two sums, uint32 [2].
    """
    bits = _traced_bits(values)
    keys, weights = _factors((*shape, bits.shape[-1]))
    key, weight = jnp.zeros((), jnp.uint32), jnp.ones((), jnp.uint32)
    key, weight = (jnp.broadcast_to(x, bits.shape) for x in (key, weight))
    for dim, begin in enumerate([*start, 0]):
        position = jax.lax.broadcasted_iota(jnp.uint32, bits.shape, dim)
        position = position + jnp.asarray(begin).astype(jnp.uint32)
        key = key + position * jnp.uint32(keys[dim])
        weight = weight + position * jnp.uint32(weights[dim])
    mixed = _mix(bits ^ key)
    weighted = mixed * weight
    if on_cpu:
        # One reduction of two operands: 20 GB/s per core, while two reductions reach 2 GB/s.
        zero = jnp.uint32(0)
        sums = jax.lax.reduce(
            (mixed, weighted),
            (zero, zero),
            lambda one, other: (one[0] + other[0], one[1] + other[1]),
            tuple(range(bits.ndim)),
        )
    else:
        # XLA for GPUs fuses these two sums; with a reduction of two operands it stores `bits ^
        # key`.
        sums = jnp.sum(mixed, dtype=jnp.uint32), jnp.sum(weighted, dtype=jnp.uint32)
    return jnp.stack(sums)


def _mix(x: jax.Array | np.ndarray) -> Any:
    """Maps 32-bit words to 32-bit words bijectively (the finalizer of MurmurHash3)."""
    unsigned = np.uint32
    x = x ^ (x >> unsigned(16))
    x = x * unsigned(0x85EBCA6B)
    x = x ^ (x >> unsigned(13))
    x = x * unsigned(0xC2B2AE35)
    return x ^ (x >> unsigned(16))


@functools.lru_cache(maxsize=4096)
def _factors(shape: Shape) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the increments of (key, weight) for each dimension of an array.

    A key is the index of the element times an odd constant, so no two elements of an array with
    fewer than 2^32 elements share a key. Weights start at 1 and grow by unrelated even numbers.
    """
    keys, weights, stride = [], [], 1
    # From 1: `_mix` maps 0 to 0, and all elements along that dimension would have one weight.
    for number, size in enumerate(reversed(shape), 1):
        keys.append(stride * _KEY & _MASK)
        weights.append((_mix_int(number) << 1) & _MASK)
        stride *= size
    return tuple(reversed(keys)), tuple(reversed(weights))


def _mix_int(x: int) -> int:
    return int(_mix(np.full(1, x, np.uint32))[0])


def _chunks(shape: Shape) -> Iterator[tuple[tuple[Any, ...], Shape]]:
    """Yields boxes (rectangular parts) that cover an array: (index, start of the box). A box has at
    most `_CHUNK` elements."""
    if 0 in shape:
        return
    dim, rest = 0, math.prod(shape)
    while rest > _CHUNK:
        rest //= shape[dim]
        dim += 1
    if dim == 0:
        yield (...,), (0,) * len(shape)
        return
    split = dim - 1  # box: one index per dimension before, `count` of it, all after
    count = max(1, _CHUNK // rest)
    for outer in np.ndindex(*shape[:split]):
        for first in range(0, shape[split], count):
            index = (*(slice(i, i + 1) for i in outer), slice(first, first + count))
            yield index, (*outer, first, *(0 for _ in shape[dim:]))


def _positions(shape: Shape, start: Sequence[int], factors: Sequence[int]) -> np.ndarray:
    """Returns one number per element of a box: the sum over dimensions of index times factor.

    A box is a rectangular part of an array. Indices count from the start of the whole array.

    Args:
      shape: shape of the box.
      start: index of the box's first element in each dimension of the array.
      factors: factor of each dimension.

    Returns:
      uint32 of shape `shape`, modulo 2^32.
    """
    total = np.zeros((1,) * len(shape), np.uint32)
    for dim, size in enumerate(shape):
        # In 64 bits first: an index may be larger than 32 bits, and the cast takes it modulo 2^32.
        line = (np.arange(size, dtype=np.uint64) + np.uint64(start[dim])).astype(np.uint32)
        line *= np.uint32(factors[dim])
        total = total + line.reshape([-1 if d == dim else 1 for d in range(len(shape))])
    return total


def _num_words(dtype: np.dtype) -> int:
    return max(1, dtype.itemsize // 4)


def _bits(values: np.ndarray, words: int) -> np.ndarray:
    """Returns the bits of `values` as uint32 [..., words]; narrow elements are zero-extended."""
    size = values.dtype.itemsize
    flat = np.asarray(values, order="C").reshape(-1)
    raw = flat.view({1: np.uint8, 2: np.uint16}.get(size, np.uint32))
    kind = values.dtype.type
    # The host stores such an element in a whole byte, of which devices have only these bits.
    if kind in _FOUR_BITS or kind in _TWO_BITS:
        raw = raw & np.uint8(15 if kind in _FOUR_BITS else 3)
    return raw.reshape(*values.shape, words).astype(np.uint32, copy=False)


def _traced_bits(values: jax.Array) -> jax.Array:
    """Returns the bits of `values` as uint32 [..., words], like `_bits`, inside a traced
    function."""
    # `bitcast_convert_type` takes neither booleans nor complex numbers.
    if values.dtype == jnp.bool_:
        values = values.astype(jnp.uint8)
    if jnp.issubdtype(values.dtype, jnp.complexfloating):
        values = jnp.stack([values.real, values.imag], axis=-1)
        words = 2 * values.dtype.itemsize // 4
        return _traced_bits(values).reshape(*values.shape[:-1], words)
    size: Any = {1: jnp.uint8, 2: jnp.uint16}.get(values.dtype.itemsize, jnp.uint32)
    if values.dtype.type in _FOUR_BITS:
        size = jnp.uint4
    elif values.dtype.type in _TWO_BITS:
        size = jnp.uint2
    bits = jax.lax.bitcast_convert_type(values, size).astype(jnp.uint32)
    return bits if values.dtype.itemsize == 8 else bits[..., None]
