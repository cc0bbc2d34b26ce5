"""Runs functions of whole matrices on sharded arrays, and Newton-Schulz orthogonalization.

Independent of any optimizer: works with shapes and mesh axes. Each matrix is gathered from its
shards on one device, and the result is split again. Matrices of equal size are distributed over the
devices that shard them, so each device computes a part of them. Every device computes all
replicated matrices.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from optax.contrib import MuonDimensionNumbers

from zerojax.config.late_dataclasses import dataclass

Dims = Sequence[tuple[str, ...]]
SCOPE = "whole_matrices"
"""Named scope, visible in compiled programs, of the operations that gather and split matrices."""


@jax.named_scope("newton_schulz")
def newton_schulz(x: jax.Array, coefficients: jax.Array, *, steps: int, eps: float) -> jax.Array:
    """Computes nearly orthogonal matrices with the input's singular vectors, as optax does.

    Args:
      x: matrices, float32 [matrices, rows, columns].
      coefficients: float32 [3], factors of X, (XX')X and (XX')^2 X in one iteration.
      steps: number of iterations.
      eps: number added to the Frobenius norm, by which each matrix is divided first.
    """
    turned = x.shape[1] > x.shape[2]  # the product XX' of the shorter side costs less
    x = x.swapaxes(1, 2) if turned else x
    # The Frobenius norm is at least the largest singular value, so that no singular value is above
    # 1, where the iteration could diverge.
    x = x / (jnp.sqrt(jnp.sum(x * x, axis=(1, 2), keepdims=True)) + eps)
    first, second, third = coefficients
    for _ in range(steps):
        product = x @ x.swapaxes(1, 2)
        x = first * x + (second * product + third * (product @ product)) @ x
    return x.swapaxes(1, 2) if turned else x


def newton_schulz_flops(rows: int, columns: int, *, steps: int) -> int:
    """Returns the number of floating-point operations of the matrix products for one matrix."""
    short, long = sorted((rows, columns))
    return steps * (4 * short * short * long + 2 * short**3)


@dataclass(frozen=True, kw_only=True)
class MatrixStack:
    """Layout of an array as a stack of matrices, and of the part that a shard holds.

    Attributes:
      order: permutation of the dimensions: first those that count matrices, then those of one
        side, then those of the other side. Within a side, split dimensions come first, which
        permutes rows or columns. Newton-Schulz commutes with permutations and with the transpose,
        so the result is the same. `up` and `down` of an MLP get the same order of sides.
      count: number of matrices of which a device holds parts.
      size: size of the device's part of a matrix, one number per side.
      splits: (side, mesh axes) of each split dimension, in the order in which they are gathered.
    """

    order: tuple[int, ...]
    count: int
    size: tuple[int, int]
    splits: tuple[tuple[int, tuple[str, ...]], ...]

    @property
    def kind(self) -> tuple[Any, ...]:
        """Key of the stack's layout; matrices of stacks with equal keys are distributed
        together."""
        return self.size, self.splits

    def to_matrices(self, shard: jax.Array) -> jax.Array:
        """Reshapes a shard to [count, *size]."""
        return shard.transpose(self.order).reshape(self.count, *self.size)

    def from_matrices(self, matrices: jax.Array, shape: Sequence[int]) -> jax.Array:
        """Reshapes matrices back to a shard of this shape."""
        back = [self.order.index(dim) for dim in range(len(shape))]
        return matrices.reshape([shape[dim] for dim in self.order]).transpose(back)


def as_stack(shape: Sequence[int], dims: Dims, matrix: MuonDimensionNumbers) -> MatrixStack:
    """Returns the layout of the matrices in an array.

    Args:
      shape: shape of a shard.
      dims: for each dimension, the mesh axes that split it.
      matrix: dimensions of rows and of columns; the other dimensions count matrices.
    """
    sides = []
    for side in (matrix.reduction_axis, matrix.output_axis):
        split_first = sorted(dim % len(shape) for dim in _as_tuple(side))
        # Stable, so that dimensions of the same kind keep their order.
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
        # One order for all stacks: otherwise stacks with the same splits would have different
        # kinds.
        splits=tuple(sorted(splits, key=lambda split: (split[1], split[0]))),
    )


def classes_of(stacks: Mapping[str, MatrixStack]) -> list[list[str]]:
    """Groups stacks with equal `MatrixStack.kind` by name, in order of each group's first stack."""
    found: dict[tuple[Any, ...], list[str]] = {}
    for name, stack in stacks.items():
        found.setdefault(stack.kind, []).append(name)
    return list(found.values())


@dataclass(frozen=True, kw_only=True)
class MatrixExchange:
    """All-to-all that gathers matrices along one split side, or splits them again.

    Attributes:
      axes: mesh axes of the devices that take part.
      size: number of these devices.
      elements: number of elements that one device holds, padded to a multiple of `size` matrices.
    """

    axes: tuple[str, ...]
    size: int
    elements: int


def exchanges_of(
    stacks: Sequence[MatrixStack], axis_sizes: Mapping[str, int]
) -> tuple[list[MatrixExchange], int]:
    """Returns (all-to-alls of a class of stacks, number of whole matrices that a device computes).

    Args:
      stacks: stacks of one class, that is with equal `MatrixStack.kind`.
      axis_sizes: {mesh axis: size}.
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
    """Applies a function of whole matrices to shards; call it inside `shard_map`.

    Uses two all-to-alls for each class (`classes_of`) and each split dimension. The first one turns
    parts of all matrices on each device into some whole matrices on each device; the second one
    reverses this.

    Args:
      function: function from [matrices, rows, columns] to the same shape that treats each matrix
        independently. It must commute with permutations of rows or columns and with the transpose,
        and return zero for zero.
      shards: {name: this device's shard, an array with any number of dimensions}.
      stacks: {name: layout of its matrices}.

    Returns:
      {name: this device's shard of the result}.
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
            # Without a barrier XLA for CPUs (jax 0.10.2) gives the padding and stacks of one layer
            # different layouts, and then rejects the all-to-all that it built from them.
            x = lax.optimization_barrier(x)
            x = lax.all_to_all(x, axes, split_axis=0, concat_axis=1 + side, tiled=True)
    x = function(x)
    for (side, axes), count in zip(reversed(splits), reversed(counts), strict=True):
        with jax.named_scope(SCOPE):
            # The rows after `count` are the padding of the first exchange.
            x = lax.all_to_all(x, axes, split_axis=1 + side, concat_axis=0, tiled=True)[:count]
    return x


def fans(shape: Sequence[int], matrix: MuonDimensionNumbers) -> tuple[int, int]:
    """Returns (number of rows, number of columns) of the matrices in an array of this shape."""
    sides = (_as_tuple(matrix.reduction_axis), _as_tuple(matrix.output_axis))
    rows, columns = (math.prod(shape[dim] for dim in side) for side in sides)
    return rows, columns


def _as_tuple(dims: int | Sequence[int]) -> tuple[int, ...]:
    return (dims,) if isinstance(dims, int) else tuple(dims)
