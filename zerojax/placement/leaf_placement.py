"""Decides the placement of one parameter: its sharded dimensions, how it is gathered, and the
reason for each exception."""

from __future__ import annotations

import dataclasses
import enum
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec as P

from zerojax.config.late_dataclasses import dataclass
from zerojax.optim.weight_codes import BLOCK, WeightCodes
from zerojax.optim.wire_codes import WireCodes
from zerojax.placement.device_mesh import (
    COMPILER_AXES,
    DATA,
    EXPERT,
    MODEL,
    STAGE,
    state_axes,
)
from zerojax.tracing.row_lookups import RowReads

Shape = tuple[int, ...]

Rules = Sequence[tuple[str, Sequence[str | None]]]


FULL_ENOUGH = 1_000_000
"""Smallest number of elements with which a communication bucket may end where a layer of a list
ends. Equal layers then have equal buckets, so that computations on their slices compile once
instead of once per layer. A bucket with fewer elements takes as long as an empty bucket."""


class Access(enum.Enum):
    """How forward and backward read a parameter and reduce its gradient."""

    WHOLE = "whole"
    """The whole parameter is stored on every data shard; its gradient is all-reduced once per
    step."""
    GATHER_ONCE = "gather once"
    """The parameter is stored in shards and gathered once per step; its gradient is
    reduce-scattered once per step."""
    GATHER_ONCE_SCATTER_EARLY = "gather once, scatter early"
    """The parameter is gathered once per step; its gradient is reduce-scattered inside the backward
    pass."""
    GATHER_ON_USE = "gather on use"
    """The parameter is gathered where the model reads it, and again in the backward pass, which
    reduce-scatters its gradient immediately."""
    LOOK_UP = "look up"
    """The parameter (a table) is never gathered: its rows are sent to the devices that need them,
    and the gradients of rows are sent back."""

    @property
    def is_whole(self) -> bool:
        """Whether every data shard stores the whole parameter."""
        return self is Access.WHOLE

    @property
    def is_gathered(self) -> bool:
        """Whether the whole parameter is gathered from its shards."""
        return self.gathers_once or self.gathers_on_use

    @property
    def gathers_once(self) -> bool:
        """Whether the parameter is gathered once per step."""
        return self in (Access.GATHER_ONCE, Access.GATHER_ONCE_SCATTER_EARLY)

    @property
    def gathers_on_use(self) -> bool:
        """Whether the parameter is gathered where the model reads it."""
        return self is Access.GATHER_ON_USE

    @property
    def looks_up(self) -> bool:
        """Whether rows of the parameter are sent, and never all of it."""
        return self is Access.LOOK_UP

    @property
    def reads_shard(self) -> bool:
        """Whether the model is given the shard, and no whole parameter."""
        return self in (Access.GATHER_ON_USE, Access.LOOK_UP)

    @property
    def scatters_early(self) -> bool:
        """Whether the gradient is reduce-scattered inside the backward pass."""
        return self in (Access.GATHER_ON_USE, Access.GATHER_ONCE_SCATTER_EARLY)

    @property
    def scatters_late(self) -> bool:
        """Whether the gradient is whole until the end of the step, and then reduce-scattered."""
        return self is Access.GATHER_ONCE

    @property
    def has_whole_gradient(self) -> bool:
        """Whether the gradient is whole after the backward pass."""
        return self in (Access.WHOLE, Access.GATHER_ONCE)


