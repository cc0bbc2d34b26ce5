"""Adapts a pair of functions `(init, apply)` as a `Model`.

All parameters are read before `apply` starts, not at their first use.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax

from zerojax.config.tree_types import Batch, Tree
from zerojax.models.given_arrays import check_no_torch
from zerojax.tracing import trees
from zerojax.tracing.protocol import NO_RULES, Arrays, Loss, OnRead, StepRule


class BoundFunction:
    """Function `apply` with bound parameters; `key` is the PRNG key of this forward pass, and
    `training` is False in evaluation."""

    def __init__(self, apply: Callable, params: Tree, key: jax.Array, *, training: bool):
        self._apply = apply
        self.params = params
        self.key = key
        self.training = training

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._apply(self.params, *args, **kwargs)


class FunctionModel:
    """Model of a pair `(init, apply)`; `init(key)`, or `init(key, batch)` if it has several
    arguments, returns the parameters.

    It has no extras (arrays that are not parameters).
    """

    kind = "functions"
    reads_lazily = False
    overwritten: frozenset[str] = frozenset()
    step_rules: Mapping[str, StepRule] = NO_RULES

    def __init__(self, init: Callable, apply: Callable):
        self.source = init, apply
        self._template: Tree = None

    def parameter_names(self) -> Any:
        return trees.names_like(self._template)

    def init(self, key: jax.Array, batch: Batch, loss: Loss) -> tuple[Arrays, Arrays]:
        make = self.source[0]
        takes_batch = len(inspect.signature(make).parameters) > 1
        params = make(key, batch) if takes_batch else make(key)
        # Only the structure is needed later, so no array is held.
        self._template = jax.tree.map(lambda leaf: 0, params)
        named = trees.flatten_names(params)
        for name, leaf in named.items():
            if not hasattr(leaf, "dtype") and not isinstance(leaf, int | float):
                raise TypeError(
                    f"init returned {leaf!r} at {name}, but every leaf of the parameters must be "
                    "an array; keep other values outside the tree, such as in a closure of apply"
                )
        check_no_torch(named)
        return named, {}

    def initial_arrays(self) -> tuple[Arrays, Arrays] | None:
        return None

    def run(
        self,
        params: Arrays,
        extras: Arrays,
        key: jax.Array,
        function: Callable[[Any], Any],
        *,
        train: bool = True,
        on_read: OnRead | None = None,
    ) -> tuple[Any, Arrays]:
        reads = on_read or {}
        values = {name: reads[name](v) if name in reads else v for name, v in params.items()}
        tree = trees.unflatten_like(self._template, values)
        return function(BoundFunction(self.source[1], tree, key, training=train)), extras

    def to_source(self, params: Arrays, extras: Arrays) -> Any:
        """Returns the tree of parameters that `apply` accepts."""
        return trees.unflatten_like(self._template, params)
