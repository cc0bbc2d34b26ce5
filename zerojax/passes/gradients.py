"""Builds forward and backward pass over microbatches at each ZeRO stage, and evaluation."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zerojax.config.mesh import DEVICE
from zerojax.config.tree_types import Tree
from zerojax.models.losses import no_sums, split_result
from zerojax.passes import model_state
from zerojax.passes.loads_ahead import load_one_ahead
from zerojax.passes.microbatch import (
    Arrays,
    PassConfig,
    cast_batch,
    map_forward,
    map_gradients,
    run_microbatch,
    shard_key,
    split_batch,
)
from zerojax.passes.parameters import (
    build_reads,
    build_rewriting,
    build_tilings,
    cast,
    owned_tables,
    prepare_parameters,
    reduce_gradients,
    values_to_read,
)
from zerojax.passes.table_reads import with_lookups
from zerojax.placement.device_mesh import EXPERT
from zerojax.placement.expert_axis import check_expert_calls
from zerojax.placement.frozen_codes import check_evaluation
from zerojax.placement.leaf_placement import LeafPlacement
from zerojax.tracing.activation_offload import keep_inputs_on_host
from zerojax.tracing.expert_calls import find_expert_calls
from zerojax.tracing.protocol import Loss
from zerojax.tracing.row_lookups import find_row_lookups
from zerojax.tracing.tiled_programs import tile_reads
from zerojax.tracing.trace import ModelTrace, trace_model
from zerojax.tracing.unrolling import unroll_layers
from zerojax.transport.sums import sum_replicated


def build_gradients(
    config: PassConfig, *, unsummed: frozenset[str] = frozenset()
) -> Callable[..., tuple[Arrays, Arrays, Arrays]]:
    """Builds the gradient function of a batch, to be traced inside a jitted step.

    The function takes `(params, frozen, extras, key_data, batch, loss_factor, copies, scales)`.
    `params` and `frozen` are stored parameters (shards of global arrays). `key_data` is the uint32
    data of the step's random key. `batch` is {key: [global batch, ...]}. `loss_factor` is a float32
    [] by which the loss is multiplied before it is differentiated, or None. `copies` is {name:
    unsharded weight in the compute dtype} of parameters with `delta_codes`, or None if there are
    none. `scales` is float32 [microbatches, layers], the scale of each layer and equal on every
    device, or None if layers have no scales (`PassConfig.scale_layers`).

    Args:
      config: configuration of the pass.
      unsummed: names of parameters whose gradients are not summed over devices. Each device keeps
        the gradient of its data shard: [devices, *true shape], sharded over the axes of a pass, in
        the dtype in which it is computed.

    Returns:
      A function that returns `(sums, grads, extras)`. `sums` are float32 sums over the global batch
      (see `zerojax.losses.as_sums`). `grads` is {name: float32 gradient with the stored shape and
      spec}, summed, but not divided by the weight or by the loss factor.
    """

    def local(
        params: Arrays,
        frozen: Arrays,
        extras: Arrays,
        key_data: jax.Array,
        batch: Arrays,
        loss_factor: jax.Array | None,
        copies: Arrays | None = None,
        scales: jax.Array | None = None,
    ):
        key = shard_key(key_data)
        inputs, constants = prepare_parameters(config, params, frozen, copies)
        differentiate = build_differentiation(config, constants, frozen, loss_factor)
        sums, grads, after = _accumulate(config, differentiate, inputs, extras, key, batch, scales)
        own = {name: grads[name][None] for name in grads if name in unsummed}
        summed = reduce_gradients(config, {n: x for n, x in grads.items() if n not in own})
        grads = {name: own[name] if name in own else summed[name] for name in grads}
        agreed = model_state.agree(extras, after, config.model.overwritten, config.counted)
        return sum_replicated(sums), grads, agreed

    return map_gradients(config, local, unsummed=unsummed)


def build_differentiation(
    config: PassConfig, constants: Arrays, frozen: Arrays, loss_factor: jax.Array | None
) -> Callable[..., Any]:
    """Builds the forward and backward pass of one microbatch.

    Only the gradients that ZeRO scatters inside the backward pass are reduced over devices.

    Args:
      config: configuration of the pass.
      constants: values that are not differentiated, from `prepare_parameters`.
      frozen: frozen parameters, as stored.
      loss_factor: factor by which the loss is multiplied before it is differentiated; None: 1.

    Returns:
      `(inputs, extras, key, batch) -> ((scaled loss, (sums, extras afterwards)), gradients)`. With
      `PassConfig.scale_layers` it takes as a further argument the scale of each layer.
    """
    on_read = build_reads(config, frozen)

    def loss_of(inputs: Arrays, extras: Arrays, key: jax.Array, batch: Arrays):
        values = values_to_read(config, inputs, constants, frozen)
        sums, after = run_microbatch(config, values, extras, key, batch, on_read, train=True)
        return sums["loss"], (sums, after)

    tables = owned_tables(config)
    shards_of = lambda inputs, *_: {n: {**constants, **inputs}[n] for n in tables}  # noqa: E731
    loss_of = with_lookups(loss_of, tables, shards_of)
    keeps_inputs = config.offload is not None and config.offload.activations != DEVICE
    if keeps_inputs:
        loss_of = keep_inputs_on_host(loss_of, list(constants.values()))
    loss_of = tile_reads(loss_of, build_tilings(config, frozen))
    loss_of = build_rewriting(config, frozen)(loss_of) if on_read else loss_of
    if config.unroll:
        loss_of = unroll_layers(loss_of, list(constants.values()))
    if config.scale_layers is not None:
        loss_of = config.scale_layers(loss_of, list(constants.values()))

    def differentiated(inputs: Arrays, *others: Tree):
        loss, (sums, after) = loss_of(inputs, *others)
        scaled = loss if loss_factor is None else loss * loss_factor
        return scaled, (sums, after)

    differentiate = model_state.value_and_grad(differentiated, config.model.overwritten)
    return load_one_ahead(differentiate) if keeps_inputs else differentiate


def _accumulate(
    config: PassConfig,
    differentiate: Callable[..., Any],
    inputs: Arrays,
    extras: Arrays,
    key: jax.Array,
    batch: Arrays,
    scales: jax.Array | None,
) -> tuple[Arrays, Arrays, Arrays]:
    """Sums losses and gradients over all microbatches of this data shard; not reduced over
    devices.
    """
    if config.num_microbatches == 1:
        drawn = () if scales is None else (scales[0],)
        (_, (sums, extras)), grads = differentiate(inputs, extras, key, batch, *drawn)
        return sums, grads, extras

    overwritten = config.model.overwritten
    latest_steps = model_state.pick(extras, overwritten)

    def one(carry: Tree, item: Tree) -> tuple[Any, None]:
        sums, grads, extras = carry
        index, microbatch, *drawn = item
        microbatch_key = jax.random.fold_in(key, index)
        given = {**extras, **latest_steps}
        (_, (more, after)), new = differentiate(inputs, given, microbatch_key, microbatch, *drawn)
        extras = model_state.after_microbatch(extras, after, overwritten)
        sums = jax.tree.map(jnp.add, sums, more)
        return (sums, jax.tree.map(lambda a, g: a + g.astype(a.dtype), grads, new), extras), None

    dtype = config.precision.accumulate_dtype
    zeros = {name: jnp.zeros(value.shape, dtype) for name, value in inputs.items()}
    start = no_sums(config.metrics), zeros
    start = *start, model_state.before_microbatches(extras, overwritten)
    items = jnp.arange(config.num_microbatches), split_batch(batch, config.num_microbatches)
    items = items if scales is None else (*items, scales)
    (sums, grads, extras), _ = lax.scan(one, start, items)
    return sums, grads, extras


def build_forward(config: PassConfig, function: Loss) -> Callable[..., Arrays]:
    """Builds the traced forward function, `(params, frozen, extras, key_data, batch, copies) ->
    sums`.

    It runs `function(model, batch)` in evaluation mode; nothing is differentiated, and extras
    (non-parameter arrays) do not change. The sums are those of `zerojax.losses.as_sums` over the
    global batch. `copies` is {name: unsharded weight in the compute dtype} of parameters with
    `delta_codes`, or None if there are none.
    """
    config = dataclasses.replace(config, loss=function)

    def local(
        params: Arrays,
        frozen: Arrays,
        extras: Arrays,
        key_data: jax.Array,
        batch: Arrays,
        copies: Arrays | None = None,
    ):
        evaluate, _ = build_evaluating(config, params, frozen, extras, batch, copies)
        return sum_replicated(evaluate(extras, shard_key(key_data), batch))

    return map_forward(config, local)


def build_evaluating(
    config: PassConfig,
    params: Arrays,
    frozen: Arrays,
    extras: Arrays,
    batch: Arrays,
    copies: Arrays | None = None,
) -> tuple[Callable[..., Arrays], tuple[str, ...]]:
    """Builds the evaluation function that runs on one device, for batches of any size.

    Returns:
      (`(extras, key, batch) -> sums`, names of the loss's own metrics).
    """
    evaluation = for_evaluation(config, {**params, **frozen}, extras, batch)
    inputs, constants = prepare_parameters(evaluation, params, frozen, copies)
    values = values_to_read(evaluation, inputs, constants, frozen)
    on_read = build_reads(evaluation, frozen)

    def loss_of(values: Arrays, extras: Arrays, key: jax.Array, batch: Arrays):
        return run_microbatch(evaluation, values, extras, key, batch, on_read, train=False)[0]

    loss_of = with_lookups(loss_of, owned_tables(evaluation), lambda values, *_: values)
    loss_of = tile_reads(loss_of, build_tilings(evaluation, frozen))
    loss_of = build_rewriting(evaluation, frozen)(loss_of) if on_read else loss_of
    evaluate = lambda extras, key, batch: loss_of(values, extras, key, batch)  # noqa: E731
    return evaluate, evaluation.metrics


def for_evaluation(config: PassConfig, stored: Arrays, extras: Arrays, batch: Arrays) -> PassConfig:
    """Returns the configuration of an evaluation pass: no reduce-scatters, and parameters read as
    evaluation needs them.
    """
    abstract = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)  # noqa: E731
    leaves = config.placement.leaves
    params = {
        name: jax.ShapeDtypeStruct(
            leaves[name].device_shape(config.placement.axis_sizes),
            config.precision.compute_dtype
            if leaves[name].codes is not None
            else cast(x, config.precision.compute_dtype).dtype,
        )
        for name, x in stored.items()
    }
    extras, exact = jax.tree.map(abstract, extras), config.exact_leaves

    def trace_of(exact: frozenset[str]) -> ModelTrace:
        as_read = functools.partial(cast_batch, precision=config.precision, exact=exact)
        given = jax.eval_shape(as_read, batch)
        return trace_model(config.model, params, extras, given, config.loss, train=False)

    trace = trace_of(exact)
    while further := frozenset(trace.exact_leaves) - exact:
        exact |= further  # of a metric or a loss that only evaluations compute
        trace = trace_of(exact)
    check_evaluation(leaves, trace.barriers)
    if config.mesh.shape[EXPERT] > 1:
        calls = find_expert_calls(trace.program.jaxpr, sorted(params))
        used = calls.dims.keys() | calls.elsewhere.keys()
        experts = [n for n in used if leaves[n].expert_dim is not None]
        check_expert_calls(calls, experts, f"expert={config.mesh.shape[EXPERT]}")

    rows = find_row_lookups(trace.program.jaxpr, sorted(params))
    by_row = rows.row_reads.keys() - rows.elsewhere.keys() - trace.barriers.keys()

    def place(leaf: LeafPlacement) -> LeafPlacement:
        if leaf.access.looks_up and leaf.name in by_row:
            return leaf
        lazily = leaf.access.gathers_on_use and leaf.name not in trace.barriers
        if lazily or leaf.access.is_whole:
            in_bits = leaf.eight_bits and leaf.name in trace.eight_bits
            return dataclasses.replace(leaf, eight_bits=in_bits)
        return leaf.gathered_once()

    placement = dataclasses.replace(
        config.placement, leaves={name: place(leaf) for name, leaf in leaves.items()}
    )
    names = tuple(sorted(split_result(trace.result).metrics))
    return dataclasses.replace(
        config, placement=placement, regather=False, metrics=names, exact_leaves=exact
    )
