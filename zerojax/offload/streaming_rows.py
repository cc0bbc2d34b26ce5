"""Transfers stacked parameters between host and devices, one layer (row) at a time.

Weights go from host memory to the device, where they are all-gathered; gradients are reduced and go
back. Code that accesses host memory is in a nested `shard_map` over the axes that the compiler
partitions, as in `zerojax.transport.collectives`. So the compiler never partitions a transfer, and
each device moves its own shard. Row numbers are linear in the counter of the enclosing loop and are
not clamped: only then XLA copies by DMA instead of by a kernel that reads host memory. The sums of
gradients are in the same memory (host or device) as their weights.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from zerojax.config.late_dataclasses import dataclass
from zerojax.config.tree_types import Tree
from zerojax.offload.streaming_layers import Inputs, has_gradient
from zerojax.passes import PassConfig, tile_collectives
from zerojax.placement.device_mesh import (
    DATA_AXES,
    EXPERT,
    MODEL,
    REPLICA,
    communicates_through_gloo,
)
from zerojax.placement.slices import put_slice, take_slice, to_device, to_host
from zerojax.tracing.tiled_products import TiledProduct, WeightProduct
from zerojax.tracing.tiled_programs import ShardedWeight
from zerojax.transport import collectives
from zerojax.transport.sums import over_auto_axes

Arrays = dict[str, Any]

_AXES_OF_EXPERTS = tuple(axis for axis in DATA_AXES if axis != EXPERT)


class RowStacks:
    """Creates, reads and writes stacks {name: [rows, ...]}, row by row in a loop.

    Args:
      specs: {name: partition spec of a row over the axes that the compiler partitions}.
      on_host: whether the stacks are in pinned host memory.
    """

    def __init__(self, specs: Mapping[str, P], *, on_host: bool = True) -> None:
        self.specs, self.on_host = dict(specs), on_host

    def leave(self, row: jax.Array) -> jax.Array:
        """Returns a row on the device, copied to host memory if the stacks are there."""
        return to_host(row) if self.on_host else row

    def _stack_specs(self, names: Collection[str]) -> dict[str, P]:
        return {name: P(None, *self.specs[name]) for name in names}

    def empty(self, rows: int, like: Mapping[str, Any]) -> Arrays:
        """Creates stacks {name: [rows, *shape]} with arbitrary values.

        Args:
          rows: number of rows of each stack.
          like: {name: value with the shape and dtype of one row}.
        """

        def local(rows_like: Arrays) -> Arrays:
            # Each stack gets other values. The compiler would merge two equal stacks into one
            # array, and copy that in host memory before a loop writes to it.
            return {
                name: self.leave(jnp.full((rows, *row.shape), number, like[name].dtype))
                for number, (name, row) in enumerate(rows_like.items())
            }

        # The local shape of a row is known only inside; these arrays carry it and nothing else.
        carriers = {name: jnp.zeros(row.shape, jnp.int8) for name, row in like.items()}
        specs = {name: self.specs[name] for name in like}
        return over_auto_axes(local, (specs,), self._stack_specs(like))(carriers)

    def load(self, stacks: Arrays, index: jax.Array | int) -> Arrays:
        """Returns row `index` of each stack, in device memory: {name of the stack: row}."""

        def local(stacks: Arrays, index: jax.Array) -> Arrays:
            take = lambda stack: take_slice(stack, index)  # noqa: E731
            bring = (lambda stack: to_device(take(stack))) if self.on_host else take
            return {name: bring(stack) for name, stack in stacks.items()}

        rows = {name: self.specs[name] for name in stacks}
        given = self._stack_specs(stacks), P()
        return over_auto_axes(local, given, rows)(stacks, jnp.asarray(index, jnp.int32))

    def store(self, stacks: Arrays, rows: Arrays, index: jax.Array | int) -> Arrays:
        """Returns the stacks with row `index` of each replaced by its entry of `rows`."""

        def local(stacks: Arrays, rows: Arrays, index: jax.Array) -> Arrays:
            return {
                name: put_slice(stack, self.leave(rows[name].astype(stack.dtype)), index)
                for name, stack in stacks.items()
            }

        whole = self._stack_specs(stacks)
        given = whole, {name: self.specs[name] for name in stacks}, P()
        return over_auto_axes(local, given, whole)(stacks, rows, jnp.asarray(index, jnp.int32))


class LayerRows:
    """Loads the parameters of one layer at a time, from stacks in host memory and on the device.

    Args:
      config: configuration of the pass.
      waiting: {name: this device's shard of a stack that is read row by row}: of those in host
        memory, or of those that a delayed update changes during the pass.
      inputs, constants: of the stacks on the device, see
        `zerojax.passes.prepare_parameters`.
      frozen: names of the parameters without gradient.
    """

    def __init__(
        self,
        config: PassConfig,
        waiting: Arrays,
        inputs: Arrays,
        constants: Arrays,
        frozen: frozenset[str],
    ) -> None:
        self.config, self.waiting = config, waiting
        self.inputs, self.resident = inputs, {**inputs, **constants}
        self.frozen = frozen
        self.leaves = {n: config.placement.leaves[n] for n in (*waiting, *self.resident)}
        sharded = [name for name, leaf in self.leaves.items() if leaf.zero_dim is not None]
        self.collectives = {
            name: collectives.leaf_collectives(
                self.leaves[name],
                config.placement.num_shards(self.leaves[name]),
                compute_dtype=config.precision.compute_dtype,
                reduce_dtype=config.precision.reduce_dtype,
                by_permutes=communicates_through_gloo(config.mesh),
            )
            for name in sharded
        }
        self.tiles = {name: tiles for name, tiles in config.tiles.items() if name in waiting}
        assert config.offload is not None
        rows = {name: P(*self.leaves[name].axes[1:]) for name in waiting}
        self.stacks = RowStacks(rows, on_host=not config.offload.delayed)

    @property
    def names(self) -> list[str]:
        return list(self.leaves)

    @property
    def _experts(self) -> frozenset[str]:
        """Names of the stacks whose experts are divided over the mesh axis `expert`."""
        return frozenset(n for n, leaf in self.leaves.items() if leaf.expert_dim is not None)

    @property
    def trained(self) -> list[str]:
        """Names of the stacked parameters that have a gradient."""
        return [name for name in self.leaves if name not in self.frozen]

    @property
    def streamed(self) -> list[str]:
        """Names of the trained stacks in `waiting`."""
        return [name for name in self.trained if name in self.waiting]

    @property
    def sinks(self) -> dict[str, Any]:
        """{name: dtype of the gradient} of the stacked weights that are gathered in tiles."""
        return dict.fromkeys(self.tiles, self.config.precision.reduce_dtype)

    def sharded(self, name: str, row: Any, product: WeightProduct) -> ShardedWeight:
        """Wraps one layer's shard of a weight so that the only product that reads it gathers it in
        tiles.

        Args:
          name: name of the stacked parameter.
          row: this device's shard, a result of `complete`; or (shard, zeros) if its gradient is
            wanted.
          product: matrix product that reads the weight.
        """
        tiles = self.tiles[name]
        leaf = tile_collectives(self.collectives[name], tiles)
        shard, sink = row if isinstance(row, tuple) else (row, None)
        tiled = TiledProduct(
            product=product,
            gather=leaf.gather,
            scatter=leaf.scatter,
            dim=tiles.dim,
            count=tiles.count,
            groups=tiles.groups,
        )
        return ShardedWeight(shard, sink, tiled)

    def like_complete(self, wholes: Arrays) -> Arrays:
        """Returns the shapes and dtypes of the result of `complete`.

        Args:
          wholes: {name: shape and dtype of the unsharded weights of one layer}.
        """
        shapes = {n: self.collectives[n].shard_shape(wholes[n].shape) for n in self.tiles}
        return {
            name: jax.ShapeDtypeStruct(shapes.get(name, x.shape), x.dtype)
            for name, x in wholes.items()
        }

    def load(self, index: jax.Array | int, waiting: Arrays | None = None) -> Arrays:
        """Loads one layer's row of every stack, in the compute dtype.

        A row is unsharded, or a shard if it is gathered in tiles.

        Args:
          index: number of the layer.
          waiting: {name: stack in host memory} to read instead of `self.waiting`; None:
            `self.waiting`.
        """
        rows = self.stacks.load(self.waiting if waiting is None else waiting, index)
        return self.complete(rows, index)

    def complete(self, rows: Arrays, index: jax.Array | int) -> Arrays:
        """Adds the rows of stacks on the device, and all-gathers; the result is that of `load`.

        Args:
          rows: {name: this device's shard of one row} of the stacks that are not on the device.
          index: number of the layer.
        """
        rows = dict(rows)
        rows |= {name: take_slice(stack, index) for name, stack in self.resident.items()}
        gathered = {name: row for name, row in rows.items() if self._comes_in_shards(name)}
        limit = self.config.allgather_bucket_size
        wholes = collectives.gather_buckets(gathered, self.collectives, limit)
        dtype = self.config.precision.compute_dtype
        return {name: wholes.get(name, _cast(rows[name], dtype)) for name in self.leaves}

    def _comes_in_shards(self, name: str) -> bool:
        """Returns whether one layer of this stacked parameter is all-gathered before the layer
        runs.
        """
        leaf = self.leaves[name]
        if name in self.tiles:
            return False
        if name in self.waiting:
            return leaf.zero_dim is not None
        return leaf.access.gathers_on_use

    def reduce(self, grads: Arrays) -> Arrays:
        """Sums one layer's gradients over devices, for stacks that are reduced layer by layer.

        These are stacks in host memory, and parameters whose gradients ZeRO scatters inside the
        backward pass. All other gradients are returned unchanged and are summed once per step.
        Gradients of weights gathered in tiles are already summed over the devices of a replica.
        """
        limit, dtype = self.config.reduce_bucket_size, self.config.precision.reduce_dtype
        scattered = {name: grad for name, grad in grads.items() if self._is_scattered(name)}
        reduced = collectives.scatter_buckets(scattered, self.collectives, limit)
        axes = {name: leaf.axes[1:] for name, leaf in self.leaves.items()}
        wholes = {n: g.astype(dtype) for n, g in grads.items() if self._is_summed(n)}
        experts, dense = split_by_name(wholes, self._experts)
        reduced |= collectives.sum_buckets(dense, axes, limit, DATA_AXES)
        reduced |= collectives.sum_buckets(experts, axes, limit, _AXES_OF_EXPERTS)
        reduced |= {name: grads[name] for name in self.tiles if name in grads}
        # The reduce-scatter and the products in tiles sum only inside a replica.
        if self.config.placement.axis_sizes[REPLICA] > 1:
            names = [name for name in (*scattered, *self.tiles) if name in self.waiting]
            shards = {name: reduced[name].astype(dtype) for name in names}
            reduced |= collectives.sum_buckets(shards, axes, limit, (REPLICA,))
        return {name: reduced.get(name, grad) for name, grad in grads.items()}

    def _is_scattered(self, name: str) -> bool:
        leaf = self.leaves[name]
        if name in self.waiting:
            return leaf.zero_dim is not None and name not in self.tiles
        return leaf.access.scatters_early

    def _is_summed(self, name: str) -> bool:
        return name in self.waiting and self.leaves[name].zero_dim is None

    def squares(self, name: str, row: jax.Array) -> jax.Array:
        """Returns the sums of squares of this device's part of a reduced gradient row.

        The result is float32 with one entry for each part over the mesh axis `model`.
        """
        axes = self.leaves[name].axes[1:]
        local = lambda x: jnp.sum(jnp.square(x.astype(jnp.float32)))[None]  # noqa: E731
        parts = P(MODEL) if MODEL in axes else P()
        return over_auto_axes(local, P(*axes), parts)(row)

    def squares_like(self, name: str) -> jax.Array:
        """Returns zeros in the shape and dtype of the result of `squares`."""
        split = MODEL in self.leaves[name].axes[1:]
        return jnp.zeros(self.config.mesh.shape[MODEL] if split else 1, jnp.float32)

    def sum_squares(self, squares: Arrays) -> Arrays:
        """Adds up the squares of all rows on all devices: {parameter: float32 []}."""
        totals = {name: jnp.sum(parts) for name, parts in squares.items()}
        # Parameters that are split over the same axes share one sum over devices.
        names: dict[tuple[str, ...], list[str]] = {}
        for name in squares:
            names.setdefault(self._split_over(name), []).append(name)
        for over, chosen in names.items():
            if over:
                specs = dict.fromkeys(chosen, P())
                add = functools.partial(lax.psum, axis_name=over)
                parts = {name: totals[name] for name in chosen}
                totals |= over_auto_axes(add, (specs,), specs)(parts)
        return totals

    def _split_over(self, name: str) -> tuple[str, ...]:
        """Returns the manual mesh axes over which a row's gradient is sharded after `reduce`."""
        leaf = self.leaves[name]
        zero = () if leaf.zero_dim is None else leaf.zero_axes
        return zero if leaf.expert_dim is None else (*zero, EXPERT)


# --- storage for layer inputs between forward and backward pass -----------------------------------


def device_inputs() -> Inputs:
    """Returns a storage for layer inputs in device memory."""
    return Inputs(
        empty=lambda number, like: [jnp.zeros((number, *x.shape), x.dtype) for x in like],
        load=lambda stacks, index: tuple(take_slice(stack, index) for stack in stacks),
        store=lambda stacks, rows, index: [
            put_slice(stack, row, index) for stack, row in zip(stacks, rows, strict=True)
        ],
    )


def host_inputs(specs: list[P]) -> Inputs:
    """Returns a storage for layer inputs in pinned host memory.

    Inputs without a gradient are small and stay on the device.

    Args:
      specs: partition spec of each activation over the axes that the compiler partitions.
    """
    stacks = RowStacks({str(at): spec for at, spec in enumerate(specs)})
    here = device_inputs()

    def split(values: Tree) -> tuple[Arrays, list]:
        on_host = {str(at): x for at, x in enumerate(values) if has_gradient(x)}
        return on_host, [x for x in values if not has_gradient(x)]

    def empty(number: int, like: Tree) -> Any:
        on_host, rest = split(like)
        return stacks.empty(number, on_host), here.empty(number, tuple(rest))

    def load(kept: Tree, index: jax.Array | int) -> Any:
        on_host, rest = stacks.load(kept[0], index), iter(here.load(kept[1], index))
        return tuple(
            on_host[str(at)] if str(at) in on_host else next(rest) for at in range(len(specs))
        )

    def store(kept: Tree, values: Tree, index: jax.Array | int) -> Any:
        on_host, rest = split(values)
        return stacks.store(kept[0], on_host, index), here.store(kept[1], tuple(rest), index)

    return Inputs(empty=empty, load=load, store=store)


def split_by_name(arrays: Arrays, names: Collection[str]) -> tuple[Arrays, Arrays]:
    """Splits `arrays` into (those whose name is in `names`, all other arrays)."""
    chosen = {name: x for name, x in arrays.items() if name in names}
    return chosen, {name: x for name, x in arrays.items() if name not in names}


def _cast(value: jax.Array, dtype: DTypeLike) -> jax.Array:
    return value.astype(dtype) if jnp.issubdtype(value.dtype, jnp.floating) else value


class GradientSink(Protocol):
    """Receives the layers' gradients in a backward pass, one layer after the other."""

    def start(self, totals: Tree, sums: Arrays) -> Any:
        """Prepares the totals for the backward pass of a microbatch.

        Args:
          sums: sums of loss and weight of the microbatch, on this data shard.
        """
        ...

    def take(self, totals: Tree, index: jax.Array | int, grads: Arrays) -> Any:
        """Returns the totals with the gradients of one layer added.

        Args:
          grads: {name: gradient of the layer's trained weights, unsharded and not reduced}.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class GradientTotals:
    """A sink that sums gradients.

    Its totals are {"host": stacks in host memory, "device": stacks on the device, "squares": sums
    of squares}.

    Attributes:
      rows: loader of the layers' parameters.
      num_layers: number of layers, which is the number of rows of each stack.
      first: bool [], whether this is the first microbatch; None if there is only one. In the first
        microbatch, values read from the (uninitialized) stacks in host memory are discarded.
    """

    rows: LayerRows
    num_layers: int
    first: jax.Array | None = None

    def empty(self, *, adds: bool) -> Arrays:
        """Returns the totals before the first microbatch.

        Args:
          adds: whether there are several microbatches, whose gradients are added.
        """
        precision = self.rows.config.precision
        dtype = precision.accumulate_dtype if adds else precision.reduce_dtype
        like = {
            name: jax.ShapeDtypeStruct(self.rows.waiting[name].shape[1:], dtype)
            for name in self.rows.streamed
        }
        return {
            "host": self.rows.stacks.empty(self.num_layers, like),
            "device": {
                name: jnp.zeros(x.shape, precision.accumulate_dtype if adds else x.dtype)
                for name, x in self.rows.inputs.items()
            },
            "squares": {name: self.rows.squares_like(name) for name in self.rows.streamed},
        }

    def start(self, totals: Arrays, sums: Arrays) -> Arrays:
        """Resets the sums of squares to 0 at the start of each microbatch.

        So in the end they are the sums of squares of the complete gradients, added up in the last
        microbatch.
        """
        del sums
        return {**totals, "squares": jax.tree.map(jnp.zeros_like, totals["squares"])}

    def take(self, totals: Arrays, index: jax.Array | int, grads: Arrays) -> Arrays:
        """Reduces the gradients of a layer and adds them to the totals."""
        waiting, here = split_by_name(self.rows.reduce(grads), self.rows.streamed)
        if self.first is not None:
            before = self.rows.stacks.load(totals["host"], index)
            waiting = {
                name: jnp.where(self.first, 0, before[name]) + grad.astype(before[name].dtype)
                for name, grad in waiting.items()
            }
        squares = {
            name: totals["squares"][name] + self.rows.squares(name, grad)
            for name, grad in waiting.items()
        }
        return {
            "host": self.rows.stacks.store(totals["host"], waiting, index),
            "device": put_rows(totals["device"], here, index, adds=self.first is not None),
            "squares": squares,
        }


def put_rows(stacks: Arrays, rows: Arrays, index: jax.Array | int, *, adds: bool) -> Arrays:
    """Overwrites one row of each stack on the device, or adds to it if `adds`; returns the
    stacks.
    """

    def put(stack: jax.Array, row: jax.Array) -> jax.Array:
        row = row.astype(stack.dtype)
        return put_slice(stack, take_slice(stack, index) + row if adds else row, index)

    return {name: put(stack, rows[name]) for name, stack in stacks.items()}
