"""Rounds kernels to 8- or 4-bit integers with one scale per output, or per 32 inputs of an output,
or to 8-bit floats with one scale per output.

Quantization-aware training (`rounded_dot`), generation (`coded_dot`) and exports of codes use this
module, with the same bits: a weight's value is code x scale, rounded to the dtype of the kernel, as
a server computes it.
"""

from __future__ import annotations

import functools
import math
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from zerojax.config.compression import MAX_BITS
from zerojax.config.late_dataclasses import dataclass


@dataclass(frozen=True)
class IntegerFormat:
    """Format of the integers (codes) that represent the weights of a kernel.

    Attributes:
      bits: number of bits of a code.
      group: number of consecutive inputs that share a scale; None if all inputs of an output do.
    """

    bits: int
    group: int | None = None

    @property
    def largest(self) -> int:
        """Largest magnitude of a code; the most negative integer of the range is not used."""
        return 2 ** (self.bits - 1) - 1


def _largest_codes() -> list[int]:
    return [0, 0, *(IntegerFormat(bits=bits).largest for bits in range(2, MAX_BITS + 1))]


FP8 = "fp8"
"""Name of the format of 8-bit floats (float8_e4m3fn)."""
_FLOAT8 = np.dtype(jnp.float8_e4m3fn)
_LARGEST_FLOAT8 = np.float32(jnp.finfo(_FLOAT8).max)
_INVERSE_FLOAT8 = np.float32(1) / _LARGEST_FLOAT8
_LARGEST_BITS = np.uint8(0x7E)
"""Bits of the largest float8_e4m3fn; one more is NaN."""
FORMATS = {"int8": IntegerFormat(bits=8), "int4": IntegerFormat(bits=4, group=32)}
LEVELS = np.array(
    [(largest, 1 / largest if largest else 0) for largest in _largest_codes()], np.float32
)
"""Largest code of each width and its inverse, float32 [width, 2]; zeros for widths without codes. A
compiled division could give another inverse."""


def check_inputs(name: str, num_inputs: int) -> None:
    """Raises a ValueError if a kernel's number of inputs is not a multiple of the group size."""
    group = FORMATS[name].group
    if group is not None and num_inputs % group:
        raise ValueError(
            f"{name} stores one scale per {group} inputs, but a kernel has {num_inputs} "
            f"inputs; use sizes that are divisible by {group}, or int8"
        )


def codes_and_scales(
    xp: ModuleType, weights: jax.Array | np.ndarray, name: str, levels: jax.Array | None = None
) -> tuple[Any, Any]:
    """Quantizes a kernel; NumPy and JAX give the same bits.

    Args:
      xp: module to compute with, numpy or jax.numpy.
      weights: [inputs, outputs]; float32, bfloat16 or float16. Scales are rounded to this dtype.
      name: format of the codes, "int8" or "int4".
      levels: an entry of `LEVELS`, float32 [2], for codes of another width in the same groups;
        None: the width of the format.

    Returns:
      Codes as float32 [groups, inputs of a group, outputs], and scales as float32 [groups, 1,
      outputs]. Codes of weights that are not finite are not finite.
    """
    form = FORMATS[name]
    inputs, outputs = weights.shape
    wide = _exact(xp, weights).reshape(-1, form.group or inputs, outputs)
    most, inverse = LEVELS[form.bits] if levels is None else (levels[0], levels[1])
    return _with_scales(xp, wide, 1, most, inverse, weights.dtype)


def _with_scales(
    xp: ModuleType,
    wide: jax.Array | np.ndarray,
    axis: int,
    most: jax.Array | float,
    inverse: jax.Array | float,
    dtype: DTypeLike,
) -> tuple[Any, Any]:
    """Returns (codes, scales) of float32 values that share a scale along `axis`.

    `most` is the largest code, and `inverse` its inverse, from `LEVELS`.
    """
    largest = xp.max(xp.abs(wide), axis=axis, keepdims=True)
    scales = _rounded(xp, largest * inverse, dtype)
    # A scale is 0 if all weights are, or if they are too small for the dtype; quotients need
    # another number.
    scales = xp.where(scales == 0, np.float32(1), scales)
    return _nearest(xp, wide, scales, most), scales


