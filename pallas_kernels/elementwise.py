"""Defines rules (in-place elementwise updates) and their plain reference."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels import rounding

FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)


Blocks = tuple[jax.Array, ...]
"""Arrays of a leaf as float32 blocks of one shape: whole arrays in the reference, tiles in a
kernel."""
Scalar = jax.Array | float
"""A number of an update, constant or traced; in a kernel a block that repeats it."""


class KernelRef(Protocol):
    """Memory that a kernel reads and writes: a `jax.Ref`, or a view of one, such as `ref.at[row]`.

    JAX has no public type that includes the views.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype: ...

    @property
    def at(self) -> Any:
        """Indexed like an array, it selects a view."""
        ...

    @property
    def T(self) -> KernelRef:
        """The view of a matrix's transpose."""
        ...

    def __getitem__(self, index: object) -> jax.Array: ...

    def __setitem__(self, index: object, value: jax.Array) -> None: ...


class Values(NamedTuple):
    """Results of a rule's function `math`, as float32 blocks.

    Attributes:
      updated: new values of the updated arrays, in their order.
      outputs: values of additional, new arrays.
      sums: values to be summed over the leaf.
    """

    updated: Blocks = ()
    outputs: Blocks = ()
    sums: Blocks = ()


class Updated(NamedTuple):
    """New arrays and sums of one leaf, after an update by a rule.

    Attributes:
      updated: arrays with the shapes and dtypes of the inputs; a kernel writes them into the
        inputs' memory.
      outputs: new arrays of the same shape.
      sums: float32 scalars; for an update by rows, float32 [rows].
    """

    updated: tuple[jax.Array, ...]
    outputs: tuple[jax.Array, ...]
    sums: tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """Elementwise update formula of an optimizer, or of a part of it.

    Attributes:
      name: name of the kernel in a lowered program.
      math: function (updated, read, scalars) that returns `Values`. All are float32 blocks of one
        shape; in the reference, scalars have shape (). The kernel calls it with blocks and the
        reference with whole arrays, so constants are written with `jnp.full_like`.
      scalars: NamedTuple class whose fields are the float32 numbers passed to `math`.
      num_updated, num_read, num_outputs, num_sums: numbers of arrays of each kind.
      averages: whether the last updated array is the moving average of the first, see `averaging`;
        `math` neither receives nor returns it.
    """

    name: str
    math: Callable[[Blocks, Blocks, Any], Values]
    scalars: type
    num_updated: int
    num_read: int
    num_outputs: int = 0
    num_sums: int = 0
    averages: bool = False


AVERAGE_RATE = "average_rate"
"""Name of the additional scalar of a rule made by `averaging`."""


# Cached, because scalars are checked by `isinstance`: a rule must always get the same class.
@functools.cache
def averaging_scalars(scalars: Any) -> Any:
    """Builds a NamedTuple class with the fields of `scalars`, and `AVERAGE_RATE` at the end."""
    fields = (*scalars._fields, AVERAGE_RATE)
    return collections.namedtuple(f"{scalars.__name__}AndAverage", fields)


@functools.cache
def averaging(rule: Rule) -> Rule:
    """Extends a rule to also update a moving average of its first array, in the same pass.

    The average becomes average + average_rate * (new - average), where `new` is the stored value of
    the first array, after rounding. The average is the last of the updated arrays and is rounded to
    nearest. If the rule's scalar `skip` is not 0, the average is unchanged.
    """
    return dataclasses.replace(
        rule,
        name=f"{rule.name}_ema",
        scalars=averaging_scalars(rule.scalars),
        num_updated=rule.num_updated + 1,
        averages=True,
    )


def moved_average(average: jax.Array, new: jax.Array, s: Any) -> Any:
    """Computes the new average as a float32 block; `new` is a float32 block of stored values."""
    moved = average + s.average_rate * (new - average)
    return jnp.where(s.skip == jnp.zeros_like(average), moved, average)


