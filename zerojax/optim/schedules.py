"""Learning-rate schedules over applied updates: warm-up, then a decay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zerojax.config import OptimizerConfig

Schedule = Callable[[Any], Any]


def as_schedule(learning_rate: float | Schedule) -> Schedule:
    """A function of updates applied; a number is one that is constant."""
    if callable(learning_rate):
        return learning_rate
    return optax.constant_schedule(learning_rate)


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
