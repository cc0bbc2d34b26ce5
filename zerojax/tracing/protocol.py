"""Defines the protocol `Model`: named arrays, and calls of the model with other arrays."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np

Arrays = dict[str, Any]
"""{name: array}, abstract or concrete."""
OnRead = Mapping[str, Callable[[Any], jax.Array]]
"""{name of a parameter: function of its stored form, called wherever the model reads it}."""
Loss = Callable[[Any, Any], Any]
"""`loss(model, batch)`; `zerojax.train` says what it may return."""
ModelLike = Any
"""An `nnx.Module`, a factory `rngs -> nnx.Module`, a `linen.Module`, or a pair `(init, apply)`."""
Rule = Callable[[jax.Array, jax.Array], jax.Array]


class StepRule(NamedTuple):
    """Update of an extra (state of the model) from a count, once per optimizer step.

    Attributes:
      target: name of the extra that is updated.
      rule: see `zerojax.models.StepCount`.
      ndim: dimensions of the count in its module; additional ones in the state are those of stacks.
    """

    target: str
    rule: Rule
    ndim: int

    def apply(self, value: Any, counts: Any) -> Any:
        """Returns the next value of the target from `counts`; dimensions of stacks come first."""
        rule = self.rule
        for _ in range(np.ndim(counts) - self.ndim):
            rule = jax.vmap(rule)
        return rule(value, counts)


NO_RULES: Mapping[str, StepRule] = types.MappingProxyType({})


@runtime_checkable
class LazyArray(Protocol):
    """Array in files, which are read on demand.

    Attributes:
      shape, dtype: of the whole array.
      is_stacked: whether dimension 0 counts layers that are stored separately, so that reading one
        at a time has no extra cost.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    is_stacked: bool

    def read(self, index: Sequence[tuple[int, int]]) -> np.ndarray:
        """Reads the part given by a range [first, end) for each dimension, into new memory."""
        ...


class Model(Protocol):
    """Internal form of every model, in whatever library it is written.

    Attributes:
      kind: kind of the user's model, for messages: "nnx module", "nnx factory", "pretrained model",
        "linen module", "functions".
      source: the user's own object.
      reads_lazily: whether `on_read` runs where the model uses a parameter (True), or for all
        parameters before the model starts (False: a pair of functions has no point of use).
      overwritten: names of the extras whose gradient is their new value, as in Flax's collection
        `_overwrite_with_gradient` (scales of 8-bit products); known after `init`.
      step_rules: {name of an extra that counts in a step: its update once per step}.
    """

    kind: str
    source: Any
    reads_lazily: bool

    @property
    def overwritten(self) -> frozenset[str]: ...

    @property
    def step_rules(self) -> Mapping[str, StepRule]: ...

    def parameter_names(self) -> Any:
        """Returns the user's tree of the parameters, with names for leaves; after `init`.

        In the user's own training loop, an optax optimizer would get a tree of this structure.
        """
        ...

    def init(self, key: jax.Array, batch: Any, loss: Loss) -> tuple[Arrays, Arrays]:
        """Returns new arrays, `({name: parameter}, {name: extra})`; can be traced.

        Extras hold PRNG keys as key data.
        """
        ...

    def initial_arrays(self) -> tuple[Arrays, Arrays] | None:
        """Returns the arrays of the user's model object; None if `init` must create them.

        Every name is present. A parameter may be a `LazyArray`; a `ShapeDtypeStruct` stands for an
        array that `init` has to create.
        """
        ...

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
        """Calls `function(model)` with these arrays bound into the model.

        Args:
          params: {name: array, or the pytree that `on_read[name]` takes}.
          extras: {name: array}.
          key: typed PRNG key of this call; every random stream of the model is folded with it.
          function: usually a loss; gets an object to call like the user's model.
          train: False switches dropout off and uses running averages, as the model itself defines.
          on_read: {name: function of the stored value that returns the value the model reads}.

        Returns:
          (result of `function`, the new extras).
        """
        ...

    def to_source(self, params: Arrays, extras: Arrays) -> Any:
        """Returns a model of the user's own kind that holds these arrays."""
        ...