@dataclass(frozen=True, kw_only=True)
class LeafPlacement:
    """Placement of one parameter, which is one row of the placement table.

    Attributes:
      name: name of the parameter, such as "blocks/attention/query/kernel".
      shape: unpadded shape.
      stack_dims: number of leading dimensions that a scan over layers or `jax.vmap` removes; they
        are never sharded.
      mapped_dims: number of these dimensions that `jax.vmap` maps; one read returns all entries
        along them.
      axes: for each dimension the mesh axis of tensor parallelism, or None.
      zero_dim: dimension that ZeRO shards, counted from the end (negative), so that it stays valid
        when leading dimensions are removed; None if ZeRO does not shard the parameter.
      zero_axes: mesh axes that shard zero_dim, outermost first: `data`; also `expert` for other
        parameters than experts if experts are split; also `context` if sequences are split; and
        `stage` for a parameter that every pipeline stage reads, so that it is not stored twice.
      expert_dim: dimension of experts (negative), which is split over `expert`; None if there is no
        such dimension or experts are not split.
      padded_size: stored number of elements along zero_dim, a multiple of the number of shards.
      access: how forward and backward read the parameter.
      row_reads: rows looked up per microbatch, for a lookup table that is sharded along its
        columns; None for other parameters.
      eight_bits: whether the parameter is gathered as 8-bit floats, because the model uses it only
        as 8-bit floats.
      node_shards: number of neighbouring shards in one node. Once per step each node fetches a part
        of the parameter from other nodes, and gathers it within the node at each use
        (`wire.secondary`). None: all devices gather the parameter together.
      wire_codes: codes in which the parameter is gathered (between nodes if node_shards is set);
        None: not quantized.
      delta_codes: codes of the difference between master weights and the copy that every device
        keeps, sent once per step; None: there is no copy (`wire.weights`).
      gradient_codes: codes in which the gradient is reduce-scattered (between nodes if node_shards
        is set); None: not quantized.
      gradient_in_full: whether the gradient is sent in float32, whatever `reduce_dtype` is.
      frozen: whether the parameter has no gradient and no optimizer state.
      codes: how a frozen parameter is quantized; None: it is stored as numbers. If zero_dim is the
        dimension of quantization blocks, it is split between blocks, without padding.
      layer_rows: for a parameter that a pipeline splits, the layer in each row of the stored stack,
        -1 for a row of padding (zeros); dimension 0 is split over `stage`. None: every pipeline
        stage has the whole parameter.
      is_row_of_stages: whether this is one row of a stack that a pipeline splits, in the form of
        checkpoints.
      reasons: reasons why the placement differs from the rule of the ZeRO stage; () if it does not.
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
    wire_codes: WireCodes | None = None
    delta_codes: WireCodes | None = None
    gradient_codes: WireCodes | None = None
    gradient_in_full: bool = False
    mapped_dims: int = 0
    frozen: bool = False
    codes: WeightCodes | None = None
    zero_axes: tuple[str, ...] = (DATA,)
    expert_dim: int | None = None
    row_reads: RowReads | None = None
    layer_rows: tuple[int, ...] | None = None
    is_row_of_stages: bool = False
    reasons: tuple[str, ...] = ()

    def gathered_once(self) -> LeafPlacement:
        """Returns the placement of a parameter that is gathered once per step instead."""
        return dataclasses.replace(
            self, access=Access.GATHER_ONCE, eight_bits=False, node_shards=None
        )

    @property
    def num_slices(self) -> int:
        """Number of reads of one layer that cover the parameter: the number of layers of a stacked
        parameter."""
        return math.prod(self.shape[: max(self.stack_dims - self.mapped_dims, 0)])

    @property
    def kept_shape(self) -> Shape:
        """Shape of the array in a checkpoint: the unpadded shape, or the shape of its codes."""
        return self.shape if self.codes is None else self.codes.coded_shape(self.shape)

    @property
    def stored_shape(self) -> Shape:
        """Shape of the array in the training state: padded if the data shards do not divide it,
        with the rows of pipeline stages in place of layers."""
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
        """Whether layers are stored in another order than the model's, or with rows of padding
        between them."""
        return self.layer_rows is not None and self.layer_rows != tuple(range(self.shape[0]))

    @property
    def stored_spec(self) -> P:
        """Partition spec of master weights, optimizer state and reduced gradients."""
        axes: list[Any] = list(self.axes)
        if self.zero_dim is not None:
            axes[self.zero_dim] = self.zero_axes[0] if len(self.zero_axes) == 1 else self.zero_axes
        if self.layer_rows is not None:
            axes[0] = STAGE
        if self.expert_dim is not None:
            axes[self.expert_dim] = EXPERT
        return P(*axes)

    def device_shape(self, axis_sizes: Mapping[str, int]) -> Shape:
        """Returns the shape that the model sees on one device: unpadded, with only this device's
        experts."""
        shape = list(self.shape)
        if self.expert_dim is not None:
            shape[self.expert_dim] //= axis_sizes[EXPERT]
        return tuple(shape)

    @property
    def manual_spec(self) -> P:
        """Part of `stored_spec` with the axes that are manual in the `shard_map` of a pass."""
        return P(*(None if axis in COMPILER_AXES else axis for axis in self.stored_spec))

    def canonical_spec(self, axis_sizes: Mapping[str, int]) -> P:
        """Returns a partition spec that divides the unpadded shape evenly and splits no block of
        codes.

        It is used in checkpoints and for resharding. If a pipeline does not divide the layers,
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
        """Returns the partition spec of a stack while its rows are reordered: dimension 0 is not
        split.

        Meanwhile `stage` splits another dimension of `stored_shape`, if it divides one, so that no
        device stores the whole stack.
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
    """Assigns the mesh axis `axis`, in place, to the largest unassigned dimension from `start` on
    that it divides.

    If there is no such dimension, the axis stays unused, or, with `shared`, also splits a dimension
    that another axis splits.
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


