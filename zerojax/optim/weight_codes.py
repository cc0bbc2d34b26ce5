"""Quantizes frozen weights to 4 or 8 bits: blocks of codes with one scale each, as bytes.

A block is 64 consecutive values along one dimension. It is stored as consecutive bytes along the
same dimension: the codes of its values, then its scale, a little-endian bfloat16. An array of codes
therefore has as many dimensions as the weights, can be sharded like them at block boundaries, and
is one array in a checkpoint and in a collective.

nf4: 32 bytes per block; each byte has the code of value i in its lower 4 bits and the code of value
i + 32 in its upper 4 bits. A code is the index of the nearest of `NF4_LEVELS` times the scale; the
scale is the largest magnitude. int8: 64 bytes per block, each the nearest multiple of the scale,
which is the largest magnitude / 127.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from zerojax.config.late_dataclasses import dataclass
from zerojax.tracing.protocol import LazyArray

BLOCK = 64
"""Number of values that share a scale."""

NF4_LEVELS = np.array(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ],
    np.float32,
)
"""Levels of the 4-bit NormalFloat of QLoRA (Dettmers et al. 2023, arXiv:2305.14314), appendix E:
means of neighbouring quantiles of the normal distribution, 8 from -1 to 0 and 9 from 0 to 1."""

# A sum of two levels is exact in double precision, so the mean is rounded only once.
_BOUNDARIES = ((NF4_LEVELS[1:].astype(np.float64) + NF4_LEVELS[:-1]) / 2).astype(np.float32)
_CODE_BYTES = {"nf4": BLOCK // 2, "int8": BLOCK}
_SCALE_BYTES = 2
KINDS = tuple(_CODE_BYTES)
_LARGEST_INT8 = 127
_IN_CACHE = 1 << 16
"""Number of values that the host encodes at a time: 7 ns per value on one core, compared with 11 ns
if all are encoded at once."""


FROZEN_CODES = "frozen_codes"
"""Key in a checkpoint's plan of {parameter: fields of its `WeightCodes`}."""


def codes_of_plan(plan: Mapping[str, Any]) -> dict[str, WeightCodes]:
    """Returns {parameter: its `WeightCodes`} from the plan stored in a checkpoint."""
    return {name: WeightCodes(**fields) for name, fields in plan.get(FROZEN_CODES, {}).items()}


