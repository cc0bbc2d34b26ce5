"""Refusals of losses that depend on the number of pieces of a batch.

A piece is what the loss is called with: the rows of one microbatch on one data shard.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Set
from typing import Any

import jax
import jax.numpy as jnp

from zerojax.models.batch_rows import (
    Count,
    Dependence,
    Fixed,
    Other,
    Rows,
    Total,
    follow_rows,
    number_of_output,
)
from zerojax.models.losses import split_result
from zerojax.models.trace import ModelTrace


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pieces:
    """What a traced loss shows.

    Attributes:
      num_rows: of a piece.
      is_sum: it is certain that the loss is a sum over rows that nobody divides by their number.
      is_ratio: the loss is a sum divided by something that depends on the piece, too.
      counted: names of the model's state to which a pass adds a sum over rows.
      undefined: {name: dtype} of its state that depends on rows in another way, and of which shards
        of the batch have no mean.
    """

    num_rows: int
    is_sum: bool
    is_ratio: bool
    counted: frozenset[str]
    undefined: Mapping[str, str]


def look_at_pieces(
    trace: ModelTrace,
    params: Mapping[str, Any],
    extras: Mapping[str, Any],
    batch: Any,
    overwritten: Set[str],
) -> Pieces:
    """What the trace of a piece shows.

    Args:
      trace: of the loss; params, extras, batch: what it was traced with.
      overwritten: names of the extras that become their gradient.
    """
    leaves = jax.tree.leaves(batch)
    num_rows, num_before = leaves[0].shape[0], len(params) + len(extras)
    inputs: list[Dependence] = [Fixed(place) for place in range(num_before)]
    found = follow_rows(trace.program, [*inputs, *[Rows(0)] * len(leaves)], num_rows)
    state = found[len(trace.jaxpr.jaxpr.outvars) :]
    counted, undefined = set(), {}
    for place, (name, one) in enumerate(zip(sorted(extras), state, strict=True)):
        if name in overwritten or isinstance(one, Fixed):
            continue
        is_own = isinstance(one, Count) and one.input == len(params) + place
        floating = jnp.issubdtype(extras[name].dtype, jnp.inexact)
        if isinstance(one, Count) and is_own and (not floating or one.total.is_sum(num_rows)):
            counted.add(name)
        elif not floating:
            undefined[name] = extras[name].dtype.name
    loss, is_pair = found[0], split_result(trace.result).weight is not None
    weight = number_of_output(trace.jaxpr, 1) if is_pair else None
    is_known = not is_pair or weight is not None
    return Pieces(
        num_rows=num_rows,
        is_sum=isinstance(loss, Total) and is_known and loss.is_sum(num_rows, weight),
        is_ratio=isinstance(loss, Other) and loss.is_ratio and not is_pair,
        counted=frozenset(counted),
        undefined=undefined,
    )


def check_pieces(pieces: Pieces, num_shards: int, num_microbatches: int) -> None:
    """Refuses what depends on the number of pieces for certain; warns of what does where they
    differ.

    Raises:
      ValueError: the loss is a sum over rows, or the model has state that shards of the batch do
        not agree on.
    """
    number = num_shards * num_microbatches
    cut = f"{number} pieces of {pieces.num_rows} rows (data shards x num_microbatches)"
    if pieces.is_sum and number > 1:
        raise ValueError(
            f"the loss is a sum over the rows that it is given, not their mean, and it is called "
            f"for each of {cut}: their mean is a {number}th of the sum over the batch, so loss and "
            "gradients would depend on the number of devices. Return the mean over the rows, or "
            "the sum and what to divide it by: return jnp.sum(losses), losses.size. "
            "zerojax.check names the line"
        )
    if pieces.is_ratio and number > 1:
        warnings.warn(
            f"the loss divides by a number that depends on the rows that it is given, and is "
            f"called for each of {cut}: the mean of such quotients is not the quotient over the "
            "batch where the divisors differ, as masks do. Return both instead of dividing: "
            "return loss_sum, weight. zerojax.check shows by how much it differs",
            RuntimeWarning,
            stacklevel=3,
        )
    if pieces.undefined and num_shards > 1:
        name, dtype = min(pieces.undefined.items())
        raise ValueError(
            f"the model's state {name} ({dtype}) depends on the rows of the batch, and not as a "
            f"count does, which is its old value plus a sum over rows: each of {num_shards} shards "
            "of the batch would have another value. Add to it, as in state + jnp.sum(...), or keep "
            "it in floating point, of which the mean over the shards is taken, or return the "
            f"number from the loss as a metric: return loss, {{{name.split('/')[-1]!r}: value}}. "
            "zerojax.check names the line"
        )


def describe_pieces(pieces: Pieces) -> list[str]:
    """What a plan over one piece says of what would be refused over more."""
    lines = []
    if pieces.is_sum:
        lines.append(
            "the loss is a sum over the rows of the batch: it is refused on more devices or with "
            "more microbatches, where its mean over pieces would be another number"
        )
    if pieces.undefined:
        lines.append(
            f"the model's state {min(pieces.undefined)} depends on the rows of the batch and is no "
            "count: it is refused on more data shards"
        )
    return lines
