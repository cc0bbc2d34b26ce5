"""Runs AdamW with one-byte moments by one in-place Mosaic GPU kernel, or by the reference.

The kernel is bound by arithmetic, not by memory. It executes 145 instructions for each element: 49
to encode, 25 for AdamW, 18 for random bits, 16 for the maxima of a block, 37 for the rest. 54 of
them run at half rate (comparisons, selections, bits) and 6 at an eighth (roots, reciprocals). A
multiprocessor starts 128 in a cycle, and copies the 16 bytes of an element in 1.3 cycles on an
H100, in 0.9 on an H200.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels import mosaic, rounding
from pallas_kernels.adam8bit import (
    Blocks8bit,
    Moments8bit,
    adam8bit,
    block_of,
    check_leaf,
    kept_scales,
    reference_adam8bit,
)
from pallas_kernels.choice import Choice, Impl, choose
from pallas_kernels.elementwise import (
    FLOATS,
    KernelRef,
    Scalar,
    averaging_scalars,
    check_seed,
    moved_average,
    stored_as,
)
from pallas_kernels.optimizers import AdamScalars

AVERAGING = averaging_scalars(AdamScalars)
"""Class of the scalars of an update that also updates an average of the parameter."""


class Adam8bitLeaf(NamedTuple):
    """New arrays of one leaf after an update by AdamW with 8-bit moments.

    Attributes:
      param, moments: updated arrays, with the inputs' shapes and dtypes; a kernel writes them into
        the inputs' memory.
      compute: copy of the new parameter in the requested dtype, or None.
      average: updated average of the parameter; None without one.
    """

    param: jax.Array
    moments: Moments8bit
    compute: jax.Array | None
    average: jax.Array | None = None


def update_adam8bit(
    param: jax.Array,
    moments: Moments8bit,
    grad: jax.Array,
    *,
    scalars: tuple[Scalar, ...],
    seed: jax.Array,
    compute_dtype: DTypeLike | None = None,
    average: jax.Array | None = None,
    impl: Impl | Choice = "auto",
) -> Adam8bitLeaf:
    """Updates one leaf by AdamW with 8-bit moments.

    Inside a `jax.jit` that donates the arrays, they change in place.

    Args:
      param: parameter of any shape; float32, or bfloat16 that is rounded stochastically.
      moments: 8-bit moments, initially `adam8bit.init_moments(param.shape)`.
      grad: gradient of this shape; float32, bfloat16 or float16.
      scalars: result of `optimizers.adam_scalars`; with an average, `AVERAGING` of these scalars
        and of its rate.
      seed: random seed, uint32 [2] from `rounding.seed_of`, different for every leaf and step.
      compute_dtype: dtype of a copy of the new parameter; None makes no copy.
      average: moving average of the parameter, float32 of its shape; moved towards the new
        parameter as it is stored, see `elementwise.averaging`.
      impl: requested implementation, see `choice.choose`; a `Choice` is used without a check.

    Raises:
      TypeError, ValueError: the arrays do not belong to one leaf, another argument is of the wrong
        kind, or the leaf is too large for the kernel.
      KernelUnavailable: the kernel was requested and cannot run on these devices.
    """
    check_leaf(param, moments, grad, average)
    check_seed("adam8bit", seed)
    check_options(scalars, compute_dtype, averages=average is not None)
    choice = choose(impl, kernel="adam8bit") if isinstance(impl, str) else impl
    static = choice.implementation, compute_dtype
    return _update(static, param, moments, grad, average, tuple(scalars), seed)


def scalars_of(averages: bool) -> Any:
    """Returns the class of the scalars for an update with or without an average."""
    return AVERAGING if averages else AdamScalars


def check_options(
    scalars: object, compute_dtype: DTypeLike | None, *, averages: bool = False
) -> None:
    """Raises a TypeError for scalars of another rule, or for an unsupported `compute_dtype`."""
    wanted = scalars_of(averages)
    if not isinstance(scalars, wanted):
        raise TypeError(
            f"adam8bit: scalars are {type(scalars).__name__}, but must be {wanted.__name__}; "
            "make them with pallas_kernels.optimizers.adam_scalars"
            + ", then AVERAGING of them and a rate"
            * averages
        )
    if compute_dtype is not None and compute_dtype not in FLOATS:
        raise TypeError(
            f"adam8bit: compute_dtype={jnp.dtype(compute_dtype)} is not one of float32, bfloat16, "
            "float16"
        )


@functools.partial(jax.jit, static_argnums=0)  # for the reason given in `update`
def _update(
    static: tuple[str, Any],
    param: jax.Array,
    moments: Moments8bit,
    grad: jax.Array,
    average: jax.Array | None,
    scalars: tuple[Scalar, ...],
    seed: jax.Array,
) -> Adam8bitLeaf:
    (implementation, compute_dtype), averages = static, average is not None
    block = block_of(param.size)
    rows = param.size // block
    if implementation == "xla" or rows == 0:
        new, moments, exact = reference_adam8bit(
            param, moments, grad, AdamScalars(*scalars[: len(AdamScalars._fields)]), seed=seed
        )
        compute = None if compute_dtype is None else exact.astype(compute_dtype)
        if average is not None:
            average = moved_average(average, new.astype(jnp.float32), AVERAGING(*scalars))
        return Adam8bitLeaf(new, moments, compute, average)
    tiles = mosaic.Tiles(block, rows, 1, param.size - rows * block)
    if tiles.tail and param.size > mosaic.MAX_FLAT:
        raise ValueError(
            f"adam8bit: a leaf of {param.size} elements is not a multiple of 128 and "
            f"larger than {mosaic.MAX_FLAT}, the limit of 32-bit offsets; use impl='xla'"
        )
    # Tiles of a matrix are addressed by the number of their row, so that only the flat view has
    # the limit of 32-bit offsets.
    view = (param.size,) if tiles.tail else (rows, block)
    state = (param.reshape(view), moments.mu.reshape(view), moments.nu.reshape(view))
    state = (*state, moments.mu_scale, moments.nu_scale)
    more = () if average is None else (average.reshape(view),)
    refs = [jax.new_ref(x) for x in (*state, *more)]
    flat = grad.reshape(view)
    packed = jnp.stack([jnp.asarray(x, jnp.float32) for x in scalars])
    prepared, out_type = [], ()
    if tiles.tail:
        exact = _update_tail(refs, flat, scalars, seed, tiles)
        if compute_dtype is not None:
            prepared = [mosaic.before_tail(exact.astype(compute_dtype), tiles)]
    elif compute_dtype is not None:
        out_type = (jax.ShapeDtypeStruct(view, compute_dtype),)
    kernel = mosaic.run_on_tiles(
        _body(tiles, has_output=compute_dtype is not None, averages=averages),
        tiles,
        name="adam8bit",
        out_type=out_type,
        # The maximum of a block has barriers of its own, between all reads of the old scales and
        # the store of the new ones. Everything else is read and written by the same thread.
        has_barriers=False,
        clamps=False,
        interpret=implementation == "interpret",
    )
    results = kernel(*refs, flat, packed, seed, *prepared)
    outputs = [jax.freeze(ref) for ref in prepared] or list(results)
    compute = outputs[0].reshape(param.shape) if outputs else None
    return frozen_leaf(refs, param.shape, compute)


def frozen_leaf(
    refs: Sequence[jax.Ref], shape: tuple[int, ...], compute: jax.Array | None
) -> Adam8bitLeaf:
    """Reads the arrays from a leaf's Refs after a kernel: parameter, moments, optional average."""
    new, mu, nu, mu_scale, nu_scale, *average = (jax.freeze(ref) for ref in refs)
    moments = Moments8bit(mu.reshape(shape), nu.reshape(shape), mu_scale, nu_scale)
    averages = [x.reshape(shape) for x in average]
    return Adam8bitLeaf(new.reshape(shape), moments, compute, *averages)


