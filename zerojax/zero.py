"""What is gathered when, and what is scattered when, in the pass of every ZeRO stage.

One `shard_map`, manual over the data axes; tensor-parallel axes stay with the compiler. Knows a
model only as something to run and parameters only by their placement; never sees the optimizer,
which runs outside on global arrays.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from zerojax import collectives, model_state, replicated
from zerojax.activations import activation_rules
from zerojax.mesh import DATA, DATA_AXES, MODEL, REPLICA, communicates_through_gloo
from zerojax.model import Loss, Model, trace_model
from zerojax.placement import Access, LeafPlacement, Placement
from zerojax.precision import Precision
from zerojax.rewriting import Rewriting

Arrays = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassConfig:
    """What a pass over a batch depends on, besides its arrays.

    Attributes:
      model, loss: what to run.
      mesh: a `Mesh`, or an `AbstractMesh` when only a program is wanted.
      placement, precision: where parameters lie and in which dtypes they are read and reduced.
      num_microbatches: pieces of each device's rows; their gradients are accumulated.
      reduce_bucket_size, allgather_bucket_size: elements per collective.
      sequence_sharding: split the residual stream over `model` along the sequence.
      regather: at stage 3, gather parameters again in the backward pass instead of keeping them.
    """

    model: Model
    loss: Loss
    mesh: Any
    placement: Placement
    precision: Precision
    num_microbatches: int
    reduce_bucket_size: int
    allgather_bucket_size: int
    sequence_sharding: bool
    regather: bool


def build_gradients(config: PassConfig) -> Callable[..., tuple[Arrays, Arrays, Arrays]]:
    """A function of `(params, frozen, extras, key_data, batch, loss_factor)`, to be traced inside a
    jitted step.

    Its arguments: `params` and `frozen` as stored (shards of global arrays); `key_data` uint32, the
      key of the step; `batch` {key: [global batch, ...]}; `loss_factor` float32 [], what the loss
      is multiplied by before it is differentiated, or None.

    Returns:
      A function giving `({"loss": sum, "weight": sum}, grads, extras)`: sums over the global batch,
      float32; grads {name: float32, stored shape and spec}, summed, not yet divided by the weight
      nor by the factor.
    """
    table = config.placement.leaves
    specs = {name: leaf.data_spec for name, leaf in table.items()}

    def local(
        params: Arrays,
        frozen: Arrays,
        extras: Arrays,
        key_data: Any,
        batch: Arrays,
        loss_factor: jax.Array | None,
    ):
        key = _shard_key(key_data)
        inputs, constants = _prepare(config, params, frozen)
        on_read = _reads(config, frozen)

        def loss_of(inputs: Arrays, extras: Arrays, key: Any, batch: Arrays):
            values = _values_to_read(config, inputs, constants, frozen)
            result, after = _run(config, values, extras, key, batch, on_read, train=True)
            return result[0], (result[1], after)

        loss_of = _rewriting(config, frozen)(loss_of) if on_read else loss_of

        def differentiated(inputs: Arrays, extras: Arrays, key: Any, batch: Arrays):
            loss, (weight, after) = loss_of(inputs, extras, key, batch)
            scaled = loss if loss_factor is None else loss * loss_factor
            return scaled, ({"loss": loss, "weight": weight}, after)

        differentiate = model_state.value_and_grad(differentiated, config.model.overwritten)
        sums, grads, after = _accumulate(config, differentiate, inputs, extras, key, batch)
        grads = _reduce(config, grads)
        agreed = model_state.agree(extras, after, config.model.overwritten)
        return replicated.sum_replicated(sums), grads, agreed

    def gradients(
        params: Arrays,
        frozen: Arrays,
        extras: Arrays,
        key_data: Any,
        batch: Arrays,
        loss_factor: jax.Array | None = None,
    ):
        params_specs = {name: specs[name] for name in params}
        frozen_specs = {name: specs[name] for name in frozen}
        mapped = jax.shard_map(
            local,
            mesh=config.mesh,
            in_specs=(params_specs, frozen_specs, P(), P(), P(DATA_AXES), P()),
            out_specs=(P(), params_specs, P()),
            axis_names=set(DATA_AXES),
            check_vma=False,
        )
        return mapped(params, frozen, extras, key_data, batch, loss_factor)

    return gradients


def build_forward(config: PassConfig, function: Loss) -> Callable[..., Arrays]:
    """`(params, frozen, extras, key_data, batch) -> {"loss": sum, "weight": sum}`, to be traced.

    Runs `function(model, batch)` in evaluation mode; nothing is differentiated and extras do not
    change.
    """
    table = config.placement.leaves
    config = dataclasses.replace(config, loss=function)

    def local(params: Arrays, frozen: Arrays, extras: Arrays, key_data: Any, batch: Arrays):
        evaluation = _for_evaluation(config, {**params, **frozen}, extras, batch)
        inputs, constants = _prepare(evaluation, params, frozen)
        values = _values_to_read(evaluation, inputs, constants, frozen)
        key = _shard_key(key_data)
        on_read = _reads(evaluation, frozen)

        def loss_of(values: Arrays, extras: Arrays, key: Any, batch: Arrays):
            return _run(evaluation, values, extras, key, batch, on_read, train=False)[0]

        loss_of = _rewriting(evaluation, frozen)(loss_of) if on_read else loss_of
        loss, weight = loss_of(values, extras, key, batch)
        return replicated.sum_replicated({"loss": loss, "weight": weight})

    def forward(params: Arrays, frozen: Arrays, extras: Arrays, key_data: Any, batch: Arrays):
        specs = lambda arrays: {name: table[name].data_spec for name in arrays}  # noqa: E731
        mapped = jax.shard_map(
            local,
            mesh=config.mesh,
            in_specs=(specs(params), specs(frozen), P(), P(), P(DATA_AXES)),
            out_specs=P(),
            axis_names=set(DATA_AXES),
            check_vma=False,
        )
        return mapped(params, frozen, extras, key_data, batch)

    return forward


def _for_evaluation(
    config: PassConfig, stored: Arrays, extras: Arrays, batch: Arrays
) -> PassConfig:
    """What evaluation does otherwise: nothing is scattered, and the function may read otherwise."""
    abstract = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)  # noqa: E731
    leaves = config.placement.leaves
    params = {
        name: jax.ShapeDtypeStruct(
            leaves[name].shape, _cast(x, config.precision.compute_dtype).dtype
        )
        for name, x in stored.items()
    }
    extras, batch = jax.tree.map(abstract, (extras, batch))
    trace = trace_model(config.model, params, extras, batch, config.loss, train=False)

    def place(leaf: LeafPlacement) -> LeafPlacement:
        lazily = leaf.access is Access.GATHER_ON_USE and leaf.name not in trace.barriers
        if lazily or leaf.access is Access.WHOLE:
            return leaf
        return dataclasses.replace(leaf, access=Access.GATHER_ONCE)

    placement = dataclasses.replace(
        config.placement, leaves={name: place(leaf) for name, leaf in leaves.items()}
    )
    return dataclasses.replace(config, placement=placement, regather=False)


def as_sum_and_weight(result: Any) -> tuple[jax.Array, jax.Array]:
    """A loss as float32 `(sum, weight)`; a scalar counts as the mean of one equally sized piece."""
    loss, weight = result if isinstance(result, tuple) else (result, 1.0)
    return jnp.asarray(loss, jnp.float32), jnp.asarray(weight, jnp.float32)


def cast_batch(batch: Arrays, dtype: Any) -> Arrays:
    """Floating-point leaves in `dtype`; integers and booleans as they are."""
    return jax.tree.map(
        lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, batch
    )


def _shard_key(key_data: jax.Array) -> jax.Array:
    """The step's key folded with this data shard's index, so that shards drop different units."""
    index = lax.axis_index(REPLICA) * lax.axis_size(DATA) + lax.axis_index(DATA)
    return jax.random.fold_in(jax.random.wrap_key_data(key_data), index)


def _run(
    config: PassConfig,
    values: Arrays,
    extras: Arrays,
    key: jax.Array,
    batch: Arrays,
    on_read: Mapping[str, Any],
    *,
    train: bool,
) -> tuple[tuple[jax.Array, jax.Array], Arrays]:
    rules = {"sequence": MODEL} if config.sequence_sharding else None
    batch = cast_batch(batch, config.precision.compute_dtype)
    with activation_rules(rules):
        result, after = config.model.run(
            values,
            extras,
            key,
            lambda bound: config.loss(bound, batch),
            train=train,
            on_read=on_read,
        )
    return as_sum_and_weight(result), after


def _of_access(config: PassConfig, names: Any, *accesses: Access) -> list[str]:
    return [name for name in names if config.placement.leaves[name].access in accesses]


def _leaf_collectives(config: PassConfig, names: Any) -> dict[str, collectives.LeafCollectives]:
    return {
        name: collectives.leaf_collectives(
            config.placement.leaves[name],
            config.placement.axis_sizes[DATA],
            compute_dtype=config.precision.compute_dtype,
            reduce_dtype=config.precision.reduce_dtype,
            exchange=communicates_through_gloo(config.mesh),
        )
        for name in names
    }


def _prepare(config: PassConfig, params: Arrays, frozen: Arrays) -> tuple[Arrays, Arrays]:
    """Once per step: gathers what is gathered once, casts the rest.

    Returns:
      ({name: what is differentiated}, {name: whole value that is only read}).
    """
    compute, reduce = config.precision.compute_dtype, config.precision.reduce_dtype
    stored = {**params, **frozen}
    once = _of_access(config, stored, Access.GATHER_ONCE, Access.GATHER_ONCE_SCATTER_EARLY)
    sharded = {name: _cast(stored[name], compute) for name in once}
    wholes = collectives.gather_buckets(
        sharded, _leaf_collectives(config, once), config.allgather_bucket_size
    )
    inputs, constants = {}, {}
    for name, value in stored.items():
        access = config.placement.leaves[name].access
        if access is Access.WHOLE:
            inputs[name] = _cast(value, compute)
        elif access is Access.GATHER_ONCE:
            inputs[name] = wholes[name]
        else:
            inputs[name] = _cast(value, reduce)
            if access is Access.GATHER_ONCE_SCATTER_EARLY:
                constants[name] = wholes[name]
    for name in frozen:
        value = inputs.pop(name)
        constants.setdefault(name, value)
    return inputs, constants


def _cast(value: jax.Array, dtype: Any) -> jax.Array:
    return value.astype(dtype) if jnp.issubdtype(value.dtype, jnp.floating) else value


def _values_to_read(
    config: PassConfig, inputs: Arrays, constants: Arrays, frozen: Arrays
) -> Arrays:
    """What is bound into the model: a value, a shard, or (whole, shard) for the early scatter."""
    values = {name: constants[name] for name in frozen}
    for name, value in inputs.items():
        values[name] = (constants[name], value) if name in constants else value
    return {name: values[name] for name in config.placement.leaves if name in values}


def _reads(config: PassConfig, frozen: Arrays) -> dict[str, Any]:
    """What reading does, for the parameters where it does something."""
    leaves = config.placement.leaves
    on_use = _of_access(config, leaves, Access.GATHER_ON_USE)
    early = _of_access(config, leaves, Access.GATHER_ONCE_SCATTER_EARLY)
    table = _leaf_collectives(config, on_use + early)
    reads: dict[str, Any] = {name: collectives.GatherOnUse(name, table[name]) for name in on_use}
    tapped = [name for name in early if name not in frozen]
    return reads | {name: collectives.ScatterEarly(name, table[name]) for name in tapped}


def _rewriting(config: PassConfig, frozen: Arrays) -> Rewriting:
    """Reads of one layer in one collective; at stage 3 gathers are done again.

    Frozen parameters have buckets of their own, since nothing of theirs is scattered.
    """
    placed = config.placement.leaves
    names = _of_access(config, placed, Access.GATHER_ON_USE, Access.GATHER_ONCE_SCATTER_EARLY)
    table = _leaf_collectives(config, names)
    lazy = config.placement.zero == 3
    limit = config.allgather_bucket_size if lazy else config.reduce_bucket_size

    def buckets(names: Sequence[str]) -> list[list[str]]:
        made = []
        for fixed in (False, True):
            chosen = [name for name in names if (name in frozen) == fixed]
            sizes = {name: _slice_size(placed[name]) for name in chosen}
            made += collectives.make_buckets(sizes, limit)
        return made

    def read_together(names: Sequence[str], given: Sequence[Any]) -> Sequence[Any]:
        leaves = tuple(table[name] for name in names)
        operands = [list(arrays) for arrays in zip(*given, strict=True)]
        read = collectives.gather_on_use if lazy else collectives.scatter_early
        return read(leaves, *operands)

    return Rewriting(
        shapes={name: placed[name].shape for name in names},
        buckets=buckets,
        read_together=read_together,
        regather=config.regather,
        everywhere=not config.model.reads_lazily,
    )


def _slice_size(leaf: LeafPlacement) -> int:
    """Elements of the part of a parameter that one read gives."""
    return math.prod(leaf.shape[leaf.stack_dims :])


def _accumulate(
    config: PassConfig,
    differentiate: Callable[..., Any],
    inputs: Arrays,
    extras: Arrays,
    key: jax.Array,
    batch: Arrays,
) -> tuple[Arrays, Arrays, Arrays]:
    """Loss sums and gradients of all microbatches of this data shard, nothing reduced yet."""
    if config.num_microbatches == 1:
        (_, (sums, extras)), grads = differentiate(inputs, extras, key, batch)
        return sums, grads, extras

    def split(x: jax.Array) -> jax.Array:
        return x.reshape(config.num_microbatches, -1, *x.shape[1:])

    overwritten = config.model.overwritten
    latest_steps = model_state.pick(extras, overwritten)

    def one(carry: Any, item: Any) -> tuple[Any, None]:
        sums, grads, extras = carry
        index, microbatch = item
        microbatch_key = jax.random.fold_in(key, index)
        given = {**extras, **latest_steps}
        (_, (more, after)), new = differentiate(inputs, given, microbatch_key, microbatch)
        extras = model_state.after_microbatch(extras, after, overwritten)
        sums = jax.tree.map(jnp.add, sums, more)
        return (sums, jax.tree.map(lambda a, g: a + g.astype(a.dtype), grads, new), extras), None

    dtype = config.precision.accumulate_dtype
    zeros = {name: jnp.zeros(value.shape, dtype) for name, value in inputs.items()}
    start = {"loss": jnp.float32(0), "weight": jnp.float32(0)}, zeros
    start = *start, model_state.before_microbatches(extras, overwritten)
    items = jnp.arange(config.num_microbatches), jax.tree.map(split, batch)
    (sums, grads, extras), _ = lax.scan(one, start, items)
    return sums, grads, extras


def _reduce(config: PassConfig, grads: Arrays) -> Arrays:
    """Gradients summed over the data axes, as stored: float32, sharded where the placement says."""
    leaves = config.placement.leaves
    bucket_size, dtype = config.reduce_bucket_size, config.precision.reduce_dtype
    axes = {name: leaf.axes for name, leaf in leaves.items()}
    wholes = {n: grads[n].astype(dtype) for n in _of_access(config, grads, Access.WHOLE)}
    reduced = collectives.sum_buckets(wholes, axes, bucket_size)
    once = {n: grads[n] for n in _of_access(config, grads, Access.GATHER_ONCE)}
    shards = collectives.scatter_buckets(once, _leaf_collectives(config, once), bucket_size)
    shards |= {n: grads[n] for n in grads if n not in shards and n not in reduced}
    if config.placement.axis_sizes[REPLICA] > 1:
        shards = {name: shard.astype(dtype) for name, shard in shards.items()}
        shards = collectives.sum_over_replicas(shards, axes, bucket_size)
    reduced |= shards
    return {name: reduced[name].astype(jnp.float32) for name in grads}