def float8_and_scales(xp: ModuleType, weights: jax.Array | np.ndarray) -> tuple[Any, Any]:
    """Quantizes a kernel to 8-bit floats; NumPy and JAX give the same bits.

    Args:
      xp: module to compute with, numpy or jax.numpy.
      weights: [inputs, outputs]; float32, bfloat16 or float16. Scales are rounded to this dtype.

    Returns:
      Codes, float8_e4m3fn [inputs, outputs], and scales, float32 [1, outputs]. Codes of weights
      that are not finite are NaN.
    """
    wide = _exact(xp, weights)
    largest = xp.max(xp.abs(wide), axis=0, keepdims=True)
    scales = _rounded(xp, largest * _INVERSE_FLOAT8, weights.dtype)
    scales = xp.where(scales == 0, np.float32(1), scales)
    # As in `_nearest`, the quotient is a guess, and products with the middle of two codes decide.
    size = xp.abs(wide)
    guess = xp.minimum(size * (np.float32(1) / scales), _LARGEST_FLOAT8).astype(_FLOAT8)
    # For one sign, floats with adjacent bits are adjacent.
    code, above = guess, _float8_of(xp.minimum(guess.view(np.uint8) + 1, _LARGEST_BITS))
    code = xp.where(_middle(code, above) * scales < size, above, code)
    bits = code.view(np.uint8)
    # uint8 would wrap around below 0.
    below = _float8_of(bits - xp.minimum(bits, np.uint8(1)))
    code = xp.where((_middle(code, below) * scales >= size) & (bits > 0), below, code)
    codes = xp.where(wide < 0, -code.astype(np.float32), code.astype(np.float32))
    codes = xp.where(xp.isfinite(wide), codes, np.float32(np.nan))
    return codes.astype(_FLOAT8), scales


def _float8_of(bits: jax.Array | np.ndarray) -> Any:
    return bits.astype(np.uint8).view(_FLOAT8)


def _middle(one: jax.Array | np.ndarray, other: jax.Array | np.ndarray) -> Any:
    return (one.astype(np.float32) + other.astype(np.float32)) * np.float32(0.5)


def encoded(kernel: jax.Array, name: str, num_inputs: int) -> tuple[jax.Array, jax.Array]:
    """Quantizes a kernel to 8-bit codes and one scale per output.

    Args:
      kernel: [*inputs, *outputs]; float32, bfloat16 or float16.
      name: format of the codes, "int8" or "fp8".
      num_inputs: number of dimensions of the inputs.

    Returns:
      Codes, int8 or float8_e4m3fn, in the shape of `kernel`, and scales [*outputs] in its dtype.
      int8: code x scale, rounded to this dtype, is the value of `rounded`. If a weight is not
      finite, the scale of its output is NaN.
    """
    flat = kernel.reshape(math.prod(kernel.shape[:num_inputs]), -1)
    if name == FP8:
        codes, scales = float8_and_scales(jnp, flat)
        are_finite = jnp.all(jnp.isfinite(flat), axis=0, keepdims=True)
        scales = jnp.where(are_finite, scales, jnp.nan).astype(kernel.dtype)
    else:
        assert FORMATS[name].group is None, name
        codes, scales = codes_and_scales(jnp, flat, name)
        codes, scales = _as_integers(codes, scales, 1, kernel.dtype)
    return codes.reshape(kernel.shape), scales.reshape(kernel.shape[num_inputs:])


