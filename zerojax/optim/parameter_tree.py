"""Converts between parameters by name and the user's own tree, for optimizers.

zerojax keeps parameters in one dict by name ("backbone/kernel"). Optimizers of optax use nested
trees: masks, labels and learning rates are functions of such a tree. Optimizers therefore receive
the model's own tree, and their states are converted back to dicts by name for storage.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import jax
import optax

from zerojax.config.tree_types import Tree

_MISSING = object()


class ParameterTree:
    """Conversion between parameters by name and the tree of the user's model.

    Attributes:
      names: the user's tree, with the name of the parameter at each leaf.
      is_flat: whether the user's tree is itself a dict by name, so that both forms are the same.
    """

    def __init__(self, names: Tree):
        self.names = names
        self._all = frozenset(_names(names))
        self.is_flat = isinstance(names, str) or names == {name: name for name in self._all}

    def holds(self, arrays: object) -> bool:
        """Returns whether `arrays` is a dict by name whose names all belong to this tree."""
        return isinstance(arrays, Mapping) and bool(arrays) and arrays.keys() <= self._all

    def nest(self, by_name: Mapping[str, Any]) -> Tree:
        """Converts values by name to the user's tree.

        Parameters missing from `by_name`, such as frozen ones, are left out of dicts; in other
        containers `optax.MaskedNode` replaces them.
        """
        return {} if (tree := _nest(self.names, by_name)) is _MISSING else tree

    def by_name(self, tree: Tree, names: Collection[str]) -> dict[str, Any]:
        """Converts a tree of values like the user's, or a prefix of it, to {name: value}.

        A value above several parameters, as in a mask `{"backbone": True}`, applies to all of them.

        Raises:
          ValueError, KeyError: the entries of the tree do not match the parameters, or one of
            `names` has no value.
        """
        values = dict(_values(tree, self.names))
        return {name: values[name] for name in names}

    def choice_by_name(self, choice: Tree) -> Any:
        """Converts a mask or similar argument for the user's tree to a function of a dict by name.

        Args:
          choice: a tree such as a mask; a function from the user's tree to such a tree; or None,
            which is returned unchanged.
        """
        if choice is None:
            return None

        def of_names(params: Tree) -> Any:
            nested = self.nest(params) if self.holds(params) else params
            chosen = choice(nested) if callable(choice) else choice
            if nested is params or (isinstance(chosen, Mapping) and chosen.keys() == params.keys()):
                return chosen
            try:
                return self.by_name(chosen, params)
            except (ValueError, KeyError):  # the caller raises an error for the unconverted result
                return chosen

        return of_names

    def state_by_name(self, state: Tree) -> Tree:
        """Converts each tree of parameters in an optimizer's state to a dict by name."""
        if _is_part(state, self.names):
            return dict(_values(state, self.names))
        children, structure = _children(state)
        if not children:
            return state
        return jax.tree.unflatten(structure, [self.state_by_name(child) for child in children])

    def nest_state(self, state: Tree) -> Tree:
        """Converts each dict by name in an optimizer's state to the user's tree."""
        nest = lambda part: self.nest(part) if self.holds(part) else part  # noqa: E731
        return jax.tree.map(nest, state, is_leaf=self.holds)


class OnParameterTree(optax.GradientTransformationExtraArgs):
    """Transformation of dicts by name that calls another transformation with the user's tree.

    Attributes:
      ema: average settings of the inner transformation, if it has one (`zerojax.with_ema`).
    """

    ema: Any

    def __new__(cls, tx: optax.GradientTransformation, tree: ParameterTree) -> OnParameterTree:
        inner = optax.with_extra_args_support(tx)
        nesters: dict[Any, Callable[[Tree], Tree]] = {}

        def nest_state(state: Tree, arrays: Mapping[str, Any]) -> Tree:
            structs = {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in arrays.items()}
            # The structure of a state can depend on all of these.
            key = tuple((name, x.shape, x.dtype) for name, x in structs.items())
            if key not in nesters:
                nesters[key] = _nester(jax.eval_shape(inner.init, tree.nest(structs)), tree)
            return nesters[key](state)

        def init(params: Tree) -> Tree:
            if not tree.holds(params):  # optax's placeholders
                return inner.init(params)
            return tree.state_by_name(inner.init(tree.nest(params)))

        def update(
            updates: Tree, state: Tree, params: Tree = None, **extra: Any
        ) -> tuple[dict[str, Any], Tree]:
            state = nest_state(state, updates if params is None else params)
            names = [*updates]
            extra = {k: tree.nest(x) if tree.holds(x) else x for k, x in extra.items()}
            params = None if params is None else tree.nest(params)
            new, state = inner.update(tree.nest(updates), state, params, **extra)
            return tree.by_name(new, names), tree.state_by_name(state)

        self = super().__new__(cls, init, update)
        self.ema = getattr(tx, "ema", None)
        return self


