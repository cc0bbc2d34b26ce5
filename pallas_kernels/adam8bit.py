"""Quantizes AdamW's moments to one byte per element, in blocks; includes the plain reference.

A leaf (one array) is flattened and divided into blocks of at most 512 elements that share two
float32 scales (block-wise as in arXiv:2110.02861). A code represents a root of the value, so that
small values keep digits; zero is not a code of the second moment (arXiv:2309.01507). Values are
rounded stochastically, so that a moment that changes by less than one code still changes on
average.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import rounding
from pallas_kernels.elementwise import FLOATS, Scalar, stored_as
from pallas_kernels.optimizers import AdamScalars, adam_direction, new_moments, unless_skipped

QUANT_BLOCKS = (512, 384, 256, 128)
"""Candidate numbers of elements that share a scale: the first that divides the leaf is used, so
that no short block remains; else 512. Each block reads and writes 16 bytes of scales."""
MU_LEVELS, NU_LEVELS, NU_OFFSET = 127.0, 256.0, 129.0
NU_ZERO = -128
"""Smallest code of a second moment; its value is 2^-32 of the block's scale. New second moments
have it."""
MU_FLOOR, NU_FLOOR = 2.0**-112, 2.0**-94
"""Minimum scales. The values of the smallest codes are then still normal float32 numbers (2^-126 or
more), which also hardware that flushes smaller numbers to 0 can represent."""
NU_SMALLEST = 2.0**-126
"""Value of the smallest code at the minimum scale; `decode_moments` returns 0 instead."""
NEARLY_ALL = 1 - 2.0**-20
"""Values of at least this fraction of their block's scale get the largest code, however the
kernel's division rounds. Otherwise the scale could shrink by one code, and moments that are stored
as float32 and encoded again would not be recovered bit by bit."""


class Moments8bit(NamedTuple):
    """Adam's moments of one leaf of any shape, as 8-bit codes and scales.

    Attributes:
      mu: int8, with the leaf's shape; sign(code) * (code / 127)^2 * scale is the first moment.
      nu: int8, with the leaf's shape; ((code + 129) / 256)^4 * scale is the second moment.
      mu_scale, nu_scale: float32 [number of blocks], the largest |mu| and nu of each block, or
        `MU_FLOOR` and `NU_FLOOR` if these are larger.
    """

    mu: jax.Array
    nu: jax.Array
    mu_scale: jax.Array
    nu_scale: jax.Array


class Blocks8bit(NamedTuple):
    """Parameters, codes of moments and scales of blocks in float32, before or after an update."""

    param: jax.Array
    mu: jax.Array
    nu: jax.Array
    mu_scale: jax.Array
    nu_scale: jax.Array


def block_of(size: int) -> int:
    """Returns the number of elements that share a scale, in a leaf of `size` elements."""
    return next((block for block in QUANT_BLOCKS if size % block == 0), QUANT_BLOCKS[0])


def num_blocks(size: int) -> int:
    """Returns the number of blocks (and so of scales) of a leaf of `size` elements."""
    return -(-size // block_of(size))


def init_moments(shape: tuple[int, ...]) -> Moments8bit:
    """Builds the 8-bit moments of a leaf before its first update; all represent 0."""
    blocks = num_blocks(_size(shape))
    return Moments8bit(
        mu=jnp.zeros(shape, jnp.int8),
        nu=jnp.full(shape, NU_ZERO, jnp.int8),
        mu_scale=jnp.full((blocks,), MU_FLOOR, jnp.float32),
        nu_scale=jnp.full((blocks,), NU_FLOOR, jnp.float32),
    )


def decode_moments(moments: Moments8bit) -> tuple[jax.Array, jax.Array]:
    """Decodes to float32 (mu, nu) with the leaf's shape; `encode_moments` restores the codes."""
    shape = moments.mu.shape
    mu = decode_mu(_rows(moments.mu).astype(jnp.float32), moments.mu_scale[:, None])
    nu = decode_nu(_rows(moments.nu, NU_ZERO).astype(jnp.float32), moments.nu_scale[:, None])
    nu = jnp.where(nu > NU_SMALLEST, nu, 0.0)
    return _unrows(mu, shape), _unrows(nu, shape)


def encode_moments(mu: jax.Array, nu: jax.Array) -> Moments8bit:
    """Encodes float32 moments by their nearest codes; inverts `decode_moments` bit by bit.

    Args:
      mu: first moment, float32 of any shape.
      nu: second moment, float32 of the same shape, not negative.
    """
    shape, (mu, nu) = mu.shape, (_rows(mu), _rows(nu))
    scales = scales_of(mu, nu, lambda x: jnp.max(x, axis=1, keepdims=True))
    # As random bits, 2^15 is the fraction 1/2, with which stochastic rounding rounds to nearest.
    half = jnp.full(mu.shape, 2**15, jnp.uint32)
    codes = (
        encode_mu(mu, _four_over(scales[0]), half),
        encode_nu(nu, _four_over(scales[1]), half),
    )
    stored = (_unrows(code, shape).astype(jnp.int8) for code in codes)
    return Moments8bit(*stored, *(scale[:, 0] for scale in scales))


