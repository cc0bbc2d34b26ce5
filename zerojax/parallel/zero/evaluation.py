"""Forward pass in evaluation mode."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from zerojax.models.losses import split_result
from zerojax.models.protocol import Loss
from zerojax.models.trace import trace_model
from zerojax.parallel import replicated_sums
from zerojax.parallel.zero.microbatch import Arrays, PassConfig, run_microbatch, shard_key
from zerojax.parallel.zero.parameters import (
    build_reads,
    build_rewriting,
    cast,
    prepare_parameters,
    values_to_read,
)
from zerojax.parallel.zero.regions import map_forward
from zerojax.plan.leaf import Access, LeafPlacement


def build_forward(config: PassConfig, function: Loss) -> Callable[..., Arrays]:
    """`(params, frozen, extras, key_data, batch) -> sums`, to be traced.

    Sums are those of `zerojax.losses.as_sums`, over the global batch. Runs `function(model, batch)`
    in evaluation mode; nothing is differentiated and extras do not change.
    """
    config = dataclasses.replace(config, loss=function)

    def local(params: Arrays, frozen: Arrays, extras: Arrays, key_data: Any, batch: Arrays):
        evaluate, _ = build_evaluating(config, params, frozen, extras, batch)
        return replicated_sums.sum_replicated(evaluate(extras, shard_key(key_data), batch))

    return map_forward(config, local)


def build_evaluating(
    config: PassConfig, params: Arrays, frozen: Arrays, extras: Arrays, batch: Arrays
) -> tuple[Callable[..., Arrays], tuple[str, ...]]:
    """(`(extras, key, batch) -> sums` of one device, batches of any size; names of own metrics)."""
    evaluation = for_evaluation(config, {**params, **frozen}, extras, batch)
    inputs, constants = prepare_parameters(evaluation, params, frozen)
    values = values_to_read(evaluation, inputs, constants, frozen)
    on_read = build_reads(evaluation, frozen)

    def loss_of(values: Arrays, extras: Arrays, key: Any, batch: Arrays):
        return run_microbatch(evaluation, values, extras, key, batch, on_read, train=False)[0]

    loss_of = build_rewriting(evaluation, frozen)(loss_of) if on_read else loss_of
    evaluate = lambda extras, key, batch: loss_of(values, extras, key, batch)  # noqa: E731
    return evaluate, evaluation.metrics


def for_evaluation(config: PassConfig, stored: Arrays, extras: Arrays, batch: Arrays) -> PassConfig:
    """What evaluation does otherwise: nothing is scattered, and the function may read otherwise."""
    abstract = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)  # noqa: E731
    leaves = config.placement.leaves
    params = {
        name: jax.ShapeDtypeStruct(
            leaves[name].shape, cast(x, config.precision.compute_dtype).dtype
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
    names = tuple(sorted(split_result(trace.result).metrics))
    return dataclasses.replace(config, placement=placement, regather=False, metrics=names)
