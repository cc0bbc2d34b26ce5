"""All-gather of sharded parameters and reduce-scatter of gradients, one collective per bucket.

All functions are traced inside a `shard_map` region that is manual over the data axes (in a
pipeline also over `stage`).

Every collective runs in a nested `shard_map` over the remaining (automatic) axes. Reason: XLA does
not partition a manual collective over automatic axes. It would gather tensor-parallel shards first,
and send 5.15 instead of 3.33 units at data 4 x model 2. The nesting also avoids an abort of XLA on
CPU for bfloat16 reductions in partially manual regions.
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
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from zerojax.config.late_dataclasses import dataclass
from zerojax.config.tree_types import Tree
from zerojax.operators.marks import mark_read
from zerojax.optim.weight_codes import WeightCodes
from zerojax.optim.wire_codes import WireCodes
from zerojax.placement.device_mesh import PASS_AXES
from zerojax.placement.leaf_placement import FULL_ENOUGH, LeafPlacement
from zerojax.tracing import trees
from zerojax.tracing.reads import asked_eight_bits
from zerojax.transport.sums import (
    BarrierKind,
    Groups,
    TreeOrder,
    cut_columns,
    cut_flat,
    groups_of_nodes,
    is_one_device,
    over_auto_axes,
    scatter_by_permutes,
    scatter_in_tree,
    sum_in_codes,
    values_in_barriers,
)
from zerojax.zoo import fp8

Arrays = dict[str, Any]

DECODED = "decoded weights"
"""Name (as for `jax.ad_checkpoint.checkpoint_name`) of the values that `decode_on_use` returns."""


@dataclass(frozen=True)
class LeafCollectives:
    """The collectives of one parameter: a static, hashable value that a traced program may hold.

    Attributes:
      zero_dim: number of the sharded dimension, counted from the end (negative).
      size, padded_size: true size and stored (padded) size of the sharded dimension.
      axes: tensor-parallel mesh axis (or None) of each dimension of the parameter; for one layer of
        a stack, the last entries apply.
      num_shards: number of shards.
      over: mesh axes over which the shards are distributed, outermost first.
      runs: number of contiguous runs of equal length that make up a shard; between the starts of
        two runs are `num_shards` run lengths. It is 1, or the number of nodes if a device holds one
        run of each node's shard.
      groups: groups of devices that exchange data; None means that all devices of `over` do.
      compute_dtype: name of the dtype of a gathered value.
      reduce_dtype: name of the dtype in which a gradient is sent.
      by_permutes: whether gradients are summed by collective permutes (see `scatter_by_permutes`).
      tree: fixed order in which gradients are summed in float32; None leaves the order to the
        collective.
      barrier: fusion barrier that separates gathered and scattered values from the model's
        computation, so that the latter compiles to the same code on any number of devices; None: no
        barrier.
      eight_bits: whether gathered values are sent as 8-bit floats (see `zerojax.zoo.fp8`).
      wire_codes: quantization of gathered values while they are sent; None: not quantized.
      gradient_codes: quantization of gradients while they are sent; they are summed in float32.
      codes: quantization of the stored values; None: not quantized. With it, sizes count codes.
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
    eight_bits: bool = False
    codes: WeightCodes | None = None
    wire_codes: WireCodes | None = None
    gradient_codes: WireCodes | None = None
    runs: int = 1
    groups: Groups | None = None

    def spec(self, ndim: int) -> P:
        """Returns the tensor-parallel spec of a value with `ndim` dimensions.

        The value may be one layer of a stack; it then lacks the leading dimensions of the
        parameter.
        """
        return P(*self.axes[len(self.axes) - ndim :])

    def gather(self, shard: jax.Array, history: jax.Array | None = None) -> jax.Array:
        """All-gathers this device's shard; returns the whole value in `compute_dtype`, without
        padding.

        Args:
          history: history of the scale of 8-bit values; None if `eight_bits` is False.
        """

        def local(shard: jax.Array, history: jax.Array | None) -> jax.Array:
            dim, sent = shard.ndim + self.zero_dim, self.encode(shard, history)
            if self.runs > 1 or self.wire_codes is not None:
                rows = lax.all_gather(sent, self.over, axis_index_groups=self.groups)
                return self.keep_apart(self.from_sent(rows, shard.shape))
            whole = lax.all_gather(
                sent, self.over, axis=dim, tiled=True, axis_index_groups=self.groups
            )
            if self.size != self.padded_size:
                whole = lax.slice_in_dim(whole, 0, self.size, axis=dim)
            return self.keep_apart(self.decode(whole))

        spec = self.spec(shard.ndim)
        return over_auto_axes(local, (spec, P()), spec)(shard, history)

    def encode(self, shard: jax.Array, history: jax.Array | None) -> jax.Array:
        """Converts a shard to the array that is sent: `compute_dtype`, or uint8 codes.

        With `wire_codes` the result has one dimension.
        """
        if self.codes is not None:
            return shard
        shard = shard.astype(self.compute_dtype)
        if self.wire_codes is not None:
            return self.wire_codes.encode(shard.reshape(-1))
        if not self.eight_bits:
            return shard
        assert history is not None
        return fp8.in_bits(shard, history)

    def decode(self, sent: jax.Array) -> jax.Array:
        """Converts received values to `compute_dtype`; 8-bit values stay divided by their scale."""
        if self.codes is not None:
            return self.codes.decode(sent, self.compute_dtype)
        return fp8.from_bits(sent, self.compute_dtype) if self.eight_bits else sent

    def from_sent(self, rows: jax.Array, shard_shape: Sequence[int]) -> jax.Array:
        """Decodes a parameter received from all devices: unsharded, unpadded, in `compute_dtype`.

        Args:
          rows: [num_shards, ...], the result of `encode` of each device.
          shard_shape: shape of one shard.
        """
        if self.wire_codes is not None:
            rows = self.wire_codes.decode(rows, math.prod(shard_shape)).astype(self.compute_dtype)
        return self.decode(self.from_rows(rows, shard_shape))

    def scatter(self, whole: jax.Array) -> jax.Array:
        """Reduce-scatters unsharded gradients: returns this device's shard of their sum.

        The result has `reduce_dtype`, or float32 if `tree` is set.
        """

        def local(whole: jax.Array) -> jax.Array:
            if self.tree is not None:
                return _scatter_in_tree({"": whole}, {"": self})[""]
            if self.gradient_codes is not None:
                return _scatter_in_codes({"": whole}, {"": self})[""]
            whole = whole.astype(self.reduce_dtype)
            if self.by_permutes:
                return scatter_by_permutes({"": whole}, {"": self})[""]
            if self.runs > 1:
                flat = self.scatter_rows(self.split_rows(whole))
                return flat.reshape(self.shard_shape(whole.shape))
            dim = whole.ndim + self.zero_dim
            padded = pad_dim(whole, dim, self.padded_size)
            return lax.psum_scatter(
                padded,
                self.over,
                scatter_dimension=dim,
                tiled=True,
                axis_index_groups=self.groups,
            )

        spec = self.spec(whole.ndim)
        return over_auto_axes(local, spec, spec)(whole)

    def scatter_rows(self, rows: jax.Array) -> jax.Array:
        """Sums `rows` [num_shards, elements] over the devices; returns this device's row of
        sums.
        """
        return lax.psum_scatter(rows, self.over, scatter_dimension=0, axis_index_groups=self.groups)

    def keep_apart(self, value: Tree) -> Any:
        """Returns the value unchanged; adds fusion barriers around it if `barrier` is set."""
        if self.barrier is None:
            return value
        return values_in_barriers(self.barrier, jax.tree.leaves(value)[0], value)

    def from_rows(self, rows: jax.Array, shard_shape: Sequence[int]) -> jax.Array:
        """Joins `rows`, the shards of all devices, to the unsharded, unpadded value.

        `rows` is [num_shards, elements of a shard].
        """
        dim = len(shard_shape) + self.zero_dim
        before, after = shard_shape[:dim], shard_shape[dim + 1 :]
        run = shard_shape[dim] // self.runs
        pieces = rows.reshape(self.num_shards, *before, self.runs, run, *after)
        stacked = jnp.moveaxis(pieces, 0, dim + 1)
        shape = (*before, self.padded_size, *after)
        return lax.slice_in_dim(stacked.reshape(shape), 0, self.size, axis=dim)

    def split_rows(self, whole: jax.Array) -> jax.Array:
        """Cuts an unsharded value into the shards of all devices: [num_shards, elements per
        shard].
        """
        dim = whole.ndim + self.zero_dim
        padded = pad_dim(whole, dim, self.padded_size)
        run = self.padded_size // self.num_shards // self.runs
        before, after = whole.shape[:dim], whole.shape[dim + 1 :]
        pieces = padded.reshape(*before, self.runs, self.num_shards, run, *after)
        return jnp.moveaxis(pieces, dim + 1, 0).reshape(self.num_shards, -1)

    def piece(self, whole: jax.Array, index: jax.Array) -> jax.Array:
        """Returns part number `index` (one device's shard) of an unsharded value; only for `runs` =
        1.
        """
        assert self.runs == 1
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
    compute_dtype: DTypeLike,
    reduce_dtype: DTypeLike,
    by_permutes: bool = False,
    tree: TreeOrder | None = None,
    barrier: BarrierKind | None = None,
    eight_bits: bool = False,
    in_codes: bool = False,
    wire_codes: WireCodes | None = None,
    gradient_codes: WireCodes | None = None,
) -> LeafCollectives:
    """Builds the collectives of a sharded parameter from its placement, among all devices.

    Args:
      leaf: placement of the parameter.
      num_shards: number of its shards.
      compute_dtype: dtype of gathered values.
      reduce_dtype: dtype in which gradients are sent.
      by_permutes, tree, barrier, eight_bits: see `LeafCollectives`.
      in_codes: True: decode the gathered codes of a quantized parameter; False: return the codes.
      wire_codes: quantization of sent values; None sends them in `compute_dtype`.
      gradient_codes: quantization of sent gradients; None sends them in `reduce_dtype`.
    """
    assert leaf.zero_dim is not None
    assert leaf.padded_size is not None
    return LeafCollectives(
        zero_dim=leaf.zero_dim,
        size=leaf.kept_shape[leaf.zero_dim],
        padded_size=leaf.stored_shape[leaf.zero_dim],
        axes=leaf.axes,
        num_shards=num_shards,
        over=leaf.zero_axes,
        compute_dtype=np.dtype(compute_dtype).name,
        reduce_dtype=np.dtype(reduce_dtype).name,
        by_permutes=by_permutes,
        tree=tree,
        barrier=barrier,
        eight_bits=eight_bits,
        codes=leaf.codes if in_codes else None,
        wire_codes=wire_codes,
        gradient_codes=gradient_codes,
    )


