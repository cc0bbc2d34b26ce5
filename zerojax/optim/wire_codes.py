"""Quantizes gradients in collectives to 8 or 4 bits: blocks of codes with one scale each, as bytes.

Each value of a block is stored as the integer nearest to value / scale, of magnitude at most 127 or
7. The scale is the block's largest magnitude / 127 or / 7, as bfloat16, rounded up, so the error of
a value is at most half a scale. A block with a NaN or an infinity decodes to no finite value.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from zerojax.config.late_dataclasses import dataclass

BLOCKS = {8: 256, 4: 64}
"""{bits of a code: number of values that share a scale}. With 4-bit codes, blocks of 256 increase
the loss of a small GPT by 0.05 to 0.09, blocks of 64 by less than 0.01 (three seeds)."""
_LARGEST = {8: 127, 4: 7}
_SCALE_BYTES = 2


@dataclass(frozen=True)
class WireCodes:
    """Quantization and summation of one parameter's gradient; static and hashable.

    Attributes:
      bits: number of bits of a code, 8 or 4.
      in_node: number of consecutive shards on one node. Gradients are summed within the node first,
        and the sum is encoded again and sent between nodes. 1: all devices exchange directly.
    """

    bits: int
    in_node: int = 1

    def in_blocks(self, elements: int) -> int:
        """Rounds the number of values up to whole blocks."""
        block = BLOCKS[self.bits]
        return -(-elements // block) * block

    def num_bytes(self, elements: int) -> int:
        """Returns the number of bytes of `elements` values after encoding, with their scales.

        >>> WireCodes(8).num_bytes(1000), WireCodes(4).num_bytes(128)
        (1032, 68)
        """
        blocks = self.in_blocks(elements) // BLOCKS[self.bits]
        return blocks * (BLOCKS[self.bits] * self.bits // 8 + _SCALE_BYTES)

    def encode(self, values: jax.Array) -> jax.Array:
        """Quantizes [..., elements] to uint8 [..., num_bytes]: codes of all blocks, then scales."""
        block, largest = BLOCKS[self.bits], _LARGEST[self.bits]
        missing = self.in_blocks(values.shape[-1]) - values.shape[-1]
        widths = [(0, 0)] * (values.ndim - 1) + [(0, missing)]
        # Padding is zeros, which change no block's largest magnitude.
        values = jnp.pad(values.astype(jnp.float32), widths)
        blocks = values.reshape(*values.shape[:-1], -1, block)
        scales = _rounded_up(jnp.max(jnp.abs(blocks), axis=-1) / largest)
        # Checked explicitly: a maximum on CPUs may ignore NaN (xla_cpu_enable_fast_min_max).
        scales = jnp.where(jnp.isfinite(blocks).all(axis=-1), scales, jnp.nan).astype(scales.dtype)
        wide = scales.astype(jnp.float32)[..., None]
        # A block of zeros has scale 0; the inner `where` keeps the division finite where it is
        # discarded.
        quotients = jnp.where(wide > 0, blocks / jnp.where(wide > 0, wide, 1.0), 0.0)
        codes = jnp.clip(jnp.round(quotients), -largest, largest).astype(jnp.int8)
        sent = _as_bytes(codes, self.bits)
        parts = (sent, lax.bitcast_convert_type(scales, jnp.uint8))
        lines = [part.reshape(*values.shape[:-1], -1) for part in parts]
        return jnp.concatenate(lines, axis=-1)

    def decode(self, sent: jax.Array, elements: int) -> jax.Array:
        """Decodes uint8 [..., num_bytes] to float32 [..., elements]."""
        block = BLOCKS[self.bits]
        blocks = self.in_blocks(elements) // block
        size = block * self.bits // 8
        lead = sent.shape[:-1]
        codes = _from_bytes(sent[..., : blocks * size].reshape(*lead, blocks, size), self.bits)
        # Two bytes are reinterpreted as one bfloat16, so the last dimension must be the pair.
        pairs = sent[..., blocks * size :].reshape(*lead, blocks, _SCALE_BYTES)
        scales = lax.bitcast_convert_type(pairs, jnp.bfloat16).astype(jnp.float32)
        # 0 times infinity is NaN, so no value of such a block decodes to a number.
        values = codes.astype(jnp.float32) * scales[..., None]
        return values.reshape(*lead, -1)[..., :elements]

    @property
    def bits_each(self) -> float:
        """Number of bits per value in a long row, including the scales.

        >>> WireCodes(8).bits_each, WireCodes(4).bits_each
        (8.0625, 4.25)
        """
        return self.bits + 8 * _SCALE_BYTES / BLOCKS[self.bits]


def bytes_sent(codes: WireCodes, elements: int, shards: int) -> int:
    """Returns the bytes that one device sends in a reduce-scatter of a gradient of this size.

    Each shard is one row. With two levels (n nodes of m devices) the device sends n rows to each of
    the m - 1 other devices of its node, and one row of their sum to each of the n - 1 other nodes.
    """
    row = codes.num_bytes(math.ceil(elements / shards))
    nodes, members = shards // codes.in_node, codes.in_node
    if members == 1 or nodes == 1:
        return (shards - 1) * row
    return (members - 1) * nodes * row + (nodes - 1) * row


def _rounded_up(scales: jax.Array) -> jax.Array:
    """Rounds scales up to bfloat16, except within a few units in float32's last place.

    The compiled form of the division therefore does not change a scale that bfloat16 represents
    exactly.
    """
    bits = lax.bitcast_convert_type(scales, jnp.uint32)
    # 0xFFF0 and not 0xFFFF: a value up to 15 units above a bfloat16 is rounded to it, as the
    # docstring says.
    up = (bits + jnp.uint32(0xFFF0)) & jnp.uint32(0xFFFF0000)
    return lax.bitcast_convert_type(up, jnp.float32).astype(jnp.bfloat16)


def _as_bytes(codes: jax.Array, bits: int) -> jax.Array:
    """Packs int8 [..., block] into uint8 [..., block * bits / 8]. With 4 bits, each byte holds one
    value of each half of a block."""
    if bits == 8:
        return lax.bitcast_convert_type(codes, jnp.uint8)
    half = codes.shape[-1] // 2
    # Codes of 4 bits are stored with 8 added, because shifts and masks of negative numbers keep
    # the sign.
    low, high = ((part + 8).astype(jnp.uint8) for part in (codes[..., :half], codes[..., half:]))
    return low | (high << 4)


def _from_bytes(sent: jax.Array, bits: int) -> jax.Array:
    """Unpacks the result of `_as_bytes` to int8 [..., block]."""
    if bits == 8:
        return lax.bitcast_convert_type(sent, jnp.int8)
    halves = (sent & 15, sent >> 4)
    return jnp.concatenate([half.astype(jnp.int8) - 8 for half in halves], axis=-1)
