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
import numpy as np
from flax import linen, nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

Arrays = tuple[jax.Array, ...]

MATMUL_DTYPES = (None, "fp8")
FORWARD, BACKWARD = jnp.float8_e4m3fn, jnp.float8_e5m2
KEPT_INPUT = "zerojax.fp8_input"
"""Names the 8 bits of an input that a backward pass needs, for policies of checkpoints."""
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
    return Overwritten(history.at[KERNEL, 0].set(largest_magnitude(kernel)))


def scales_from(history: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The scale of each operand: 8-bit value times scale = value.

    Args:
      history: float32 [3, length], largest magnitudes of the latest steps; zero where unknown.

    Returns:
      float32 scalars for input, kernel and output gradient: the smallest power of two with which
      the largest magnitude is representable; 1 where the history is empty.
    """
    return (
        scale_from(history, INPUT),
        scale_from(history, KERNEL),
        scale_from(history, OUTPUT_GRADIENT),
    )


def scale_from(history: jax.Array, operand: int) -> jax.Array:
    """float32 []: the scale of INPUT, KERNEL or OUTPUT_GRADIENT, as `scales_from` has it."""
    largest = jnp.max(history[operand])
    limit = float(jnp.finfo(_DTYPES[operand]).max)
    ratio = jnp.clip(largest / limit, _SMALLEST, _LARGEST)
    # Adding a mantissa of ones carries into the exponent unless the mantissa is zero.
    bits = lax.bitcast_convert_type(ratio, jnp.uint32) + np.uint32(0x7FFFFF)
    power = lax.bitcast_convert_type(bits & np.uint32(0xFF800000), jnp.float32)
    return jnp.where(largest > 0, power, 1.0)


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
    return fp8_dots(x, (kernel,), (history,), (None,), num_inputs)[0]


def in_bits(x: jax.Array, history: jax.Array) -> jax.Array:
    """uint8, of the shape of `x`: the bits to which `fp8_dot` rounds a kernel with this history."""
    scale = scale_from(history, KERNEL)
    return lax.bitcast_convert_type(quantise(x, scale, FORWARD), jnp.uint8)


def from_bits(bits: jax.Array, dtype: Any) -> jax.Array:
    """What `in_bits` kept, in units of the scale: up to 448, exact in every `dtype` of products."""
    return lax.bitcast_convert_type(bits, FORWARD).astype(dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def fp8_dots(
    x: jax.Array,
    kernels: Arrays,
    histories: Arrays,
    largest: tuple[jax.Array | None, ...],
    num_inputs: int,
) -> tuple[jax.Array, ...]:
    """The products of one `x` with several kernels; see `fp8_dot`.

    `x` is quantised once and its 8 bits are kept once for the backward pass. Its scale is the
    largest that a history asks for: histories that began alike have seen the same `x` ever since.
    The gradients of `x` are added in the dtype of the kernels, that of the last kernel first, as
    JAX adds them where each product is one by itself.

    Args:
      largest: None for a kernel as it is. For one from `from_bits`, which is in units of its scale,
        float32 []: its largest magnitude before it was rounded, on this device; of all devices the
        largest counts. Gradients are those of the kernel itself in both cases.
    """
    return _forward(x, kernels, histories, largest, num_inputs)[0]


def _forward(
    x: jax.Array, kernels: Arrays, histories: Arrays, largest: Any, num_inputs: int
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
    # The name lets a checkpoint that keeps what is dear keep these 8 bits, not the 32 before them.
    # As integers, since JAX puts what a checkpoint keeps through `reduce_precision`, which takes
    # e4m3's largest values (256 to 448) for infinities.
    bits = checkpoint_name(lax.bitcast_convert_type(small, jnp.uint8), KEPT_INPUT)
    # The kernels themselves, not their 8 bits: at ZeRO-3 they are gathered and quantised again.
    return results, (bits, largest_magnitude(x), kernels, histories, largest)


def _backward(num_inputs: int, kept: Any, gradients: Arrays) -> Any:
    input_bits, largest_input, kernels, histories, largest = kept
    small_input = lax.bitcast_convert_type(input_bits, FORWARD)
    input_scale, scales = _scales_of_all(histories)
    batch_dims = small_input.ndim - num_inputs
    batch = tuple(range(batch_dims))
    made = []
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
        made.append((input_gradient, kernel_gradient, remember(history, newest)))
    input_gradients, kernel_gradients, after = zip(*made, strict=True)
    nothing = jax.tree.map(jnp.zeros_like, largest)
    return functools.reduce(jnp.add, input_gradients[::-1]), kernel_gradients, after, nothing


fp8_dots.defvjp(_forward, _backward)


def _small_kernel(kernel: jax.Array, scale: jax.Array, known: jax.Array | None) -> jax.Array:
    """A kernel in 8 bits; one from `from_bits`, whose largest magnitude is known, has them."""
    return quantise(kernel, scale, FORWARD) if known is None else kernel.astype(FORWARD)


def _scales_of_all(histories: Arrays) -> tuple[jax.Array, list[tuple[jax.Array, jax.Array]]]:
    """(scale of the input, for each history (scale of its kernel, of its output gradient))."""
    scales = [scales_from(history) for history in histories]
    largest = functools.reduce(jnp.maximum, [input_scale for input_scale, _, _ in scales])
    return largest, [(kernel_scale, gradient_scale) for _, kernel_scale, gradient_scale in scales]


def remember(history: jax.Array, newest: jax.Array) -> jax.Array:
    """The history with `newest` [3] in front and its oldest entry gone."""
    return jnp.concatenate([newest[:, None], history[:, :-1]], axis=1)


def largest_magnitude(x: jax.Array) -> jax.Array:
    """float32 []: what a history remembers of an array."""
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
