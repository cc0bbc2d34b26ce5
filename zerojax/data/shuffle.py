"""Shuffles an epoch by a permutation that is computed for each position and never stored."""

from __future__ import annotations

import hashlib

import numpy as np

# Four rounds already give a pseudo-random permutation of the whole domain (Luby and Rackoff 1988).
# Eight are used, because the halves of a small domain have few bits, and the cost is small: 4096
# positions take well under a millisecond.
NUM_ROUNDS = 8
_MULTIPLIER_A = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_B = np.uint64(0x94D049BB133111EB)


def permute(positions: np.ndarray, size: int, key: tuple[int, ...]) -> np.ndarray:
    """Permutes positions of [0, size) by the permutation that `key` selects.

    A Feistel network permutes the range up to the smallest power of two >= size. It is applied
    repeatedly until the value is below `size` (Black and Rogaway 2002). This is a bijection for
    every size and key, with O(1) memory and on average less than two evaluations per position.

    >>> sorted(permute(np.arange(5), 5, key=(0, 1)).tolist())
    [0, 1, 2, 3, 4]

    Args:
      positions: integers in [0, size), any shape.
      size: number of elements, at least 1.
      key: integers that select the permutation, for example `(seed, epoch)`.

    Returns:
      Permuted positions, int64, with the shape of `positions`.

    Raises:
      ValueError: `size` is below 1, or a position is outside [0, size).
    """
    if size < 1:
        raise ValueError(f"size={size} is below 1 element; pass the number of elements to permute")
    values = np.asarray(positions)
    if values.size and (values.min() < 0 or values.max() >= size):
        raise ValueError(
            f"positions range from {values.min()} to {values.max()}, but must be from 0 to "
            f"{size - 1}; "
            "take them modulo the size"
        )
    shape = values.shape
    values = values.astype(np.uint64).reshape(-1)
    num_bits = (size - 1).bit_length()
    if num_bits == 0:
        return np.zeros(shape, np.int64)
    round_keys = derive_words(key)
    result = _encrypt(values, num_bits, round_keys)
    outside = np.flatnonzero(result >= np.uint64(size))
    while outside.size:
        walked = _encrypt(result[outside], num_bits, round_keys)
        result[outside] = walked
        outside = outside[walked >= np.uint64(size)]
    return result.astype(np.int64).reshape(shape)


def _encrypt(values: np.ndarray, num_bits: int, round_keys: list[np.uint64]) -> np.ndarray:
    """Applies the network once to uint64 [n] values below 2**num_bits; a bijection of this range.

    The halves may differ by one bit, so that any num_bits works: each round changes one half by a
    hash of the other, which is invertible for any widths.
    """
    low_bits = num_bits // 2
    shift = np.uint64(low_bits)
    low_mask = np.uint64((1 << low_bits) - 1)
    high_mask = np.uint64((1 << (num_bits - low_bits)) - 1)
    low, high = values & low_mask, values >> shift
    for number, round_key in enumerate(round_keys):
        if number % 2:
            low = low ^ (mix_bits(high, round_key) & low_mask)
        else:
            high = high ^ (mix_bits(low, round_key) & high_mask)
    return (high << shift) | low


def mix_bits(values: np.ndarray, round_key: np.uint64) -> np.ndarray:
    """Computes the finalizer of splitmix64 (Steele, Lea and Flood 2014) of `values + round_key`."""
    mixed = values + round_key
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MULTIPLIER_A
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MULTIPLIER_B
    return mixed ^ (mixed >> np.uint64(31))


def derive_words(key: tuple[int, ...]) -> list[np.uint64]:
    """Derives `NUM_ROUNDS` words that depend on every part of `key`."""
    # hashlib, unlike hash(), gives the same result on every machine, Python and process.
    text = ",".join(str(int(part)) for part in key)
    digest = hashlib.blake2b(text.encode(), digest_size=8 * NUM_ROUNDS).digest()
    return [np.uint64(word) for word in np.frombuffer(digest, "<u8")]