def _update_tail(
    refs: list[jax.Ref],
    grad: jax.Array,
    scalars: tuple[Scalar, ...],
    seed: jax.Array,
    tiles: mosaic.Tiles,
) -> Any:
    """Updates the last, short block by the reference, on the same memory, before the kernel runs.

    `mosaic.fused_update` explains the order. Returns the block's new parameters as float32.
    """
    start = tiles.size - tiles.tail
    param, mu, nu, mu_scale, nu_scale, *average = refs
    old_param, old_mu, old_nu, old_grad = mosaic.tails_of((param, mu, nu, grad), start)
    old = Moments8bit(old_mu, old_nu, *mosaic.tails_of((mu_scale, nu_scale), tiles.rows))
    plain = AdamScalars(*scalars[: len(AdamScalars._fields)])
    new, moments, exact = reference_adam8bit(
        old_param, old, old_grad, plain, seed=seed, first_index=start
    )
    for ref in average:
        (before,) = mosaic.tails_of((ref,), start)
        ref[start:] = moved_average(before, new.astype(jnp.float32), AVERAGING(*scalars))
    param[start:], mu[start:], nu[start:] = new, moments.mu, moments.nu
    mu_scale[tiles.rows :], nu_scale[tiles.rows :] = moments.mu_scale, moments.nu_scale
    return exact


