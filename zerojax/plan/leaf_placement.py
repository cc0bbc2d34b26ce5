"""Places one parameter: sharded dimensions, gather mode, and the rules that decide them."""

from __future__ import annotations

import dataclasses
import enum
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec as P

from zerojax.optim.weight_codes import BLOCK, WeightCodes
from zerojax.optim.wire_codes import GradientCodes
from zerojax.plan.device_mesh import (
    COMPILER_AXES,
    DATA,
    EXPERT,
    MODEL,
    STAGE,
    state_axes,
)
from zerojax.tracing.row_lookups import Asked

Shape = tuple[int, ...]

Rules = Sequence[tuple[str, Sequence[str | None]]]


FULL_ENOUGH = 1_000_000
"""Minimum elements for a bucket to end where a layer of a list ends: equal layers then have equal
buckets, and computations on their slices compile once instead of for each layer. A bucket of
fewer elements takes as long as an empty one."""


class Access(enum.Enum):
    """Ways in which forward and backward read a parameter and reduce its gradient."""

    WHOLE = "whole"
    """Stored whole on every data shard; its gradient is summed once per step."""
    GATHER_ONCE = "gather once"
    """Stored in shards, gathered once per step; its gradient is scattered once per step."""
    GATHER_ONCE_SCATTER_EARLY = "gather once, scatter early"
    """Gathered once per step; its gradient is scattered inside the backward pass."""
    GATHER_ON_USE = "gather on use"
    """Gathered where the model reads it and again in the backward pass, which scatters its gradient
    immediately."""
    LOOK_UP = "look up"
    """Never gathered: its rows are sent to where they are needed, and their gradients back."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeafPlacement:
    """The placement of one parameter: one row of the table.

    Attributes:
      name: "blocks/attention/query/kernel".
      shape: the true shape.
      stack_dims: leading dimensions that a layer scan slices away, or that `jax.vmap` maps; never
        sharded.
      mapped_dims: how many of these `jax.vmap` maps: one read returns all entries along them.
      axes: mesh axis per dimension from tensor parallelism, None where there is none.
      zero_dim: the dimension that ZeRO shards, counted from the end (negative, so that it survives
        the slicing of leading dimensions); None when ZeRO leaves the parameter whole.
      zero_axes: the mesh axes that shard it, outermost first: `data`; also `expert` for
        non-expert parameters where experts are split; also `context` where sequences are split; and
        `stage` for a parameter that every pipeline stage reads, so that none is stored twice.
      expert_dim: the dimension of experts, negative, which is split over `expert`; None: it has
        none, or experts are not split.
      padded_size: stored size of `zero_dim` in elements, a multiple of the number of shards.
      access: how forward and backward read it.
      asked: rows looked up per microbatch, for a lookup table whose `zero_dim` is the columns;
        None: not a lookup table.
      eight_bits: whether it is gathered as 8-bit floats, because the model uses it only as such.
      node_shards: number of neighbouring shards in one node. At each use the node gathers the
        parameter within itself, from a part fetched from other nodes once per step
        (`wire.secondary`); None: all devices gather it together.
      wire_codes: codes in which it is gathered, with `node_shards` between nodes; None: uncoded.
      delta_codes: codes of the difference between its masters and the copy that every device keeps,
        sent once per step; None: no copy is kept (`wire.weights`).
      gradient_codes: codes in which its gradient is scattered, with `node_shards` between nodes;
        None: uncoded.
      gradient_in_full: whether its gradient is sent in float32 for any `reduce_dtype`.
      frozen: no gradient and no optimizer state.
      codes: how a frozen parameter is coded; None: it is stored as numbers. Where `zero_dim` cuts
        the blocks' dimension it cuts between blocks, without padding.
      layer_rows: for a parameter on a pipeline the layer in each row of the stored stack, -1 where
        a row is padding (zeros); its dimension 0 is split over `stage`. None: not on a pipeline,
        so that every pipeline stage has all of it.
      is_row_of_stages: whether it is one row of a stack that a pipeline splits, in portable form.
      reasons: why this parameter is an exception to the rule of the ZeRO stage, if it is.
    """

    name: str
    shape: Shape
    stack_dims: int
    axes: tuple[str | None, ...]
    zero_dim: int | None
    padded_size: int | None
    access: Access
    eight_bits: bool = False
    node_shards: int | None = None
    wire_codes: GradientCodes | None = None
    delta_codes: GradientCodes | None = None
    gradient_codes: GradientCodes | None = None
    gradient_in_full: bool = False
    mapped_dims: int = 0
    frozen: bool = False
    codes: WeightCodes | None = None
    zero_axes: tuple[str, ...] = (DATA,)
    expert_dim: int | None = None
    asked: Asked | None = None
    layer_rows: tuple[int, ...] | None = None
    is_row_of_stages: bool = False
    reasons: tuple[str, ...] = ()

    @property
    def num_slices(self) -> int:
        """Number of one-slice reads that cover the parameter: the number of layers of a stack."""
        return math.prod(self.shape[: max(self.stack_dims - self.mapped_dims, 0)])

    @property
    def kept_shape(self) -> Shape:
        """The shape of the array in a checkpoint: the unpadded shape, or the shape of its codes."""
        return self.shape if self.codes is None else self.codes.coded_shape(self.shape)

    @property
    def stored_shape(self) -> Shape:
        """The shape in the state: padded where `data` does not divide, rows in place of layers."""
        shape = list(self.kept_shape)
        in_blocks = self.codes is not None and self.codes.dim == self.zero_dim
        if self.zero_dim is not None and self.padded_size is not None and not in_blocks:
            shape[self.zero_dim] = self.padded_size
        if self.layer_rows is not None:
            shape[0] = len(self.layer_rows)
        return tuple(shape)

    @property
    def is_padded(self) -> bool:
        return self.stored_shape != self.kept_shape

    @property
    def has_rows(self) -> bool:
        """Whether layers are stored in another order, or with padding rows between them."""
        return self.layer_rows is not None and self.layer_rows != tuple(range(self.shape[0]))

    @property
    def stored_spec(self) -> P:
        """The partition spec of masters, optimizer state and reduced gradients."""
        axes: list[Any] = list(self.axes)
        if self.zero_dim is not None:
            axes[self.zero_dim] = self.zero_axes[0] if len(self.zero_axes) == 1 else self.zero_axes
        if self.layer_rows is not None:
            axes[0] = STAGE
        if self.expert_dim is not None:
            axes[self.expert_dim] = EXPERT
        return P(*axes)

    def device_shape(self, axis_sizes: Mapping[str, int]) -> Shape:
        """Returns the shape that the model sees: unpadded, with only this device's experts."""
        shape = list(self.shape)
        if self.expert_dim is not None:
            shape[self.expert_dim] //= axis_sizes[EXPERT]
        return tuple(shape)

    @property
    def manual_spec(self) -> P:
        """The part of `stored_spec` that the `shard_map` of a pass sees."""
        return P(*(None if axis in COMPILER_AXES else axis for axis in self.stored_spec))

    def canonical_spec(self, axis_sizes: Mapping[str, int]) -> P:
        """Returns a spec that divides the unpadded shape evenly and splits no block of codes.

        Used on disk and between two placements. Where a pipeline does not divide the layers,
        `stage` splits another dimension.
        """
        if not self.is_padded and self.layer_rows is None and not self.is_row_of_stages:
            return self.stored_spec
        axes: list[Any] = [axis if axis == MODEL else None for axis in self.stored_spec]
        if self.expert_dim is not None:
            axes[self.expert_dim] = EXPERT
        shape = list(self.shape)
        if self.codes is not None:
            shape[self.codes.dim] //= BLOCK
        if self.layer_rows is not None and self.shape[0] % axis_sizes[STAGE] == 0:
            axes[0] = STAGE
        if self.zero_dim is not None:
            own = tuple(axis for axis in state_axes(axis_sizes) if axis not in axes)
            if shape[self.zero_dim] % math.prod(axis_sizes[axis] for axis in own) == 0:
                axes[self.zero_dim] = own[0] if len(own) == 1 else own
            else:
                for axis in own:
                    _put(axes, axis, shape, axis_sizes)
        if self.is_row_of_stages or (self.layer_rows is not None and axes[0] != STAGE):
            _put(axes, STAGE, shape, axis_sizes, shared=True)
        return P(*axes)

    def reorder_spec(self, axis_sizes: Mapping[str, int]) -> P:
        """Returns the spec of a stack while its rows are reordered: unsplit along dimension 0.

        `stage` splits another dimension of `stored_shape` meanwhile, if it divides one, so that no
        device holds the whole stack.
        """
        axes: list[Any] = [None, *self.stored_spec[1:]]
        _put(axes, STAGE, self.stored_shape, axis_sizes, start=1, shared=True)
        return P(*axes)


