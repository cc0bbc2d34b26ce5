"""Optimizer of a configuration, and the reasons of its defaults.

Any `optax.GradientTransformation` does as well.
"""

from __future__ import annotations

import dataclasses

import optax

from zerojax.config import OptimizerConfig
from zerojax.optim.adam8bit import adam8bit
from zerojax.optim.methods import adamw, lamb, lion, sgd
from zerojax.optim.optimizer import Optimizer
from zerojax.optim.schedules import Schedule, build_schedule


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
        known = isinstance(optimizer, Optimizer)
        return BuiltOptimizer(optimizer, optimizer.learning_rate if known else None)
    if isinstance(optimizer, optax.MultiSteps):
        raise TypeError(
            "optimizer is an optax.MultiSteps, which is no transformation; give its "
            "optimizer.gradient_transformation(), or leave it out and use num_microbatches, which "
            "adds up gradients within a step"
        )
    if optimizer is not None and not isinstance(optimizer, OptimizerConfig):
        raise TypeError(
            f"optimizer is a {type(optimizer).__name__}; give an optax.GradientTransformation such "
            "as optax.adamw(3e-4), an OptimizerConfig, or None for AdamW with the defaults"
        )
    config = optimizer or OptimizerConfig()
    schedule, reason = build_schedule(config, steps)
    tx = _configured(config, schedule)
    origin = "default" if optimizer is None else "configured"
    named = f"optimizer {config.name} ({origin}), learning rate {config.learning_rate:g}: {reason}"
    return BuiltOptimizer(tx, schedule, (named,))


def _configured(config: OptimizerConfig, schedule: Schedule) -> Optimizer:
    common = {
        "weight_decay": config.weight_decay,
        "clip_norm": config.clip_norm,
        "groups": config.groups,
        "impl": config.impl,
    }
    betas = {"b1": config.beta1, "b2": config.beta2}
    if config.name == "sgd":
        momentum = config.beta1 or None
        return sgd(schedule, momentum=momentum, nesterov=config.nesterov, **common)
    if config.name == "lion":
        return lion(schedule, **betas, **common)
    build = {"adamw": adamw, "adam8bit": adam8bit, "lamb": lamb}[config.name]
    return build(schedule, eps=config.eps, **betas, **common)
