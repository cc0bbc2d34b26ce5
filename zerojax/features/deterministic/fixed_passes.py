"""Runs a reproducible pass: the batch is divided into the same pieces on any number of devices.

The batch has `virtual_shards` pieces with equal numbers of rows. Each device computes its own
pieces, which have consecutive numbers, one after the other. So each forward and backward pass has
the same shapes on every mesh, and fusion barriers around it make it compile to the same code. Sums
follow the tree of `transport.sums`. At ZeRO stages 0 and 1 a device sums the gradients of its
pieces before a single reduction. From stage 2 on, the gradients of each piece are reduced
separately, also those of parameters that are gathered once per step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from zerojax.config.tree_types import Tree
from zerojax.models.losses import no_sums
from zerojax.passes import model_state
from zerojax.passes.gradients import build_differentiation, build_evaluating
from zerojax.passes.microbatch import (
    Arrays,
    PassConfig,
    map_forward,
    map_gradients,
    split_batch,
)
from zerojax.passes.parameters import leaf_collectives, prepare_parameters, wire_dtype
from zerojax.placement.device_mesh import DATA, DATA_AXES
from zerojax.tracing.protocol import Loss
from zerojax.transport import collectives
from zerojax.transport.sums import (
    TreeOrder,
    barrier_kind,
    max_replicated,
    over_auto_axes,
    run_in_barriers,
    sum_in_tree,
    sum_replicated,
    tree_sum,
    tree_total,
)


def build_gradients(config: PassConfig) -> Callable[..., tuple[Arrays, Arrays, Arrays]]:
    """Builds a gradient function that gives equal bits on every mesh, like
    `passes.build_gradients`.

    It divides the batch into virtual shards, which are equal pieces on any number of devices.
    """
    count, order, zeros = config.num_microbatches, config.tree, no_sums(config.metrics)
    assert order is not None

    def local(
        params: Arrays,
        frozen: Arrays,
        extras: Arrays,
        key_data: jax.Array,
        batch: Arrays,
        loss_factor: jax.Array | None,
    ):
        inputs, constants = prepare_parameters(config, params, frozen)
        differentiate = build_differentiation(config, constants, frozen, loss_factor)
        pieces = split_batch(batch, count)
        overwritten = config.model.overwritten

        def pass_of(inputs: Arrays, extras: Arrays, key: jax.Array, piece: Arrays) -> Any:
            (_, (sums, after)), grads = differentiate(inputs, extras, key, piece)
            changes = model_state.changes(extras, after, overwritten)
            rest = {name: x for name, x in after.items() if name not in changes}
            return _round(config, grads), changes, sums, rest

        def value_of(number: jax.Array, carried: Tree) -> tuple[Any, Any]:
            given = inputs, extras, virtual_key(key_data, number, count), _piece(pieces, number)
            grads, changes, sums, rest = run_in_barriers(
                barrier_kind(config.mesh), key_data, pass_of, *given
            )
            if order is TreeOrder.HIGHEST_FIRST:
                grads, changes = _reduce(config, grads), _sum_changes(config, changes)
            noted, earlier = carried
            row = jnp.stack(jax.tree.leaves(sums))
            noted = lax.dynamic_update_index_in_dim(noted, row, number, 0)
            # Each piece begins with the step's extras, so the increments of counts are summed.
            more = model_state.added(extras, rest, config.counted)
            rest |= {name: earlier[name] + x for name, x in more.items()}
            rest = model_state.after_microbatch(earlier, rest, overwritten)
            return (grads, changes), (noted, rest)

        shapes = params if order is TreeOrder.HIGHEST_FIRST else inputs
        averaged = {n: x for n, x in extras.items() if model_state.is_averaged(n, x, overwritten)}
        start = {n: x for n, x in extras.items() if n not in averaged}
        start = model_state.before_microbatches(start, overwritten)
        (grads, changes), (noted, rest) = tree_total(
            value_of,
            count,
            order,
            like=(_floats({name: shapes[name] for name in inputs}), _floats(averaged)),
            carried=(jnp.zeros((count, len(jax.tree.leaves(zeros))), jnp.float32), start),
        )
        if order is TreeOrder.LOWEST_FIRST:
            grads, changes = _reduce(config, grads), _sum_changes(config, changes)
        sums = jax.tree.unflatten(jax.tree.structure(zeros), sum_of_pieces(noted))
        assert config.fixed_pieces is not None
        agreed = model_state.add_changes(averaged, changes, config.fixed_pieces, config.counted)
        more = model_state.added(extras, rest, config.counted)
        more = sum_replicated(more) if more else {}
        agreed |= {name: extras[name] + x for name, x in more.items()}
        largest = model_state.pick(rest, overwritten)
        largest = max_replicated(largest) if largest else {}
        return sums, grads, {**rest, **agreed, **largest}

    return map_gradients(config, local)


def build_forward(config: PassConfig, function: Loss) -> Callable[..., Arrays]:
    """Builds a forward function that gives equal bits on every mesh, like `passes.build_forward`.

    It divides the batch into virtual shards, which are equal pieces on any number of devices.
    """
    config = dataclasses.replace(config, loss=function)
    count = config.num_microbatches

    def local(params: Arrays, frozen: Arrays, extras: Arrays, key_data: jax.Array, batch: Arrays):
        evaluate, metrics = build_evaluating(config, params, frozen, extras, batch)
        _check_rows(batch, count)
        pieces = split_batch(batch, count)

        def one(number: jax.Array, noted: jax.Array) -> jax.Array:
            given = extras, virtual_key(key_data, number, count), _piece(pieces, number)
            sums = run_in_barriers(barrier_kind(config.mesh), key_data, evaluate, *given)
            row = jnp.stack(jax.tree.leaves(sums))
            return lax.dynamic_update_index_in_dim(noted, row, number, 0)

        tree = jax.tree.structure(no_sums(metrics))
        noted = lax.fori_loop(0, count, one, jnp.zeros((count, tree.num_leaves), jnp.float32))
        return jax.tree.unflatten(tree, sum_of_pieces(noted))

    return map_forward(config, local)


def _check_rows(batch: Arrays, count: int) -> None:
    rows = jax.tree.leaves(batch)[0].shape[0]
    if rows % count:
        raise ValueError(
            f"the evaluation batch has {rows} rows on each device, but with deterministic='mesh' "
            f"each device divides its rows into {count} equal parts; use a multiple of {count} "
            "rows per device"
        )


def _piece(pieces: Arrays, number: jax.Array) -> Arrays:
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, number, keepdims=False), pieces)


def virtual_key(key_data: jax.Array, number: jax.Array, count: int) -> jax.Array:
    """Folds the number of a virtual shard into the step's key; the result does not depend on the
    mesh.

    Args:
      key_data: key data of the step.
      number: index of the virtual shard (piece of the batch) among those of this device.
      count: number of virtual shards of this device.
    """
    index = lax.axis_index(DATA) * count + number
    return jax.random.fold_in(jax.random.wrap_key_data(key_data), index)


def sum_of_pieces(noted: jax.Array) -> jax.Array:
    """Sums recorded numbers over all virtual shards of all devices.

    Args:
      noted: numbers of this device's virtual shards, float32 [virtual shards of this device,
        numbers].
    """

    def gather(mine: jax.Array) -> jax.Array:
        return lax.all_gather(mine, DATA_AXES, axis=0, tiled=True)

    spec = jax.sharding.PartitionSpec()
    return tree_sum(over_auto_axes(gather, spec, spec)(noted), TreeOrder.LOWEST_FIRST)


def _floats(arrays: Arrays) -> Arrays:
    return {name: _float32(x) for name, x in arrays.items()}


def _float32(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, jnp.float32)


def _round(config: PassConfig, grads: Arrays) -> Arrays:
    """Rounds the gradients of each virtual shard to the reduction dtype; returns float32.

    Gradients that were already scattered are sums and are not rounded.
    """
    dtype, leaves = config.precision.reduce_dtype, config.placement.leaves
    return {
        name: grad if leaves[name].access.scatters_early else grad.astype(dtype).astype(jnp.float32)
        for name, grad in grads.items()
    }


def _reduce(config: PassConfig, grads: Arrays) -> Arrays:
    """Sums gradients over devices, unless the backward pass has scattered them; float32, as
    stored.
    """
    leaves = config.placement.leaves
    once = {n: g for n, g in grads.items() if leaves[n].access.scatters_late}
    table = leaf_collectives(config, once)
    reduced = collectives.scatter_buckets(once, table, config.reduce_bucket_size)
    whole = {n: g for n, g in grads.items() if leaves[n].access.is_whole}
    reduced |= _sum_whole(config, whole, wire_dtype(config))
    return {name: reduced.get(name, grad) for name, grad in grads.items()}


def _sum_changes(config: PassConfig, changes: Arrays) -> Arrays:
    return _sum_whole(config, changes, jnp.float32)


def _sum_whole(config: PassConfig, values: Arrays, wire: DTypeLike) -> Arrays:
    """Sums unsharded gradients over the devices in float32, with one exchange per bucket."""
    assert config.tree is not None
    order = config.tree
    sizes = {name: value.size for name, value in values.items()}
    spec = jax.sharding.PartitionSpec()
    result: Arrays = {}
    for names in collectives.make_buckets(sizes, config.reduce_bucket_size):
        bucket = {name: values[name] for name in names}
        specs = dict.fromkeys(bucket, spec)

        def local(bucket: Arrays) -> Arrays:
            return sum_in_tree(bucket, order, wire)

        result |= over_auto_axes(local, (specs,), specs)(bucket)
    return result