def encoded_rows(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Quantizes each row of features, such as a key of one head, to int8 codes and one scale.

    Args:
      x: [..., features]; float32, bfloat16 or float16.

    Returns:
      Codes, int8, in the shape of `x`, and scales [...] in its dtype; NaN for a row with a value
      that is not finite.
    """
    most, inverse = LEVELS[FORMATS["int8"].bits]
    codes, scales = _with_scales(jnp, _exact(jnp, x), -1, most, inverse, x.dtype)
    codes, scales = _as_integers(codes, scales, -1, x.dtype)
    return codes, scales[..., 0]


def _as_integers(codes: jax.Array, scales: jax.Array, axis: int, dtype: DTypeLike) -> Any:
    """Returns (int8 codes, scales in `dtype`). Scales are NaN where a code along `axis` is not
    finite, because integers cannot show it."""
    are_finite = jnp.all(jnp.isfinite(codes), axis=axis, keepdims=True)
    return codes.astype(jnp.int8), jnp.where(are_finite, scales, jnp.nan).astype(dtype)


def coded_dot(x: jax.Array, codes: jax.Array, scales: jax.Array, num_inputs: int) -> jax.Array:
    """Contracts the last dimensions of `x` with the first ones of a kernel that is stored as codes.

    Products are summed in float32 before they are multiplied by the scale. In float16 a sum of
    products with codes up to 127 could overflow.

    Args:
      x: [..., *inputs].
      codes: int8 or float8_e4m3fn [*inputs, *outputs].
      scales: [*outputs], in the dtype of the products.
      num_inputs: number of contracted dimensions.

    Returns:
      [..., *outputs] in the dtype of `scales`.
    """
    contracted = tuple(range(x.ndim - num_inputs, x.ndim)), tuple(range(num_inputs))

    def product(dtype: DTypeLike) -> Any:
        return lambda x, codes: lax.dot_general(
            x.astype(dtype),
            codes.astype(dtype),
            (contracted, ((), ())),
            preferred_element_type=jnp.float32,
        )

    dtype = scales.dtype
    x = x.astype(dtype)
    if dtype == jnp.float16:  # XLA:CPU has no float16 products that are summed in float32
        options = {"cpu": product(jnp.float32), "default": product(dtype)}
        wide = lax.platform_dependent(x, codes, **options)
    else:
        wide = product(dtype)(x, codes)
    by_output = lax.expand_dims(scales.astype(jnp.float32), range(wide.ndim - scales.ndim))
    return (wide * by_output).astype(dtype)


def _nearest(
    xp: ModuleType,
    values: jax.Array | np.ndarray,
    scales: jax.Array | np.ndarray,
    largest: jax.Array | float,
) -> Any:
    """Finds the nearest codes by comparing products; a tie gives the smaller magnitude.

    A quotient is only a first guess, because a compiler may multiply by the inverse, which gives
    other bits.
    """
    size, half = xp.abs(values), np.float32(0.5)
    guess = xp.rint(size * (np.float32(1) / scales))
    guess = xp.where((guess + half) * scales < size, guess + 1, guess)
    guess = xp.where((guess - half) * scales >= size, guess - 1, guess)
    # A scale that was rounded down can give a code above the largest.
    codes = xp.minimum(guess, largest)
    return xp.where(values < 0, -codes, codes)


def rounded(
    xp: ModuleType, weights: jax.Array | np.ndarray, name: str, levels: jax.Array | None = None
) -> Any:
    """Returns the kernel [inputs, outputs] that codes and scales represent, in its own dtype.

    See `codes_and_scales` for the arguments.
    """
    codes, scales = codes_and_scales(xp, weights, name, levels)
    values = _rounded(xp, codes * scales, weights.dtype)
    return values.astype(weights.dtype).reshape(weights.shape)


def _exact(xp: ModuleType, values: jax.Array | np.ndarray) -> Any:
    """Casts to float32 in a way that keeps XLA from removing the earlier rounding of `values`."""
    return _rounded(xp, values.astype(np.float32), values.dtype)


def _rounded(xp: ModuleType, values: jax.Array | np.ndarray, dtype: DTypeLike) -> Any:
    """Rounds float32 values to the precision of `dtype`; the result is still float32."""
    kind = jnp.finfo(dtype)
    if kind.bits >= 32:
        return values
    if xp is np:
        return values.astype(dtype).astype(np.float32)
    normal = lax.reduce_precision(values, kind.nexp, kind.nmant)
    if kind.nexp == jnp.finfo(np.float32).nexp:
        return normal
    # `reduce_precision` returns zero below the smallest normal number (6e-5 in float16).
    unit = np.float32(kind.smallest_subnormal)
    return xp.where(xp.abs(values) < kind.tiny, xp.rint(values * (1 / unit)) * unit, normal)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def rounded_dot(
    x: jax.Array, kernel: jax.Array, name: str, num_inputs: int, levels: jax.Array | None = None
) -> jax.Array:
    """Contracts the last dimensions of `x` with the first ones of a rounded kernel.

    The kernel receives the gradient of the rounded kernel unchanged (the straight-through
    estimator, arXiv:1308.3432). The backward pass rounds the kernel again, so that ZeRO stage 3
    stores no rounded copy.

    Args:
      x: [..., *inputs], in the dtype of `kernel`.
      kernel: [*inputs, *outputs]; float32, bfloat16 or float16.
      name: format of the codes, "int8" or "int4".
      num_inputs: number of contracted dimensions.
      levels: an entry of `LEVELS`, float32 [2], for another width; zeros: the kernel is not
        rounded. None: the width of the format.

    Returns:
      [..., *outputs] in the dtype of `kernel`.
    """
    return _forward(x, kernel, name, num_inputs, levels)[0]


def _forward(
    x: jax.Array, kernel: jax.Array, name: str, num_inputs: int, levels: jax.Array | None
) -> Any:
    contracted = tuple(range(x.ndim - num_inputs, x.ndim)), tuple(range(num_inputs))
    values = _rounded_kernel(kernel, name, num_inputs, levels)
    product = lax.dot_general(x, values, (contracted, ((), ())))
    return product, (x, kernel, levels)


def _backward(
    name: str,
    num_inputs: int,
    kept: tuple[jax.Array, jax.Array, jax.Array | None],
    gradient: jax.Array,
) -> Any:
    x, kernel, levels = kept
    batch = tuple(range(x.ndim - num_inputs))
    outputs = tuple(range(len(batch), gradient.ndim)), tuple(range(num_inputs, kernel.ndim))
    values = _rounded_kernel(kernel, name, num_inputs, levels)
    of_x = lax.dot_general(gradient, values, (outputs, ((), ())))
    of_kernel = lax.dot_general(x, gradient, ((batch, batch), ((), ())))
    return of_x, of_kernel, None if levels is None else jnp.zeros_like(levels)


rounded_dot.defvjp(_forward, _backward)


def _rounded_kernel(
    kernel: jax.Array, name: str, num_inputs: int, levels: jax.Array | None
) -> jax.Array:
    inputs = math.prod(kernel.shape[:num_inputs])
    values = rounded(jnp, kernel.reshape(inputs, -1), name, levels).reshape(kernel.shape)
    return values if levels is None else jnp.where(levels[0] > 0, values, kernel)