@dataclass(frozen=True, kw_only=True)
class PlacementRules:
    """Settings by which parameters are placed.

    Attributes:
      zero: ZeRO stage. 0: nothing is sharded; 1: optimizer state and master weights are; 2: also
        gradients; 3: also the parameters that forward and backward read.
      tensor_parallel: pairs (regular expression on the parameter's name, mesh axis of each trailing
        dimension). The first match counts; dimensions without an axis are not split.
      freeze: regular expressions on names of parameters that are not trained.
      freeze_codes: how frozen kernels are quantized; None: they are not.
      persistence_threshold: number of elements; at stage 3 a parameter with fewer elements is
        gathered once per step instead of at every use, which saves collectives.
      expert_dims: {name: dimension of experts (negative), which is split over `expert`}.
      lookups: {lookup table: number of rows looked up}.
      stacks: {stacked parameter of rolled layers: the user's names of its rows}. Patterns match the
        names of rows, and axes of a tensor-parallel rule are those of a row. All rows of a stack
        have the same rule.
      fixed_pieces: number of shards for which dimensions are chosen and padded, a multiple of the
        number of devices; None: the actual number of shards.
    """

    zero: int = 1
    tensor_parallel: Rules = ()
    freeze: Sequence[str] = ()
    freeze_codes: str | None = None
    persistence_threshold: int = 100_000
    fixed_pieces: int | None = None
    expert_dims: Mapping[str, int] = dataclasses.field(default_factory=dict)
    lookups: Mapping[str, RowReads] = dataclasses.field(default_factory=dict)
    stacks: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)


def tensor_parallel_axes(
    shapes: Mapping[str, Shape],
    axis_sizes: Mapping[str, int],
    rules: Rules,
    stacks: Mapping[str, tuple[str, ...]] | None = None,
    line_of: Callable[[str], str | None] = lambda name: None,
) -> dict[str, tuple[str | None, ...]]:
    """Finds the mesh axis of each dimension of every parameter, from the first matching
    tensor-parallel rule.

    Args:
      shapes: {name: shape} of all parameters.
      axis_sizes: {mesh axis: size}.
      rules: pairs (regular expression on the name, mesh axis of each trailing dimension).
      stacks: {stacked parameter: the user's names of its rows}, which the expressions match.
      line_of: function from a parameter to the line of the model that reads it, for errors.
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
                line = line_of(name)
                raise ValueError(
                    f"{name}{f' ({line})' if line else ''}: dim {index} of size {shape[index]} is "
                    f"not divisible by {axis}={size}; choose a {axis} size that divides "
                    f"{shape[index]}, or change its tensor-parallel rule"
                )
        result[name] = tuple(axis if axis and axis_sizes[axis] > 1 else None for axis in full)
    return result
