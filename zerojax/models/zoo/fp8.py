"""Matrix product in 8-bit floats: e4m3 forward, e5m2 for gradients, delayed scaling.

The method is delayed scaling with a history (arXiv:2209.05433; NVIDIA's Transformer Engine), and
the way its state trains is Flax's (`flax.linen.fp8_ops`): the backward pass returns the new value
of the state as if it were its gradient, in the collection `_overwrite_with_gradient`. What is
computed is the pattern that XLA takes to the tensor cores whichever kernel it chooses: a dot whose
operands are 8-bit arrays, times one scale. (Operands that are dequantised before the dot become
cuBLASLt's 8-bit product, but a plain bfloat16 product where XLA prefers Triton.)

Flax's own composition is not called, for four reasons: it keeps the gathered kernel, quantised, for
the backward pass, which would undo ZeRO-3; it clips infinities, which hides an overflow of float16;
its products are float16 before they are scaled, and overflow; it exists for `linen` only. Scales
are powers of two here, so that they are exact in bfloat16 and a slightly other history on another
mesh rounds nothing differently.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

MATMUL_DTYPES = (None, "fp8")
FORWARD, BACKWARD = jnp.float8_e4m3fn, jnp.float8_e5m2
HISTORY_LENGTH = 16
"""Steps of which the largest magnitude counts; the length in Transformer Engine's examples."""

INPUT, KERNEL, OUTPUT_GRADIENT = range(3)
_DTYPES = (FORWARD, FORWARD, BACKWARD)
_SMALLEST, _LARGEST = 2.0**-60, 2.0**60  # so that the product of two scales is a normal float32

Overwritten = nnx.variable_type_from_name(
    linen.fp8_ops.OVERWRITE_WITH_GRADIENT, allow_register=True
)
"""The class of variables whose new value is what the backward pass returns as their gradient."""


def check_matmul_dtype(name: str | None) -> None:
    """Raises ValueError for a name that is not in `MATMUL_DTYPES`."""
    if name not in MATMUL_DTYPES:
        raise ValueError(
            f"matmul_dtype={name!r} is unknown; use 'fp8' for 8-bit products of the layers, or "
            "None for products in the compute dtype"
        )


def init_history(kernel: jax.Array) -> nnx.Variable[jax.Array]:
    """float32 [3, HISTORY_LENGTH]: the history of a new layer, which knows its kernel only."""
    history = jnp.zeros((3, HISTORY_LENGTH), jnp.float32)
    return Overwritten(history.at[KERNEL, 0].set(_largest(kernel)))


