"""Exponential moving average (EMA) of the weights, stored in the optimizer's state.

After every update that is applied (`optax.MultiSteps` only accumulates in some of its calls) the
average becomes average + (1 - decay) (parameter - average), in float32 (Polyak and Juditsky, SIAM
J. Control Optim. 30, 1992; arXiv:1803.05407, section 3 for neural networks). It starts equal to the
weights. This module does not depend on how arrays are sharded.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, Self, get_args

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import GetAttrKey
from jax.typing import ArrayLike

from zerojax.config.late_dataclasses import dataclass
from zerojax.config.tree_types import Tree
from zerojax.tracing.trees import Unnamed

Weights = Literal["trained", "ema"]
"""Choice between the trained weights of a run and their average."""
EMA = "ema"
"""Name of the average in an optimizer's state and in checkpoints: "opt_state/ema/NAME"."""
COUNT = "ema_count"
"""Name of the count of averaged updates, next to `EMA` in the optimizer state."""


@dataclass(frozen=True, kw_only=True)
class Ema:
    """Decay and warm-up of an average of the weights.

    Attributes:
      decay: fraction of the average that each update keeps, in [0, 1).
      warmup: whether to limit the decay of update t, counted from 0, to (1 + t) / (10 + t), so that
        the average soon forgets the initial weights.
    """

    decay: float
    warmup: bool = True

    def __post_init__(self) -> None:
        number = isinstance(self.decay, int | float) and not isinstance(self.decay, bool)
        if not number or not 0 <= self.decay < 1:
            raise ValueError(
                f"ema decay={self.decay!r} must be in [0, 1); 0.999 is usual, which "
                "averages over about 1 / (1 - decay) updates"
            )

    def rate(self, count: ArrayLike) -> jax.Array:
        """Computes 1 - decay of the next update, float32 []; `count`: number of updates so far."""
        rate = jnp.float32(1 - self.decay)  # computed in double precision
        if not self.warmup:
            return rate
        # 9 / (10 + t) is 1 - (1 + t) / (10 + t) without the loss of digits.
        return jnp.maximum(rate, 9 / (10 + jnp.asarray(count, jnp.float32)))

    def describe(self) -> str:
        """Returns a one-line description for the log."""
        warmup = ", at most (1 + t) / (10 + t) at update t" if self.warmup else ""
        return (
            f"ema: a float32 average of the trained weights with decay {self.decay:g}{warmup}; "
            "weights='ema' evaluates and exports it"
        )


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class EmaState:
    """State of an optimizer together with an average of the parameters.

    The key `inner` does not appear in names of arrays, so the optimizer's own arrays have the same
    names with and without an average.

    Attributes:
      inner: state of the optimizer.
      count: int32 []; number of updates averaged.
      ema: averages, float32 arrays in the tree of the parameters.
    """

    inner: Tree
    count: Any
    ema: Tree

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any], ...], None]:
        """Returns the children with their keys, for JAX."""
        named = (GetAttrKey(COUNT), self.count), (GetAttrKey(EMA), self.ema)
        return ((Unnamed("inner"), self.inner), *named), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple[Any, Any, Any]) -> Self:
        """Builds the state from its children, for JAX."""
        return cls(*children)


def new_ema_state(inner: Tree, params: Tree) -> EmaState:
    """Returns the state before the first update: the average is a copy of the weights."""
    return EmaState(inner, jnp.zeros((), jnp.int32), jax.tree.map(as_average, params))


def as_average(param: jax.Array) -> jax.Array:
    """Copies a parameter to float32; a step donates parameter and average, so memory must
    differ."""
    return jnp.array(param, jnp.float32, copy=True)


def ema_of(opt_state: Tree) -> Mapping[str, Any] | None:
    """Returns {name: average} from an optimizer's state, or None if it has no average."""
    return opt_state.ema if isinstance(opt_state, EmaState) else None


def is_average(weights: Weights, opt_state: Tree) -> bool:
    """Checks a user's `weights` argument, and returns True if it is "ema".

    Args:
      weights: argument that the user passed.
      opt_state: optimizer state of the run.

    Raises:
      ValueError: `weights` is not valid, or it is "ema" and the state has no average.
    """
    check_weights(weights)
    if weights == "ema" and not isinstance(opt_state, EmaState):
        raise ValueError(
            "weights='ema', but the run stores no average of its weights; set optimizer.ema_decay "
            "(0.999 is usual) or pass optimizer=zerojax.with_ema(OPTIMIZER) before training, or "
            "use weights='trained'"
        )
    return weights == "ema"


def check_weights(weights: object) -> None:
    """Raises a ValueError if `weights` is neither "trained" nor "ema"."""
    if weights not in get_args(Weights):
        raise ValueError(f"weights={weights!r} is not valid; use 'trained' or 'ema'")


def around(
    init: Callable[..., Tree], update: Callable[..., tuple[Tree, Tree]], ema: Ema | None
) -> tuple[Callable[..., Tree], Callable[..., tuple[Tree, Tree]]]:
    """Extends a pair (init, update) with an average of the parameters; unchanged if `ema` is
    None."""
    if ema is None:
        return init, update

    def init_both(params: Tree) -> EmaState:
        return new_ema_state(init(params), params)

    def update_both(
        updates: Tree, state: EmaState, params: Tree = None, **extra: Any
    ) -> tuple[Tree, EmaState]:
        if params is None:
            raise ValueError("the ema needs the parameters: call update(gradients, state, params)")
        updates, inner = update(updates, state.inner, params, **extra)
        applied = _applied(state.inner, inner)
        rate = jnp.where(applied, ema.rate(state.count), 0)

        def move(average: jax.Array, new: jax.Array) -> jax.Array:
            return average + rate * (new.astype(jnp.float32) - average)

        moved = jax.tree.map(move, state.ema, optax.apply_updates(params, updates))
        count = jnp.where(applied, optax.safe_increment(state.count), state.count)
        return updates, EmaState(inner, count, moved)

    return init_both, update_both


def _applied(before: Tree, after: Tree) -> jax.Array | bool:
    """Returns whether an update changed the parameters: bool []; False while `optax.MultiSteps`,
    alone or in a chain, only accumulates gradients."""
    if isinstance(after, optax.MultiStepsState):
        return after.gradient_step != before.gradient_step
    if type(after) is not tuple:  # a tuple is the state of a chain
        return True
    return functools.reduce(jnp.logical_and, map(_applied, before, after), True)


class WithEma(optax.GradientTransformationExtraArgs):
    """Optax transformation that also keeps an average of the parameters in its state.

    Attributes:
      ema: decay and warm-up of the average.
    """

    ema: Ema

    def __new__(cls, tx: optax.GradientTransformation, ema: Ema) -> WithEma:
        inner = optax.with_extra_args_support(tx)
        self = super().__new__(cls, *around(inner.init, inner.update, ema))
        self.ema = ema
        return self
