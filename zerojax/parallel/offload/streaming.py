"""Forward and backward pass with layer weights streamed from host memory.

One `shard_map`, manual over the data axes, as without offload. The traced loss is cut into what is
before the layers, the layers and what is after them; each is differentiated by itself. Parameters
that are not stacked, and small stacks, are read as `zero` reads them. A stack on the host is read
as at stage 3 whatever the stage is: a layer's shard is brought to the device and gathered there;
its gradient is reduced in every microbatch and goes back to the host.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zerojax.models.losses import no_sums
from zerojax.models.protocol import Loss
from zerojax.parallel import model_state, replicated_sums
from zerojax.parallel.offload.streaming_pass import StreamedPass
from zerojax.parallel.offload.streaming_totals import GradientTotals
from zerojax.parallel.zero import (
    PassConfig,
    for_evaluation,
    map_forward,
    map_gradients,
    reduce_gradients,
    shard_key,
    split_batch,
)

Arrays = dict[str, Any]


def build_gradients(config: PassConfig) -> Callable[..., tuple[Arrays, Arrays, Arrays]]:
    """See `zerojax.parallel.zero.build_gradients`: the same arguments, results and sums, and more.

    Gradients of streamed parameters come in pinned host memory, in the reduce dtype, or in the
    accumulate dtype where there are several microbatches. `sums["squares"]` {name: float32 []} has
    the sum of squares of each of them over all its shards, as the gradients are: neither divided by
    the weight nor by the factor.
    """

    def local(
        params: Arrays,
        frozen: Arrays,
        extras: Arrays,
        key_data: Any,
        batch: Arrays,
        loss_factor: jax.Array | None,
    ):
        microbatches = split_batch(batch, config.num_microbatches)
        weights = StreamedPass(
            config, params, frozen, extras, key_data, one_of(microbatches), train=True
        )
        given = extras, shard_key(key_data), microbatches, loss_factor
        sums, outer, totals, after = _all_microbatches(weights, *given)
        resident = reduce_gradients(config, {**outer, **totals["device"]})
        grads = {**resident, **totals["host"]}
        sums = replicated_sums.sum_replicated(sums)
        sums["squares"] = weights.rows.sum_squares(totals["squares"])
        agreed = model_state.agree(extras, after, config.model.overwritten, config.counted)
        return sums, {name: grads[name] for name in params}, agreed

    return map_gradients(config, local)


def _all_microbatches(
    weights: StreamedPass,
    extras: Arrays,
    key: jax.Array,
    microbatches: Arrays,
    loss_factor: jax.Array | None,
) -> tuple[Arrays, Arrays, Arrays, Arrays]:
    """(sums, gradients around the layers, totals of the layers', extras), of this data shard."""
    number = weights.config.num_microbatches
    sink = GradientTotals(rows=weights.rows, num_layers=weights.pieces.num_layers)
    totals = sink.empty(adds=number > 1)
    if number == 1:
        batch = jax.tree.map(lambda x: x[0], microbatches)
        return weights.differentiate(extras, key, batch, loss_factor, sink, totals)

    def one(carry: Any, item: Any) -> tuple[Any, None]:
        sums, outer, totals, extras = carry
        index, batch = item
        own = jax.random.fold_in(key, index)
        adding = dataclasses.replace(sink, first=index == 0)
        more, new, totals, extras = weights.differentiate(
            extras, own, batch, loss_factor, adding, totals
        )
        sums = jax.tree.map(jnp.add, sums, more)
        outer = jax.tree.map(lambda total, grad: total + grad.astype(total.dtype), outer, new)
        return (sums, outer, totals, extras), None

    dtype = weights.config.precision.accumulate_dtype
    zeros = {name: jnp.zeros(x.shape, dtype) for name, x in weights.outer.items()}
    start = no_sums(weights.config.metrics), zeros, totals, extras
    return lax.scan(one, start, (jnp.arange(number), microbatches))[0]


def build_forward(config: PassConfig, function: Loss) -> Callable[..., Arrays]:
    """See `zerojax.parallel.zero.build_forward`: the same arguments and results."""
    config = dataclasses.replace(config, loss=function)

    def local(params: Arrays, frozen: Arrays, extras: Arrays, key_data: Any, batch: Arrays):
        evaluation = for_evaluation(config, {**params, **frozen}, extras, batch)
        one = one_of(split_batch(batch, 1))
        weights = StreamedPass(evaluation, params, frozen, extras, key_data, one, train=False)
        return replicated_sums.sum_replicated(weights.evaluate(extras, shard_key(key_data), batch))

    return map_forward(config, local)


def one_of(microbatches: Arrays) -> Arrays:
    """One microbatch, as `ShapeDtypeStruct`s."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), microbatches)
