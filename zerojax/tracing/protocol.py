"""The `Model` protocol: arrays, and a call with other arrays."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np

Arrays = dict[str, Any]
OnRead = Mapping[str, Callable[[Any], jax.Array]]
Loss = Callable[[Any, Any], Any]
ModelLike = Any
Rule = Callable[[jax.Array, jax.Array], jax.Array]


class StepRule(NamedTuple):
    """What becomes of a count once per step.

    Attributes:
      target: name of the extra that is made anew.
      rule: as `zerojax.models.StepCount` has it.
      ndim: dimensions of the count in its module; more in the state are those of stacks.
    """

    target: str
    rule: Rule
    ndim: int

    def apply(self, value: Any, counts: Any) -> Any:
        """The next value of the target, of arrays with the dimensions of stacks before others."""
        rule = self.rule
        for _ in range(np.ndim(counts) - self.ndim):
            rule = jax.vmap(rule)
        return rule(value, counts)


NO_RULES: Mapping[str, StepRule] = types.MappingProxyType({})


@runtime_checkable
class LazyArray(Protocol):
    """An array that lies in files until somebody asks for a part of it.

    Attributes:
      shape, dtype: of the whole array.
      is_stacked: dimension 0 counts layers that are stored apart, so that reading one at a time
        costs nothing.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    is_stacked: bool

    def read(self, index: Sequence[tuple[int, int]]) -> np.ndarray:
        """The box with the range (first, behind the last) in each dimension, in new memory."""
        ...


class Model(Protocol):
    """The internal form of every model.

    Attributes:
      kind: what the user gave, for people: "nnx module", "nnx factory", "pretrained model",
        "linen module", "functions".
      source: the user's own object.
      reads_lazily: whether `on_read` runs where the model uses a parameter (True), or for all
        parameters before the model starts (False: a pair of functions has no point of use).
      overwritten: names of the extras whose gradient is their new value, as Flax means by its
        collection `_overwrite_with_gradient` (scales of 8-bit products); known after `init`.
      step_rules: {name of an extra that passes count in: what becomes of it once per step}.
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

        It is what an optimizer of optax is given in a loop of the user's own.
        """
        ...

    def init(self, key: jax.Array, batch: Any, loss: Loss) -> tuple[Arrays, Arrays]:
        """New arrays, traceable: `({name: parameter}, {name: extra})`.

        Extras hold PRNG keys as key data.
        """
        ...

    def initial_arrays(self) -> tuple[Arrays, Arrays] | None:
        """The arrays that the user's object already holds, or None when `init` has to make them.

        Every name is there; a parameter may be a `LazyArray`, and a `ShapeDtypeStruct` stands for
        an array that `init` has to make after all.
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
          params: {name: array, or whatever pytree `on_read[name]` takes}.
          extras: {name: array}.
          key: typed PRNG key of this call; every random stream of the model is folded with it.
          function: usually a loss; gets an object to call like the user's model.
          train: False switches dropout off and uses running averages, as the model itself defines.
          on_read: per name, what the model gets when it reads that parameter.

        Returns:
          (what `function` returned, the extras afterwards).
        """
        ...

    def to_source(self, params: Arrays, extras: Arrays) -> Any:
        """The user's kind of object holding these arrays."""
        ...
