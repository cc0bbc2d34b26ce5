"""Where each parameter lives: a table of partition specs, and the rules that fill it.

Knows names, shapes, axis sizes and which layers lie in which rows of a stack; never touches arrays,
devices, schedules or Flax. Sources: ZeRO, Rajbhandari et al. 2019 (arXiv:1910.02054); tensor
parallelism, Shoeybi et al. 2019 (arXiv:1909.08053).
"""

from __future__ import annotations

import dataclasses
import enum
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec as P

from zerojax import trees
from zerojax.mesh import DATA, MODEL, STAGE

Shape = tuple[int, ...]
Rules = Sequence[tuple[str, Sequence[str | None]]]


class Access(enum.Enum):
    """How forward and backward get at a parameter, and where its gradient goes."""

    WHOLE = "whole"
    """Stored whole on every data shard; its gradient is summed once per step."""
    GATHER_ONCE = "gather once"
    """Stored in shards, gathered once per step; its gradient is scattered once per step."""
    GATHER_ONCE_SCATTER_EARLY = "gather once, scatter early"
    """Gathered once per step; its gradient is scattered inside the backward pass."""
    GATHER_ON_USE = "gather on use"
    """Gathered where the model reads it and again in the backward pass, which scatters its gradient
    on the spot."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeafPlacement:
    """The row of one parameter.

    Attributes:
      name: "blocks/attention/query/kernel".
      shape: the true shape.
      stack_dims: leading dimensions that a layer scan slices away; never sharded.
      axes: mesh axis per dimension from tensor parallelism, None where there is none.
      zero_dim: the dimension that `data` shards, counted from the end (negative, so that it
        survives the slicing of leading dimensions); None when ZeRO leaves the parameter whole.
      padded_size: stored size of `zero_dim`, a multiple of the `data` axis.
      access: how forward and backward get at it.
      frozen: no gradient and no optimizer state.
      layer_rows: for a parameter on a pipeline the layer in each row of the stored stack, -1 where
        a row is padding (zeros); its dimension 0 is split over `stage`. None: not on a pipeline,
        so that every pipeline stage has all of it.
      reasons: why this row is an exception to its stage's rule, if it is.
    """

    name: str
    shape: Shape
    stack_dims: int
    axes: tuple[str | None, ...]
    zero_dim: int | None
    padded_size: int | None
    access: Access
    frozen: bool = False
    layer_rows: tuple[int, ...] | None = None
    reasons: tuple[str, ...] = ()

    @property
    def stored_shape(self) -> Shape:
        """The shape in the state: padded where `data` does not divide, rows in place of layers."""
        shape = list(self.shape)
        if self.zero_dim is not None and self.padded_size is not None:
            shape[self.zero_dim] = self.padded_size
        if self.layer_rows is not None:
            shape[0] = len(self.layer_rows)
        return tuple(shape)

    @property
    def is_padded(self) -> bool:
        return self.stored_shape != self.shape

    @property
    def model_spec(self) -> P:
        """Tensor parallelism alone: how the gathered parameter lies."""
        return P(*self.axes)

    @property
    def stored_spec(self) -> P:
        """How masters, optimizer state and reduced gradients lie."""
        axes = list(self.axes)
        if self.zero_dim is not None:
            axes[self.zero_dim] = DATA
        if self.layer_rows is not None:
            axes[0] = STAGE
        return P(*axes)

    @property
    def data_spec(self) -> P:
        """The part of `stored_spec` that a region sees that is manual over `data` alone."""
        return P(*(axis if axis == DATA else None for axis in self.stored_spec))

    @property
    def manual_spec(self) -> P:
        """The part of `stored_spec` that a region sees that is manual over `data` and `stage`."""
        return P(*(axis if axis in (DATA, STAGE) else None for axis in self.stored_spec))

    def canonical_spec(self, axis_sizes: Mapping[str, int]) -> P:
        """A spec that divides the true shape evenly: on disk and between two placements.

        Where a pipeline does not divide the layers, `stage` takes another dimension.
        """
        axes: list[Any] = [axis if axis == MODEL else None for axis in self.stored_spec]
        if self.layer_rows is not None and self.shape[0] % axis_sizes[STAGE] == 0:
            axes[0] = STAGE
        if self.zero_dim is not None:
            if self.shape[self.zero_dim] % axis_sizes[DATA] == 0:
                axes[self.zero_dim] = DATA
            else:
                _put(axes, DATA, self.shape, axis_sizes)
        if self.layer_rows is not None and axes[0] != STAGE:
            _put(axes, STAGE, self.shape, axis_sizes, shared=True)
        return P(*axes)

    def exchange_spec(self, axis_sizes: Mapping[str, int]) -> P:
        """How a stack lies while its rows change places: whole along dimension 0.

        `stage` splits another dimension of `stored_shape` meanwhile, if it divides one, so that no
        device holds the whole stack.
        """
        axes: list[Any] = [None, *self.stored_spec[1:]]
        _put(axes, STAGE, self.stored_shape, axis_sizes, start=1, shared=True)
        return P(*axes)


def _put(
    axes: list[Any],
    axis: str,
    shape: Shape,
    axis_sizes: Mapping[str, int],
    *,
    start: int = 0,
    shared: bool = False,
) -> None:
    """Gives `axis` the largest free dimension from `start` on that it divides, in place.

    Where there is none it stays out, or, if `shared`, splits the parts of another axis.
    """
    size = axis_sizes[axis]
    indices = range(start, len(shape))
    free = [i for i in indices if axes[i] is None and shape[i] % size == 0]
    if free:
        axes[max(free, key=lambda i: shape[i])] = axis
    elif shared:
        taken = [i for i in indices if axes[i] is not None]
        for i in [i for i in taken if shape[i] % (axis_sizes[axes[i]] * size) == 0][:1]:
            axes[i] = (axes[i], axis)


@dataclasses.dataclass(frozen=True)
class Placement:
    """The table: one row per parameter.

    Attributes:
      leaves: name -> row, in the model's order.
      zero: the ZeRO stage that filled it.
      axis_sizes: mesh axis -> size.
    """

    leaves: Mapping[str, LeafPlacement]
    zero: int
    axis_sizes: Mapping[str, int]

    def num_parameters(self, *, frozen: bool | None = None) -> int:
        """True parameters, without padding; all of them, or only the frozen or the trained ones."""
        return sum(
            trees.num_elements(leaf.shape)
            for leaf in self.leaves.values()
            if frozen is None or leaf.frozen == frozen
        )

    def shard_elements(self, leaf: LeafPlacement) -> int:
        """Elements of this parameter's master on one device."""
        split = math.prod(self.axis_sizes[axis] for axis in leaf.stored_spec if axis is not None)
        return trees.num_elements(leaf.stored_shape) // split

    def exceptions(self) -> list[tuple[str, str]]:
        """(name, reason) of every parameter that is not placed by its stage's plain rule."""
        return [(leaf.name, reason) for leaf in self.leaves.values() for reason in leaf.reasons]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlacementRules:
    """What the user can say about placement.

    Attributes:
      zero: ZeRO stage. 0: all whole; 1: optimizer state and masters sharded; 2: and gradients; 3:
        and the parameters that forward and backward read.
      tensor_parallel: (regular expression on the name, mesh axis per trailing dimension); the first
        that matches counts; dimensions it does not mention stay whole.
      freeze: regular expressions on names.
      persistence_threshold: elements; at stage 3 a smaller parameter is gathered once per step
        instead of at every use, which saves a collective per use.
    """

    zero: int = 1
    tensor_parallel: Rules = ()
    freeze: Sequence[str] = ()
    persistence_threshold: int = 100_000