def scales_of(
    mu: jax.Array, nu: jax.Array, largest: Callable[[jax.Array], jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Computes (scales of mu, scales of nu) of blocks; `largest` returns a block's largest
    element."""
    mu_scale, nu_scale = largest(jnp.abs(mu)), largest(nu)
    return (
        jnp.maximum(mu_scale, MU_FLOOR),
        jnp.maximum(nu_scale, NU_FLOOR),
    )


def decode_mu(code: jax.Array, scale: jax.Array) -> Any:
    """Decodes first moments; codes and scales are float32 of one shape."""
    root = code * jnp.full_like(code, 1 / MU_LEVELS)
    return root * jnp.abs(root) * scale


def decode_nu(code: jax.Array, scale: jax.Array) -> Any:
    """Decodes second moments; codes and scales are float32 of one shape."""
    # Exact in any order: the product with a power of two, and the sum of 9 bits.
    step = jnp.full_like(code, 1 / NU_LEVELS)
    root = code * step + jnp.full_like(code, NU_OFFSET / NU_LEVELS)
    square = root * root
    return square * square * scale


def encode_mu(mu: jax.Array, four_over_scale: jax.Array, bits: jax.Array) -> Any:
    """Rounds first moments stochastically to codes (float32) that decode to `mu` on average.

    The argument is 4 / scale, because 1 / scale is not a normal number for the largest scales.
    """
    part = jnp.abs(mu) * four_over_scale
    square = part * jnp.full_like(mu, MU_LEVELS**2 / 4)
    below = _floor(jnp.sqrt(square))
    above = below + jnp.ones_like(below)
    # The chance of `above` is the quotient of two differences of squares. It is compared without a
    # division, which is 8 instructions in the kernel. above^2 - below^2 is above + below, exactly.
    is_above = square - below * below > _fraction(bits) * (above + below)
    code = jnp.where(is_above, above, below)
    code = jnp.where(
        part < jnp.full_like(part, 4 * NEARLY_ALL), code, jnp.full_like(code, MU_LEVELS)
    )
    return jnp.where(mu < jnp.zeros_like(mu), -code, code)


def encode_nu(nu: jax.Array, four_over_scale: jax.Array, bits: jax.Array) -> Any:
    """Rounds second moments stochastically to codes (float32); no code is below `NU_ZERO`."""
    part = nu * four_over_scale
    fourth = part * jnp.full_like(nu, NU_LEVELS**4 / 4)
    below = _floor(jnp.sqrt(jnp.sqrt(fourth)))
    above = below + jnp.ones_like(below)
    low, high = below * below, above * above
    is_above = fourth - low * low > _fraction(bits) * (high * high - low * low)
    level = jnp.where(is_above, above, below)
    level = jnp.maximum(level, jnp.ones_like(level))
    level = jnp.where(
        part < jnp.full_like(part, 4 * NEARLY_ALL), level, jnp.full_like(level, NU_LEVELS)
    )
    return level - jnp.full_like(level, NU_OFFSET)


def adam8bit(
    old: Blocks8bit,
    grad: jax.Array,
    s: AdamScalars,
    *,
    bits: rounding.Bits,
    largest: Callable[[jax.Array], jax.Array],
    spread: Callable[[jax.Array], jax.Array],
) -> Blocks8bit:
    """Computes an AdamW update of blocks with 8-bit moments, for both kernel and reference.

    Args:
      old: parameter, codes as float32, and for each scale one number per block.
      grad: gradient, a float32 block.
      s: scalars of the update, as blocks; in the reference, as numbers.
      bits: random bits for the elements.
      largest: function that returns a block's largest element, one number per block.
      spread: function that broadcasts one number per block to the block.
    """
    mu = decode_mu(old.mu, spread(old.mu_scale))
    nu = decode_nu(old.nu, spread(old.nu_scale))
    new_mu, new_nu = new_moments(mu, nu, grad * s.gradient_scale, s)
    param = old.param - s.learning_rate * adam_direction(old.param, new_mu, new_nu, s)
    param, new_mu, new_nu = unless_skipped(s.skip, (old.param, mu, nu), (param, new_mu, new_nu))
    mu_scale, nu_scale = scales_of(new_mu, new_nu, largest)
    mu_code = encode_mu(new_mu, _four_over(spread(mu_scale)), bits(0))
    nu_code = encode_nu(new_nu, _four_over(spread(nu_scale)), bits(1))
    # Encoded again, the old moments would be rounded stochastically and so would change.
    mu_code, nu_code = unless_skipped(s.skip, (old.mu, old.nu), (mu_code, nu_code))
    return Blocks8bit(param, mu_code, nu_code, mu_scale, nu_scale)


def reference_adam8bit(
    param: jax.Array,
    moments: Moments8bit,
    grad: jax.Array,
    scalars: AdamScalars,
    *,
    seed: jax.Array,
    first_index: int = 0,
) -> tuple[jax.Array, Moments8bit, jax.Array]:
    """Updates one leaf by AdamW with 8-bit moments, in plain `jax.numpy`.

    Args:
      param: parameter of any shape; float32, bfloat16 (rounded stochastically) or float16.
      moments: 8-bit moments of a leaf of this shape.
      grad: gradient of this shape; float32, bfloat16 or float16.
      scalars: result of `optimizers.adam_scalars`.
      seed: random seed, uint32 [2], from `rounding.seed_of`.
      first_index: position of the first element in its leaf, for the random bits.

    Returns:
      (new parameter, new moments, new parameter as float32).
    """
    scalars = AdamScalars(*(jnp.asarray(x, jnp.float32) for x in scalars))
    shape = param.shape
    block = block_of(param.size)
    index = lax.iota(jnp.uint32, num_blocks(param.size) * block)
    index = index.reshape(-1, block) + jnp.uint32(first_index % 2**32)
    bits = rounding.bits_at(index, (seed[0], seed[1]))
    new = adam8bit(
        Blocks8bit(
            _rows(param).astype(jnp.float32),
            _rows(moments.mu).astype(jnp.float32),
            _rows(moments.nu, NU_ZERO).astype(jnp.float32),
            moments.mu_scale[:, None],
            moments.nu_scale[:, None],
        ),
        _rows(grad).astype(jnp.float32),
        scalars,
        bits=bits,
        largest=lambda x: jnp.max(x, axis=1, keepdims=True),
        spread=lambda x: x,
    )
    scales = kept_scales(scalars.skip, moments, new.mu_scale[:, 0], new.nu_scale[:, 0])
    mu, nu = (_unrows(x, shape).astype(jnp.int8) for x in (new.mu, new.nu))
    stored = _unrows(stored_as(param.dtype, new.param, bits, 2), shape)
    return stored, Moments8bit(mu, nu, *scales), _unrows(new.param, shape)


def kept_scales(
    skip: Scalar, old: Moments8bit, mu_scale: jax.Array, nu_scale: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Selects the new scales, or the old ones if `skip` is 1.

    Uses arithmetic, because Mosaic cannot select between scalars. This needs finite new scales,
    which a skipped step has, because its values were replaced before.
    """
    applied = 1.0 - skip
    return skip * old.mu_scale + applied * mu_scale, skip * old.nu_scale + applied * nu_scale


def check_leaf(
    param: jax.Array, moments: Moments8bit, grad: jax.Array, average: jax.Array | None = None
) -> None:
    """Checks that the arrays of an update belong to one leaf and have supported dtypes.

    Raises:
      TypeError: a dtype is not supported.
      ValueError: shapes differ, or `average` is not float32.
    """
    for name, x in (("param", param), ("grad", grad)):
        if x.dtype not in FLOATS:
            raise TypeError(f"adam8bit: {name} is {x.dtype}, not float32, bfloat16 or float16")
    if param.dtype == jnp.float16:
        raise TypeError(
            "adam8bit: float16 parameters cannot be rounded stochastically; use float32 or bfloat16"
        )
    scales = (num_blocks(param.size),)
    expected = (param.shape, param.shape, scales, scales)
    for name, x, shape in zip(Moments8bit._fields, moments, expected, strict=True):
        dtype = jnp.float32 if name.endswith("scale") else jnp.int8
        if x.dtype != dtype:
            raise TypeError(
                f"adam8bit: {name} is {x.dtype}, but must be {jnp.dtype(dtype)}; use "
                "encode_moments for float32 moments, init_moments for a new leaf"
            )
        if tuple(x.shape) != tuple(shape):
            raise ValueError(
                f"adam8bit: {name} has shape {tuple(x.shape)}, but for a parameter of shape "
                f"{tuple(param.shape)} it must be {tuple(shape)} (see init_moments)"
            )
    if average is not None and (average.dtype, average.shape) != (jnp.float32, param.shape):
        raise ValueError(
            f"adam8bit: average is {average.dtype}{list(average.shape)}, but must be float32 of "
            f"the parameter's shape {list(param.shape)}"
        )
    if tuple(grad.shape) != tuple(param.shape):
        raise ValueError(
            f"adam8bit: grad {grad.shape} and param {param.shape} differ in shape; pass the "
            "gradient of this parameter"
        )


def _four_over(scale: jax.Array) -> Any:
    return jnp.full_like(scale, 4.0) / scale


def _floor(x: jax.Array) -> Any:
    return x.astype(jnp.int32).astype(jnp.float32)  # correct for values that are not negative


def _fraction(bits: jax.Array) -> Any:
    whole = bits.astype(jnp.int32).astype(jnp.float32)
    return whole * jnp.full_like(whole, 2.0**-16)


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for dim in shape:
        size *= dim
    return size


def _rows(x: jax.Array, missing_value: int = 0) -> jax.Array:
    """Reshapes a leaf to [blocks, elements]; fills the last block with `missing_value`."""
    block = block_of(x.size)
    missing = num_blocks(x.size) * block - x.size
    flat = x.reshape(-1)
    # The values added decode to almost 0, so that they do not raise the last block's scale.
    if missing:
        flat = jnp.pad(flat, (0, missing), constant_values=missing_value)
    return flat.reshape(-1, block)


def _unrows(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return x.reshape(-1)[: _size(shape)].reshape(shape)
