"""The model's own state over microbatches and shards of the batch.

Most extras are written by the forward pass (batch statistics). Some are **overwritten** with their
gradient: their new value comes out of the backward pass, as the largest magnitudes that the scales
of 8-bit products follow from. Several new values become one by Flax's own rule for them
(`flax.linen.fp8_ops`), the largest of each element. So the largest magnitudes of a step are those
of all its microbatches and shards, and all of a step is computed with the same scales.

Some are **counted**: what a pass adds to them is a sum over the rows of the batch, as far as the
trace of the model shows it (`zerojax.plan.loss_checks`), or as a `StepCount` says. What each shard
adds is added up, so they are those of one device with the whole batch. What is made of a
`StepCount` is made by the step, after all passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Set
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zerojax.parallel.sums import max_replicated, sum_replicated
from zerojax.plan.device_mesh import PASS_AXES

Arrays = dict[str, Any]


def value_and_grad(loss_of: Callable[..., Any], overwritten: Set[str]) -> Callable[..., Any]:
    """`jax.value_and_grad` of a loss, by whose extras some come back as their gradient.

    Args:
      loss_of: `(inputs, extras, *rest) -> (loss, (anything, extras afterwards))`.
      overwritten: names among the extras.

    Returns:
      `(inputs, extras, *rest) -> ((loss, (anything, extras afterwards)), gradients of inputs)`.
    """
    if not overwritten:
        return jax.value_and_grad(loss_of, has_aux=True)

    def differentiate(inputs: Arrays, extras: Arrays, *rest: Any) -> Any:
        def loss_of_both(inputs: Arrays, chosen: Arrays) -> Any:
            return loss_of(inputs, {**extras, **chosen}, *rest)

        both = jax.value_and_grad(loss_of_both, argnums=(0, 1), has_aux=True)
        (loss, (aux, after)), (grads, new) = both(inputs, pick(extras, overwritten))
        return (loss, (aux, {**after, **new})), grads

    return differentiate


def pick(extras: Arrays, names: Set[str]) -> Arrays:
    """The extras of these names."""
    return {name: value for name, value in extras.items() if name in names}


def before_microbatches(extras: Arrays, overwritten: Set[str]) -> Arrays:
    """The extras that the first microbatch's are added to: minus infinity where overwritten."""
    chosen = pick(extras, overwritten)
    return {**extras, **{name: jnp.full_like(x, -jnp.inf) for name, x in chosen.items()}}


def after_microbatch(earlier: Arrays, later: Arrays, overwritten: Set[str]) -> Arrays:
    """The extras after one more microbatch: the largest of both where overwritten."""
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
    """Extras made the same on every data shard.

    What is overwritten becomes the largest of all shards; what is counted changes by the sum of
    their changes; other floating-point values change by their mean change.

    Args:
      overwritten_over: mesh axes over which new values of what is overwritten differ.
    """
    chosen = pick(after, overwritten)
    largest = max_replicated(chosen, overwritten_over) if chosen else {}
    count = math.prod(lax.axis_size(axis) for axis in PASS_AXES)
    changed = changes(before, after, overwritten)
    changed |= added(before, after, counted)
    summed = sum_replicated(changed) if changed else {}
    return {**after, **add_changes(before, summed, count, counted), **largest}


def is_averaged(name: str, value: Any, overwritten: Set[str]) -> bool:
    """Whether an extra becomes the mean of what shards of the batch make of it, or their sum."""
    return name not in overwritten and jnp.issubdtype(value.dtype, jnp.floating)


def changes(before: Arrays, after: Arrays, overwritten: Set[str]) -> Arrays:
    """{name: float32, by how much it changed}, of the extras that are averaged."""
    found = {}
    for name, new in after.items():
        if is_averaged(name, new, overwritten):
            # Where nothing changed the change is an exact zero, for infinities (masks) too.
            old, new = before[name].astype(jnp.float32), new.astype(jnp.float32)
            found[name] = jnp.where(new == old, 0, new - old)
    return found


def added(before: Arrays, after: Arrays, counted: Set[str]) -> Arrays:
    """{name: by how much it changed, in its own dtype}, of integers that are counted."""
    chosen = pick(after, counted).items()
    return {n: x - before[n] for n, x in chosen if not jnp.issubdtype(x.dtype, jnp.floating)}


def add_changes(before: Arrays, summed: Arrays, count: int, counted: Set[str]) -> Arrays:
    """{name: the extra with the mean of `count` changes, of which `summed` is the sum}.

    To what is counted the sum itself is added.
    """
    return {
        name: before[name] + (x if name in counted else x / count).astype(before[name].dtype)
        for name, x in summed.items()
    }
