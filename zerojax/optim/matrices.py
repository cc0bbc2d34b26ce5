"""Matrices made orthogonal: each put together from its shards on one device, and cut again.

Knows shapes and mesh axes; never an optimizer. Matrices of one size are dealt out together over the
devices that share them, so that each multiplies its part. A matrix that every device has whole is
multiplied on every device.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from optax.contrib import MuonDimensionNumbers

Dims = Sequence[tuple[str, ...]]
SCOPE = "whole_matrices"
"""In the names of the operations that put matrices together and cut them, compiled ones too."""


@jax.named_scope("newton_schulz")
def newton_schulz(x: jax.Array, coefficients: jax.Array, *, steps: int, eps: float) -> jax.Array:
    """Nearly orthogonal matrices with the singular vectors of those given, as optax has them.

    Args:
      x: float32 [matrices, rows, columns].
      coefficients: float32 [3], of X, (XX')X and (XX')^2 X.
      steps: how often they are applied.
      eps: added to the Frobenius norm, by which each matrix is divided first.
    """
    turned = x.shape[1] > x.shape[2]  # the smaller product costs less
    x = x.swapaxes(1, 2) if turned else x
    x = x / (jnp.sqrt(jnp.sum(x * x, axis=(1, 2), keepdims=True)) + eps)
    first, second, third = coefficients
    for _ in range(steps):
        product = x @ x.swapaxes(1, 2)
        x = first * x + (second * product + third * (product @ product)) @ x
    return x.swapaxes(1, 2) if turned else x


def newton_schulz_flops(rows: int, columns: int, *, steps: int) -> int:
    """Floating-point operations of the products of one matrix."""
    short, long = sorted((rows, columns))
    return steps * (4 * short * short * long + 2 * short**3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatrixStack:
    """One array as matrices, and how they lie in a shard of it.

    Attributes:
      order: the dimensions: those that count matrices, then one side, then the other. In a side
        those that are split come first, which permutes rows or columns; Newton-Schulz permutes its
        result alike, and turns it with the matrix. So the sides lie in the same order for `up` and
        `down` of an MLP.
      count: matrices of which a device has parts.
      size: of its part of a matrix, side by side.
      splits: (side, mesh axes) of each dimension that is split, in the order of their exchange.
    """

    order: tuple[int, ...]
    count: int
    size: tuple[int, int]
    splits: tuple[tuple[int, tuple[str, ...]], ...]

    @property
    def kind(self) -> tuple[Any, ...]:
        """Equal for stacks whose matrices are dealt out together: a class."""
        return self.size, self.splits

    def to_matrices(self, shard: jax.Array) -> jax.Array:
        """[count, *size] of a shard."""
        return shard.transpose(self.order).reshape(self.count, *self.size)

    def from_matrices(self, matrices: jax.Array, shape: Sequence[int]) -> jax.Array:
        """The inverse, for a shard of this shape."""
        back = [self.order.index(dim) for dim in range(len(shape))]
        return matrices.reshape([shape[dim] for dim in self.order]).transpose(back)


def as_stack(shape: Sequence[int], dims: Dims, matrix: MuonDimensionNumbers) -> MatrixStack:
    """How the matrices of an array lie.

    Args:
      shape: of a shard.
      dims: for each dimension the mesh axes that split it.
      matrix: the dimensions of rows and of columns; the others count matrices.
    """
    sides = []
    for side in (matrix.reduction_axis, matrix.output_axis):
        split_first = sorted(dim % len(shape) for dim in _as_tuple(side))
        split_first.sort(key=lambda dim: not dims[dim])
        split = tuple(tuple(dims[dim]) for dim in split_first if dims[dim])
        sides.append((math.prod(shape[dim] for dim in split_first), split, split_first))
    first, second = sorted(sides)
    counted = [dim for dim in range(len(shape)) if dim not in (*first[2], *second[2])]
    splits = [(side, axes) for side, part in enumerate((first, second)) for axes in part[1]]
    return MatrixStack(
        order=(*counted, *first[2], *second[2]),
        count=math.prod(shape[dim] for dim in counted),
        size=(first[0], second[0]),
        splits=tuple(sorted(splits, key=lambda split: (split[1], split[0]))),
    )


def classes_of(stacks: Mapping[str, MatrixStack]) -> list[list[str]]:
    """Names of the stacks of each class, in the order of their first one."""
    found: dict[tuple[Any, ...], list[str]] = {}
    for name, stack in stacks.items():
        found.setdefault(stack.kind, []).append(name)
    return list(found.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatrixExchange:
    """What a class sends for one of its splits, there and back.

    Attributes:
      axes: mesh axes of the devices that take part.
      size: how many they are.
      elements: of one device's part, padded to a multiple of `size` matrices.
    """

    axes: tuple[str, ...]
    size: int
    elements: int


def exchanges_of(
    stacks: Sequence[MatrixStack], axis_sizes: Mapping[str, int]
) -> tuple[list[MatrixExchange], int]:
    """(the exchanges of a class, matrices that one device then multiplies).

    Args:
      stacks: of one class.
      axis_sizes: mesh axis -> size.
    """
    count, (rows, columns) = sum(stack.count for stack in stacks), stacks[0].size
    sides, made = [rows, columns], []
    for side, axes in stacks[0].splits:
        size = math.prod(axis_sizes[axis] for axis in axes)
        count = -(-count // size)
        made.append(MatrixExchange(axes=axes, size=size, elements=count * size * math.prod(sides)))
        sides[side] *= size
    return made, count


def on_whole_matrices(
    function: Callable[[jax.Array], jax.Array],
    shards: Mapping[str, jax.Array],
    stacks: Mapping[str, MatrixStack],
) -> dict[str, jax.Array]:
    """This device's shards of a function of whole matrices; inside `shard_map`.

    Two all-to-alls for each class and each dimension that is split: one turns parts of all matrices
    into whole ones of some of them, the other turns them back.

    Args:
      function: [matrices, rows, columns] -> the same, each matrix by itself, commuting with
        permutations of rows or columns and with the transpose; zero for zero.
      shards: {name: an array of any dimensions}.
      stacks: of the same names.
    """
    found: dict[str, jax.Array] = {}
    for names in classes_of(stacks):
        members = [stacks[name].to_matrices(shards[name]) for name in names]
        result = _on_one_class(function, jnp.concatenate(members), stacks[names[0]].splits)
        ends = itertools.accumulate(stacks[name].count for name in names)
        for name, end in zip(names, ends, strict=True):
            own = result[end - stacks[name].count : end]
            found[name] = stacks[name].from_matrices(own, shards[name].shape)
    return found


def _on_one_class(
    function: Callable[[jax.Array], jax.Array],
    x: jax.Array,
    splits: Sequence[tuple[int, tuple[str, ...]]],
) -> jax.Array:
    counts = []
    for side, axes in splits:
        counts.append(len(x))
        with jax.named_scope(SCOPE):
            x = jnp.pad(x, ((0, -len(x) % lax.axis_size(axes)), (0, 0), (0, 0)))
            # Without a barrier XLA for CPUs (jax 0.10.2) takes padding and stacks of one layer for
            # pieces with layouts of their own, and refuses its own all-to-all of them.
            x = lax.optimization_barrier(x)
            x = lax.all_to_all(x, axes, split_axis=0, concat_axis=1 + side, tiled=True)
    x = function(x)
    for (side, axes), count in zip(reversed(splits), reversed(counts), strict=True):
        with jax.named_scope(SCOPE):
            x = lax.all_to_all(x, axes, split_axis=1 + side, concat_axis=0, tiled=True)[:count]
    return x


def fans(shape: Sequence[int], matrix: MuonDimensionNumbers) -> tuple[int, int]:
    """(rows, columns) of the matrices in an array of this shape."""
    sides = (_as_tuple(matrix.reduction_axis), _as_tuple(matrix.output_axis))
    rows, columns = (math.prod(shape[dim] for dim in side) for side in sides)
    return rows, columns


def _as_tuple(dims: int | Sequence[int]) -> tuple[int, ...]:
    return (dims,) if isinstance(dims, int) else tuple(dims)