def check_arrays(
    rule: Rule,
    updated: Sequence[Any],
    read: Sequence[Any],
    seed: object,
    out_dtypes: Sequence[DTypeLike],
    *,
    scalars: tuple[Scalar, ...] | None = None,
    by_row: bool = False,
) -> None:
    """Checks that a rule can update arrays of these shapes and dtypes.

    Raises:
      TypeError: a dtype is not float32, bfloat16 or float16; a float16 array would have to be
        rounded stochastically; or the scalars belong to another rule.
      ValueError: shapes differ, also those of scalars; the rule has another number of arrays or
        fewer outputs; or there are no rows.
    """
    if scalars is not None and not isinstance(scalars, rule.scalars):
        raise TypeError(
            f"{rule.name}: scalars are {type(scalars).__name__}, but must be "
            f"{rule.scalars.__name__}, see {rule.scalars.__module__}"
        )
    counts = (len(updated), len(read))
    if counts != (rule.num_updated, rule.num_read):
        raise ValueError(
            f"{rule.name} updates {rule.num_updated} arrays and reads {rule.num_read}; "
            f"got {counts[0]} and {counts[1]}"
        )
    if len(out_dtypes) > rule.num_outputs:
        raise ValueError(
            f"{rule.name} has {rule.num_outputs} outputs, but out_dtypes has {len(out_dtypes)} "
            "entries"
        )
    shapes = {tuple(x.shape) for x in (*updated, *read)}
    if len(shapes) > 1:
        raise ValueError(f"{rule.name}: the arrays of one leaf differ in shape: {sorted(shapes)}")
    shape = next(iter(shapes))
    if by_row and (not shape or shape[0] == 0):
        raise ValueError(
            f"{rule.name}: by_row=True needs rows along dimension 0, but the leaf has shape "
            f"{list(shape)}; leave by_row out for one leaf"
        )
    allowed = ((), (shape[0],)) if by_row else ((),)
    for name, value in zip(rule.scalars._fields, scalars or (), strict=False):
        if jnp.shape(value) not in allowed:
            wanted = f"a number, or one for each of {shape[0]} rows" if by_row else "a number"
            raise ValueError(
                f"{rule.name}: {name} has shape {list(jnp.shape(value))}, but must be {wanted}"
            )
    for dtype in (*(x.dtype for x in (*updated, *read)), *out_dtypes):
        if dtype not in FLOATS:
            raise TypeError(f"{rule.name}: {dtype} is not one of float32, bfloat16, float16")
    if seed is not None and any(x.dtype == jnp.float16 for x in updated):
        raise TypeError(
            f"{rule.name}: float16 arrays cannot be rounded stochastically; use bfloat16 or no seed"
        )


def check_seed(name: str, seed: Any) -> None:
    """Raises a TypeError for a seed that does not come from `rounding.seed_of`."""
    dtype, found = getattr(seed, "dtype", type(seed).__name__), jnp.shape(seed)
    if dtype != jnp.uint32 or found != (2,):
        raise TypeError(
            f"{name}: seed is {dtype}{list(found)}, but must be uint32[2]; "
            "make it with pallas_kernels.rounding.seed_of from a key of jax.random"
        )


def reference_update(
    rule: Rule,
    updated: Sequence[jax.Array],
    read: Sequence[jax.Array],
    scalars: tuple[Scalar, ...],
    *,
    out_dtypes: Sequence[DTypeLike] = (),
    seed: jax.Array | None = None,
    first_index: int = 0,
    by_row: bool = False,
) -> Updated:
    """Applies a rule to whole arrays, in plain `jax.numpy`.

    Args:
      rule: update formula.
      updated, read: arrays of one shape; float32, bfloat16 or float16.
      scalars: an instance of `rule.scalars`.
      out_dtypes: dtypes of the requested outputs.
      seed: random seed, uint32 [2] from `rounding.seed_of`, to round updated bfloat16 arrays
        stochastically; None rounds to nearest.
      first_index: position of the first element in its leaf, for the random bits.
      by_row: whether dimension 0 counts rows with their own scalars and sums, see `update.update`.
    """
    row_dims = (*updated, *read)[0].ndim - 1 if by_row else 0

    def spread(x: Scalar) -> jax.Array:
        x = jnp.asarray(x, jnp.float32)
        return x.reshape(-1, *(1,) * row_dims) if x.ndim else x

    scalars = rule.scalars(*map(spread, scalars))
    blocks = tuple(x.astype(jnp.float32) for x in updated)
    read = tuple(x.astype(jnp.float32) for x in read)
    values = rule.math(blocks[:-1] if rule.averages else blocks, read, scalars)
    bits = None
    if seed is not None:
        shape, size = updated[0].shape, updated[0].size
        index = lax.iota(jnp.uint32, size).reshape(shape) + jnp.uint32(first_index % 2**32)
        bits = rounding.bits_at(index, (seed[0], seed[1]))
    stored = stored_blocks([x.dtype for x in updated], values.updated, bits)
    if rule.averages:
        average = moved_average(blocks[-1], stored[0].astype(jnp.float32), scalars)
        stored.append(average.astype(updated[-1].dtype))
    # A caller may request fewer outputs than the rule has.
    outputs = [new.astype(d) for new, d in zip(values.outputs, out_dtypes, strict=False)]
    summed = tuple(range(1, 1 + row_dims)) if by_row else None
    return Updated(
        tuple(stored), tuple(outputs), tuple(jnp.sum(x, axis=summed) for x in values.sums)
    )


def stored_blocks(
    dtypes: Sequence[Any], blocks: Sequence[Any], bits: rounding.Bits | None
) -> list[Any]:
    """Rounds each float32 block to the dtype in which its updated array is stored."""
    pairs = zip(dtypes, blocks, strict=False)
    return [stored_as(dtype, x, bits, number) for number, (dtype, x) in enumerate(pairs)]


def stored_as(dtype: DTypeLike, x: jax.Array, bits: rounding.Bits | None, number: int) -> Any:
    """Rounds a float32 block to `dtype`; to bfloat16 stochastically, unless `bits` is None."""
    if bits is not None and dtype == jnp.bfloat16:
        x = rounding.round_to_bfloat16(x, bits(number))
    return x.astype(dtype)
