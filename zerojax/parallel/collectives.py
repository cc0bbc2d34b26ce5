"""All-gather of sharded parameters and reduce-scatter of gradients, one collective per bucket.

The arrays are inside a region that is manual over the data axes (in a pipeline also over `stage`).

Every collective sits in a nested `shard_map` over the axes that are still with the compiler. XLA
does not partition a manual collective over automatic axes: it would gather tensor-parallel shards
first, and send 5.15 instead of 3.33 units at data 4 x model 2. The nesting also avoids an abort of
XLA on CPU for bfloat16 reductions in partially manual regions.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from zerojax.models import trees
from zerojax.models.jaxpr import mark_read
from zerojax.parallel.sums import (
    BarrierKind,
    TreeOrder,
    cut_flat,
    over_auto_axes,
    scatter_by_permutes,
    scatter_in_tree,
    values_in_barriers,
)
from zerojax.plan.device_mesh import PASS_AXES
from zerojax.plan.leaf_placement import LeafPlacement

Arrays = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class LeafCollectives:
    """The collectives of one parameter: a static, hashable value that a traced program may hold.

    Attributes:
      zero_dim: sharded dimension, negative.
      size, padded_size: true and stored size of that dimension.
      axes: tensor-parallel axis per dimension of the whole leaf; a slice uses the trailing ones.
      num_shards: in how many pieces it is cut.
      over: the mesh axes over which they lie, outermost first.
      compute_dtype: dtype of a gathered value, by name.
      reduce_dtype: dtype of a gradient on the wire, by name.
      by_permutes: sum gradients by permutes, see `scatter_by_permutes`.
      tree: sum gradients in float32 in this fixed order; None leaves the order to the collective.
      barrier: keeps what is gathered and scattered apart from what the model computes with it, so
        that the latter compiles to the same code on any number of devices; None does not.
    """

    zero_dim: int
    size: int
    padded_size: int
    axes: tuple[str | None, ...]
    num_shards: int
    over: tuple[str, ...]
    compute_dtype: str
    reduce_dtype: str
    by_permutes: bool = False
    tree: TreeOrder | None = None
    barrier: BarrierKind | None = None

    def spec(self, ndim: int) -> P:
        """Tensor-parallel spec of a value that may have lost leading dimensions to a layer scan."""
        return P(*self.axes[len(self.axes) - ndim :])

    def gather(self, shard: jax.Array) -> jax.Array:
        """The whole value in `compute_dtype` from this device's shard, without padding."""

        def local(shard: jax.Array) -> jax.Array:
            dim = shard.ndim + self.zero_dim
            whole = lax.all_gather(
                shard.astype(self.compute_dtype), self.over, axis=dim, tiled=True
            )
            if self.size != self.padded_size:
                whole = lax.slice_in_dim(whole, 0, self.size, axis=dim)
            return self.keep_apart(whole)

        spec = self.spec(shard.ndim)
        return over_auto_axes(local, spec, spec)(shard)

    def scatter(self, whole: jax.Array) -> jax.Array:
        """This device's shard of the sum of all whole gradients, in `reduce_dtype`; with `tree` in
        float32."""

        def local(whole: jax.Array) -> jax.Array:
            if self.tree is not None:
                return _scatter_in_tree({"": whole}, {"": self})[""]
            whole = whole.astype(self.reduce_dtype)
            if self.by_permutes:
                return scatter_by_permutes({"": whole}, {"": self})[""]
            dim = whole.ndim + self.zero_dim
            padded = pad_dim(whole, dim, self.padded_size)
            return lax.psum_scatter(padded, self.over, scatter_dimension=dim, tiled=True)

        spec = self.spec(whole.ndim)
        return over_auto_axes(local, spec, spec)(whole)

    def keep_apart(self, value: Any) -> Any:
        """The same, in fusion barriers where that is asked for."""
        if self.barrier is None:
            return value
        return values_in_barriers(self.barrier, jax.tree.leaves(value)[0], value)

    def from_rows(self, rows: jax.Array, shard_shape: Sequence[int]) -> jax.Array:
        """The whole, unpadded value from `rows` [num_shards, elements of a shard]."""
        dim = len(shard_shape) + self.zero_dim
        stacked = jnp.moveaxis(rows.reshape(self.num_shards, *shard_shape), 0, dim)
        shape = (*shard_shape[:dim], self.padded_size, *shard_shape[dim + 1 :])
        return lax.slice_in_dim(stacked.reshape(shape), 0, self.size, axis=dim)

    def split_rows(self, whole: jax.Array) -> jax.Array:
        """[num_shards, elements of a shard]: a whole value cut into the devices' shards."""
        dim = whole.ndim + self.zero_dim
        padded = pad_dim(whole, dim, self.padded_size)
        chunk = self.padded_size // self.num_shards
        shape = (*whole.shape[:dim], self.num_shards, chunk, *whole.shape[dim + 1 :])
        return jnp.moveaxis(padded.reshape(shape), dim, 0).reshape(self.num_shards, -1)

    def piece(self, whole: jax.Array, index: jax.Array) -> jax.Array:
        """The shard number `index`, cut from a whole value."""
        dim = whole.ndim + self.zero_dim
        padded = pad_dim(whole, dim, self.padded_size)
        chunk = self.padded_size // self.num_shards
        return lax.dynamic_slice_in_dim(padded, index * chunk, chunk, dim)

    def shard_shape(self, whole_shape: Sequence[int]) -> tuple[int, ...]:
        dim = len(whole_shape) + self.zero_dim
        chunk = self.padded_size // self.num_shards
        return (*whole_shape[:dim], chunk, *whole_shape[dim + 1 :])