def _nester(nested: Tree, tree: ParameterTree) -> Callable[[Tree], Tree]:
    """Builds the inverse of `state_by_name` for states with the structure of `nested`."""
    structure = jax.tree.structure(nested)
    # The leaves are numbered, because a dict by name has them in another order than the user's
    # tree.
    numbers = tree.state_by_name(structure.unflatten(range(structure.num_leaves)))
    place_of = {number: place for place, number in enumerate(jax.tree.leaves(numbers))}

    def nest(state: Tree) -> Tree:
        leaves = jax.tree.leaves(state)
        return structure.unflatten([leaves[place_of[n]] for n in range(structure.num_leaves)])

    return nest


def _children(node: Tree) -> tuple[list[Any], Any]:
    """Returns the children and the structure of one tree node; no children for a leaf."""
    # Every node but the root counts as a leaf, so that only one level is flattened.
    children, structure = jax.tree.flatten(node, is_leaf=lambda part: part is not node)
    is_leaf = len(children) == 1 and children[0] is node
    return ([], None) if is_leaf else (children, structure)


def _names(node: Tree) -> Iterator[str]:
    return iter(jax.tree.leaves(node))


def _nest(node: Tree, by_name: Mapping[str, Any]) -> Any:
    if isinstance(node, str):
        return by_name.get(node, _MISSING)
    if isinstance(node, dict):
        parts = {key: _nest(child, by_name) for key, child in node.items()}
        parts = {key: part for key, part in parts.items() if part is not _MISSING}
        return parts or _MISSING
    children, structure = _children(node)
    parts = [_nest(child, by_name) for child in children]
    if all(part is _MISSING for part in parts):
        return _MISSING
    masked = optax.MaskedNode()
    return structure.unflatten([masked if part is _MISSING else part for part in parts])


def _is_container_like(tree: Tree, node: Tree) -> bool:
    """Returns whether `tree` has the same structure as `node`, one level deep.

    A dict matches a dict of names that has all of its keys (keys may be missing in `tree`). Other
    containers match if they have the same type and number of children, not 0. A leaf never matches.
    """
    if isinstance(node, dict):
        return isinstance(tree, Mapping) and tree.keys() <= node.keys()
    children, structure = _children(tree)
    return bool(children) and structure == _children(node)[1]


def _is_part(state: Tree, node: Tree) -> bool:
    """Returns whether a part of an optimizer's state is a tree of all or of some parameters."""
    if isinstance(node, str) or not _is_container_like(state, node) or not _children(state)[0]:
        return False

    def fits(part: Tree, node: Tree) -> bool:
        if isinstance(node, str) or isinstance(part, optax.MaskedNode):
            return True
        return _is_container_like(part, node) and all(fits(*pair) for pair in _pairs(part, node))

    return all(fits(*pair) for pair in _pairs(state, node))


def _pairs(tree: Tree, node: Tree) -> list[tuple[Any, Any]]:
    if isinstance(node, dict):
        return [(part, node[key]) for key, part in tree.items()]
    return list(zip(_children(tree)[0], _children(node)[0], strict=True))


def _values(tree: Tree, node: Tree) -> Iterator[tuple[str, Any]]:
    if isinstance(node, str):
        yield node, tree
    elif _is_container_like(tree, node) and not isinstance(tree, optax.MaskedNode):
        for pair in _pairs(tree, node):
            yield from _values(*pair)
    # A named tuple may be a value itself, such as `MuonDimensionNumbers`.
    elif isinstance(tree, Mapping | list | tuple) and not hasattr(tree, "_fields"):
        raise ValueError(
            f"{tree!r:.100} does not match the tree of the parameters {node!r:.100}; use the "
            "same containers and keys, or one value in place of a whole subtree"
        )
    else:
        for name in _names(node):
            yield name, tree
