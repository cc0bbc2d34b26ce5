"""Defines `Model`, the protocol of models in every library: named arrays, and calls with other
arrays.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np
from jax.tree_util import Partial

from zerojax.config.tree_types import Batch

Arrays = dict[str, Any]
"""{name: array}, abstract or concrete."""
OnRead = Mapping[str, Callable[[Any], jax.Array]]
"""{parameter: function that is called at each read with its stored form and returns its value}."""
Loss = Callable[[Any, Any], Any]
"""`loss(model, batch)`; the docstring of `zerojax.train` lists the allowed results."""
ModelLike = Any
"""An `nnx.Module`, a factory `rngs -> nnx.Module`, a `linen.Module`, or a pair `(init, apply)`."""
Rule = Callable[[jax.Array, jax.Array], jax.Array]


class StepRule(NamedTuple):
    """Update of an extra (state of the model) from a count, once per optimizer step.

    Attributes:
      target: name of the extra (non-parameter array) that is updated.
      rule: update rule, defined at `zerojax.models.StepCount`.
      ndim: number of dimensions of the count in its module; in stacked layers the state has
        additional leading dimensions.
    """

    target: str
    rule: Rule
    ndim: int

    def apply(self, value: jax.Array, counts: jax.Array) -> Any:
        """Returns the next value of the target, computed from `counts`."""
        rule = self.rule
        for _ in range(np.ndim(counts) - self.ndim):
            rule = jax.vmap(rule)
        return rule(value, counts)


NO_RULES: Mapping[str, StepRule] = types.MappingProxyType({})


@runtime_checkable
class LazyArray(Protocol):
    """Array in files that are read on demand.

    Attributes:
      shape, dtype: shape and dtype of the complete array.
      is_stacked: whether dimension 0 counts layers that are stored separately, so that reading one
        at a time has no extra cost.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    is_stacked: bool

    def read(self, index: Sequence[tuple[int, int]]) -> np.ndarray:
        """Reads the part given by a range [first, end) for each dimension, into new memory."""
        ...


def on_batch(loss: Loss, batch: Batch) -> Partial:
    """Returns `function(model)` for `Model.run`, which calls the loss on the batch.

    The batch is in its leaves, so that a model that traces the function again knows the arrays.
    """
    return Partial(functools.partial(_call, loss), batch)


def _call(loss: Loss, batch: Batch, model: Any) -> Any:
    return loss(model, batch)


class Model(Protocol):
    """Internal form of every model, in whatever library it is written.

    Attributes:
      kind: kind of the user's model, for messages: "nnx module", "nnx factory", "pretrained model",
        "linen module", "functions".
      source: object that the user passed.
      reads_lazily: whether `on_read` runs where the model uses a parameter (True), or for all
        parameters before the model starts (False: a pair of functions has no point of use).
      overwritten: names of the extras (non-parameter arrays) that are replaced by their gradient,
        as in Flax's collection `_overwrite_with_gradient` (scales of 8-bit products); known after
        `init`.
      step_rules: {name of an extra that counts during a step: update that runs once per step}.
    """

    kind: str
    source: Any
    reads_lazily: bool

    @property
    def overwritten(self) -> frozenset[str]: ...

    @property
    def step_rules(self) -> Mapping[str, StepRule]: ...

    def parameter_names(self) -> Any:
        """Returns the user's pytree of parameters with names as leaves; call it after `init`.

        It has the structure that an optax optimizer gets in the user's own training loop.
        """
        ...

    def init(self, key: jax.Array, batch: Batch, loss: Loss) -> tuple[Arrays, Arrays]:
        """Returns new initial arrays, `({name: parameter}, {name: extra})`; can be traced.

        PRNG keys in extras (non-parameter arrays) are represented by their key data.
        """
        ...

    def initial_arrays(self) -> tuple[Arrays, Arrays] | None:
        """Returns the arrays of the user's model object; None if `init` must create them.

        The result contains every name. A parameter may be a `LazyArray`; a `ShapeDtypeStruct` marks
        an array that `init` has to create.
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
          function: usually the loss; its argument is an object that can be called like the user's
            model.
          train: whether to run in training mode; False switches dropout off and uses running
            averages, as the model defines it.
          on_read: {name: function of the stored value that returns the value the model reads}.

        Returns:
          (result of `function`, the new extras (non-parameter arrays)).
        """
        ...

    def to_source(self, params: Arrays, extras: Arrays) -> Any:
        """Returns a model of the user's own kind that holds these arrays."""
        ...
