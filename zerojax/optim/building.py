"""Which optimizer and which learning rate: optax transformations with zerojax's defaults.

Knows parameter names and steps; never where anything lies. Any `optax.GradientTransformation` does
as well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zerojax import trees
from zerojax.config import OptimizerConfig

Schedule = Callable[[Any], Any]

_VECTOR_NAMES = ("bias", "scale")


def is_matrix(name: str, ndim: int) -> bool:
    """Whether weight decay applies: two or more dimensions, and not a bias or scale by name.

    The name decides for stacked layers, whose biases have two dimensions as well.
    """
    return ndim >= 2 and name.rsplit(trees.SEPARATOR, 1)[-1] not in _VECTOR_NAMES


def decay_mask(params: Any) -> Any:
    """A tree of booleans: True where weight decay applies (see `is_matrix`)."""
    flat = {name: is_matrix(name, jnp.ndim(x)) for name, x in trees.flatten_names(params).items()}
    return trees.unflatten_like(params, flat)


def adamw(
    learning_rate: float | Schedule = 3e-4,
    *,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    mask: Any = decay_mask,
    clip_norm: float | None = 1.0,
) -> optax.GradientTransformation:
    """AdamW (arXiv:1711.05101) with global-norm clipping and decay on matrices only.

    Args:
      learning_rate: a number, or a function of the number of updates applied.
      b1, b2: decay of the first and second moment.
      eps: added to the root of the second moment.
      weight_decay: per unit of learning rate.
      mask: which parameters decay, as optax takes it.
      clip_norm: limit of the global gradient norm; None does not clip.
    """
    core = optax.adamw(learning_rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, mask=mask)
    return core if clip_norm is None else optax.chain(clip_by_global_norm(clip_norm), core)


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformationExtraArgs:
    """`optax.clip_by_global_norm` that takes the norm from the step, which has it already.

    It comes first in a chain: the norm that the step hands on is that of the gradients. Elsewhere
    take optax's own.
    """

    def update(
        updates: Any, state: Any, params: Any = None, *, grad_norm: Any = None, **_: Any
    ) -> tuple[Any, Any]:
        norm = optax.tree.norm(updates) if grad_norm is None else grad_norm
        scale = lambda x: jnp.where(norm < max_norm, x, x / norm.astype(x.dtype) * max_norm)  # noqa: E731
        return jax.tree.map(scale, updates), state

    return optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)


@dataclasses.dataclass(frozen=True)
class BuiltOptimizer:
    """An optimizer and what is known of it.

    Attributes:
      tx: the transformation.
      learning_rate: the schedule, for reports; None when the user's own transformation hides it.
      reasons: why the defaults are what they are.
    """

    tx: optax.GradientTransformation
    learning_rate: Schedule | None
    reasons: tuple[str, ...] = ()


def build_optimizer(
    optimizer: optax.GradientTransformation | OptimizerConfig | None, steps: int | None
) -> BuiltOptimizer:
    """The transformation for what the user gave.

    Args:
      optimizer: a transformation, which is taken as it is; or an `OptimizerConfig`; None takes the
        default `OptimizerConfig`.
      steps: length of the run, which cosine, linear and wsd schedules need; None holds the rate
        constant after the warm-up.

    Raises:
      TypeError: anything else.
    """
    if isinstance(optimizer, optax.GradientTransformation):
        return BuiltOptimizer(optimizer, None)
    if optimizer is not None and not isinstance(optimizer, OptimizerConfig):
        raise TypeError(
            f"optimizer is a {type(optimizer).__name__}; give an optax.GradientTransformation such "
            "as optax.adamw(3e-4), an OptimizerConfig, or None for AdamW with the defaults"
        )
    config = optimizer or OptimizerConfig()
    schedule, reason = build_schedule(config, steps)
    clip = [] if config.clip_norm is None else [clip_by_global_norm(config.clip_norm)]
    tx = optax.chain(*clip, _update_rule(config, schedule))
    origin = "default" if optimizer is None else "configured"
    named = f"optimizer {config.name} ({origin}), learning rate {config.learning_rate:g}: {reason}"
    return BuiltOptimizer(tx, schedule, (named,))


def _update_rule(config: OptimizerConfig, schedule: Schedule) -> optax.GradientTransformation:
    decay = {"weight_decay": config.weight_decay, "mask": decay_mask}
    betas = {"b1": config.beta1, "b2": config.beta2}
    if config.name == "adamw":
        return optax.adamw(schedule, eps=config.eps, **betas, **decay)
    if config.name == "lion":
        return optax.lion(schedule, **betas, **decay)
    if config.name == "lamb":
        return optax.lamb(schedule, eps=config.eps, **betas, **decay)
    sgd = optax.sgd(schedule, momentum=config.beta1 or None)
    return optax.chain(optax.add_decayed_weights(config.weight_decay, decay_mask), sgd)


def build_schedule(config: OptimizerConfig, steps: int | None) -> tuple[Schedule, str]:
    """(learning rate as a function of updates applied, one line that explains it)."""
    peak, final = config.learning_rate, config.learning_rate * config.final_lr_fraction
    if config.warmup_steps is not None:
        warmup = config.warmup_steps
    else:
        warmup = 10 if steps is None else min(max(10, round(0.02 * steps)), steps // 2)
    if steps is None or config.schedule == "constant":
        why = "constant" + ", since the length of the run is not known" * (steps is None)
        after: Schedule = optax.constant_schedule(peak)
        return _with_warmup(after, peak, warmup), f"{warmup} warm-up steps, then {why}"
    rest = max(steps - warmup, 1)
    if config.schedule == "cosine":
        after = optax.cosine_decay_schedule(peak, rest, alpha=config.final_lr_fraction)
    elif config.schedule == "linear":
        after = optax.linear_schedule(peak, final, rest)
    else:
        tail = max(round(config.decay_fraction * steps), 1)
        hold = max(rest - tail, 0)
        after = optax.join_schedules(
            [optax.constant_schedule(peak), optax.linear_schedule(peak, final, tail)], [hold]
        )
    reason = f"{warmup} warm-up steps, then {config.schedule} to {final:g}"
    return _with_warmup(after, peak, warmup), reason


def _with_warmup(after: Schedule, peak: float, warmup: int) -> Schedule:
    """Linear from peak/warmup at the first update to `peak`, then `after` counted from there."""
    if warmup == 0:
        return after

    def schedule(count: Any) -> jax.Array:
        rising = peak * (jnp.asarray(count, jnp.float32) + 1) / warmup
        return jnp.where(count < warmup, rising, after(jnp.maximum(count - warmup, 0)))

    return schedule