def place_parameters(
    shapes: Mapping[str, Shape],
    read_shapes: Mapping[str, frozenset[Shape]],
    axis_sizes: Mapping[str, int],
    rules: PlacementRules,
    *,
    always_frozen: Mapping[str, str] | None = None,
    barriers: Mapping[str, str] | None = None,
    reads_lazily: bool = True,
    layer_rows: Mapping[str, tuple[int, ...]] | None = None,
) -> Placement:
    """Fills the table.

    The ZeRO dimension of a parameter is the largest one that `data` divides, among those that
    neither a layer scan slices nor tensor parallelism splits (both on one dimension would permute
    the stored weights); where none is divisible, the largest free one, padded.

    Args:
      shapes: name -> true shape.
      read_shapes: name -> shapes with which the model reads it; tells which dimensions a scan
        slices.
      axis_sizes: mesh axis -> size.
      rules: the user's wishes.
      always_frozen: name -> reason, for parameters that can have no gradient (integers); kept
        whole.
      barriers: name -> why the parameter cannot be gathered where the model reads it.
      reads_lazily: False when the model has no point of use (a pair of functions).
      layer_rows: name -> `LeafPlacement.layer_rows`, for the parameters on a pipeline.

    Raises:
      ValueError: a rule names an unknown axis, does not fit a shape, or does not divide it; a
        parameter on a pipeline is not read layer by layer, or a rule splits its layers.
    """
    frozen = dict(always_frozen or {})
    frozen_by_user = (
        trees.match_names(shapes, rules.freeze, option="freeze") if rules.freeze else ()
    )
    axes_of = _tensor_parallel_axes(shapes, axis_sizes, rules.tensor_parallel)
    leaves = {}
    for name, shape in shapes.items():
        stack_dims, barrier = _stack_dims(shape, read_shapes.get(name))
        barrier = (barriers or {}).get(name) or barrier
        reasons = [frozen[name]] if name in frozen else []
        zero_dim = padded = None
        axes = axes_of[name]
        rows = (layer_rows or {}).get(name)
        if rows is not None:
            _check_rows(name, shape, rows, axis_sizes)
            _check_stack(name, axes, stack_dims, barrier)
        if axis_sizes[DATA] > 1 and rules.zero > 0 and name not in (always_frozen or {}):
            zero_dim, padded, reason = _zero_dim(shape, axes, stack_dims, axis_sizes[DATA])
            reasons += [reason] if reason else []
        access, reason = Access.WHOLE, None
        if zero_dim is not None:
            access, reason = _access(shape, barrier, rules, reads_lazily)
        reasons += [reason] if reason else []
        leaves[name] = LeafPlacement(
            name=name,
            shape=shape,
            stack_dims=stack_dims,
            axes=axes,
            zero_dim=zero_dim,
            padded_size=padded,
            access=access,
            frozen=name in frozen or name in frozen_by_user,
            layer_rows=rows,
            reasons=tuple(reasons),
        )
    return Placement(leaves, rules.zero, dict(axis_sizes))


