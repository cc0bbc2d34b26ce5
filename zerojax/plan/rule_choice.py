"""Chooses the dimensions of parameters that tensor parallelism splits, and counts the all-reduces
that follow."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jax.extend.core import Jaxpr

from zerojax.config.late_dataclasses import dataclass
from zerojax.tracing.splitting import DimGroup, DimGroups, gradient_program

Kind = Literal["column", "row", "vocabulary", "follows", "whole"]
SMALL_SHARE = 0.01
"""A vocabulary is not split if that saves less than this share of all weights: a table of positions
or token types would cost an all-reduce of activations and save next to nothing."""
_SEVERAL = ("is cut by `split`", "is cut by `slice`")
"""Reasons why matrices are not split that contain several matrices, such as queries, keys and
values in one."""
_SUMMED = "is used with values that are not split"


@dataclass(frozen=True, kw_only=True)
class SplitChoice:
    """The dimension of a parameter that tensor parallelism splits, or the reason why it is not
    split.

    Attributes:
      dim: dimension that is split; None: the parameter is not split.
      kind: how the parameter takes part in the split.
      why: sentence with the reason, in which {} stands for `partner`.
      partner: name of the other parameter in `why`; None if there is none.
      forward_bytes, backward_bytes: bytes of the results that one device all-reduces in one
        microbatch.
      forward_sums, backward_sums: number of these all-reduces.
    """

    dim: int | None
    kind: Kind
    why: str
    partner: str | None = None
    forward_bytes: int = 0
    backward_bytes: int = 0
    forward_sums: int = 0
    backward_sums: int = 0


def choose_splits(
    forward: Jaxpr,
    params: Mapping[str, Any],
    state: Sequence[str],
    batch: Sequence[str],
    *,
    trained: set[str],
    degree: int,
    added_first: bool,
) -> dict[str, SplitChoice]:
    """Chooses which dimension of each parameter is split over `degree` devices.

    Dimensions that must be split together form a group. Groups that share parameters compete: the
    group is chosen that splits the most weights per byte all-reduced in the forward pass. A group
    that is best for the model's structure but cannot be split stays unsplit, and no costlier group
    replaces it.

    Args:
      forward: traced loss of one microbatch; its inputs are `params`, `state` and `batch`.
      params: {name: abstract array}.
      state, batch: names of the other inputs.
      trained: names of the parameters that have gradients.
      degree: number of devices.
      added_first: whether the compiler adds results of products before it all-reduces their sum.
    """
    groups = DimGroups(forward.jaxpr, list(params), state, batch)
    sizes = {n: math.prod(p.shape) * p.dtype.itemsize for n, p in params.items()}
    candidates = [group for group in groups.find() if group.columns or group.tables]
    chosen: list[DimGroup] = []
    refused: dict[str, str] = {}
    for group in _competing(candidates, groups, sizes):
        why = _why_whole(group, sizes, degree)
        if why is None:
            chosen.append(group)
        else:
            refused |= dict.fromkeys(group.dims, why)
    for group in candidates:
        if group.inputs or group.is_part:
            why = _why_whole(group, sizes, degree)
            refused = dict.fromkeys(group.columns, why or _SUMMED) | refused
    found = {name: _role(group, name) for group in chosen for name in group.dims}
    for name in params:
        if name not in found:
            found[name] = SplitChoice(dim=None, kind="whole", why=refused.get(name, _SUMMED))
    places = [place for place, name in enumerate(params) if name in trained]
    program = gradient_program(forward, places)
    outputs = [name for name in params if name in trained]
    both = DimGroups(program, list(params), state, batch, outputs=outputs)
    own = _by_parameter(groups, groups, chosen, added_first)
    total = _by_parameter(groups, both, chosen, added_first)
    return {
        name: dataclasses.replace(
            found[name],
            forward_bytes=own[name][0],
            backward_bytes=max(total[name][0] - own[name][0], 0),
            forward_sums=own[name][1],
            backward_sums=max(total[name][1] - own[name][1], 0),
        )
        for name in params
    }


def _competing(
    candidates: Sequence[DimGroup], groups: DimGroups, sizes: Mapping[str, int]
) -> list[DimGroup]:
    """Returns groups that can be split together, because they share no parameter and no value, the
    best first.

    Groups of dimensions that the batch also has, and parts of heads, are never split.
    """
    candidates = [group for group in candidates if not group.inputs and not group.is_part]

    def cost(group: DimGroup) -> float:
        summed = sum(one.num_bytes * one.times for one in group.sums)
        return summed / sum(map(sizes.__getitem__, group.dims))

    taken: list[DimGroup] = []
    for group in sorted(candidates, key=cost):
        shared = any(group.dims.keys() & other.dims.keys() for other in taken)
        if not shared and not any(groups.meet(group.factor, other.factor) for other in taken):
            taken.append(group)
    return taken


def _why_whole(group: DimGroup, sizes: Mapping[str, int], degree: int) -> str | None:
    """Returns the reason why a group of dimensions is not split; None if it is."""
    if group.inputs:
        return f"its dimension of size {group.size} is shared with {group.inputs[0]}"
    if group.obstacles:
        why = group.obstacles[0]
        remedy = "; use a separate parameter for each part" if why in _SEVERAL else ""
        return f"its dimension of size {group.size} {why}{remedy}"
    if group.size % degree:
        fitting = [n for n in range(2, degree) if group.size % n == 0]
        use = f"use model={fitting[-1]}" if fitting else "no smaller size divides it either"
        return (
            f"its dimension has {group.size} parts (key/value heads in attention), which "
            f"model={degree} does not divide; {use}"
        )
    if group.rows:
        return None
    if group.tables and not group.by_batch and not group.columns:
        return "its rows are looked up by positions or constants, not by the batch"
    share = sum(map(sizes.__getitem__, group.dims)) / sum(sizes.values())
    if share < SMALL_SHARE:
        return f"it is {share:.1%} of all weights, too few to be worth an all-reduce"
    return None


def _by_parameter(
    forward: DimGroups, program: DimGroups, chosen: Sequence[DimGroup], added_first: bool
) -> dict[str, tuple[int, int]]:
    """Counts the all-reduces that the products of each parameter cause.

    Args:
      forward: groups of dimensions in the forward pass.
      program: groups of dimensions in the program whose all-reduces count.
      chosen: groups of the forward pass that are split.
      added_first: whether the compiler adds results of products before it all-reduces their sum.

    Returns:
      {parameter: (bytes, number of all-reduces)}.
    """
    found = collections.defaultdict(lambda: (0, 0))
    of_factor: dict[int, DimGroup] = {}
    for group in chosen:
        for name, dim in group.dims.items():
            factor = group.factor if program is forward else program.group_at(name, dim)
            of_factor.setdefault(factor, group)  # type: ignore[arg-type]
    for factor, one in program.totals(of_factor, added_first=added_first):
        group = of_factor[factor]
        main = _first(group, group.rows or group.columns or group.tables)
        name = next((name for name in group.dims if name in one.weights), main)
        size, number = found[name]
        found[name] = size + round(one.num_bytes * one.times), number + round(one.times)
    return found


def _role(group: DimGroup, name: str) -> SplitChoice:
    """Returns the choice, without its costs, for a parameter in a group that is split."""
    make = functools.partial(SplitChoice, dim=group.dims[name])
    if name in group.rows:
        why = "sums over split features: an all-reduce of its result follows"
        return make(kind="row", why=why)
    if name in group.tables:
        reduced = "; the loss reduces the split output" if name in group.columns else ""
        why = f"each device looks up its own rows, then an all-reduce follows{reduced}"
        return make(kind="vocabulary", why=why)
    parts = f"its output is split into up to {group.size} parts"
    if name in group.columns and group.rows:
        partner = _first(group, group.rows)
        return make(kind="column", why=f"{parts}, which {{}} sums over", partner=partner)
    if name in group.columns:
        return make(kind="vocabulary", why=f"{parts}, which the loss reduces")
    partner = _first(group, group.columns | group.tables)
    return make(kind="follows", why="is combined with the split output of {}", partner=partner)


def _first(group: DimGroup, names: frozenset[str]) -> str:
    return next(name for name in group.dims if name in names)