def inside_nodes(leaf: LeafCollectives, members: int) -> LeafCollectives:
    """Returns the collectives inside a node, whose devices together hold a copy of the parameter.

    Each device holds one part for every node: the shard that the device at its position in that
    node has. The parts are in the order of the nodes.
    """
    inside, _ = groups_of_nodes(leaf.num_shards, members)
    return dataclasses.replace(
        leaf,
        num_shards=members,
        runs=leaf.num_shards // members,
        groups=inside,
        wire_codes=None,
        gradient_codes=None,
    )


def between_nodes(leaf: LeafCollectives, members: int) -> LeafCollectives:
    """Returns the collectives among devices that have the same position in different nodes.

    Each device holds one part of its node's copy of a parameter (`wire.secondary`); these devices
    exchange that part.
    """
    _, between = groups_of_nodes(leaf.num_shards, members)
    held = leaf.padded_size // members
    return dataclasses.replace(
        leaf,
        size=held,
        padded_size=held,
        num_shards=leaf.num_shards // members,
        groups=between,
        eight_bits=False,
    )


def pad_dim(x: jax.Array, dim: int, size: int) -> jax.Array:
    """Appends zeros to dimension `dim` of `x` until it has `size` entries."""
    missing = size - x.shape[dim]
    if missing == 0:
        return x
    widths = [(0, missing if index == dim else 0, 0) for index in range(x.ndim)]
    return lax.pad(x, jnp.zeros((), x.dtype), widths)


