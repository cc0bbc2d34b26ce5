"""Matrix product in 8-bit floats: e4m3 forward, e5m2 for gradients, delayed scaling.

Scales follow a history of largest magnitudes (arXiv:2209.05433; NVIDIA's Transformer Engine). As in
Flax (`flax.linen.fp8_ops`), the backward pass returns the new history as if it were the history's
gradient, in the collection `_overwrite_with_gradient`. The product is a dot of two 8-bit arrays,
times one scale; XLA runs this pattern on the tensor cores with every kernel it may choose. A dot of
dequantized operands would become an 8-bit product of cuBLASLt, but a bfloat16 product if XLA
chooses Triton.

Flax's own function is not used, for four reasons: it stores the gathered, quantized kernel for the
backward pass, which would defeat ZeRO-3; it clips infinities, which hides overflows of float16; its
products are float16 before they are scaled, so that they overflow; it supports only `linen`. Scales
in this module are powers of two: they are exact in bfloat16, and histories that differ slightly
between meshes give the same rounding.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from zerojax.operators.rounded_weights import FORMATS

Arrays = tuple[jax.Array, ...]

MATMUL_DTYPES = (None, "fp8", *(f"fake_{name}" for name in FORMATS))
FORWARD, BACKWARD = jnp.float8_e4m3fn, jnp.float8_e5m2
KEPT_INPUT = "zerojax.fp8_input"
"""Checkpoint name, for remat policies, of the 8-bit input that a backward pass needs."""
HISTORY_LENGTH = 16
"""Number of steps in the history, as in Transformer Engine's examples."""

INPUT, KERNEL, OUTPUT_GRADIENT = range(3)
_DTYPES = (FORWARD, FORWARD, BACKWARD)
_SMALLEST, _LARGEST = 2.0**-60, 2.0**60  # the product of two scales is then a normal float32

Overwritten = nnx.variable_type_from_name(
    linen.fp8_ops.OVERWRITE_WITH_GRADIENT, allow_register=True
)
"""Class of variables whose next value is the "gradient" that the backward pass returns for them."""


def check_matmul_dtype(name: str | None) -> None:
    """Raises a ValueError for a name that is not in `MATMUL_DTYPES`."""
    if name not in MATMUL_DTYPES:
        raise ValueError(
            f"matmul_dtype={name!r} is unknown; use 'fp8' for 8-bit products of the layers, "
            "'fake_int8' or 'fake_int4' for kernels rounded to integers, or None for products in "
            "the compute dtype"
        )


def rounded_format(name: str) -> str:
    """Returns the integer format of "fake_int8" or "fake_int4": "int8" or "int4"."""
    return name.removeprefix("fake_")


def init_history(kernel: jax.Array) -> nnx.Variable[jax.Array]:
    """Returns a new kernel's history of largest magnitudes, with one entry: the kernel's own.

    The history is float32 [3, HISTORY_LENGTH].
    """
    history = jnp.zeros((3, HISTORY_LENGTH), jnp.float32)
    return Overwritten(history.at[KERNEL, 0].set(largest_magnitude(kernel)))


