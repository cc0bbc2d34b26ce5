"""Converts between the names of stacked layer parameters and the user's names, one for each row of
a stack.

This module handles names, shapes and trees of a state, never arrays; `zerojax.step.reshard`
converts arrays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from zerojax.config.late_dataclasses import dataclass
from zerojax.config.tree_types import Tree
from zerojax.placement.device_mesh import STAGE
from zerojax.placement.leaf_placement import LeafPlacement
from zerojax.placement.state_layout import OffloadLayout
from zerojax.placement.table import Placement

Stacks = Mapping[str, tuple[str, ...]]
"""{name of a stacked parameter: the user's names of its rows, in order}."""


@dataclass(frozen=True, eq=False)
class StackRows:
    """Rows of a stacked parameter, in place of the stacked array; a leaf for JAX's tree functions.

    Attributes:
      values: one value for each row, in order.
    """

    values: tuple[Any, ...]


class RowsDifferError(ValueError):
    """Error for rows of a stacked parameter that have different tree structures; the message states
    two rows."""


def users_names(name: str, stacks: Stacks) -> tuple[str, ...]:
    """Returns the user's names for a stored parameter: the names of all rows if it is a stack, else
    its own name."""
    return stacks.get(name, (name,))


def find_row(name: str, stacks: Stacks) -> tuple[str, int] | None:
    """Finds the stack that contains a parameter; returns (name of the stack, row index), or
    None."""
    for stack, rows in stacks.items():
        if name in rows:
            return stack, rows.index(name)
    return None


def group_rows(tree: Tree, stacks: Stacks) -> Tree:
    """Replaces the rows of each stack in a tree by one `StackRows` under the name of the stack.

    Args:
      tree: tree with the user's names; a dict in it has all rows of a stack or none.
      stacks: {name of a stacked parameter: the user's names of its rows}.

    Raises:
      RowsDifferError: rows of a stack have different tree structures, or some rows are missing.
    """
    stack_of = {name: stack for stack, names in stacks.items() for name in names}
    if not stack_of:
        return tree

    def group(node: Tree) -> Any:
        if not _has_any(node, stack_of):
            return node
        result: dict[str, Any] = {}
        for name, value in node.items():
            stack = stack_of.get(name)
            if stack is None:
                result[name] = value
            elif stack not in result:
                result[stack] = _joined(node, stack, stacks[stack])
        return result

    return jax.tree.map(group, tree, is_leaf=lambda node: _has_any(node, stack_of))


def ungroup_rows(
    tree: Tree, stacks: Stacks, row_of: Callable[[Any, int], Any] = lambda rows, i: rows.values[i]
) -> Tree:
    """Replaces each stack in a tree by its rows under the user's names; the inverse of
    `group_rows`.

    Args:
      tree: tree with the names of stacks.
      stacks: {name of a stacked parameter: the user's names of its rows}.
      row_of: function (leaf of a stack, row number) -> the row.
    """

    def ungroup(node: Tree) -> Any:
        if not _has_any(node, stacks):
            return node
        result: dict[str, Any] = {}
        for name, value in node.items():
            if name not in stacks:
                result[name] = value
                continue
            for index, row in enumerate(stacks[name]):
                result[row] = jax.tree.map(lambda leaf, index=index: row_of(leaf, index), value)
        return result

    return jax.tree.map(ungroup, tree, is_leaf=lambda node: _has_any(node, stacks))


def _has_any(node: Tree, names: Mapping[str, Any]) -> bool:
    return isinstance(node, dict) and any(name in names for name in node)


def _joined(node: Mapping[str, Any], stack: str, names: tuple[str, ...]) -> Tree:
    missing = [name for name in names if name not in node]
    if missing:
        raise RowsDifferError(f"{stack}: {missing[0]} is missing where {names[0]} is present")
    first = jax.tree.structure(node[names[0]])
    for name in names:
        if jax.tree.structure(node[name]) != first:
            raise RowsDifferError(f"{stack}: {names[0]} and {name} are stored in different forms")
    return jax.tree.map(lambda *values: StackRows(values), *(node[name] for name in names))


def row_structs(params: Mapping[str, Any], stacks: Stacks) -> dict[str, Any]:
    """Converts {stored name: struct} to {user's name: struct}; a stack becomes one entry for each
    row."""
    rows: dict[str, Any] = {}
    for name, x in params.items():
        shape = x.shape[1:] if name in stacks else x.shape
        rows |= dict.fromkeys(users_names(name, stacks), jax.ShapeDtypeStruct(shape, x.dtype))
    return rows


def row_placement(placement: Placement, stacks: Stacks) -> Placement:
    """Converts the placement table of stored parameters to the user's names, for checkpoints and
    resharding.

    Args:
      placement: placement table of the stored parameters.
      stacks: {name of a stacked parameter: the user's names of its rows}.
    """
    leaves: dict[str, LeafPlacement] = {}
    for name, leaf in placement.leaves.items():
        rows = {row: _row(leaf, row) for row in stacks[name]} if name in stacks else {name: leaf}
        leaves |= rows
    return dataclasses.replace(placement, leaves=leaves)


def _row(leaf: LeafPlacement, name: str) -> LeafPlacement:
    """Returns the placement of one row of a stack, in which `stage` splits one of the row's
    dimensions."""
    return dataclasses.replace(
        leaf,
        name=name,
        shape=leaf.shape[1:],
        stack_dims=max(leaf.stack_dims - 1, 0),
        mapped_dims=min(leaf.mapped_dims, max(leaf.stack_dims - 1, 0)),
        axes=leaf.axes[1:],
        layer_rows=None,
        is_row_of_stages=leaf.layer_rows is not None and STAGE not in leaf.zero_axes,
    )


def row_layout(layout: OffloadLayout, stacks: Stacks) -> OffloadLayout:
    """Converts an offload layout to the user's names; each row has the slices of its stack."""
    leaves = {
        row: leaf for name, leaf in layout.leaves.items() for row in users_names(name, stacks)
    }
    return dataclasses.replace(layout, leaves=leaves)