# --- reads: the value that a model gets when it reads a sharded parameter -------------------------

Leaves = tuple[LeafCollectives, ...]
Several = Sequence[jax.Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def gather_on_use(leaves: Leaves, shards: Several) -> Several:
    """Gathers the whole values of `shards` in one collective; gradients are reduce-scattered.

    The dtype of the shards is the wider one of the compute dtype and the dtype that
    `LeafCollectives.scatter` returns.
    """
    return _in_one(gather_buckets, leaves, shards)


def _gather_forward(leaves: Leaves, shards: Several) -> tuple[Several, None]:
    if leaves[0].wire_codes is not None:
        # As a call: see `_gather_bits_forward`.
        return gather_on_use(leaves, shards), None
    return _in_one(gather_buckets, leaves, shards), None


def _gather_backward(leaves: Leaves, _: None, cotangents: Several) -> tuple[Several]:
    return (_scattered(leaves, cotangents),)


def _scattered(leaves: Leaves, cotangents: Several) -> Several:
    """Reduce-scatters the cotangents of gathered values; casts them to the dtype of their
    shards.
    """
    shards = _in_one(scatter_buckets, leaves, cotangents)
    pairs = zip(leaves, shards, strict=True)
    return [x.astype(jnp.promote_types(x.dtype, leaf.compute_dtype)) for leaf, x in pairs]


gather_on_use.defvjp(_gather_forward, _gather_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def gather_eight_bits(leaves: Leaves, shards: Several, histories: Several) -> Several:
    """Gathers the whole values of `shards` like `gather_on_use`, but rounded to 8-bit floats."""
    return _in_one(gather_buckets, leaves, shards, histories)


def _gather_bits_forward(
    leaves: Leaves, shards: Several, histories: Several
) -> tuple[Several, Several]:
    # As a call, not inlined: a checkpoint would save values before and after the gather, float32 of
    # a shard or 8 bits of the whole (`rewrite.is_made_again` recognizes the call).
    return gather_eight_bits(leaves, shards, histories), histories


def _gather_bits_backward(
    leaves: Leaves, histories: Several, cotangents: Several
) -> tuple[Several, Several]:
    # The products that use this scale compute the history's new value.
    nothing = [jnp.zeros_like(history) for history in histories]
    return _scattered(leaves, cotangents), nothing


gather_eight_bits.defvjp(_gather_bits_forward, _gather_bits_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def scatter_early(leaves: Leaves, wholes: Several, shards: Several) -> Several:
    """Returns `wholes`; in the backward pass one reduce-scatter computes the gradients of
    `shards`.
    """
    return wholes


def _tap_forward(leaves: Leaves, wholes: Several, shards: Several) -> tuple[Several, None]:
    return wholes, None


def _tap_backward(leaves: Leaves, _: None, cotangents: Several) -> tuple[Several, Several]:
    zeros = [jnp.zeros_like(cotangent) for cotangent in cotangents]
    return zeros, _in_one(scatter_buckets, leaves, cotangents)


scatter_early.defvjp(_tap_forward, _tap_backward)


def _in_one(collective: Callable, leaves: Leaves, *arrays: Several) -> Several:
    # These names contain no layer number, which would end a bucket.
    table = {f"{index}th": leaf for index, leaf in enumerate(leaves)}
    values, *more = (dict(zip(table, several, strict=True)) for several in arrays)
    return list(collective(values, table, sys.maxsize, *more).values())


@dataclass(frozen=True)
class GatherOnUse:
    """Reads a ZeRO-3 shard: all-gathers the value, and reduce-scatters its gradient.

    With 8-bit values it returns the rounded values and records the largest magnitude of the shard
    before rounding. The maximum over all devices is taken later, when the history is updated.
    """

    name: str
    leaf: LeafCollectives

    def __call__(self, shard: jax.Array) -> jax.Array:
        if not self.leaf.eight_bits:
            (whole,) = gather_on_use((self.leaf,), [shard])
            return mark_read(whole, self.name)
        asked = asked_eight_bits()
        assert asked is not None, f"{self.name} is read in full, which its placement excludes"
        (whole,) = gather_eight_bits((self.leaf,), [shard], [asked.history])
        exact = lax.stop_gradient(shard).astype(self.leaf.compute_dtype)
        asked.largest = fp8.largest_magnitude(exact)
        return mark_read(whole, self.name)


@dataclass(frozen=True)
class ScatterEarly:
    """Reads a ZeRO-2 parameter `(whole, shard)`: returns `whole`; its gradient goes to `shard`.

    The reduce-scatter runs at the point of the backward pass that computes the gradient. So the
    unsharded gradients of all layers are never in memory together.
    """

    name: str
    leaf: LeafCollectives

    def __call__(self, value: tuple[jax.Array, jax.Array]) -> jax.Array:
        # `whole` is a constant of the differentiation, so it needs no stop_gradient; that
        # operation would make a scan stack a copy of it for the backward pass.
        whole, shard = value
        (same,) = scatter_early((self.leaf,), [whole], [shard])
        return mark_read(same, self.name)


@dataclass(frozen=True)
class DecodeOnUse:
    """Reads a frozen, quantized parameter that is not sharded: decodes its codes.

    Attributes:
      name: name of the parameter.
      codes: quantization of the parameter.
      axes: tensor-parallel mesh axis (or None) of each dimension of the parameter.
      compute_dtype: name of the dtype of the decoded value.
    """

    name: str
    codes: WeightCodes
    axes: tuple[str | None, ...]
    compute_dtype: str

    def __call__(self, stored: jax.Array) -> jax.Array:
        return mark_read(decode_on_use(self, stored), self.name)

    def decode(self, stored: jax.Array) -> jax.Array:
        spec = P(*self.axes[len(self.axes) - stored.ndim :])
        decode = functools.partial(self.codes.decode, dtype=self.compute_dtype)
        return over_auto_axes(decode, (spec,), spec)(stored)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def decode_on_use(read: DecodeOnUse, stored: jax.Array) -> jax.Array:
    """Decodes a stored, quantized parameter; its codes have no gradient.

    The traced program contains it as a call, so that `jax.checkpoint` recognizes it
    (`rewrite.is_made_again`) and never saves the decoded value for the backward pass.
    """
    return checkpoint_name(read.decode(stored), DECODED)


def _decode_forward(read: DecodeOnUse, stored: jax.Array) -> tuple[jax.Array, jax.Array]:
    return decode_on_use(read, stored), stored


def _decode_backward(_: DecodeOnUse, stored: jax.Array, __: jax.Array) -> tuple[np.ndarray]:
    return (np.zeros(stored.shape, jax.dtypes.float0),)


decode_on_use.defvjp(_decode_forward, _decode_backward)


# --- buckets: many leaves, one collective ---------------------------------------------------------


def make_buckets(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Divides names, in order, into buckets of at most `limit` elements.

    A parameter with more elements has a bucket of its own. A bucket with at least `FULL_ENOUGH`
    elements also ends where the next layer of a Python list begins.
    """
    buckets: list[list[str]] = []
    filled, layer = 0, None
    for name, size in sizes.items():
        begins = trees.layer_of(name) != layer and filled >= FULL_ENOUGH
        if not buckets or begins or filled + size > limit:
            buckets.append([])
            filled = 0
        buckets[-1].append(name)
        filled += size
        layer = trees.layer_of(name)
    return buckets


def buckets_of(
    sizes: Mapping[str, int], leaves: Mapping[str, LeafCollectives], limit: int
) -> list[list[str]]:
    """Divides the names in `sizes` into buckets that can each be sent in one collective.

    A bucket has at most `limit` elements (see `make_buckets`). All its parameters have the same
    mesh axes, groups of devices, quantization and dtypes.
    """

    def kind(name: str) -> tuple[Any, ...]:
        leaf = leaves[name]
        wire = leaf.gradient_codes, leaf.reduce_dtype, leaf.groups
        values = leaf.eight_bits, leaf.codes is None, leaf.wire_codes, leaf.compute_dtype
        return leaf.over, *values, *wire

    made = []
    for wanted in dict.fromkeys(map(kind, sizes)):
        made += make_buckets({n: size for n, size in sizes.items() if kind(n) == wanted}, limit)
    return made


def gather_buckets(
    shards: Arrays,
    leaves: Mapping[str, LeafCollectives],
    bucket_size: int,
    histories: Arrays | None = None,
) -> Arrays:
    """All-gathers `shards`, one collective per bucket; returns unpadded values in `compute_dtype`.

    Args:
      shards: {name: this device's shard, any float dtype}.
      leaves: {name: collectives of the parameter}.
      bucket_size: largest number of gathered elements per collective.
      histories: {name: history of the 8-bit scale} if all values are sent as 8-bit floats.
    """
    scaled: Arrays = histories or dict.fromkeys(shards)
    sizes = {name: math.prod(s.shape) * leaves[name].num_shards for name, s in shards.items()}
    result: Arrays = {}
    for names in buckets_of(sizes, leaves, bucket_size):
        if len(names) == 1:
            result[names[0]] = leaves[names[0]].gather(shards[names[0]], scaled[names[0]])
        else:
            result |= _gather_bucket({n: shards[n] for n in names}, leaves, scaled)
    return {name: result[name] for name in shards}


def _gather_bucket(shards: Arrays, leaves: Mapping[str, LeafCollectives], scaled: Arrays) -> Arrays:
    def local(shards: Arrays, scaled: Arrays) -> Arrays:
        parts = {
            name: leaves[name].encode(shard, scaled[name]).reshape(-1)
            for name, shard in shards.items()
        }
        first = leaves[next(iter(shards))]
        if is_one_device(first.over):
            wholes = {n: leaves[n].from_sent(x[None], shards[n].shape) for n, x in parts.items()}
            return first.keep_apart(wholes)
        flat = jnp.concatenate([*parts.values()])
        rows = lax.all_gather(flat, first.over, axis_index_groups=first.groups)
        pieces = cut_columns(rows, [part.size for part in parts.values()])
        whole = {
            name: leaves[name].from_sent(piece, shards[name].shape)
            for name, piece in zip(shards, pieces, strict=True)
        }
        return first.keep_apart(whole)

    specs = {name: leaves[name].spec(shard.ndim) for name, shard in shards.items()}
    scaled = {name: scaled[name] for name in shards}
    return over_auto_axes(local, (specs, P()), specs)(shards, scaled)


def scatter_buckets(
    wholes: Arrays, leaves: Mapping[str, LeafCollectives], bucket_size: int
) -> Arrays:
    """Reduce-scatters unsharded gradients, one collective per bucket; returns this device's shards.

    The result has the dtype that `LeafCollectives.scatter` returns.
    """
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
        if leaves[next(iter(wholes))].gradient_codes is not None:
            return _scatter_in_codes(wholes, leaves)
        wholes = {name: whole.astype(leaves[name].reduce_dtype) for name, whole in wholes.items()}
        if any(leaves[name].by_permutes for name in wholes):
            return scatter_by_permutes(wholes, leaves)
        rows = [leaves[name].split_rows(whole) for name, whole in wholes.items()]
        flat = leaves[next(iter(wholes))].scatter_rows(jnp.concatenate(rows, axis=1))
        shapes = {name: leaves[name].shard_shape(whole.shape) for name, whole in wholes.items()}
        return cut_flat(flat, shapes)

    specs = {name: leaves[name].spec(whole.ndim) for name, whole in wholes.items()}
    return over_auto_axes(local, (specs,), specs)(wholes)


def _scatter_in_tree(wholes: Arrays, leaves: Mapping[str, LeafCollectives]) -> Arrays:
    first = leaves[next(iter(wholes))]
    assert first.tree is not None
    return scatter_in_tree(first.keep_apart(wholes), leaves, first.tree, first.reduce_dtype)


def _scatter_in_codes(wholes: Arrays, leaves: Mapping[str, LeafCollectives]) -> Arrays:
    """Reduce-scatters quantized gradients: returns shards in `reduce_dtype`, summed in float32.

    Each device sends one row of codes to each shard. No quantization block holds values of two
    parameters, because their magnitudes may differ.
    """
    first = leaves[next(iter(wholes))]
    codes = first.gradient_codes
    assert codes is not None
    rows = []
    for name, whole in wholes.items():
        row = leaves[name].split_rows(whole)
        rows.append(pad_dim(row, 1, codes.in_blocks(row.shape[1])))
    flat = sum_in_codes(jnp.concatenate(rows, axis=1), codes, first.over, first.groups)
    shards, start = {}, 0
    for (name, whole), row in zip(wholes.items(), rows, strict=True):
        shape = leaves[name].shard_shape(whole.shape)
        piece = lax.slice_in_dim(flat, start, start + math.prod(shape))
        shards[name] = piece.astype(first.reduce_dtype).reshape(shape)
        start += row.shape[1]
    return shards


def sum_buckets(
    values: Arrays,
    axes: Mapping[str, tuple[str | None, ...]],
    bucket_size: int,
    over: tuple[str, ...] = PASS_AXES,
) -> Arrays:
    """Sums values over mesh axes, one all-reduce per bucket.

    Args:
      values: {name: array}; all arrays have one dtype.
      axes: {name: tensor-parallel mesh axis (or None) of each dimension}.
      bucket_size: largest number of elements per collective.
      over: mesh axes over which the values are summed.
    """
    if is_one_device(over):
        return dict(values)
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
