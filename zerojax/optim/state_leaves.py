"""Leaves of an optimizer's state that belong to each parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax

from zerojax.optim.optimizer import coding_of

Tree = Any


def map_state(
    tx: optax.GradientTransformation,
    function: Callable[[Any, Any], Any],
    state: Tree,
    of_params: Mapping[str, Any],
    *,
    others: Callable[[Any], Any] = lambda _: "",
) -> Tree:
    """A function of each leaf that belongs to a parameter and of something of that parameter.

    A parameter that a part of the optimizer leaves to another part has no leaf there.

    Args:
      tx: the optimizer.
      function: (leaf, value of `of_params`) -> what takes its place.
      state: in its canonical form, or what has its structure.
      of_params: {name of a parameter: anything}.
      others: of each leaf that belongs to no parameter.
    """
    coding = coding_of(tx)
    init = tx.init if coding is None else coding.canonical_init
    try:
        return optax.tree_utils.tree_map_params(
            init,
            lambda leaf, of_param: leaf if _is_masked(leaf) else function(leaf, of_param),
            state,
            dict(of_params),
            transform_non_params=others,
            is_leaf=_is_masked,
        )
    except Exception:
        # optax calls `init` with placeholders, and one that asks for their shapes fails
        # (`optax.sm3`). Such a state is searched for dicts of parameters' names.
        return _map_by_names(function, state, of_params, others)


def _map_by_names(
    function: Callable[[Any, Any], Any],
    state: Tree,
    of_params: Mapping[str, Any],
    others: Callable[[Any], Any],
) -> Tree:
    def is_named(node: Any) -> bool:
        return isinstance(node, dict) and bool(node) and node.keys() <= of_params.keys()

    def of_node(node: Any) -> Any:
        if not is_named(node):
            return others(node)
        return {
            name: jax.tree.map(lambda leaf, name=name: function(leaf, of_params[name]), part)
            for name, part in node.items()
        }

    return jax.tree.map(of_node, state, is_leaf=is_named)


def _is_masked(leaf: Any) -> bool:
    return isinstance(leaf, optax.MaskedNode)