def _access(
    shape: Shape, barrier: str | None, rules: PlacementRules, reads_lazily: bool
) -> tuple[Access, str | None]:
    """How a sharded parameter is read, and why, if that is an exception to its stage's rule."""
    if rules.zero == 1:
        return Access.GATHER_ONCE, None
    if barrier is not None:
        return Access.GATHER_ONCE, f"{barrier}: gathered once per step"
    if rules.zero == 2:
        return Access.GATHER_ONCE_SCATTER_EARLY, None
    elements = trees.num_elements(shape)
    if elements < rules.persistence_threshold:
        return Access.GATHER_ONCE, (
            f"{elements} elements < persistence_threshold {rules.persistence_threshold}: "
            "gathered once per step"
        )
    reason = (
        None if reads_lazily else "functions have no point of use: all are gathered as apply starts"
    )
    return Access.GATHER_ON_USE, reason


def _stack_dims(shape: Shape, reads: frozenset[Shape] | None) -> tuple[int, str | None]:
    """(leading dimensions that a scan slices away, why it cannot be gathered where it is read)."""
    if not reads:
        return 0, "is never read by the loss"
    for read in reads:
        if read != shape[len(shape) - len(read) :]:
            return 0, f"is read with shape {list(read)}, no trailing slice of {list(shape)}"
    return len(shape) - min(map(len, reads)), None


