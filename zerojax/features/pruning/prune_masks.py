"""Computes the masks of pruned parameters, and keeps their pruned weights at 0; traced.

A mask is stored like its parameter (padding, rows, sharding), so each device masks its own shard.
The weights to keep are found by counting, which needs sums but no gathered or sorted parameter.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from zerojax.config import PruningConfig
from zerojax.config.tree_types import Tree
from zerojax.features.pruning.pruned_parameters import PrunedLeaf
from zerojax.optim import EmaState
from zerojax.placement.decisions import Decisions
from zerojax.placement.state import TrainState, feature_parts
from zerojax.placement.table import Placement

Arrays = dict[str, jax.Array]
Pruned = Mapping[str, PrunedLeaf]


def first_masks(pruned: Pruned, placement: Placement, params: Mapping[str, jax.Array]) -> Arrays:
    """Computes the masks of a new state, {name: bool array}: True where a weight is kept.

    Of units with equal sums of magnitudes, the first ones are kept.

    Args:
      pruned: decision of the run's plan.
      placement: placement table.
      params: {name: initial parameter}, as stored.
    """
    masks: Arrays = {}
    for name, leaf in pruned.items():
        source = placement.leaves[leaf.source]
        kept = _kept_units(params[leaf.source], source.shape, leaf)
        mask = _on_dims(kept, leaf, params[name].shape)
        if leaf.rows is not None:
            order = source.layer_rows or range(len(leaf.rows))
            whole = np.array([layer < 0 or not leaf.rows[layer] for layer in order])
            mask |= whole.reshape(-1, *(1,) * (mask.ndim - 1))
        masks[name] = mask
    return masks


def _kept_units(param: jax.Array, shape: tuple[int, ...], leaf: PrunedLeaf) -> jax.Array:
    """Finds the units of each layer to keep: bool [layers, ..., *units as stored].

    Args:
      param: parameter as stored; padding is 0.
      shape: its unpadded shape.
      leaf: its pruning.
    """
    others = set(range(leaf.layer_dims, param.ndim)) - {*leaf.unit_dims}
    sizes = jnp.sum(jnp.abs(param.astype(jnp.float32)), axis=tuple(others))
    true = [shape[dim] for dim in leaf.unit_dims]
    first, index = leaf.layer_dims, jnp.zeros(sizes.shape, jnp.int32)
    is_unit = jnp.ones(sizes.shape, bool)
    for place, size in enumerate(true):
        number = lax.broadcasted_iota(jnp.int32, sizes.shape, first + place)
        index += number * math.prod(true[place + 1 :])
        is_unit &= number < size
    return largest(sizes, index, is_unit, leaf.num_kept, first)


def largest(
    sizes: jax.Array, index: jax.Array, is_unit: jax.Array, num_kept: int, layer_dims: int
) -> jax.Array:
    """Marks the `num_kept` largest entries of each layer; of equal ones those with smaller index.

    Bits of floats of 0 or more have the order of their values, so both limits are found bit by bit,
    from the number of entries on one side of them.

    Args:
      sizes: float32 [*layers, *units], 0 or more.
      index: int32, number of each unit in its layer.
      is_unit: bool, False for padding.
      num_kept: number of entries to mark in each layer.
      layer_dims: number of leading dimensions that number layers.

    Returns:
      bool, with the shape of `sizes`.
    """
    bits = lax.bitcast_convert_type(sizes, jnp.int32)
    dims = tuple(range(layer_dims, sizes.ndim))

    def count(chosen: jax.Array) -> jax.Array:
        return jnp.sum(chosen & is_unit, axis=dims, keepdims=True, dtype=jnp.int32)

    def highest(allowed: Any) -> jax.Array:
        """Returns the largest int32 of 0 or more for which `allowed` is True."""

        def step(number: jax.Array, found: jax.Array) -> jax.Array:
            tried = found | (jnp.int32(1) << (30 - number))
            return jnp.where(allowed(tried), tried, found)

        start = jnp.zeros((*sizes.shape[:layer_dims], *(1,) * len(dims)), jnp.int32)
        return lax.fori_loop(0, 31, step, start)

    limit = highest(lambda tried: count(bits >= tried) >= num_kept)
    is_above, ties = bits > limit, bits == limit
    left = num_kept - count(is_above)
    end = highest(lambda tried: count(ties & (index < tried)) <= left)
    return (is_above | (ties & (index < end))) & is_unit


def _on_dims(kept: jax.Array, leaf: PrunedLeaf, shape: tuple[int, ...]) -> jax.Array:
    """Repeats the mask of units over the other dimensions of a parameter of this stored shape."""
    dims = (*range(leaf.layer_dims), *leaf.own_dims)
    sizes = [min(kept.shape[at], shape[dim]) for at, dim in enumerate(dims)]
    kept = lax.slice(kept, (0,) * kept.ndim, sizes)
    widths = [(0, shape[dim] - size, 0) for dim, size in zip(dims, sizes, strict=True)]
    kept = lax.pad(kept, jnp.zeros((), bool), widths)
    return lax.broadcast_in_dim(kept, shape, dims)


def mask_gradients(pruned: Pruned, grads: Arrays, state: TrainState) -> Arrays:
    """Multiplies the gradients of pruned weights by 0, as a product with a mask does.

    A gradient that is not finite stays so.
    """
    updates = state["step"] - state["skipped"]
    factors = {
        name: (mask | (updates < pruned[name].start_step)).astype(grads[name].dtype)
        for name, mask in _masks(state).items()
    }
    return {name: g * factors[name] if name in factors else g for name, g in grads.items()}


def masked_weights(pruned: Pruned, state: TrainState) -> tuple[Arrays, Any]:
    """Returns the parameters and the optimizer state of a state, with pruned weights, and their
    average, set to 0 if their first step has come."""
    updates, masks = state["step"] - state["skipped"], _masks(state)
    params, opt_state = weights_at(pruned, state["params"], masks, updates), state["opt_state"]
    if isinstance(opt_state, EmaState):
        average = weights_at(pruned, opt_state.ema, masks, updates)
        opt_state = dataclasses.replace(opt_state, ema=average)
    return params, opt_state


def weights_at(
    pruned: Pruned, params: Mapping[str, jax.Array], masks: Mapping[str, jax.Array], updates: Tree
) -> Arrays:
    """Returns parameters, or their averages, with pruned weights set to 0 if `updates`, the number
    of applied updates, has reached their `start_step`."""
    result = dict(params)
    for name, mask in masks.items():
        keep = mask | (updates < pruned[name].start_step)
        result[name] = jnp.where(keep, params[name], jnp.zeros((), params[name].dtype))
    return result


def begin_pruned(plan: Decisions, pruned: Pruned, state: TrainState) -> TrainState:
    """Sets the pruned weights of a new state to 0 if they are pruned from the first step on."""
    shardings = {name: x.sharding for name, x in plan.abstract_stored["params"].items()}
    begin = jax.jit(
        lambda params, masks: weights_at(pruned, params, masks, 0), out_shardings=shardings
    )
    result = state.copy()
    result["params"] = begin(state["params"], _masks(state))
    return result


def _masks(state: TrainState) -> Arrays:
    assert PruningConfig.part is not None
    return feature_parts(state)[PruningConfig.part]
