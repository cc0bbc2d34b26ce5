"""Sums, means and all rows of the whole global batch, for models that couple rows.

A step runs a model on the rows of one device. A statistic of these rows differs between devices:
for example, the mean of router probabilities, or the mean and the mean square of a batch norm. A
nonlinear function of it, such as a product of two means, then differs from the function of the
whole batch. `batch_sum` and `batch_mean` compute the statistic over all devices.

The step's loss is the sum of the losses of all devices, divided once by the weight, and the
gradients of all devices are summed. Let every device receive y = sum over devices d of x_d. The
gradient of the summed loss with respect to x_d is then the sum, over all devices, of their
gradients with respect to y. Gradients therefore need no factor for the number of devices.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh
from jax.typing import ArrayLike

from zerojax.operators.marks import BatchCall, mark_batch_call

IN_TURN = (
    "is not available with deterministic='mesh': virtual shards are computed one after the other, "
    "so the whole batch is never available at once; leave deterministic out, or compute each "
    "row from that "
    "row only"
)
"""Reason for refusing sums over the batch while its parts are computed one after the other."""
_AXES: contextvars.ContextVar[tuple[str, ...] | None] = contextvars.ContextVar(
    "batch_axes", default=()
)


@contextlib.contextmanager
def batch_split_over(axes: tuple[str, ...] | None) -> Iterator[None]:
    """Sets the mesh axes over which the batch is split while a model is traced.

    All tracing with these manual axes must happen inside this context, because JAX caches traces by
    mesh and manual axes, and does not know this setting.

    Args:
      axes: manual mesh axes whose devices hold different rows. None: parts of the batch are
        computed one after the other, and sums over the batch are refused (`IN_TURN`).
    """
    token = _AXES.set(axes)
    try:
        yield
    finally:
        _AXES.reset(token)


_PARTS = "zerojax_parts"


_STOPS: contextvars.ContextVar[bool] = contextvars.ContextVar("stops_at_gathers", default=False)


class GathersRowsError(Exception):
    """A loss called `gather_batch` inside of `stopping_at_gathers`."""


@contextlib.contextmanager
def stopping_at_gathers() -> Iterator[None]:
    """Makes `gather_batch` raise `GathersRowsError`, before a loss uses rows that are too few."""
    token = _STOPS.set(True)
    try:
        yield
    finally:
        _STOPS.reset(token)


def with_rows_of_all(loss: Callable[..., Any], rows: int) -> Callable[..., Any]:
    """Returns a loss that, traced on one device with a part of the batch, gathers as many rows as
    the batch has.

    A mesh says so, and not a variable, because JAX caches traces by mesh. In a step the mesh is
    that of the step, and the loss is called as it is.

    Args:
      loss: function `loss(model, batch)`.
      rows: number of rows of the batch.
    """

    @functools.wraps(loss)
    def gathering(model: Any, batch: Any) -> Any:
        parts = rows // jax.tree.leaves(batch)[0].shape[0]
        if parts == 1 or batch_axes() != ():
            return loss(model, batch)
        with jax.sharding.use_abstract_mesh(AbstractMesh((parts,), (_PARTS,))):
            return loss(model, batch)

    return gathering


def batch_axes() -> tuple[str, ...] | None:
    """Returns the mesh axes that split the batch in the current trace.

    None if parts of the batch are computed one after the other.
    """
    return _AXES.get()


def batch_sum(x: ArrayLike) -> jax.Array:
    """Returns the sum of `x` over all devices that hold different rows of the same batch.

    In a training or evaluation step of zerojax, `x` is already summed over this device's rows of
    one microbatch. The result is the sum over all rows of the microbatch, the same on every device,
    and its gradients equal those of one device with all rows. If rows have different weights
    (padding), the mean over the batch is `batch_sum(jnp.sum(x * w, 0)) / batch_sum(jnp.sum(w))`.

    Outside of a step (plain JAX, one device) the result is `x`.

    Args:
      x: array of any shape, the same on every device; integers, floating-point or complex. Sums of
        16-bit floats are accumulated in float32.

    Returns:
      The sum, with the shape and dtype of `x`.

    Raises:
      TypeError: `x` is boolean; a sum of booleans has another dtype.
      ValueError: the step runs with `deterministic: mesh`.

    >>> batch_sum(jnp.arange(3.0))
    Array([0., 1., 2.], dtype=float32)
    """
    return _over_batch(x, "batch_sum")


def batch_mean(x: ArrayLike) -> jax.Array:
    """Returns the mean of `x` over all devices that hold different rows of the same batch.

    This is `batch_sum` divided by the number of these devices. Each device has equally many rows,
    so the mean of means over rows is the mean over all rows of a microbatch. The load-balancing
    loss of a mixture of experts, `E * jnp.sum(batch_mean(f) * batch_mean(p))`, then equals that of
    one device.

    Args:
      x: array of any shape, the same on every device, floating-point or complex.

    Returns:
      The mean, with the shape and dtype of `x`.

    Raises:
      TypeError: `x` has integers or booleans, whose mean has another dtype.
      ValueError: the step runs with `deterministic: mesh`.
    """
    return _over_batch(x, "batch_mean")


def gather_batch(x: ArrayLike) -> jax.Array:
    """Returns the rows of `x` of all devices that hold different rows of the same batch.

    A contrastive loss compares each row with all rows of the batch. On several devices it needs
    the rows of the others: `gather_batch(x)` has them in the order of the batch, and `row_numbers`
    says which of them are this device's own. Gradients flow back to the rows of every device. The
    loss may compare all rows with all (the same on every device), or, with less work, only its own
    rows with all:

        images, texts = gather_batch(own_images), gather_batch(own_texts)
        labels = row_numbers(own_images)
        loss = cross_entropy(own_images @ texts.T, labels).mean()

    Outside of a step (plain JAX, one device) the result is `x`.

    Args:
      x: array [rows of this device, ...]; floating-point, complex, integers or booleans.

    Returns:
      Array [rows of the batch, ...] with the dtype of `x`. Its gradient is summed over devices in
      float32.

    Raises:
      ValueError: `x` is a scalar, or the step runs with `deterministic: mesh`. A plan refuses
        several microbatches, whose rows are not there at once, and split sequences.
    """
    x = jnp.asarray(x)
    if not x.ndim:
        raise ValueError("zerojax.gather_batch got a scalar; give it an array [rows, ...]")
    axes = _axes_of("gather_batch")
    if axes:
        return _all_rows(x, axes)
    if _STOPS.get():
        raise GathersRowsError
    parts = jax.sharding.get_abstract_mesh().shape.get(_PARTS, 1)
    return jnp.concatenate([mark_batch_call(x, "gather_batch")] * parts)


def row_numbers(x: jax.Array | np.ndarray) -> jax.Array:
    """Returns the numbers of this device's rows in the batch, and so in `gather_batch(x)`: int32
    [len(x)].

    Args:
      x: array [rows of this device, ...].

    Raises:
      ValueError: the step runs with `deterministic: mesh`. A plan refuses several microbatches, of
        which each would have the same numbers, and split sequences.

    >>> row_numbers(jnp.zeros((3, 2)))
    Array([0, 1, 2], dtype=int32)
    """
    axes = _axes_of("row_numbers")
    first = lax.axis_index(axes) * len(x) if axes else 0
    numbers = jnp.arange(len(x), dtype=jnp.int32) + first
    return mark_batch_call(numbers, "row_numbers")


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _all_rows(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return lax.all_gather(x, axes, axis=0, tiled=True)


def _all_rows_forward(x: jax.Array, axes: tuple[str, ...]) -> tuple[jax.Array, None]:
    return _all_rows(x, axes), None


def _all_rows_backward(axes: tuple[str, ...], _: None, cotangent: jax.Array) -> tuple[jax.Array]:
    """Sums each row's gradients of all devices on the device of the row.

    An all-to-all and a sum take the place of a reduce-scatter: they send the same bytes, add in
    float32 whatever the dtype, and are right between CPU processes (`transport.sums`).
    """
    size = math.prod(lax.axis_size(axis) for axis in axes)
    parts = cotangent.reshape(size, -1, *cotangent.shape[1:])
    received = lax.all_to_all(parts, axes, 0, 0)
    wide = jnp.promote_types(cotangent.dtype, jnp.float32)
    return (jnp.sum(received.astype(wide), axis=0).astype(cotangent.dtype),)


_all_rows.defvjp(_all_rows_forward, _all_rows_backward)


def batch_max(x: ArrayLike) -> jax.Array:
    """Returns the element-wise maximum of `x` over all devices that hold different rows; it has no
    gradient.

    Outside of a step the result is `x`. With `deterministic: mesh` it raises a ValueError.
    """
    x, axes = lax.stop_gradient(jnp.asarray(x)), _AXES.get()
    if axes is None:
        raise ValueError(f"batch_max {IN_TURN}")
    return lax.pmax(x, axes) if axes else x


def _over_batch(x: ArrayLike, kind: BatchCall) -> jax.Array:
    x = jnp.asarray(x)
    _check_dtype(x, kind)
    axes = _axes_of(kind)
    if not axes:
        return mark_batch_call(x, kind)
    wide = jnp.promote_types(x.dtype, jnp.float32) if _is_inexact(x) else x.dtype
    part = x.astype(wide)
    if kind == "batch_mean":
        part = part / math.prod(lax.axis_size(axis) for axis in axes)
    return lax.psum(part, axes).astype(x.dtype)


def _axes_of(name: str) -> tuple[str, ...]:
    axes = _AXES.get()
    if axes is None:
        raise ValueError(f"zerojax.{name} {IN_TURN}")
    return axes


def _check_dtype(x: jax.Array, kind: BatchCall) -> None:
    number = jnp.issubdtype(x.dtype, jnp.number)
    if number and (kind == "batch_sum" or _is_inexact(x)):
        return
    remedy = "x.astype(jnp.float32)" if kind == "batch_mean" else "jnp.sum(x, axis=0)"
    raise TypeError(
        f"zerojax.{kind} does not support {x.dtype.name}{list(x.shape)}: the result has the "
        "dtype of "
        f"the argument; use {remedy}"
    )


def _is_inexact(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)
