"""Partition of a model's layers over pipeline stages."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

METHODS = ("uniform", "parameters", "flops")
"""By count, or by costs: which costs those are is the caller's."""


def partition_layers(
    method: str | Sequence[int],
    num_layers: int,
    num_parts: int,
    *,
    layer_cost: float = 1.0,
    embed_cost: float = 0.0,
    head_cost: float = 0.0,
) -> tuple[int, ...]:
    """The number of layers in each part, in the model's order.

    "parameters" and "flops" make the heaviest part as light as it can be, and of all ways that do
    so take the most even one: the fewest layers in the largest part, then in the second largest,
    and so on; of those that are left the one with its smaller parts last.

    Args:
      method: a name of `METHODS`, or the numbers themselves.
      num_layers: of the model; all are equal.
      num_parts: pipeline stages times chunks on each.
      layer_cost: of one layer, at least 0; of any unit.
      embed_cost: what the first part does besides, in the same unit.
      head_cost: what the last part does besides; with one part, the same part.

    Raises:
      ValueError: no such method; more parts than layers; "uniform" does not divide; a list that
        does not fit.

    >>> partition_layers("flops", 8, 4, head_cost=2.0)
    (3, 2, 2, 1)
    """
    if not isinstance(method, str):
        return _check_list(tuple(method), num_layers, num_parts)
    if method not in METHODS:
        near = difflib.get_close_matches(method, METHODS, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"use {', '.join(METHODS)} or a list"
        raise ValueError(f"partition={method!r} is not known; {hint}")
    if num_parts > num_layers:
        raise ValueError(
            f"{num_parts} parts (stages x chunks) for {num_layers} layers: each part needs at "
            f"least one; use at most {num_layers} parts, or more layers"
        )
    if method != "uniform":
        return _balance(num_layers, num_parts, layer_cost, embed_cost, head_cost)
    if num_layers % num_parts:
        divisors = [n for n in range(1, num_layers + 1) if num_layers % n == 0]
        near = " or ".join(str(n) for n in _around(divisors, num_parts))
        even = list(_even(num_layers, num_parts))
        raise ValueError(
            f"{num_layers} layers do not divide by {num_parts} parts (stages x chunks), which "
            f'partition="uniform" needs; use {near} parts, partition="flops", or a list such as '
            f"partition={even}"
        )
    return (num_layers // num_parts,) * num_parts


def _check_list(layers: tuple[int, ...], num_layers: int, num_parts: int) -> tuple[int, ...]:
    """The user's own numbers, if they fit."""
    example = ""
    if num_parts <= num_layers:
        example = f", such as {list(_even(num_layers, num_parts))}"
    if len(layers) != num_parts:
        raise ValueError(
            f"partition={list(layers)} has {len(layers)} entries for {num_parts} parts (stages x "
            f"chunks); give one for each{example}"
        )
    if min(layers) < 1:
        raise ValueError(
            f"partition={list(layers)} leaves a part without layers; give each at least 1{example}"
        )
    if sum(layers) != num_layers:
        raise ValueError(
            f"partition={list(layers)} has {sum(layers)} layers, and the model has {num_layers}; "
            f"the entries have to add up to {num_layers}{example}"
        )
    return layers


def _around(divisors: Sequence[int], number: int) -> list[int]:
    """The nearest divisors below and above a number that is none."""
    below = [n for n in divisors if n < number]
    above = [n for n in divisors if n > number]
    return below[-1:] + above[:1]


def _even(num_layers: int, num_parts: int) -> tuple[int, ...]:
    """As equal as can be, the larger ones first."""
    size, larger = divmod(num_layers, num_parts)
    return (size + 1,) * larger + (size,) * (num_parts - larger)


def _balance(
    num_layers: int, num_parts: int, layer: float, embed: float, head: float
) -> tuple[int, ...]:
    """See `partition_layers`.

    All parts between the first and the last are alike, so only how many layers these two have is
    searched for; the others are as equal as can be.
    """
    if num_parts == 1:
        return (num_layers,)
    best, found = None, ()
    for first in range(1, num_layers - num_parts + 2):
        middle_parts = num_parts - 2
        # Two parts leave no choice for the last; else it has what leaves the middle one layer each.
        least = 1 if middle_parts else num_layers - first
        for last in range(least, num_layers - first - middle_parts + 1):
            middle = _even(num_layers - first - last, middle_parts) if middle_parts else ()
            layers = (first, *middle, last)
            heaviest = max(embed + first * layer, head + last * layer, layer * max(layers))
            rank = (heaviest, sorted(layers, reverse=True), [-count for count in layers])
            if best is None or rank < best:
                best, found = rank, layers
    return found