def leaf_collectives(
    leaf: LeafPlacement,
    num_shards: int,
    *,
    compute_dtype: Any,
    reduce_dtype: Any,
    by_permutes: bool = False,
    tree: TreeOrder | None = None,
    barrier: BarrierKind | None = None,
) -> LeafCollectives:
    """The collectives of a parameter that its placement shards."""
    assert leaf.zero_dim is not None
    assert leaf.padded_size is not None
    return LeafCollectives(
        zero_dim=leaf.zero_dim,
        size=leaf.shape[leaf.zero_dim],
        padded_size=leaf.padded_size,
        axes=leaf.axes,
        num_shards=num_shards,
        over=leaf.zero_axes,
        compute_dtype=np.dtype(compute_dtype).name,
        reduce_dtype=np.dtype(reduce_dtype).name,
        by_permutes=by_permutes,
        tree=tree,
        barrier=barrier,
    )


def pad_dim(x: jax.Array, dim: int, size: int) -> jax.Array:
    """`x` with zeros appended to dimension `dim` until it has `size` entries."""
    missing = size - x.shape[dim]
    if missing == 0:
        return x
    widths = [(0, missing if index == dim else 0, 0) for index in range(x.ndim)]
    return lax.pad(x, jnp.zeros((), x.dtype), widths)


# --- reads: what a model gets when it reads a sharded parameter -----------------------------------

