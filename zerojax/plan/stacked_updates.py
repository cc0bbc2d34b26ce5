"""Runs an optimizer that was written for separate arrays on stacked layer parameters, as one
program for all rows of a stack.

An optax transformation is traced with the user's names. Operations that are equal for every row of
a stack run once, mapped over the rows. Operations that combine rows, such as a global norm, read
slices of the stack. This module handles transformations and names, not models or meshes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import optax

from zerojax.config.late_dataclasses import dataclass
from zerojax.config.tree_types import Tree
from zerojax.optim.padding import NotProven
from zerojax.placement.layer_stacks import StackRows, Stacks, group_rows, ungroup_rows
from zerojax.tracing.rolling import map_rows


@dataclass(frozen=True, eq=False)
class _Stored:
    """A stored array: a separate parameter, a stack of layers, or another array."""

    value: Any


@dataclass(frozen=True, eq=False)
class _RowOf:
    """One row of a stored stack of layers."""

    stack: _Stored
    row: int


def over_stacks(
    tx: optax.GradientTransformation, stacks: Stacks
) -> optax.GradientTransformationExtraArgs:
    """Returns a transformation of stacked parameters that applies `tx` to each row under the row's
    own name.

    Its state has the structure of `tx`'s state with stacks in place of rows. Parameters under other
    names than those of stacks, as in checkpoints, are passed to `tx` itself.

    Args:
      tx: any optax transformation whose state stores values of parameters in dicts of their names.
      stacks: {stacked parameter: the user's names of its rows}; stacks of frozen parameters may be
        included.

    Raises:
      RowsDifferError: raised by `init` and `update` of the result, if the state has rows of one
        stack in different structures.
    """
    inner = optax.with_extra_args_support(tx)
    run = _Mapped(stacks)

    def init(params: Tree) -> Tree:
        if not _is_stacked(params, stacks):
            return inner.init(params)
        return run("init", inner.init, (params,))

    def update(updates: Tree, state: Tree, params: Tree = None, **extra: Any) -> tuple[Any, Tree]:
        if not _is_stacked(updates, stacks):
            return inner.update(updates, state, params, **extra)
        if "layers" in extra:  # rows are separate arrays here, without a layer dimension
            extra["layers"] = frozenset(extra["layers"]) - stacks.keys()
        fixed = {name: x for name, x in extra.items() if not _is_arrays(x)}
        arrays = {name: x for name, x in extra.items() if name not in fixed}

        def plain(updates: Tree, state: Tree, params: Tree, arrays: Tree) -> tuple[Any, Tree]:
            return inner.update(updates, state, params, **arrays, **fixed)

        key = ("update", *sorted((name, _as_key(x)) for name, x in fixed.items()))
        return run(key, plain, (updates, state, params, arrays))

    return optax.GradientTransformationExtraArgs(init, update)


def _is_stacked(params: Tree, stacks: Stacks) -> bool:
    return isinstance(params, Mapping) and any(name in stacks for name in params)


def _is_arrays(tree: Tree) -> bool:
    return all(hasattr(leaf, "dtype") for leaf in jax.tree.leaves(tree))


def _as_key(value: object) -> Any:
    return tuple(sorted(value)) if isinstance(value, frozenset) else repr(value)


class _Mapped:
    """Runs the user's functions on stacked arrays; each function is traced once per set of
    shapes."""

    def __init__(self, stacks: Stacks) -> None:
        self._stacks = stacks
        self._made: dict[Any, tuple[Any, Any]] = {}

    def __call__(self, key: object, function: Callable[..., Tree], stored: tuple[Any, ...]) -> Tree:
        """Returns the result of `function(*stored)`, called with the user's names, with rows
        stacked again."""
        boxed = jax.tree.map(_Stored, stored)
        named = ungroup_rows(boxed, self._stacks, _RowOf)
        leaves, structure = jax.tree.flatten(named)
        groups: dict[_Stored, dict[int, int]] = {}
        others: dict[int, Any] = {}
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, _RowOf):
                groups.setdefault(leaf.stack, {})[leaf.row] = position
            else:
                others[position] = leaf.value
        structs = tuple(map(_struct, leaves))
        made = (key, structure, tuple((x.shape, x.dtype) for x in structs))
        if made not in self._made:
            tree = structure.unflatten(structs)
            self._made[made] = self._trace(function, tree, _in_order(groups))
        mapped, places = self._made[made]
        stacked, rest = mapped([box.value for box in groups], others)
        _check_rows(groups, mapped.outputs, stacked)
        return jax.tree.map(
            lambda place: stacked[place[0]] if isinstance(place, tuple) else rest[place],
            places,
            is_leaf=_is_place,
        )

    def _trace(
        self, function: Callable[..., Tree], structs: Tree, groups: list[tuple[int, ...]]
    ) -> tuple[Any, Any]:
        """Returns (the program mapped over rows, for each result its stack or its position)."""
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*structs)
        leaves, structure = jax.tree.flatten(shapes)
        positions = structure.unflatten(range(len(leaves)))
        found = group_rows(positions, self._stacks)
        outputs: list[tuple[int, ...]] = []

        def place(leaf: object) -> Any:
            if not isinstance(leaf, StackRows):
                return leaf
            outputs.append(leaf.values)
            return len(outputs) - 1, StackRows

        places = jax.tree.map(place, found)
        return map_rows(closed, groups, outputs), places


def _check_rows(
    groups: Mapping[_Stored, Mapping[int, int]],
    outputs: Sequence[Sequence[int]],
    stacked: Sequence[jax.Array],
) -> None:
    """Raises if a pipeline's stacks have empty rows and a result of the update has no such rows.

    Values computed from stacks have these rows as well; new arrays, such as moments, do not.

    Raises:
      NotProven: the caller then passes stacks without empty rows.
    """
    stored: dict[int, set[int]] = {}
    for box, rows in groups.items():
        stored.setdefault(len(rows), set()).add(box.value.shape[0])
    for rows, array in zip(outputs, stacked, strict=True):
        wanted = stored.get(len(rows), {len(rows)})
        if array.shape[0] not in wanted:
            raise NotProven(f"new arrays of {len(rows)} layers in stacks of {max(wanted)} rows")


def _is_place(place: object) -> bool:
    return isinstance(place, tuple) and bool(place) and place[-1] is StackRows


def _in_order(groups: Mapping[Any, Mapping[int, int]]) -> list[tuple[int, ...]]:
    """Returns, for each stack, the positions of its rows among the arrays of the tree, in row
    order.

    The arrays of the tree are sorted by name, in which 10 is before 2.
    """
    return [tuple(rows[row] for row in sorted(rows)) for rows in groups.values()]


def _struct(leaf: _Stored | _RowOf) -> jax.ShapeDtypeStruct:
    if isinstance(leaf, _RowOf):
        value = leaf.stack.value
        return jax.ShapeDtypeStruct(value.shape[1:], value.dtype)
    return jax.ShapeDtypeStruct(leaf.value.shape, leaf.value.dtype)