def scales_from(history: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The scale of each operand: 8-bit value times scale = value.

    Args:
      history: float32 [3, length], largest magnitudes of the latest steps; zero where unknown.

    Returns:
      float32 scalars for input, kernel and output gradient: the smallest power of two with which
      the largest magnitude is representable; 1 where the history is empty.
    """
    limits = jnp.array([jnp.finfo(dtype).max for dtype in _DTYPES], jnp.float32)
    largest = jnp.max(history, axis=-1)
    ratio = jnp.clip(largest / limits, _SMALLEST, _LARGEST)
    # Adding a mantissa of ones carries into the exponent unless the mantissa is zero.
    bits = lax.bitcast_convert_type(ratio, jnp.uint32) + jnp.uint32(0x7FFFFF)
    power = lax.bitcast_convert_type(bits & jnp.uint32(0xFF800000), jnp.float32)
    scales = jnp.where(largest > 0, power, 1.0)
    return scales[INPUT], scales[KERNEL], scales[OUTPUT_GRADIENT]


def quantise(x: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
    """`x / scale` in an 8-bit `dtype`, rounded to nearest; finite values beyond its range saturate.

    Infinities stay what a step notices and skips: infinite in e5m2, NaN in e4m3, which has none.

    Args:
      x: any floating dtype and shape.
      scale: float32 [], a power of two.
    """
    limit = float(jnp.finfo(dtype).max)
    scaled = x.astype(jnp.float32) * (1 / scale)
    return jnp.where(jnp.isinf(scaled), scaled, jnp.clip(scaled, -limit, limit)).astype(dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def fp8_dot(x: jax.Array, kernel: jax.Array, history: jax.Array, num_inputs: int) -> jax.Array:
    """The product of `x`'s last dimensions with `kernel`'s first ones, through 8-bit floats.

    Its derivative with respect to `history` is the history afterwards: one entry newer, with the
    largest magnitudes of `x`, of `kernel` and of the gradient of the result.

    Args:
      x: [..., *inputs], in the dtype of `kernel`.
      kernel: [*inputs, *outputs]; float32, bfloat16 or float16.
      history: float32 [3, length]; decides the scales and does not depend on `x` or `kernel`.
      num_inputs: number of contracted dimensions.

    Returns:
      [..., *outputs] in the dtype of `kernel`, summed in float32.
    """
    return _forward(x, kernel, history, num_inputs)[0]


def _forward(x: jax.Array, kernel: jax.Array, history: jax.Array, num_inputs: int) -> Any:
    input_scale, kernel_scale, _ = scales_from(history)
    small = quantise(x, input_scale, FORWARD)
    contracted = tuple(range(x.ndim - num_inputs, x.ndim)), tuple(range(num_inputs))
    y = _scaled_dot(
        (small, input_scale),
        (quantise(kernel, kernel_scale, FORWARD), kernel_scale),
        contracted,
        kernel.dtype,
        precision=lax.Precision.DEFAULT,
    )
    # The name lets a checkpoint that keeps what is dear keep these 8 bits, not the 32 before them.
    # As integers, since JAX puts what a checkpoint keeps through `reduce_precision`, which takes
    # e4m3's largest values (256 to 448) for infinities.
    bits = checkpoint_name(lax.bitcast_convert_type(small, jnp.uint8), "zerojax.fp8_input")
    # The kernel itself, not its 8 bits: at ZeRO-3 it is gathered again and quantised again.
    return y, (bits, _largest(x), kernel, history)


def _backward(num_inputs: int, kept: Any, gradient: jax.Array) -> Any:
    input_bits, largest_input, kernel, history = kept
    small_input = lax.bitcast_convert_type(input_bits, FORWARD)
    input_scale, kernel_scale, gradient_scale = scales_from(history)
    small_kernel = quantise(kernel, kernel_scale, FORWARD)
    small_gradient = quantise(gradient, gradient_scale, BACKWARD)
    batch_dims = small_input.ndim - num_inputs
    batch = tuple(range(batch_dims))
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
    newest = jnp.stack([largest_input, _largest(kernel), _largest(gradient)])
    return input_gradient, kernel_gradient, remember(history, newest)


fp8_dot.defvjp(_forward, _backward)


def remember(history: jax.Array, newest: jax.Array) -> jax.Array:
    """The history with `newest` [3] in front and its oldest entry gone."""
    return jnp.concatenate([newest[:, None], history[:, :-1]], axis=1)


def _largest(x: jax.Array) -> jax.Array:
    """float32 []: the largest magnitude."""
    return jnp.max(jnp.abs(x)).astype(jnp.float32)


def _scaled_dot(
    left: tuple[jax.Array, jax.Array],
    right: tuple[jax.Array, jax.Array],
    contracted: tuple[tuple[int, ...], tuple[int, ...]],
    dtype: Any,
    *,
    precision: lax.Precision,
) -> jax.Array:
    """The product of two (8-bit array, scale).

    Args:
      contracted: dimensions of each.
      dtype: of the result.
      precision: DEFAULT lets the tensor cores add up with fewer bits, which NVIDIA's recipe does
        forward; HIGHEST does not, for gradients.
    """
    # Before it is scaled a product of float16 range would overflow; bfloat16 reaches far enough.
    wide = jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32
    y = lax.dot_general(
        left[0],
        right[0],
        (contracted, ((), ())),
        precision=precision,
        preferred_element_type=wide,
    )
    return (y * (left[1] * right[1]).astype(wide)).astype(dtype)
