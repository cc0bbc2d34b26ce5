"""Combines extras (the model's non-parameter arrays) over microbatches and data shards.

Most extras are written by the forward pass (batch statistics). There are three kinds:

**Overwritten** extras are replaced by their gradient: the backward pass computes their new value.
An example are the largest magnitudes from which the scales of 8-bit products follow. Several new
values are combined by Flax's own rule for them (`flax.linen.fp8_ops`), the elementwise maximum. So
the largest magnitudes of a step cover all its microbatches and shards, and the whole step uses the
same scales.

**Counted** extras grow by a sum over the rows of the batch. The trace of the model shows this
(`zerojax.plan.loss_checks`), or the user declares it by a `StepCount`. The increments of all shards
are added, so the result is that of one device with the whole batch. Values derived from a
`StepCount` are computed by the step, after all passes.

All other floating-point extras are averaged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Set
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zerojax.config.tree_types import Tree
from zerojax.placement.device_mesh import PASS_AXES
from zerojax.transport.sums import max_replicated, sum_replicated

Arrays = dict[str, Any]


def value_and_grad(loss_of: Callable[..., Any], overwritten: Set[str]) -> Callable[..., Any]:
    """Returns `jax.value_and_grad` of a loss, which also replaces overwritten extras (non-parameter
    arrays) by their gradient.

    Args:
      loss_of: `(inputs, extras, *rest) -> (loss, (anything, extras afterwards))`.
      overwritten: names of the overwritten extras.

    Returns:
      `(inputs, extras, *rest) -> ((loss, (anything, extras afterwards)), gradients of inputs)`.
    """
    if not overwritten:
        return jax.value_and_grad(loss_of, has_aux=True)

    def differentiate(inputs: Arrays, extras: Arrays, *rest: Tree) -> Any:
        def loss_of_both(inputs: Arrays, chosen: Arrays) -> Any:
            return loss_of(inputs, {**extras, **chosen}, *rest)

        both = jax.value_and_grad(loss_of_both, argnums=(0, 1), has_aux=True)
        (loss, (aux, after)), (grads, new) = both(inputs, pick(extras, overwritten))
        return (loss, (aux, {**after, **new})), grads

    return differentiate


def pick(extras: Arrays, names: Set[str]) -> Arrays:
    """Returns the extras (non-parameter arrays) with these names."""
    return {name: value for name, value in extras.items() if name in names}


def before_microbatches(extras: Arrays, overwritten: Set[str]) -> Arrays:
    """Returns the extras (non-parameter arrays) before the first microbatch; extras that are
    overwritten start at minus infinity.
    """
    chosen = pick(extras, overwritten)
    return {**extras, **{name: jnp.full_like(x, -jnp.inf) for name, x in chosen.items()}}


def after_microbatch(earlier: Arrays, later: Arrays, overwritten: Set[str]) -> Arrays:
    """Combines extras (non-parameter arrays) of two microbatches: keeps `later`, or for overwritten
    extras the elementwise maximum.
    """
    chosen = pick(later, overwritten)
    return {**later, **{name: jnp.maximum(earlier[name], x) for name, x in chosen.items()}}


def agree(
    before: Arrays,
    after: Arrays,
    overwritten: Set[str],
    counted: Set[str],
    *,
    overwritten_over: tuple[str, ...] = PASS_AXES,
) -> Arrays:
    """Combines the extras (non-parameter arrays) of all data shards, so that all shards have equal
    values.

    Overwritten extras become the maximum over all shards; counted ones change by the sum of the
    shards' changes; other floating-point values by the mean of the shards' changes.

    Args:
      overwritten_over: mesh axes over which the new values of overwritten extras differ, and over
        which their maximum is taken.
    """
    chosen = pick(after, overwritten)
    largest = max_replicated(chosen, overwritten_over) if chosen else {}
    count = math.prod(lax.axis_size(axis) for axis in PASS_AXES)
    changed = changes(before, after, overwritten)
    changed |= added(before, after, counted)
    summed = sum_replicated(changed) if changed else {}
    return {**after, **add_changes(before, summed, count, counted), **largest}


def is_averaged(name: str, value: jax.Array | jax.ShapeDtypeStruct, overwritten: Set[str]) -> bool:
    """Returns True if the changes of an extra are averaged over data shards, False if they are
    summed (counts).
    """
    return name not in overwritten and jnp.issubdtype(value.dtype, jnp.floating)


def changes(before: Arrays, after: Arrays, overwritten: Set[str]) -> Arrays:
    """Returns {name: float32 change} of the extras (non-parameter arrays) whose changes are
    averaged over data shards.
    """
    found = {}
    for name, new in after.items():
        if is_averaged(name, new, overwritten):
            # An unchanged value gives an exact zero, also for infinities (masks).
            old, new = before[name].astype(jnp.float32), new.astype(jnp.float32)
            found[name] = jnp.where(new == old, 0, new - old)
    return found


def added(before: Arrays, after: Arrays, counted: Set[str]) -> Arrays:
    """Returns {name: change, in its own dtype} of the integer extras (non-parameter arrays) that
    are counts.
    """
    chosen = pick(after, counted).items()
    return {n: x - before[n] for n, x in chosen if not jnp.issubdtype(x.dtype, jnp.floating)}


def add_changes(before: Arrays, summed: Arrays, count: int, counted: Set[str]) -> Arrays:
    """Returns {name: extra plus the mean change}, where `summed` is the sum of `count` changes.

    A counted extra changes by the sum itself.
    """
    return {
        name: before[name] + (x if name in counted else x / count).astype(before[name].dtype)
        for name, x in summed.items()
    }
