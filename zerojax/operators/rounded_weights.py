"""Rounds kernels to 8- or 4-bit integers with one scale per output, or per 32 inputs of an output.

Used by quantization-aware training (`rounded_dot`) and by exports of codes, with the same bits: a
weight's value is code x scale, rounded to the dtype of the kernel, as a server computes it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@dataclasses.dataclass(frozen=True)
class IntegerFormat:
    """Integers that represent the weights of a kernel.

    Attributes:
      bits: of a code.
      group: number of consecutive inputs that share a scale; None: all inputs of an output.
    """

    bits: int
    group: int | None = None

    @property
    def largest(self) -> int:
        """The largest magnitude of a code; the smallest integer of the range is not used."""
        return 2 ** (self.bits - 1) - 1


FORMATS = {"int8": IntegerFormat(bits=8), "int4": IntegerFormat(bits=4, group=32)}


def check_inputs(name: str, num_inputs: int) -> None:
    """Raises ValueError if a kernel with this number of inputs has no whole groups."""
    group = FORMATS[name].group
    if group is not None and num_inputs % group:
        raise ValueError(
            f"{name} stores one scale per {group} inputs, but a kernel has {num_inputs} "
            f"inputs; use sizes that are divisible by {group}, or int8"
        )


def codes_and_scales(xp: Any, weights: Any, name: str) -> tuple[Any, Any]:
    """Quantizes a kernel, with NumPy or JAX and equal bits.

    Args:
      xp: numpy or jax.numpy.
      weights: [inputs, outputs]; float32, bfloat16 or float16. Scales have the same dtype.
      name: "int8" or "int4".

    Returns:
      Codes as float32 [groups, inputs of a group, outputs], and scales as float32 [groups, 1,
      outputs]. Codes of weights that are not finite are not finite.
    """
    form = FORMATS[name]
    inputs, outputs = weights.shape
    wide = _exact(xp, weights).reshape(-1, form.group or inputs, outputs)
    largest = xp.max(xp.abs(wide), axis=1, keepdims=True)
    scales = _rounded(xp, largest * np.float32(1 / form.largest), weights.dtype)
    scales = xp.where(scales == 0, np.float32(1), scales)
    return _nearest(xp, wide, scales, form.largest), scales


def _nearest(xp: Any, values: Any, scales: Any, largest: int) -> Any:
    """Returns the nearest codes by comparing products; a tie gives the smaller magnitude.

    A quotient has other bits where a compiler multiplies by the inverse; so it is only a guess.
    """
    size, half = xp.abs(values), np.float32(0.5)
    guess = xp.rint(size * (np.float32(1) / scales))
    guess = xp.where((guess + half) * scales < size, guess + 1, guess)
    guess = xp.where((guess - half) * scales >= size, guess - 1, guess)
    codes = xp.minimum(guess, np.float32(largest))
    return xp.where(values < 0, -codes, codes)


def rounded(xp: Any, weights: Any, name: str) -> Any:
    """Returns the kernel [inputs, outputs] that codes and scales mean, in its own dtype."""
    codes, scales = codes_and_scales(xp, weights, name)
    values = _rounded(xp, codes * scales, weights.dtype)
    return values.astype(weights.dtype).reshape(weights.shape)


def _exact(xp: Any, values: Any) -> Any:
    """Casts to float32 such that XLA cannot remove the earlier rounding of `values`."""
    return _rounded(xp, values.astype(np.float32), values.dtype)


def _rounded(xp: Any, values: Any, dtype: Any) -> Any:
    """Rounds float32 values to the precision of `dtype`, and keeps float32."""
    kind = jnp.finfo(dtype)
    if kind.bits >= 32:
        return values
    if xp is np:
        return values.astype(dtype).astype(np.float32)
    return lax.reduce_precision(values, kind.nexp, kind.nmant)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def rounded_dot(x: jax.Array, kernel: jax.Array, name: str, num_inputs: int) -> jax.Array:
    """Contracts the last dimensions of `x` with the first ones of a rounded kernel.

    The gradient of the kernel is that of the rounded kernel, unchanged (the straight-through
    estimator, arXiv:1308.3432). The backward pass rounds the kernel again, so that ZeRO stage 3
    stores no rounded copy.

    Args:
      x: [..., *inputs], in the dtype of `kernel`.
      kernel: [*inputs, *outputs]; float32, bfloat16 or float16.
      name: "int8" or "int4".
      num_inputs: number of contracted dimensions.

    Returns:
      [..., *outputs] in the dtype of `kernel`.
    """
    return _forward(x, kernel, name, num_inputs)[0]


def _forward(x: jax.Array, kernel: jax.Array, name: str, num_inputs: int) -> Any:
    contracted = tuple(range(x.ndim - num_inputs, x.ndim)), tuple(range(num_inputs))
    product = lax.dot_general(x, _rounded_kernel(kernel, name, num_inputs), (contracted, ((), ())))
    return product, (x, kernel)


def _backward(name: str, num_inputs: int, kept: Any, gradient: jax.Array) -> Any:
    x, kernel = kept
    batch = tuple(range(x.ndim - num_inputs))
    outputs = tuple(range(len(batch), gradient.ndim)), tuple(range(num_inputs, kernel.ndim))
    of_x = lax.dot_general(gradient, _rounded_kernel(kernel, name, num_inputs), (outputs, ((), ())))
    of_kernel = lax.dot_general(x, gradient, ((batch, batch), ((), ())))
    return of_x, of_kernel


rounded_dot.defvjp(_forward, _backward)


def _rounded_kernel(kernel: jax.Array, name: str, num_inputs: int) -> jax.Array:
    inputs = math.prod(kernel.shape[:num_inputs])
    return rounded(jnp, kernel.reshape(inputs, -1), name).reshape(kernel.shape)
