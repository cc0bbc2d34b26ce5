"""One microbatch through the model, and the inputs of a pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zerojax.models.losses import as_sums
from zerojax.models.protocol import Loss, Model
from zerojax.models.zoo.activations import activation_rules
from zerojax.optim.precision import Precision
from zerojax.parallel.deterministic_sums import TreeOrder
from zerojax.plan.mesh import DATA, MODEL, REPLICA
from zerojax.plan.offload_layout import OffloadLayout
from zerojax.plan.pipeline_layout import PipelineLayout
from zerojax.plan.placement_table import Placement

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
      pipeline: how the layers lie on stages; None with one stage.
      offload: what lies outside device memory; None where nothing does.
      virtual_shards: in how many pieces the batch is cut on any number of devices, so that all give
        the same bits; None cuts it as it comes.
      metrics: names of the own metrics that the loss returns, sorted.
      counted: names of the extras to which passes add sums over the batch, see `model_state`.
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
    pipeline: PipelineLayout | None = None
    offload: OffloadLayout | None = None
    virtual_shards: int | None = None
    metrics: tuple[str, ...] = ()
    counted: frozenset[str] = frozenset()

    @property
    def tree(self) -> TreeOrder | None:
        """The order in which gradients are summed, None where it is free.

        From stage 2 on each virtual shard's gradients are exchanged by themselves, so devices come
        first; below, what a device has is summed before it is exchanged.
        """
        if self.virtual_shards is None:
            return None
        early = self.placement.zero >= 2
        return TreeOrder.HIGHEST_FIRST if early else TreeOrder.LOWEST_FIRST


def cast_batch(batch: Arrays, dtype: Any) -> Arrays:
    """Floating-point leaves in `dtype`; integers and booleans as they are."""
    return jax.tree.map(
        lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, batch
    )


def split_batch(batch: Arrays, number: int) -> Arrays:
    """[rows, ...] -> [microbatches, rows, ...]."""
    return jax.tree.map(lambda x: x.reshape(number, -1, *x.shape[1:]), batch)


def shard_key(key_data: jax.Array) -> jax.Array:
    """The step's key folded with this data shard's index, so that shards drop different units."""
    index = lax.axis_index(REPLICA) * lax.axis_size(DATA) + lax.axis_index(DATA)
    return jax.random.fold_in(jax.random.wrap_key_data(key_data), index)


def run_microbatch(
    config: PassConfig,
    values: Arrays,
    extras: Arrays,
    key: jax.Array,
    batch: Arrays,
    on_read: Mapping[str, Any],
    *,
    train: bool,
) -> tuple[Arrays, Arrays]:
    """(`losses.as_sums`, extras afterwards) of one microbatch, from what parameters read as."""
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
    return as_sums(result), after
