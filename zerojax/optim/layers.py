"""Functions applied to each array, or to each layer of a stacked array."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

import jax

from zerojax.models import trees

Tree = Any


def map_layers(
    function: Callable[..., Any], layers: Container[str], first: Tree, *others: Tree
) -> Tree:
    """`jax.tree.map(function, first, *others)`; of leaves with names in `layers`, row by row."""
    named = {name: name in layers for name in trees.flatten_names(first)}

    def leaf(is_stack: bool, *arrays: jax.Array) -> Any:
        return (jax.vmap(function) if is_stack else function)(*arrays)

    return jax.tree.map(leaf, trees.unflatten_like(first, named), first, *others)