def _body(tiles: mosaic.Tiles, *, has_output: bool, averages: bool) -> Any:
    """Builds the kernel's function; each program updates one block with its two scales."""
    kind, count = scalars_of(averages), 8 + averages

    def body(*refs: KernelRef) -> None:
        *arrays, scalar_ref, seed_ref = refs[:count]
        update_block(
            tiles,
            lax.axis_index("program"),
            (arrays, refs[count] if has_output else None),
            scalars=kind(*(scalar_ref[k] for k in range(len(kind._fields)))),
            seed=(seed_ref[0], seed_ref[1]),
        )

    return body


def update_block(
    tiles: mosaic.Tiles,
    row: jax.Array,
    refs: tuple[Sequence[Any], Any],
    *,
    scalars: Any,
    seed: tuple[jax.Array, jax.Array],
) -> None:
    """Updates block number `row` of one leaf; called inside a kernel.

    Args:
      tiles: division of the leaf; each tile is one block that shares scales.
      row: index of the block.
      refs: (parameter, codes and scales as in `Moments8bit`, optional average, gradient; output or
        None).
      scalars: scalars of the update, as numbers.
      seed: two words of the leaf's random seed.
    """
    (param, mu, nu, mu_scale, nu_scale, *average, grad), output = refs
    block = tiles.block
    spread = functools.partial(mosaic.spread, block=block)
    at = functools.partial(mosaic.at_tile, row=row, tiles=tiles)
    load = functools.partial(mosaic.load_tile, row=row, tiles=tiles)
    bits = rounding.bits_at(mosaic.block_index(row, block), (spread(seed[0]), spread(seed[1])))
    old = Moments8bit(mu, nu, mu_scale[row], nu_scale[row])
    blocks: Any = type(scalars)(*map(spread, scalars))
    new = adam8bit(
        Blocks8bit(load(param), load(mu), load(nu), old.mu_scale, old.nu_scale),
        load(grad),
        blocks,
        bits=bits,
        largest=jnp.max,
        spread=spread,
    )
    stored = stored_as(param.dtype, new.param, bits, 2)
    at(param)[...] = stored
    for ref in average:
        at(ref)[...] = moved_average(load(ref), stored.astype(jnp.float32), blocks)
    at(mu)[...] = new.mu.astype(jnp.int8)
    at(nu)[...] = new.nu.astype(jnp.int8)
    scales = kept_scales(scalars.skip, old, new.mu_scale, new.nu_scale)
    mu_scale[row], nu_scale[row] = scales
    if output is not None:
        at(output)[...] = new.param.astype(output.dtype)
