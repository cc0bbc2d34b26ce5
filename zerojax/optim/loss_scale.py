"""Dynamic loss scale for float16.

Gradients below 6e-8 are zero in float16, and those above 65504 are infinite. The loss, and with it
every gradient, is therefore multiplied by a scale, and gradients are divided by that same scale in
float32 before they are used. The dynamic scale falls when a gradient overflows and rises after a
long time without; the idea is that of Micikevicius et al. 2018 (arXiv:1710.03740).

The rules are those of DeepSpeed (`DynamicLossScaler.update_scale` in
`deepspeed/runtime/fp16/loss_scaler.py`, defaults of `deepspeed/runtime/precision_config.py`), which
it has at stages 1 to 3; they hold at stage 0 too, where its `FP16_Optimizer` knows neither
hysteresis nor an end at the minimum. What else differs: the scale has a maximum, and where
DeepSpeed raises, `update` says so and the caller stops the run. DeepSpeed's ZeRO optimizers update
the scale before they divide by it, so that gradients are half as large in a step that doubles the
scale; use the scale of the state that came in.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from zerojax.config import LossScale

State = dict[str, jax.Array]


def init(config: LossScale) -> State:
    """The state before the first step.

    Returns:
      "scale" float32 []; "good_steps" int32 [], finite steps since the last overflow; "hysteresis"
      int32 [], the number of the overflow, counted from now, that will lower the scale.
    """
    scale = config.initial if config.static is None else config.static
    return {
        "scale": jnp.asarray(scale, jnp.float32),
        "good_steps": jnp.asarray(0, jnp.int32),
        "hysteresis": jnp.asarray(config.hysteresis, jnp.int32),
    }


def update(config: LossScale, state: State, finite: Any) -> tuple[State, jax.Array]:
    """The state after a step; call it once per step, skipped or not. Works under `jax.jit`.

    Args:
      state: as `init` gives it; its scale is the one that the step's loss was multiplied by.
      finite: bool []; whether the loss and all gradients were finite.

    Returns:
      (the next state, at_floor bool []). `at_floor`: this overflow would have lowered a scale that
      is at its minimum already, so that no scale helps; DeepSpeed raises here. A caller that goes
      on stays at the minimum. A static scale is never at the floor.
    """
    if config.static is not None:
        return init(config), jnp.asarray(False)
    scale, good_steps, hysteresis = (state[name] for name in ("scale", "good_steps", "hysteresis"))
    finite = jnp.asarray(finite, jnp.bool_)
    falls = ~finite & (hysteresis <= 1)
    # The scale does not rise at a multiple of the window but at the finite step after it.
    rises = finite & (good_steps > 0) & (good_steps % config.window == 0)
    refills = finite if config.consecutive_hysteresis else rises
    at_floor = falls & (scale <= config.minimum)
    moved = jnp.where(rises, scale * config.factor, jnp.where(falls, scale / config.factor, scale))
    forgiven = jnp.where(finite | falls, hysteresis, hysteresis - 1)
    following = {
        "scale": jnp.clip(moved, config.minimum, config.maximum),
        "good_steps": jnp.where(finite, good_steps + 1, 0),
        "hysteresis": jnp.where(refills, config.hysteresis, forgiven),
    }
    return {name: x.astype(state[name].dtype) for name, x in following.items()}, at_floor
