"""AdamW with one-byte moments as one in-place Mosaic GPU kernel, or the reference."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

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
from pallas_kernels.elementwise import FLOATS, check_seed, stored_as
from pallas_kernels.optimizers import AdamScalars


class Adam8bitLeaf(NamedTuple):
    """What an update of one leaf returns.

    Attributes:
      param, moments: of the shapes and dtypes that came in, and in a kernel in their memory.
      compute: the new parameter in the dtype asked for, or None.
    """

    param: jax.Array
    moments: Moments8bit
    compute: jax.Array | None


def update_adam8bit(
    param: jax.Array,
    moments: Moments8bit,
    grad: jax.Array,
    *,
    scalars: AdamScalars,
    seed: jax.Array,
    compute_dtype: Any = None,
    impl: Impl | Choice = "auto",
) -> Adam8bitLeaf:
    """Updates one leaf. Inside a `jax.jit` that donates them, the arrays change in place.

    Args:
      param: any shape; float32, or bfloat16 that is rounded stochastically.
      moments: of `adam8bit.init_moments(param.shape)`.
      grad: of that shape; float32, bfloat16 or float16.
      scalars: of `optimizers.adam_scalars`.
      seed: uint32[2] of `rounding.seed_of`, other for every leaf and step.
      compute_dtype: of a copy of the new parameter; None for none.
      impl: see `choice.choose`; a `Choice` is taken as it is.

    Raises:
      TypeError, ValueError: arrays that are not of one leaf.
      KernelUnavailable: the kernel was asked for and cannot run here.
    """
    check_leaf(param, moments, grad)
    check_seed("adam8bit", seed)
    if not isinstance(scalars, AdamScalars):
        raise TypeError(
            f"adam8bit: scalars of type {type(scalars).__name__} in place of AdamScalars, "
            "which pallas_kernels.optimizers.adam_scalars makes"
        )
    if compute_dtype is not None and compute_dtype not in FLOATS:
        raise TypeError(
            f"adam8bit: compute_dtype={jnp.dtype(compute_dtype)} is not one of float32, bfloat16, "
            "float16"
        )
    choice = choose(impl, kernel="adam8bit") if isinstance(impl, str) else impl
    return _update(choice.implementation, compute_dtype, param, moments, grad, tuple(scalars), seed)


@functools.partial(jax.jit, static_argnums=(0, 1))  # as in `update`
def _update(
    implementation: str,
    compute_dtype: Any,
    param: jax.Array,
    moments: Moments8bit,
    grad: jax.Array,
    scalars: tuple[Any, ...],
    seed: jax.Array,
) -> Adam8bitLeaf:
    block = block_of(param.size)
    rows = param.size // block
    if implementation == "xla" or rows == 0:
        new, moments, exact = reference_adam8bit(
            param, moments, grad, AdamScalars(*scalars), seed=seed
        )
        compute = None if compute_dtype is None else exact.astype(compute_dtype)
        return Adam8bitLeaf(new, moments, compute)
    tiles = mosaic.Tiles(block, rows, 1, param.size - rows * block)
    if tiles.tail and param.size > mosaic.MAX_FLAT:
        raise ValueError(
            f"adam8bit: a leaf of {param.size} elements is not a multiple of 128 and "
            f"larger than {mosaic.MAX_FLAT}, the limit of 32-bit offsets; use impl='xla'"
        )
    view = (param.size,) if tiles.tail else (rows, block)
    state = (param.reshape(view), moments.mu.reshape(view), moments.nu.reshape(view))
    refs = [jax.new_ref(x) for x in (*state, moments.mu_scale, moments.nu_scale)]
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
        _body(tiles, has_output=compute_dtype is not None),
        tiles,
        name="adam8bit",
        out_type=out_type,
        has_barriers=True,
        interpret=implementation == "interpret",
    )
    results = kernel(*refs, flat, packed, seed, *prepared)
    outputs = [jax.freeze(ref) for ref in prepared] or list(results)
    new, mu, nu, mu_scale, nu_scale = (jax.freeze(ref) for ref in refs)
    shape = param.shape
    moments = Moments8bit(mu.reshape(shape), nu.reshape(shape), mu_scale, nu_scale)
    compute = outputs[0].reshape(shape) if outputs else None
    return Adam8bitLeaf(new.reshape(shape), moments, compute)


def _update_tail(refs: list[Any], grad: jax.Array, scalars: Any, seed: Any, tiles: Any) -> Any:
    """The last, short block by the reference, on the same memory, before the kernel (see
    `mosaic.fused_update`); returns its new parameters as float32."""
    start = tiles.size - tiles.tail
    param, mu, nu, mu_scale, nu_scale = refs
    old_param, old_mu, old_nu, old_grad = mosaic.tails_of((param, mu, nu, grad), start)
    old = Moments8bit(old_mu, old_nu, *mosaic.tails_of((mu_scale, nu_scale), tiles.rows))
    new, moments, exact = reference_adam8bit(
        old_param, old, old_grad, AdamScalars(*scalars), seed=seed, first_index=start
    )
    param[start:], mu[start:], nu[start:] = new, moments.mu, moments.nu
    mu_scale[tiles.rows :], nu_scale[tiles.rows :] = moments.mu_scale, moments.nu_scale
    return exact


def _body(tiles: Any, *, has_output: bool) -> Any:
    """The function of one program: one block of codes and its two scales."""
    block = tiles.block

    def spread(x: Any) -> Any:
        return lax.broadcast(x, (block,))

    def body(*refs: Any) -> None:
        param, mu, nu, mu_scale, nu_scale, grad, scalar_ref, seed_ref = refs[:8]
        program = lax.axis_index("program")

        def at(ref: Any) -> Any:
            return mosaic.at_tile(ref, program, tiles)

        def load(ref: Any) -> Any:
            return mosaic.load_tile(ref, program, tiles)

        seeds = (spread(seed_ref[0]), spread(seed_ref[1]))
        bits = rounding.bits_at(mosaic.block_index(program, block), seeds)
        scalars = AdamScalars(*(spread(scalar_ref[k]) for k in range(len(AdamScalars._fields))))
        old = Moments8bit(mu, nu, mu_scale[program], nu_scale[program])
        new = adam8bit(
            Blocks8bit(load(param), load(mu), load(nu), old.mu_scale, old.nu_scale),
            load(grad),
            scalars,
            bits=bits,
            largest=jnp.max,
            spread=spread,
        )
        at(param)[...] = stored_as(param.dtype, new.param, bits, 2)
        at(mu)[...] = new.mu.astype(jnp.int8)
        at(nu)[...] = new.nu.astype(jnp.int8)
        skip = scalar_ref[AdamScalars._fields.index("skip")]
        scales = kept_scales(skip, old, new.mu_scale, new.nu_scale)
        mu_scale[program], nu_scale[program] = scales
        if has_output:
            at(refs[8])[...] = new.param.astype(refs[8].dtype)

    return body