def _put(
    axes: list[Any],
    axis: str,
    shape: Sequence[int],
    axis_sizes: Mapping[str, int],
    *,
    start: int = 0,
    shared: bool = False,
) -> None:
    """Assigns `axis`, in place, to the largest unassigned dimension from `start` on that it
    divides.

    Without such a dimension the axis stays unused, or, if `shared`, also splits the dimension of
    another axis.
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlacementRules:
    """User settings of placement.

    Attributes:
      zero: ZeRO stage. 0: nothing is sharded; 1: optimizer state and masters are; 2: gradients,
        too; 3: also the parameters that forward and backward read.
      tensor_parallel: (regular expression on the name, mesh axis per trailing dimension); the first
        that matches counts; dimensions it does not mention stay whole.
      freeze: regular expressions on names.
      freeze_codes: how frozen kernels are coded; None: not at all.
      persistence_threshold: elements; at stage 3 a smaller parameter is gathered once per step
        instead of at every use, which saves a collective per use.
      expert_dims: {name: its negative dimension of experts, which is split over `expert`}.
      lookups: {lookup table: number of rows}.
      stacks: {stack of layers: the user's names of its rows}; patterns match these names, and axes
        of a tensor-parallel rule are those of a row. All rows of a stack have the same rule.
      virtual_shards: number of shards for which dimensions are chosen and padded; the number of
        devices divides it. None: the actual number of shards.
    """

    zero: int = 1
    tensor_parallel: Rules = ()
    freeze: Sequence[str] = ()
    freeze_codes: str | None = None
    persistence_threshold: int = 100_000
    virtual_shards: int | None = None
    expert_dims: Mapping[str, int] = dataclasses.field(default_factory=dict)
    lookups: Mapping[str, Asked] = dataclasses.field(default_factory=dict)
    stacks: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)


def tensor_parallel_axes(
    shapes: Mapping[str, Shape],
    axis_sizes: Mapping[str, int],
    rules: Rules,
    stacks: Mapping[str, tuple[str, ...]] | None = None,
) -> dict[str, tuple[str | None, ...]]:
    """Returns the mesh axis per dimension of every parameter, from the first matching rule.

    Args:
      stacks: as in `PlacementRules`.
    """
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
        rows = (stacks or {}).get(name, ())
        asked = rows[0] if rows else name
        axes = next((axes for pattern, axes in compiled if pattern.search(asked)), ())
        own = shape[1:] if rows else shape
        if len(axes) > len(own):
            raise ValueError(
                f"a tensor-parallel rule gives {len(axes)} axes {axes} for {asked}, which has "
                f"{len(own)} dimensions {list(own)}; give at most one axis per trailing "
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
