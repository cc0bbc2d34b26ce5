"""Gradients on the wire in 8 or 4 bits: blocks of codes with a scale each, as one row of bytes.

A block of values v is stored as the nearest integers to v / scale, of at most 127 or 7 in
magnitude, with scale = largest magnitude / 127 or / 7, bfloat16, rounded up; so no value is off by
more than half a scale. A block with a NaN or an infinity has no finite value when it is decoded.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax

BLOCKS = {8: 256, 4: 64}
"""{bits: values that share a scale}. In blocks of 256 codes of 4 bits cost a small GPT 0.05 to 0.09
of its loss, in blocks of 64 less than 0.01 (three seeds)."""
_LARGEST = {8: 127, 4: 7}
_SCALE_BYTES = 2


@dataclasses.dataclass(frozen=True)
class GradientCodes:
    """How the gradient of one parameter is coded and summed: static and hashable.

    Attributes:
      bits: of a code, 8 or 4.
      in_node: neighbours among the shards that share a node: they sum first, and what is sent
        between nodes is coded again. 1: all send each other their parts at once.
    """

    bits: int
    in_node: int = 1

    def in_blocks(self, elements: int) -> int:
        """So many values, or as many as fill their last block."""
        block = BLOCKS[self.bits]
        return -(-elements // block) * block

    def num_bytes(self, elements: int) -> int:
        """Of a row of so many values, with its scales.

        >>> GradientCodes(8).num_bytes(1000), GradientCodes(4).num_bytes(128)
        (1032, 68)
        """
        blocks = self.in_blocks(elements) // BLOCKS[self.bits]
        return blocks * (BLOCKS[self.bits] * self.bits // 8 + _SCALE_BYTES)

    def encode(self, values: jax.Array) -> jax.Array:
        """[..., elements], floating point -> uint8 [..., num_bytes]."""
        block, largest = BLOCKS[self.bits], _LARGEST[self.bits]
        missing = self.in_blocks(values.shape[-1]) - values.shape[-1]
        widths = [(0, 0)] * (values.ndim - 1) + [(0, missing)]
        values = jnp.pad(values.astype(jnp.float32), widths)
        blocks = values.reshape(*values.shape[:-1], -1, block)
        scales = _rounded_up(jnp.max(jnp.abs(blocks), axis=-1) / largest)
        # Said on its own: a maximum on CPUs may pass over NaN (xla_cpu_enable_fast_min_max).
        scales = jnp.where(jnp.isfinite(blocks).all(axis=-1), scales, jnp.nan).astype(scales.dtype)
        wide = scales.astype(jnp.float32)[..., None]
        quotients = jnp.where(wide > 0, blocks / jnp.where(wide > 0, wide, 1.0), 0.0)
        codes = jnp.clip(jnp.round(quotients), -largest, largest).astype(jnp.int8)
        sent = _as_bytes(codes, self.bits)
        parts = (sent, lax.bitcast_convert_type(scales, jnp.uint8))
        lines = [part.reshape(*values.shape[:-1], -1) for part in parts]
        return jnp.concatenate(lines, axis=-1)

    def decode(self, sent: jax.Array, elements: int) -> jax.Array:
        """uint8 [..., num_bytes] -> float32 [..., elements]."""
        block = BLOCKS[self.bits]
        blocks = self.in_blocks(elements) // block
        size = block * self.bits // 8
        lead = sent.shape[:-1]
        codes = _from_bytes(sent[..., : blocks * size].reshape(*lead, blocks, size), self.bits)
        pairs = sent[..., blocks * size :].reshape(*lead, blocks, _SCALE_BYTES)
        scales = lax.bitcast_convert_type(pairs, jnp.bfloat16).astype(jnp.float32)
        # 0 times infinity is NaN: no value of such a block is taken for one.
        values = codes.astype(jnp.float32) * scales[..., None]
        return values.reshape(*lead, -1)[..., :elements]

    @property
    def bits_each(self) -> float:
        """Of a value in a long row, its part of the scale included.

        >>> GradientCodes(8).bits_each, GradientCodes(4).bits_each
        (8.0625, 4.25)
        """
        return self.bits + 8 * _SCALE_BYTES / BLOCKS[self.bits]


def bytes_sent(codes: GradientCodes, elements: int, shards: int) -> int:
    """By one of the devices that add up a gradient of so many values and keep a shard of it each.

    Each shard is a row. In two levels, m devices of each of n nodes, n rows go to each of the m - 1
    neighbours, and one row of their sum to each of the n - 1 other nodes.
    """
    row = codes.num_bytes(math.ceil(elements / shards))
    nodes, members = shards // codes.in_node, codes.in_node
    if members == 1 or nodes == 1:
        return (shards - 1) * row
    return (members - 1) * nodes * row + (nodes - 1) * row


def _rounded_up(scales: jax.Array) -> jax.Array:
    """bfloat16, not below but for a few units in float32's last place.

    So what a division is compiled to does not decide about scales that bfloat16 has exactly.
    """
    bits = lax.bitcast_convert_type(scales, jnp.uint32)
    up = (bits + jnp.uint32(0xFFF0)) & jnp.uint32(0xFFFF0000)
    return lax.bitcast_convert_type(up, jnp.float32).astype(jnp.bfloat16)


def _as_bytes(codes: jax.Array, bits: int) -> jax.Array:
    """int8 [..., block] -> uint8 [..., block * bits / 8]; of 4 bits the two halves of a block side
    by side."""
    if bits == 8:
        return lax.bitcast_convert_type(codes, jnp.uint8)
    half = codes.shape[-1] // 2
    low, high = ((part + 8).astype(jnp.uint8) for part in (codes[..., :half], codes[..., half:]))
    return low | (high << 4)


def _from_bytes(sent: jax.Array, bits: int) -> jax.Array:
    """The way back, int8."""
    if bits == 8:
        return lax.bitcast_convert_type(sent, jnp.int8)
    halves = (sent & 15, sent >> 4)
    return jnp.concatenate([half.astype(jnp.int8) - 8 for half in halves], axis=-1)
