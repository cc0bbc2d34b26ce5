"""Dynamic loss scale for float16.

Gradients below 6e-8 become zero in float16, and gradients above 65504 become infinite. The loss,
and with it every gradient, is therefore multiplied by a scale, and gradients are divided by the
same scale in float32 before they are used. The dynamic scale decreases when a gradient overflows
and increases after many steps without overflow (Micikevicius et al. 2018, arXiv:1710.03740).

The rules are those of DeepSpeed at stages 1 to 3 (`DynamicLossScaler.update_scale` in
`deepspeed/runtime/fp16/loss_scaler.py`, defaults of `deepspeed/runtime/precision_config.py`).
Differences: the rules also apply at stage 0, where DeepSpeed's `FP16_Optimizer` has neither
hysteresis nor an error at the minimum; the scale has a maximum; and in place of DeepSpeed's error,
`update` returns `at_floor`, and the caller stops the run. DeepSpeed's ZeRO optimizers update the
scale before they divide by it, so gradients are half as large in a step that doubles the scale.
With this module, divide by the scale in the state before the update.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from zerojax.config import LossScale

State = dict[str, jax.Array]


def init(config: LossScale) -> State:
    """Builds the state of the loss scale before the first step.

    Returns:
      "scale": float32 []. "good_steps": int32 [], number of finite steps since the last overflow.
      "hysteresis": int32 [], number of further overflows after which the scale decreases.
    """
    scale = config.initial if config.static is None else config.static
    return {
        "scale": jnp.asarray(scale, jnp.float32),
        "good_steps": jnp.asarray(0, jnp.int32),
        "hysteresis": jnp.asarray(config.hysteresis, jnp.int32),
    }


def update(config: LossScale, state: State, finite: ArrayLike) -> tuple[State, jax.Array]:
    """Updates the state of the loss scale after a step, skipped or not. Works under `jax.jit`.

    Args:
      config: settings of the loss scale.
      state: state from `init` or `update`; the step's loss was multiplied by its scale.
      finite: bool []; whether the loss and all gradients were finite.

    Returns:
      (next state, at_floor bool []). `at_floor` is True if this overflow would decrease the scale
      below its minimum, so that no scale avoids the overflow; DeepSpeed raises an error then. If
      the caller continues, the scale stays at the minimum. Always False for a static scale.
    """
    if config.static is not None:
        return init(config), jnp.asarray(False)
    scale, good_steps, hysteresis = (state[name] for name in ("scale", "good_steps", "hysteresis"))
    finite = jnp.asarray(finite, jnp.bool_)
    falls = ~finite & (hysteresis <= 1)
    # The scale increases at the finite step after a multiple of the window, not at the multiple.
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
