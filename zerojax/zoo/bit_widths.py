"""Bit width of rounded kernels in each step: counts applied updates, and looks up the width.

The count is state of the layer, so one compiled step serves all widths, and checkpoints, evaluation
and generation have the width of the run. A skipped step does not count, as in DeepSpeed.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from zerojax.config.compression import BitScheduleConfig
from zerojax.models.step_count import StepCount
from zerojax.operators.rounded_weights import FORMATS, LEVELS
from zerojax.zoo.fp8 import rounded_format

_MOST = np.iinfo(np.int32).max


def is_always_full(schedule: BitScheduleConfig | None) -> bool:
    """Returns whether kernels have the width of their format in every step."""
    return schedule is None or schedule.is_off


def check_bit_schedule(matmul_dtype: str | None, schedule: BitScheduleConfig) -> None:
    """Raises a ValueError if a schedule does not fit the dtype of the products."""
    if schedule.is_off:
        return
    name = rounded_format(matmul_dtype or "")
    if name not in FORMATS:
        raise ValueError(
            f"bit_schedule with matmul_dtype={matmul_dtype!r} has no kernels to round; use "
            "matmul_dtype='fake_int8' or 'fake_int4', or remove bit_schedule"
        )
    schedule.check_target(FORMATS[name].bits)


def is_update_count(name: str) -> bool:
    """Returns whether an array of this name is a number of applied updates of a layer."""
    return name.rpartition("/")[2] == "num_updates"


def new_update_count() -> tuple[nnx.Variable[jax.Array], StepCount]:
    """Creates the number of applied updates, int32 [], and the `StepCount` that advances it.

    Returns:
      (number, to be stored as `num_updates`; count).
    """
    number = nnx.Variable(jnp.zeros((), jnp.int32))
    return number, StepCount(jnp.zeros((), jnp.int32), changes="num_updates", rule=_next)


def _next(num_updates: jax.Array, _: jax.Array) -> jax.Array:
    return num_updates + 1


def levels_after(num_updates: jax.Array, schedule: BitScheduleConfig, bits: int) -> jax.Array:
    """Looks up the largest code of a step and its inverse, float32 [2]; zeros: no rounding.

    Args:
      num_updates: int32 [], number of updates applied before the step.
      schedule: schedule of the width.
      bits: width at which the schedule ends.
    """
    falls = np.minimum(np.array(schedule.falls(bits), np.int64), _MOST).astype(np.int32)
    first = bits if schedule.start_bits is None else schedule.start_bits
    width = first - jnp.sum(num_updates >= falls, dtype=jnp.int32)
    width = jnp.where(num_updates >= min(schedule.start_step, _MOST), width, 0)
    return jnp.asarray(LEVELS)[width]
