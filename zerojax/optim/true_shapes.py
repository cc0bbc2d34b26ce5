"""optax transformations on arrays of their true shapes where stored ones are padded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax

from zerojax.optim.state_leaves import map_state

Tree = Any
Convert = Callable[[str, jax.Array], jax.Array]
"""(name of a parameter, an array of one of its shapes) -> the array in the other shape."""


class OnTrueShapes(optax.GradientTransformationExtraArgs):
    """Takes and returns stored arrays, and computes on arrays of the true shapes.

    Leaves of the state that have a parameter's shape are stored as the parameter is; all others
    keep the shape that the transformation gives them.

    Attributes:
      inner: the transformation.
      owners: the state's tree; the name of a parameter where a leaf has its shape, else "".
    """

    inner: optax.GradientTransformationExtraArgs
    owners: Tree

    def __new__(
        cls,
        tx: optax.GradientTransformation,
        true: Mapping[str, jax.ShapeDtypeStruct],
        stored: Mapping[str, tuple[int, ...]],
        *,
        cut: Convert,
        pad: Convert,
    ) -> OnTrueShapes:
        """Wraps a transformation.

        Args:
          tx: the transformation.
          true: {name: the true shape and dtype} of all trained parameters.
          stored: {name: the stored shape}.
          cut: from the stored shape to the true one, traced.
          pad: back, with zeros.
        """
        inner = optax.with_extra_args_support(tx)
        state = jax.eval_shape(inner.init, dict(true))

        def owner(leaf: Any, name: str) -> str:
            return name if leaf.shape == true[name].shape else ""

        owners = map_state(inner, owner, state, {name: name for name in true})

        def cut_all(arrays: Mapping[str, Any]) -> dict[str, Any]:
            return {name: cut(name, x) for name, x in arrays.items()}

        def pad_state(state: Tree) -> Tree:
            return jax.tree.map(lambda name, x: pad(name, x) if name else x, owners, state)

        def init(params: Any) -> Tree:
            shapes = {name: getattr(x, "shape", None) for name, x in params.items()}
            if shapes != dict(stored):  # the canonical form, or optax's placeholders
                return inner.init(params)
            return pad_state(inner.init(cut_all(params)))

        def update(
            updates: Any, state: Tree, params: Any = None, **extra: Any
        ) -> tuple[dict[str, Any], Tree]:
            state = jax.tree.map(lambda name, x: cut(name, x) if name else x, owners, state)
            if "grad" in extra:
                extra["grad"] = cut_all(extra["grad"])
            params = None if params is None else cut_all(params)
            found, state = inner.update(cut_all(updates), state, params, **extra)
            new: Any = found
            return {name: pad(name, x) for name, x in new.items()}, pad_state(state)

        self = super().__new__(cls, init, update)
        self.inner, self.owners = inner, owners
        return self