@dataclass(frozen=True)
class WeightCodes:
    """Quantization of one parameter; static and hashable, so that a traced program may hold it.

    Attributes:
      kind: kind of codes, "nf4" or "int8".
      dim: dimension along which blocks run, counted from the end (negative, so that it stays valid
        when leading dimensions are sliced); its size is a multiple of 64.
    """

    kind: str
    dim: int

    @property
    def block_bytes(self) -> int:
        """Number of bytes of one block: 34 or 66."""
        return _CODE_BYTES[self.kind] + _SCALE_BYTES

    def coded_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of the uint8 codes for values of this shape."""
        sizes = list(shape)
        assert sizes[self.dim] % BLOCK == 0, (shape, self.dim)
        sizes[self.dim] = sizes[self.dim] // BLOCK * self.block_bytes
        return tuple(sizes)

    def true_shape(self, coded: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of the values for codes of this shape."""
        sizes = list(coded)
        assert sizes[self.dim] % self.block_bytes == 0, (coded, self.dim)
        sizes[self.dim] = sizes[self.dim] // self.block_bytes * BLOCK
        return tuple(sizes)

    def encode(self, values: jax.Array | np.ndarray) -> Any:
        """Quantizes values to uint8 blocks: the codes of 64 values, then their scale.

        The values are cast to float32. The result has `coded_shape(values.shape)`. It is a NumPy
        array for a NumPy array, else a traced array. The bits of nf4 are equal, because its codes
        depend only on comparisons with products, which NumPy and XLA round equally. Codes of int8
        depend on a quotient: their bits are equal where XLA rounds a division correctly.
        """
        blocked = self._in_blocks(values.shape, BLOCK)
        if not isinstance(values, np.ndarray):
            coded = self._encode_blocks(jnp, jnp.reshape(values, blocked), self._axis(values.ndim))
            return jnp.reshape(coded, self.coded_shape(values.shape))
        behind = math.prod(blocked[self._axis(values.ndim) + 1 :])
        blocks = values.reshape(-1, BLOCK, behind)
        result = np.empty((len(blocks), self.block_bytes, behind), np.uint8)
        rows = max(_IN_CACHE // (BLOCK * behind), 1)
        for start in range(0, len(blocks), rows):
            part = slice(start, start + rows)
            result[part] = self._encode_blocks(np, blocks[part], 1)
        return result.reshape(self.coded_shape(values.shape))

    def _encode_blocks(self, xp: ModuleType, values: jax.Array | np.ndarray, axis: int) -> Any:
        """Quantizes blocks: `axis` holds the 64 values of a block, and in the result its uint8
        bytes."""
        blocks = values.astype(np.float32)
        largest = xp.max(xp.abs(blocks), axis=axis, keepdims=True)
        # A product with a constant: a compiled division could be rounded in another way.
        exact = largest if self.kind == "nf4" else largest * np.float32(1 / _LARGEST_INT8)
        if xp is np:
            scale = exact.astype(jnp.bfloat16).astype(np.float32)
            bits = scale.view(np.uint32)
        else:
            scale = _rounded(exact, jnp.bfloat16, jnp.float32)
            bits = lax.bitcast_convert_type(scale, jnp.uint32)
        code = _nearest_nf4 if self.kind == "nf4" else _nearest_int8
        # A bfloat16 is the upper half of a float32. Its lower byte comes first.
        parts = [
            code(xp, blocks, scale, axis),
            ((bits >> 16) & 255).astype(np.uint8),
            (bits >> 24).astype(np.uint8),
        ]
        return xp.concatenate(parts, axis=axis)

    def decode(self, codes: jax.Array, dtype: DTypeLike) -> jax.Array:
        """Decodes traced codes: level times scale in float32, rounded once to `dtype`. Values that
        are subnormal in float16 become 0."""
        size, axis = self.block_bytes, self._axis(codes.ndim)
        blocks = codes.reshape(self._in_blocks(codes.shape, size))
        body, low, high = (
            lax.slice_in_dim(blocks, start, stop, axis=axis)
            for start, stop in ((0, size - 2), (size - 2, size - 1), (size - 1, size))
        )
        bits = low.astype(jnp.uint16) | (high.astype(jnp.uint16) << 8)
        scale = lax.bitcast_convert_type(bits, jnp.bfloat16).astype(jnp.float32)
        if self.kind == "nf4":
            halves = jnp.expand_dims(body, axis)
            shape = (*body.shape[:axis], 2, *body.shape[axis:])
            shift = 4 * lax.broadcasted_iota(jnp.uint8, shape, axis)
            index = (halves >> shift) & 15
            units = _level(index).reshape(*body.shape[:axis], BLOCK, *body.shape[axis + 1 :])
        else:
            units = lax.bitcast_convert_type(body, jnp.int8).astype(jnp.float32)
        values = _rounded(units * scale, dtype, dtype)
        return values.reshape(self.true_shape(codes.shape))

    def decode_on_host(self, codes: np.ndarray) -> np.ndarray:
        """Decodes on the host to float32 values, with the same bits as `decode`."""
        size, axis = self.block_bytes, self._axis(codes.ndim)
        blocks = codes.reshape(self._in_blocks(codes.shape, size))
        body, low, high = np.split(blocks, [size - 2, size - 1], axis=axis)
        bits = low.astype(np.uint16) | (high.astype(np.uint16) << 8)
        scale = bits.view(jnp.bfloat16).astype(np.float32)
        if self.kind == "nf4":
            units = NF4_LEVELS[np.concatenate([body & 15, body >> 4], axis=axis)]
        else:
            units = body.view(np.int8).astype(np.float32)
        with np.errstate(invalid="ignore"):  # 0 x infinity is NaN
            return (units * scale).reshape(self.true_shape(codes.shape))

    def _axis(self, ndim: int) -> int:
        """Returns the axis of the values within a block, after the dimension is split into (blocks,
        values per block)."""
        return ndim + self.dim + 1

    def _in_blocks(self, shape: Sequence[int], size: int) -> tuple[int, ...]:
        at = len(shape) + self.dim
        return (*shape[:at], shape[at] // size, size, *shape[at + 1 :])


class CodedArray:
    """Codes of a `LazyArray`; a part is encoded when it is read.

    Attributes:
      shape, dtype: shape and dtype (uint8) of the whole array of codes.
      is_stacked: value of `is_stacked` of the encoded `LazyArray`.
    """

    def __init__(self, values: LazyArray, codes: WeightCodes) -> None:
        self.shape, self.dtype = codes.coded_shape(values.shape), np.dtype(np.uint8)
        self.is_stacked = values.is_stacked
        self._values, self._codes = values, codes

    def read(self, index: Sequence[tuple[int, int]]) -> np.ndarray:
        """Reads and encodes a box of whole blocks, as `LazyArray.read` does for values."""
        own, size = list(index), self._codes.block_bytes
        first, last = own[self._codes.dim]
        assert first % size == last % size == 0, (index, self._codes)
        own[self._codes.dim] = (first // size * BLOCK, last // size * BLOCK)
        return self._codes.encode(self._values.read(own))


def codes_for(kind: str, shape: Sequence[int], stack_dims: int) -> WeightCodes | None:
    """Returns the `WeightCodes` for a parameter, or None if no dimension after the first
    `stack_dims` is divisible by 64.

    Blocks run along the smallest dimension divisible by 64; of equal sizes, the last one. The
    choice does not depend on the mesh. ZeRO splits the largest dimension, so the two dimensions are
    rarely the same.

    Args:
      kind: kind of codes, "nf4" or "int8".
      shape: shape of the parameter.
      stack_dims: number of leading dimensions that count layers.
    """
    free = [i for i in range(stack_dims, len(shape)) if shape[i] and shape[i] % BLOCK == 0]
    if not free:
        return None
    return WeightCodes(kind, min(reversed(free), key=lambda i: shape[i]) - len(shape))


def bytes_per_parameter(kind: str) -> float:
    """Returns the number of bytes of codes and scales per parameter: 0.53125 or 1.03125."""
    return (_CODE_BYTES[kind] + _SCALE_BYTES) / BLOCK


def _nearest_nf4(
    xp: ModuleType, blocks: jax.Array | np.ndarray, scale: jax.Array | np.ndarray, axis: int
) -> Any:
    """Returns the codes of the nf4 levels nearest to `blocks / scale`, the lower one in a tie.

    Each byte holds two codes: in its low four bits for a value of the first half of `axis`, in its
    high four bits for the value at the same position in the second half.
    """
    code = xp.zeros(blocks.shape, np.uint8)
    for boundary in _BOUNDARIES:
        above = blocks > boundary * scale
        code += above.view(np.uint8) if xp is np else above.astype(jnp.uint8)
    low, high = xp.split(code, 2, axis=axis)
    return low | (high << 4)


def _level(code: jax.Array) -> jax.Array:
    """Returns the level of each 4-bit code, float32, selected with bit operations.

    A lookup table would be an extra input of the traced program. `jnp.where` with constant arrays
    is no better: JAX hoists the constants out of a loop over layers and stores them (16 float32
    copies of a kernel, compiled for an H100).
    """
    chosen: list[Any] = [int(level) for level in NF4_LEVELS.view(np.int32)]
    code = code.astype(jnp.int32)
    for bit in range(4):
        # 0 or -1, whose bits are all set.
        mask = -((code >> bit) & 1)
        pairs = zip(chosen[::2], chosen[1::2], strict=True)
        chosen = [low ^ (mask & (low ^ high)) for low, high in pairs]
    return lax.bitcast_convert_type(chosen[0], jnp.float32)


def _nearest_int8(
    xp: ModuleType, blocks: jax.Array | np.ndarray, scale: jax.Array | np.ndarray, axis: int
) -> Any:
    units = xp.rint(blocks / xp.where(scale == 0, np.float32(1), scale))
    units = xp.clip(units, -_LARGEST_INT8, _LARGEST_INT8)
    code = xp.where(units == units, units, 0).astype(np.int8)  # the scale already carries a NaN
    return code.view(np.uint8) if xp is np else lax.bitcast_convert_type(code, jnp.uint8)


def _rounded(values: jax.Array, precision: DTypeLike, dtype: DTypeLike) -> jax.Array:
    """Rounds to `precision` and casts to `dtype`, in a way that the compiler cannot remove.

    XLA may remove a cast to 16 bits and back, and then compute with more precision than the stored
    values have. On GPUs it did so between a scale and the codes that depend on the scale.
    """
    kind = jnp.finfo(precision)
    if kind.bits < 32:
        values = lax.reduce_precision(values, kind.nexp, kind.nmant)
    return values.astype(dtype)