def _check_rows(
    name: str, shape: Shape, rows: tuple[int, ...], axis_sizes: Mapping[str, int]
) -> None:
    """What `zerojax.pipeline_layout` guarantees."""
    held = sorted(layer for layer in rows if layer >= 0)
    assert held == list(range(shape[0])), (name, shape, rows)
    assert len(rows) % axis_sizes[STAGE] == 0, (name, rows, dict(axis_sizes))


def _check_stack(
    name: str, axes: tuple[str | None, ...], stack_dims: int, barrier: str | None
) -> None:
    """Refuses a parameter of which a pipeline stage cannot hold just its own layers."""
    if stack_dims == 0:
        why = barrier or "is read whole"
        raise ValueError(
            f"{name} is stacked over the layers of the pipeline, but {why}; read it inside the "
            "layer loop only, one layer at a time, or use stage=1"
        )
    if axes[0] is not None:
        raise ValueError(
            f"{name}: its tensor-parallel rule splits dim 0 over {axes[0]}, and dim 0 holds the "
            "layers, which the pipeline splits; give the rule one entry fewer, or use stage=1"
        )


def _zero_dim(
    shape: Shape, axes: tuple[str | None, ...], stack_dims: int, data_size: int
) -> tuple[int | None, int | None, str | None]:
    """(negative dimension, stored size, reason if this is an exception)."""
    free = [i for i in range(stack_dims, len(shape)) if axes[i] is None and shape[i] > 0]
    if not free:
        return None, None, "no dimension is free of layer stack and tensor parallelism: kept whole"
    divisible = [i for i in free if shape[i] % data_size == 0]
    index = max(divisible or free, key=lambda i: shape[i])
    padded = -(-shape[index] // data_size) * data_size
    reason = None
    if not divisible:
        reason = (
            f"dim {index} of {shape[index]} is padded to {padded} to divide by data {data_size}"
        )
    return index - len(shape), padded, reason


def _tensor_parallel_axes(
    shapes: Mapping[str, Shape], axis_sizes: Mapping[str, int], rules: Rules
) -> dict[str, tuple[str | None, ...]]:
    """Mesh axis per dimension of every parameter, from the first rule that matches its name."""
    compiled = []
    for pattern, axes in rules:
        for axis in axes:
            if axis not in (None, MODEL):
                raise ValueError(
                    f"tensor-parallel rule {pattern!r} names the axis {axis!r}; "
                    f"use {MODEL!r} or null"
                )
        try:
            compiled.append((re.compile(pattern), tuple(axes)))
        except re.error as error:
            raise ValueError(
                f"tensor-parallel rule {pattern!r} is not a regular expression: {error}"
            ) from None
    result = {}
    for name, shape in shapes.items():
        axes = next((axes for pattern, axes in compiled if pattern.search(name)), ())
        if len(axes) > len(shape):
            raise ValueError(
                f"a tensor-parallel rule gives {len(axes)} axes {axes} for {name}, which has "
                f"{len(shape)} dimensions {list(shape)}; give at most one axis per trailing "
                "dimension"
            )
        full = (None,) * (len(shape) - len(axes)) + axes
        for index, axis in enumerate(full):
            size = axis_sizes[axis] if axis else 1
            if shape[index] % size:
                raise ValueError(
                    f"{name}: dim {index} of size {shape[index]} is not divisible by "
                    f"{axis}={size}; choose a {axis} size that divides {shape[index]}, or change "
                    "its tensor-parallel rule"
                )
        result[name] = tuple(axis if axis and axis_sizes[axis] > 1 else None for axis in full)
    return result