Leaves = tuple[LeafCollectives, ...]
Several = Sequence[jax.Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def gather_on_use(leaves: Leaves, shards: Several) -> Several:
    """Whole values of shards in `reduce_dtype`, by one gather; their gradients land scattered."""
    return _in_one(gather_buckets, leaves, shards)


def _gather_forward(leaves: Leaves, shards: Several) -> tuple[Several, None]:
    return _in_one(gather_buckets, leaves, shards), None


def _gather_backward(leaves: Leaves, _: None, cotangents: Several) -> tuple[Several]:
    return (_in_one(scatter_buckets, leaves, cotangents),)


gather_on_use.defvjp(_gather_forward, _gather_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def scatter_early(leaves: Leaves, wholes: Several, shards: Several) -> Several:
    """The whole values; their gradients land scattered, by one reduce-scatter, on the shards."""
    return wholes


def _tap_forward(leaves: Leaves, wholes: Several, shards: Several) -> tuple[Several, None]:
    return wholes, None


def _tap_backward(leaves: Leaves, _: None, cotangents: Several) -> tuple[Several, Several]:
    zeros = [jnp.zeros_like(cotangent) for cotangent in cotangents]
    return zeros, _in_one(scatter_buckets, leaves, cotangents)


scatter_early.defvjp(_tap_forward, _tap_backward)


def _in_one(collective: Callable, leaves: Leaves, arrays: Several) -> Several:
    table = {str(index): leaf for index, leaf in enumerate(leaves)}
    return list(collective(dict(zip(table, arrays, strict=True)), table, sys.maxsize).values())


@dataclasses.dataclass(frozen=True)
class GatherOnUse:
    """ZeRO-3's read of a shard: gathers it; the gradient lands scattered on it."""

    name: str
    leaf: LeafCollectives

    def __call__(self, shard: jax.Array) -> jax.Array:
        (whole,) = gather_on_use((self.leaf,), [shard])
        return mark_read(whole, self.name)


@dataclasses.dataclass(frozen=True)
class ScatterEarly:
    """ZeRO-2's read of `(whole, shard)`: the whole; its gradient lands scattered on the shard.

    The scatter thus runs where the backward pass makes the gradient, and whole gradients of all
    layers never live together.
    """

    name: str
    leaf: LeafCollectives

    def __call__(self, value: tuple[jax.Array, jax.Array]) -> jax.Array:
        # No stop_gradient: `whole` is a constant anyway, and the extra operation would make a scan
        # stack a copy of it for the backward pass.
        whole, shard = value
        (same,) = scatter_early((self.leaf,), [whole], [shard])
        return mark_read(same, self.name)


# --- buckets: many leaves, one collective ---------------------------------------------------------


def make_buckets(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Names in order, cut into runs of at most `limit` elements; a larger one stands alone."""
    buckets: list[list[str]] = []
    filled = 0
    for name, size in sizes.items():
        if not buckets or filled + size > limit:
            buckets.append([])
            filled = 0
        buckets[-1].append(name)
        filled += size
    return buckets


def buckets_of(
    sizes: Mapping[str, int], leaves: Mapping[str, LeafCollectives], limit: int
) -> list[list[str]]:
    """`make_buckets`, for the leaves over each set of mesh axes by themselves."""
    made = []
    for over in dict.fromkeys(leaves[name].over for name in sizes):
        made += make_buckets(
            {n: size for n, size in sizes.items() if leaves[n].over == over}, limit
        )
    return made


def gather_buckets(
    shards: Arrays, leaves: Mapping[str, LeafCollectives], bucket_size: int
) -> Arrays:
    """Whole, unpadded values in `compute_dtype` of all `shards`, one all-gather per bucket.

    Args:
      shards: {name: this device's shard, any float dtype}.
      leaves: {name: its collectives}.
      bucket_size: elements of the gathered values per collective.
    """
    sizes = {name: math.prod(s.shape) * leaves[name].num_shards for name, s in shards.items()}
    result: Arrays = {}
    for names in buckets_of(sizes, leaves, bucket_size):
        if len(names) == 1:
            result[names[0]] = leaves[names[0]].gather(shards[names[0]])
        else:
            result |= _gather_bucket({name: shards[name] for name in names}, leaves)
    return {name: result[name] for name in shards}


def _gather_bucket(shards: Arrays, leaves: Mapping[str, LeafCollectives]) -> Arrays:
    def local(shards: Arrays) -> Arrays:
        parts = [
            shard.reshape(-1).astype(leaves[name].compute_dtype) for name, shard in shards.items()
        ]
        rows = lax.all_gather(jnp.concatenate(parts), leaves[next(iter(shards))].over, axis=0)
        whole, start = {}, 0
        for name, shard in shards.items():
            columns = lax.slice_in_dim(rows, start, start + shard.size, axis=1)
            whole[name] = leaves[name].from_rows(columns, shard.shape)
            start += shard.size
        return leaves[next(iter(shards))].keep_apart(whole)

    specs = {name: leaves[name].spec(shard.ndim) for name, shard in shards.items()}
    return over_auto_axes(local, (specs,), specs)(shards)


def scatter_buckets(
    wholes: Arrays, leaves: Mapping[str, LeafCollectives], bucket_size: int
) -> Arrays:
    """This device's shards of the sums, as `LeafCollectives.scatter` gives them, one collective per
    bucket."""
    sizes = {name: trees.num_elements(whole.shape) for name, whole in wholes.items()}
    result: Arrays = {}
    for names in buckets_of(sizes, leaves, bucket_size):
        if len(names) == 1:
            result[names[0]] = leaves[names[0]].scatter(wholes[names[0]])
        else:
            result |= _scatter_bucket({name: wholes[name] for name in names}, leaves)
    return {name: result[name] for name in wholes}


def _scatter_bucket(wholes: Arrays, leaves: Mapping[str, LeafCollectives]) -> Arrays:
    def local(wholes: Arrays) -> Arrays:
        if leaves[next(iter(wholes))].tree is not None:
            return _scatter_in_tree(wholes, leaves)
        wholes = {name: whole.astype(leaves[name].reduce_dtype) for name, whole in wholes.items()}
        if any(leaves[name].by_permutes for name in wholes):
            return scatter_by_permutes(wholes, leaves)
        rows = [leaves[name].split_rows(whole) for name, whole in wholes.items()]
        over = leaves[next(iter(wholes))].over
        flat = lax.psum_scatter(jnp.concatenate(rows, axis=1), over, scatter_dimension=0)
        shapes = {name: leaves[name].shard_shape(whole.shape) for name, whole in wholes.items()}
        return cut_flat(flat, shapes)

    specs = {name: leaves[name].spec(whole.ndim) for name, whole in wholes.items()}
    return over_auto_axes(local, (specs,), specs)(wholes)


def _scatter_in_tree(wholes: Arrays, leaves: Mapping[str, LeafCollectives]) -> Arrays:
    first = leaves[next(iter(wholes))]
    assert first.tree is not None
    return scatter_in_tree(first.keep_apart(wholes), leaves, first.tree, first.reduce_dtype)


def sum_buckets(
    values: Arrays,
    axes: Mapping[str, tuple[str | None, ...]],
    bucket_size: int,
    over: tuple[str, ...] = PASS_AXES,
) -> Arrays:
    """Sums over mesh axes, one all-reduce per bucket.

    Args:
      values: {name: array}, all of one dtype.
      axes: {name: tensor-parallel axis per dimension}.
      bucket_size: elements per collective.
      over: the mesh axes to sum over.
    """
    sizes = {name: trees.num_elements(value.shape) for name, value in values.items()}
    result: Arrays = {}
    for names in make_buckets(sizes, bucket_size):
        bucket = {name: values[name] for name in names}

        def local(bucket: Arrays) -> Arrays:
            flat = lax.psum(jnp.concatenate([x.reshape(-1) for x in bucket.values()]), over)
            return cut_flat(flat, {name: value.shape for name, value in bucket.items()})

        specs = {name: P(*axes[name]) for name in names}
        result |= over_auto_axes(local, (specs,), specs)(bucket)
    return {name: result[name] for name in values}