def scales_from(history: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes the scale of each operand; 8-bit value times scale is the value.

    Args:
      history: float32 [3, length], largest magnitudes of the latest steps; zero if unknown.

    Returns:
      Scales of input, kernel and output gradient, float32 scalars: the smallest power of two for
      which the largest magnitude does not overflow; 1 if the history is empty.
    """
    return (
        scale_from(history, INPUT),
        scale_from(history, KERNEL),
        scale_from(history, OUTPUT_GRADIENT),
    )


def scale_from(history: jax.Array, operand: int) -> jax.Array:
    """Computes the scale of INPUT, KERNEL or OUTPUT_GRADIENT, float32 []; see `scales_from`."""
    largest = jnp.max(history[operand])
    limit = float(jnp.finfo(_DTYPES[operand]).max)
    ratio = jnp.clip(largest / limit, _SMALLEST, _LARGEST)
    # Adding a mantissa of ones carries into the exponent, unless the mantissa is zero.
    bits = lax.bitcast_convert_type(ratio, jnp.uint32) + np.uint32(0x7FFFFF)
    power = lax.bitcast_convert_type(bits & np.uint32(0xFF800000), jnp.float32)
    return jnp.where(largest > 0, power, 1.0)


def quantise(x: jax.Array, scale: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Computes `x / scale` in an 8-bit `dtype`, rounded to nearest; finite values saturate.

    Infinities become infinite in e5m2 and NaN in e4m3, which has no infinity, so that the step is
    still detected as non-finite and skipped.

    Args:
      x: values of any floating dtype and shape.
      scale: float32 [], a power of two.
      dtype: 8-bit floating dtype.
    """
    limit = float(jnp.finfo(dtype).max)
    # Exact, because scales are powers of two.
    scaled = x.astype(jnp.float32) * (1 / scale)
    return jnp.where(jnp.isinf(scaled), scaled, jnp.clip(scaled, -limit, limit)).astype(dtype)


def fp8_dot(x: jax.Array, kernel: jax.Array, history: jax.Array, num_inputs: int) -> jax.Array:
    """Contracts the last dimensions of `x` with the first ones of `kernel`, in 8-bit floats.

    The "gradient" with respect to `history` is the next history, with the largest magnitudes of
    `x`, `kernel` and the gradient of the result as its newest entry.

    Args:
      x: [..., *inputs], in the dtype of `kernel`.
      kernel: [*inputs, *outputs]; float32, bfloat16 or float16.
      history: float32 [3, length] of earlier steps; determines the scales.
      num_inputs: number of contracted dimensions.

    Returns:
      The product [..., *outputs] in the dtype of `kernel`, summed in float32.
    """
    return fp8_dots(x, (kernel,), (history,), (None,), num_inputs)[0]


def in_bits(x: jax.Array, history: jax.Array) -> jax.Array:
    """Returns the bits of a kernel quantized as in `fp8_dot`, uint8 with the shape of `x`."""
    scale = scale_from(history, KERNEL)
    return lax.bitcast_convert_type(quantise(x, scale, FORWARD), jnp.uint8)


def from_bits(bits: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Returns the values of `in_bits` in units of the scale: up to 448, exact in each `dtype`."""
    return lax.bitcast_convert_type(bits, FORWARD).astype(dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def fp8_dots(
    x: jax.Array,
    kernels: Arrays,
    histories: Arrays,
    largest: tuple[jax.Array | None, ...],
    num_inputs: int,
) -> tuple[jax.Array, ...]:
    """Computes the products of one `x` with several kernels; see `fp8_dot`.

    `x` is quantized once, and its 8 bits are stored once for the backward pass. Its scale is the
    largest of all histories; histories with equal initial values stay equal, because they record
    the same `x`. The gradients of `x` are added in the dtype of the kernels, starting with the last
    kernel, which is JAX's order for separate products.

    Args:
      x: [..., *inputs], in the dtype of the kernels.
      kernels: kernels, each [*inputs, *outputs].
      histories: history of each kernel.
      largest: for each kernel, None if it is an ordinary kernel. For a kernel from `from_bits`,
        which is in units of its scale: its largest magnitude before rounding on this device,
        float32 []; the maximum over devices is used. Gradients are those of the unscaled kernel
        in both cases.
      num_inputs: number of contracted dimensions.

    Returns:
      The product with each kernel, [..., *outputs] in the dtype of the kernels.
    """
    return _forward(x, kernels, histories, largest, num_inputs)[0]


def _forward(
    x: jax.Array,
    kernels: Arrays,
    histories: Arrays,
    largest: Sequence[jax.Array | None],
    num_inputs: int,
) -> Any:
    input_scale, scales = _scales_of_all(histories)
    small = quantise(x, input_scale, FORWARD)
    contracted = tuple(range(x.ndim - num_inputs, x.ndim)), tuple(range(num_inputs))
    results = tuple(
        _scaled_dot(
            (small, input_scale),
            (_small_kernel(kernel, kernel_scale, known), kernel_scale),
            contracted,
            kernel.dtype,
            precision=lax.Precision.DEFAULT,
        )
        for kernel, known, (kernel_scale, _) in zip(kernels, largest, scales, strict=True)
    )
    # The name lets a remat policy store these 8 bits instead of the input in the compute dtype.
    # The bits are integers, because JAX applies `reduce_precision` to stored floats, which turns
    # the largest values of e4m3 (256 to 448) into infinities.
    bits = checkpoint_name(lax.bitcast_convert_type(small, jnp.uint8), KEPT_INPUT)
    # The kernels are stored, not their 8 bits: with ZeRO-3 they are gathered and quantized again.
    return results, (bits, largest_magnitude(x), kernels, histories, largest)


def _backward(num_inputs: int, kept: tuple[Any, ...], gradients: Arrays) -> Any:
    input_bits, largest_input, kernels, histories, largest = kept
    small_input = lax.bitcast_convert_type(input_bits, FORWARD)
    input_scale, scales = _scales_of_all(histories)
    batch_dims = small_input.ndim - num_inputs
    batch = tuple(range(batch_dims))
    gradients_of_kernels = []
    for kernel, history, known, gradient, (kernel_scale, gradient_scale) in zip(
        kernels, histories, largest, gradients, scales, strict=True
    ):
        small_kernel = _small_kernel(kernel, kernel_scale, known)
        small_gradient = quantise(gradient, gradient_scale, BACKWARD)
        input_gradient = _scaled_dot(
            (small_gradient, gradient_scale),
            (small_kernel, kernel_scale),
            (tuple(range(batch_dims, gradient.ndim)), tuple(range(num_inputs, kernel.ndim))),
            kernel.dtype,
            precision=lax.Precision.HIGHEST,
        )
        kernel_gradient = _scaled_dot(
            (small_input, input_scale),
            (small_gradient, gradient_scale),
            (batch, batch),
            kernel.dtype,
            precision=lax.Precision.HIGHEST,
        )
        largest_kernel = largest_magnitude(kernel) if known is None else known
        newest = jnp.stack([largest_input, largest_kernel, largest_magnitude(gradient)])
        gradients_of_kernels.append((input_gradient, kernel_gradient, remember(history, newest)))
    input_gradients, kernel_gradients, next_histories = zip(*gradients_of_kernels, strict=True)
    zeros = jax.tree.map(jnp.zeros_like, largest)
    input_gradient = functools.reduce(jnp.add, input_gradients[::-1])
    return input_gradient, kernel_gradients, next_histories, zeros


fp8_dots.defvjp(_forward, _backward)


def _small_kernel(kernel: jax.Array, scale: jax.Array, known: jax.Array | None) -> jax.Array:
    """Returns a kernel in 8 bits; a kernel from `from_bits` (`known` is not None) is only cast."""
    return quantise(kernel, scale, FORWARD) if known is None else kernel.astype(FORWARD)


def _scales_of_all(histories: Arrays) -> tuple[jax.Array, list[tuple[jax.Array, jax.Array]]]:
    """Returns (input scale, [(kernel scale, output gradient scale) of each history])."""
    scales = [scales_from(history) for history in histories]
    largest = functools.reduce(jnp.maximum, [input_scale for input_scale, _, _ in scales])
    return largest, [(kernel_scale, gradient_scale) for _, kernel_scale, gradient_scale in scales]


def remember(history: jax.Array, newest: jax.Array) -> jax.Array:
    """Returns the history with `newest` [3] prepended and the oldest entry removed."""
    return jnp.concatenate([newest[:, None], history[:, :-1]], axis=1)


def largest_magnitude(x: jax.Array) -> jax.Array:
    """Returns the largest absolute value of an array, float32 []."""
    return jnp.max(jnp.abs(x)).astype(jnp.float32)


def _scaled_dot(
    left: tuple[jax.Array, jax.Array],
    right: tuple[jax.Array, jax.Array],
    contracted: tuple[tuple[int, ...], tuple[int, ...]],
    dtype: DTypeLike,
    *,
    precision: lax.Precision,
) -> jax.Array:
    """Computes the product of two pairs (8-bit array, scale).

    Args:
      left, right: pairs (8-bit array, scale).
      contracted: contracted dimensions of each array.
      dtype: dtype of the result.
      precision: DEFAULT lets the tensor cores accumulate with fewer bits, as in the forward pass of
        NVIDIA's recipe; HIGHEST, for gradients, does not.
    """
    # The unscaled product would overflow in float16; the range of bfloat16 suffices.
    wide = jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32
    y = lax.dot_general(
        left[0],
        right[0],
        (contracted, ((), ())),
        precision=precision,
        preferred_element_type=wide,
    )
    return (y * (left[1] * right[1]).astype(wide)).astype(dtype)
