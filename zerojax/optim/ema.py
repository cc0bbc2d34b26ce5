"""Exponential moving average of the weights, kept beside an optimizer's state.

average + (1 - decay) (parameter - average) after every update that is applied, in float32 (Polyak
and Juditsky, SIAM J. Control Optim. 30, 1992; arXiv:1803.05407, section 3 for neural networks). It
begins as the weights. Knows states of optimizers, not how arrays lie on devices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, Self, get_args

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import GetAttrKey

from zerojax.models.trees import Unnamed

Tree = Any
Weights = Literal["trained", "ema"]
"""Which of the weights of a run: as the optimizer has left them, or their average."""
EMA = "ema"
"""The average among an optimizer's moments, and in names of a checkpoint: "opt_state/ema/NAME"."""
COUNT = "ema_count"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ema:
    """How fast an average follows the weights.

    Attributes:
      decay: part of the average that stays, in [0, 1).
      warmup: whether update t, from 0, decays by at most (1 + t) / (10 + t), so that an average
        soon forgets the weights that it began with.
    """

    decay: float
    warmup: bool = True

    def __post_init__(self) -> None:
        number = isinstance(self.decay, int | float) and not isinstance(self.decay, bool)
        if not number or not 0 <= self.decay < 1:
            raise ValueError(
                f"ema decay={self.decay!r} has to be a number in [0, 1); 0.999 is usual, and an "
                "average over about 1 / (1 - decay) updates"
            )

    def rate(self, count: Any) -> jax.Array:
        """float32 []: 1 - the decay of the update that follows `count` averaged ones."""
        rate = jnp.float32(1 - self.decay)  # taken in double precision
        if not self.warmup:
            return rate
        return jnp.maximum(rate, 9 / (10 + jnp.asarray(count, jnp.float32)))

    def describe(self) -> str:
        """One line for people."""
        warmup = ", at most (1 + t) / (10 + t) at update t" if self.warmup else ""
        return (
            f"ema: a float32 average of the trained weights with decay {self.decay:g}{warmup}; "
            "weights='ema' evaluates and exports it"
        )


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class EmaState:
    """An optimizer's state with an average of its parameters.

    In names of arrays `inner` has no part of its own, so that those of the optimizer are the same
    with an average and without.

    Attributes:
      inner: the state of the optimizer.
      count: int32 []; updates averaged.
      ema: float32 arrays in the tree of the parameters.
    """

    inner: Any
    count: Any
    ema: Any

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any], ...], None]:
        """For JAX: children with their keys."""
        named = (GetAttrKey(COUNT), self.count), (GetAttrKey(EMA), self.ema)
        return ((Unnamed("inner"), self.inner), *named), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple[Any, Any, Any]) -> Self:
        """For JAX: the inverse."""
        return cls(*children)


def new_ema_state(inner: Tree, params: Tree) -> EmaState:
    """The state before the first update: the average is the weights, in arrays of its own."""
    return EmaState(inner, jnp.zeros((), jnp.int32), jax.tree.map(as_average, params))


def as_average(param: jax.Array) -> jax.Array:
    """A float32 copy: a step donates parameter and average, which must not share memory."""
    return jnp.array(param, jnp.float32, copy=True)


def ema_of(opt_state: Tree) -> Mapping[str, Any] | None:
    """{name: average} in an optimizer's state; None where it has none."""
    return opt_state.ema if isinstance(opt_state, EmaState) else None


def is_average(weights: Weights, opt_state: Tree) -> bool:
    """Whether the average is asked for.

    Args:
      weights: as a user gives them; opt_state: of the run.

    Raises:
      ValueError: other weights, or an average where there is none.
    """
    check_weights(weights)
    if weights == "ema" and not isinstance(opt_state, EmaState):
        raise ValueError(
            "weights='ema', and the run keeps no average of its weights; set optimizer.ema_decay "
            "(0.999 is usual) or give optimizer=zerojax.with_ema(OPTIMIZER) before it trains, or "
            "use weights='trained'"
        )
    return weights == "ema"


def check_weights(weights: Any) -> None:
    """Raises ValueError for what is neither "trained" nor "ema"."""
    if weights not in get_args(Weights):
        raise ValueError(f"weights={weights!r} is not valid; use 'trained' or 'ema'")


def around(
    init: Callable[..., Tree], update: Callable[..., tuple[Tree, Tree]], ema: Ema | None
) -> tuple[Callable[..., Tree], Callable[..., tuple[Tree, Tree]]]:
    """`init` and `update` of optax's form with an average in their state; None: as they are."""
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
        rate = ema.rate(state.count)

        def move(average: jax.Array, new: jax.Array) -> jax.Array:
            return average + rate * (new.astype(jnp.float32) - average)

        moved = jax.tree.map(move, state.ema, optax.apply_updates(params, updates))
        return updates, EmaState(inner, optax.safe_increment(state.count), moved)

    return init_both, update_both


class WithEma(optax.GradientTransformationExtraArgs):
    """A transformation of optax with an average of the parameters in its state.

    Attributes:
      ema: how fast the average follows.
    """

    ema: Ema

    def __new__(cls, tx: optax.GradientTransformation, ema: Ema) -> WithEma:
        inner = optax.with_extra_args_support(tx)
        self = super().__new__(cls, *around(inner.init, inner.update, ema))
        self.ema = ema
        return self
