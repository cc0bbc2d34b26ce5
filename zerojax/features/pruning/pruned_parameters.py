"""Decides which parts of which parameters a run prunes. Knows names, shapes and the traced loss;
`zerojax.features.pruning.prune_masks` computes the masks."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Collection, Mapping

from zerojax.config import ConfigError, PruningConfig, PruningGroup
from zerojax.config.late_dataclasses import dataclass
from zerojax.optim.groups import is_matrix
from zerojax.placement.layer_stacks import Stacks, users_names
from zerojax.placement.leaf_placement import LeafPlacement
from zerojax.placement.table import Placement
from zerojax.tracing.matrix_uses import ParameterUse, find_matrix_uses
from zerojax.tracing.trace import ModelTrace
from zerojax.tracing.trees import SEPARATOR

_MOST_UNITS = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class PrunedLeaf:
    """Pruning of one stored parameter.

    Attributes:
      source: name of the parameter whose weights decide; another name for the bias of a kernel.
      unit_dims: dimensions of the source that number its units, without those of layers.
      own_dims: dimensions of this parameter that number the same units.
      layer_dims: number of leading dimensions that number layers, each pruned by itself.
      num_kept: number of units that each layer keeps.
      start_step: number of applied updates after which pruned weights are 0.
      rows: for a stack, whether each of its layers is pruned, in the model's order; None: all are.
    """

    source: str
    unit_dims: tuple[int, ...]
    own_dims: tuple[int, ...]
    layer_dims: int
    num_kept: int
    start_step: int
    rows: tuple[bool, ...] | None = None


def plan_pruning(
    config: PruningConfig,
    trace: ModelTrace,
    placement: Placement,
    stacks: Stacks,
) -> dict[str, PrunedLeaf]:
    """Finds the parameters that a run prunes: {stored name: its pruning}.

    Args:
      config: settings of the run.
      trace: trace of the loss, which shows the rows and heads of a parameter.
      placement: placement table.
      stacks: {stack of rolled layers: the user's names of its rows}.

    Raises:
      ConfigError: a group matches no parameter that it can prune, or one of another group.
    """
    leaves = {name: leaf for name, leaf in placement.leaves.items() if not leaf.frozen}
    shapes = {name: leaf.shape for name, leaf in placement.leaves.items()}
    uses = find_matrix_uses(trace.program.jaxpr, shapes)
    owner: dict[str, PruningGroup] = {}
    pruned: dict[str, PrunedLeaf] = {}
    for group in config.groups:
        matched = _matched(group, placement.leaves, stacks)
        for name, rows in matched.items():
            if name in owner:
                raise _refusal(
                    f"groups {owner[name].pattern!r} and {group.pattern!r} both match {name}; a "
                    "parameter may belong to one group: change a pattern",
                )
            owner[name] = group
            pruned[name] = leaf = _pruned(group, name, leaves[name], uses[name], rows)
            bias = _bias_of(name, leaf, leaves, group)
            if bias is not None:
                pruned[bias] = dataclasses.replace(leaf, own_dims=_last(leaves[bias], leaf))
    return {name: pruned[name] for name in placement.leaves if name in pruned}


def _matched(
    group: PruningGroup, leaves: Mapping[str, LeafPlacement], stacks: Stacks
) -> dict[str, tuple[bool, ...] | None]:
    """Returns {stored parameter: which of its rows a group prunes, None for all of them}."""
    found: dict[str, tuple[bool, ...] | None] = {}
    for name, leaf in leaves.items():
        names = users_names(name, stacks)
        rows = tuple(bool(re.search(group.pattern, each)) for each in names)
        if (
            leaf.frozen
            or not any(rows)
            or not is_matrix(names[0], len(leaf.shape) - leaf.stack_dims)
        ):
            continue
        found[name] = None if all(rows) else rows
    if found:
        return found
    raise _refusal(_why_none(group.pattern, leaves, stacks))


def _why_none(pattern: str, leaves: Mapping[str, LeafPlacement], stacks: Stacks) -> str:
    """Returns the reason for which a pattern matches no parameter that can be pruned."""
    frozen = {
        each: leaf.frozen for name, leaf in leaves.items() for each in users_names(name, stacks)
    }
    matched = [name for name in frozen if re.search(pattern, name)]
    if matched:
        why = "is frozen" if frozen[matched[0]] else "has fewer than two dimensions"
        what = f"matches {matched[0]}, which {why}, and no other parameter that can be pruned"
        return f"{pattern!r} {what}: change the pattern or remove the group"
    names = [name for name, is_frozen in frozen.items() if not is_frozen]
    near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3) or names[:3]
    return (
        f"{pattern!r} matches no parameter; similar names are {', '.join(near)}: correct the "
        "pattern or remove the group"
    )


def _pruned(
    group: PruningGroup,
    name: str,
    leaf: LeafPlacement,
    use: ParameterUse,
    rows: tuple[bool, ...] | None,
) -> PrunedLeaf:
    layers, ndim = leaf.stack_dims, len(leaf.shape)
    if group.unit == "weight":
        dims = tuple(range(layers, ndim))
    elif group.unit == "channel":
        if ndim - layers < 3:
            raise _refusal(
                f"{group.pattern!r} prunes channels, but {name} {list(leaf.shape)} has no "
                "dimensions besides inputs and outputs; use unit=row"
            )
        dims = (ndim - 1,)
    else:
        dims = _dims_of_product(group, name, leaf, use)
    units = math.prod(leaf.shape[dim] for dim in dims)
    if units > _MOST_UNITS:
        raise _refusal(
            f"{group.pattern!r} prunes {name}, of which a layer has {units:,} {group.unit}s; "
            f"at most {_MOST_UNITS:,} can be counted: use unit=row, or a pattern that leaves it out"
        )
    return PrunedLeaf(
        source=name,
        unit_dims=dims,
        own_dims=dims,
        layer_dims=layers,
        num_kept=math.ceil(group.dense_ratio * units),
        start_step=group.start_step,
        rows=rows,
    )


def _dims_of_product(
    group: PruningGroup, name: str, leaf: LeafPlacement, use: ParameterUse
) -> tuple[int, ...]:
    """Returns the dimensions of the rows or heads of a kernel, from the product that reads it."""
    product, layers = use.product, range(leaf.stack_dims)
    if product is None or {*layers, *product.rows, *product.columns} != {*range(len(leaf.shape))}:
        raise _refusal(
            f"{group.pattern!r} prunes {group.unit}s of {name}, but no single matrix product of "
            f"the loss shows its inputs and outputs; use unit=weight"
        )
    if group.unit == "row":
        return product.columns
    if len(product.rows) != 2:
        raise _refusal(
            f"{group.pattern!r} prunes heads of {name}, whose product sums over "
            f"{len(product.rows)} of the dimensions {list(leaf.shape)}; heads need the output "
            "projection of attention with shape [heads, features of a head, outputs]"
        )
    heads = leaf.shape[product.rows[0]]
    if group.num_heads not in (None, heads):
        raise _refusal(
            f"{group.pattern!r} has num_heads={group.num_heads}, but {name} {list(leaf.shape)} has "
            f"{heads} heads; use {heads}"
        )
    return product.rows[:1]


def _bias_of(
    name: str, pruned: PrunedLeaf, leaves: Mapping[str, LeafPlacement], group: PruningGroup
) -> str | None:
    """Returns the name of the bias that is added to the outputs of a kernel; None without one."""
    bias = SEPARATOR.join([*name.split(SEPARATOR)[:-1], "bias"])
    if group.unit not in ("row", "channel") or bias not in leaves:
        return None
    shape = leaves[name].shape
    wanted = (*shape[: pruned.layer_dims], *(shape[dim] for dim in pruned.unit_dims))
    return bias if leaves[bias].shape == wanted else None


def _last(bias: LeafPlacement, pruned: PrunedLeaf) -> tuple[int, ...]:
    return tuple(range(pruned.layer_dims, len(bias.shape)))


def describe_pruning(pruned: Mapping[str, PrunedLeaf], placement: Placement) -> list[str]:
    """Returns lines for the plan: the numbers of pruned parameters and of kept units, and the first
    step with zeros."""
    by_start: dict[int, list[str]] = {}
    for name, leaf in pruned.items():
        by_start.setdefault(leaf.start_step, []).append(name)
    lines = []
    for start, names in sorted(by_start.items()):
        kernels = [name for name in names if pruned[name].source == name]
        lines.append(
            f"pruning: {len(kernels)} parameters (such as {kernels[0]}) and "
            f"{len(names) - len(kernels)} of their biases are pruned from step {start + 1} on, by "
            f"the magnitudes of the initial weights; {kernels[0]} keeps "
            f"{pruned[kernels[0]].num_kept:,} of {_units(pruned[kernels[0]], placement):,} units "
            "of a layer; the masks take 1 byte per element"
        )
    return lines


def _units(leaf: PrunedLeaf, placement: Placement) -> int:
    shape = placement.leaves[leaf.source].shape
    return math.prod(shape[dim] for dim in leaf.unit_dims)


def masked_names(pruned: Collection[str], stacks: Stacks) -> frozenset[str]:
    """Returns the names of masks in a state with the user's names: all rows of a pruned stack."""
    return frozenset(each for name in pruned for each in users_names(name, stacks))


def _refusal(text: str) -> ConfigError:
    return ConfigError(text, ("pruning", "groups"))
