"""Sums and means over the whole global batch, for models that couple rows.

A step runs a model on the rows of one device at a time. What a model computes of its rows (a mean
of router probabilities, the mean and the mean square of a batch norm) is another number on each
device, and what is made of it, such as a product of two means, is not what one device with all rows
makes. `batch_sum` and `batch_mean` take it over all devices.

The step's loss is the sum of what all devices return, divided once, and the gradients of all
devices are added up. So where y = sum over devices d of x_d is given to every device, the gradient
of the summed loss with respect to x_d is the sum over all devices of their gradients with respect
to y: a sum again. With it no factor of the number of devices is left or missing.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zerojax.operators.marks import BatchCall, mark_batch_call

IN_TURN = (
    "with deterministic='mesh': virtual shards are computed one after the other, and none has the "
    "rows of all; leave deterministic out, or compute each row from that row alone"
)
"""Why there are no sums over the batch where its pieces are computed in turn."""
_AXES: contextvars.ContextVar[tuple[str, ...] | None] = contextvars.ContextVar(
    "batch_axes", default=()
)


@contextlib.contextmanager
def batch_split_over(axes: tuple[str, ...] | None) -> Iterator[None]:
    """Models that are traced meanwhile see a part of the batch on each device of these axes.

    None: they see pieces of it in turn (`IN_TURN`), and sums over the batch are refused.

    Everything that is traced where the axes are manual is to be inside: JAX keeps what it has
    traced of a function for a mesh and its manual axes, and knows nothing of this setting.
    """
    token = _AXES.set(axes)
    try:
        yield
    finally:
        _AXES.reset(token)


def batch_axes() -> tuple[str, ...] | None:
    """The axes whose devices have other parts of the batch where a model is traced now; None where
    pieces are computed in turn."""
    return _AXES.get()


def batch_sum(x: Any) -> jax.Array:
    """The sum of `x` over all devices that hold other rows of the same batch.

    In a step of zerojax, and in its evaluation, `x` is what this device computed of its own rows
    of one microbatch, already summed over them; the result is that of all rows of the microbatch,
    the same on every device, and gradients through it are those of one device with all rows.
    Where rows count differently (weights, padding), a mean over the batch is
    `batch_sum(jnp.sum(x * w, 0)) / batch_sum(jnp.sum(w))`.

    Anywhere else (plain JAX, one device) the result is `x`.

    Args:
      x: any shape, the same on every device; integers, floating-point or complex. Sums of 16-bit
        floats are taken in float32.

    Returns:
      The shape and dtype of `x`.

    Raises:
      TypeError: booleans, of which a sum is another dtype.
      ValueError: under `deterministic: mesh`.

    >>> batch_sum(jnp.arange(3.0))
    Array([0., 1., 2.], dtype=float32)
    """
    return _over_batch(x, "batch_sum")


def batch_mean(x: Any) -> jax.Array:
    """The mean of `x` over all devices that hold other rows of the same batch.

    As `batch_sum`, divided by the number of these devices: each has equally many rows, so of means
    over rows it is the mean over all rows of a microbatch. With it the loss that balances a mixture
    of experts, `E * jnp.sum(batch_mean(f) * batch_mean(p))`, is that of one device.

    Args:
      x: any shape, the same on every device, floating-point or complex.

    Returns:
      The shape and dtype of `x`.

    Raises:
      TypeError: integers or booleans, whose mean is none.
      ValueError: under `deterministic: mesh`.
    """
    return _over_batch(x, "batch_mean")


def batch_max(x: Any) -> jax.Array:
    """The largest `x` of all devices that hold other rows of the same batch; without a gradient."""
    x, axes = lax.stop_gradient(jnp.asarray(x)), _AXES.get()
    if axes is None:
        raise ValueError(f"batch_max {IN_TURN}")
    return lax.pmax(x, axes) if axes else x


def _over_batch(x: Any, kind: BatchCall) -> jax.Array:
    x = jnp.asarray(x)
    _check_dtype(x, kind)
    axes = _AXES.get()
    if axes is None:
        raise ValueError(f"zerojax.{kind} {IN_TURN}")
    if not axes:
        return mark_batch_call(x, kind)
    wide = jnp.promote_types(x.dtype, jnp.float32) if _is_inexact(x) else x.dtype
    part = x.astype(wide)
    if kind == "batch_mean":
        part = part / math.prod(lax.axis_size(axis) for axis in axes)
    return lax.psum(part, axes).astype(x.dtype)


def _check_dtype(x: jax.Array, kind: BatchCall) -> None:
    number = jnp.issubdtype(x.dtype, jnp.number)
    if number and (kind == "batch_sum" or _is_inexact(x)):
        return
    remedy = "x.astype(jnp.float32)" if kind == "batch_mean" else "jnp.sum(x, axis=0)"
    raise TypeError(
        f"zerojax.{kind} was given {x.dtype.name}{list(x.shape)}, and its result has the dtype of "
        f"what it is given; give it {remedy}"
    )


def _is_inexact(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)
