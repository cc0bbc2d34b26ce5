"""Learning-rate schedules over applied updates: warm-up with a decay, and DeepSpeed's schedules.

DeepSpeed's schedules have the same value as in DeepSpeed at each update. The formulas are those of
`deepspeed/runtime/lr_schedules.py` (0.19.8). DeepSpeed evaluates a schedule once when it is created
and then after every applied update. Update `count`, counted from 0, therefore uses the value that
DeepSpeed's class computes for `last_batch_iteration = count - 1`. Counts are exact integers; other
values are float32 here and double precision in DeepSpeed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from zerojax.config import OptimizerConfig
from zerojax.config.checks import (
    MAX_SIZE,
    check_at_least,
    check_positive,
    check_whole_number,
    refuse,
)
from zerojax.config.late_dataclasses import dataclass
from zerojax.config.loader import ConfigError, coerce_fields, from_dict
from zerojax.optim.step_sizes import StepSizes

Schedule = Callable[[Any], Any]
"""Function from the number of updates applied so far to the learning rate, as in optax."""
_ONE_CYCLE_B2 = 0.99
WarmupType = Literal["log", "linear"]


def as_schedule(learning_rate: float | Schedule) -> Schedule:
    """Returns the rate as a function of updates applied; a number gives a constant schedule."""
    if callable(learning_rate):
        return learning_rate
    return optax.constant_schedule(learning_rate)


def build_schedule(
    config: OptimizerConfig, steps: int | None, sizes: StepSizes | None = None
) -> tuple[Schedule, str]:
    """Builds (learning rate as a function of updates applied, one line that explains it).

    Args:
      config: configuration of the optimizer.
      steps: number of steps of the run; None: not known, and the rate does not decay.
      sizes: rows and tokens of the steps; None: not known.

    Raises:
      ConfigError: the configuration depends on rows or tokens that are not known, or counts more
        tokens than the run has.
    """
    schedule, why = _for_base_batch(config, steps, sizes)
    if config.scaling is None:
        return schedule, why
    base, power = config.base_batch, {"linear": 1.0, "sqrt": 0.5}[config.scaling]
    assert base is not None
    if sizes is None:
        raise ConfigError(
            f"{config.scaling} needs the rows of the batch, which are not known here; set "
            "learning_rate for your batch, and leave scaling out",
            ("optimizer", "scaling"),
        )

    def scaled(count: ArrayLike) -> jax.Array:
        return schedule(count) * (sizes.rows_of(count) / base) ** power

    factors = {rows: (rows / base) ** power for rows in sizes.rows}
    times = ", ".join(f"{factor:.4g} for {rows} rows" for rows, factor in factors.items())
    most = config.learning_rate * max(factors.values())
    rule = f"{config.scaling} in the batch, base_batch={base}"
    return scaled, f"{why}; times {times} ({rule}), so at most {most:.4g}"


def _for_base_batch(
    config: OptimizerConfig, steps: int | None, sizes: StepSizes | None
) -> tuple[Schedule, str]:
    """Builds the schedule without the scaling by the batch, and the line that explains it."""
    check_whole_number("steps", steps, 0, MAX_SIZE)
    peak = config.learning_rate
    rise, risen, why = _warmup(config, steps, sizes)
    if steps is None or config.schedule == "constant":
        why += "constant" + ", since the length of the run is not known" * (steps is None)
        return _joined(rise, risen, optax.constant_schedule(peak)), why
    why += f"{config.schedule} to {peak * config.final_lr_fraction:g}"
    if config.schedule_unit == "steps":
        # At least 1: optax refuses a decay of 0 steps.
        decay = _decay(config, max(steps - risen, 1), max(round(config.decay_fraction * steps), 1))
        return _joined(rise, risen, lambda count: decay(jnp.maximum(count - risen, 0))), why
    known = _known(sizes)
    known.check_tokens("schedule_unit", "tokens")
    # Floats, because JAX takes whole numbers as int32, and a run can have more tokens.
    total, first = known.tokens_until(steps), float(known.tokens_until(risen))
    tail = max(config.decay_fraction * total, 1.0)
    decay = _decay(config, max(total - first, 1.0), tail)

    def by_tokens(count: ArrayLike) -> jax.Array:
        return decay(jnp.maximum(known.tokens_of(count) - first, 0))

    return _joined(rise, risen, by_tokens), f"{why} by tokens ({total:,} in {steps:,} steps)"


def _known(sizes: StepSizes | None) -> StepSizes:
    why = "the batch is not known here"
    return StepSizes.constant(1, why_unknown=why) if sizes is None else sizes


def _decay(config: OptimizerConfig, rest: Any, tail: Any) -> Schedule:
    """Builds the rate after the warm-up, as a function of the steps or tokens since then.

    Args:
      config: configuration of the optimizer.
      rest: length of the run after the warm-up: int steps or float tokens.
      tail: length of the decay of wsd, in the same unit.
    """
    peak, final = config.learning_rate, config.learning_rate * config.final_lr_fraction
    if config.schedule == "cosine":
        return optax.cosine_decay_schedule(peak, rest, alpha=config.final_lr_fraction)
    if config.schedule == "linear":
        return optax.linear_schedule(peak, final, rest)
    hold = max(rest - tail, 0)
    return optax.join_schedules(
        [optax.constant_schedule(peak), optax.linear_schedule(peak, final, tail)], [hold]
    )


def default_warmup(steps: int | None) -> int:
    """Returns the number of warm-up steps of a run of `steps` steps that does not set it."""
    return 10 if steps is None else min(max(10, round(0.02 * steps)), steps // 2)


def _warmup(
    config: OptimizerConfig, steps: int | None, sizes: StepSizes | None
) -> tuple[Schedule, int, str]:
    """Returns (rate in each update of the warm-up, number of steps of the warm-up, beginning of the
    line that explains the schedule)."""
    peak, tokens = config.learning_rate, config.warmup_tokens
    if tokens is not None:
        known = _known(sizes)
        known.check_tokens("warmup_tokens", tokens)
        risen = known.steps_until(tokens)
        if steps is not None and risen > steps:
            raise ConfigError(
                f"{tokens} is above the {known.tokens_until(steps)} tokens of the run's {steps} "
                "steps; lower it, or train longer",
                ("optimizer", "warmup_tokens"),
            )

        def rise_by_tokens(count: ArrayLike) -> jax.Array:
            return peak * jnp.minimum(known.tokens_of(count + 1) / float(tokens), 1.0)

        return rise_by_tokens, risen, f"{tokens:,} warm-up tokens ({risen} steps), then "
    if config.warmup_steps is not None:
        warmup = config.warmup_steps
    else:
        warmup = default_warmup(steps)

    def rise(count: ArrayLike) -> jax.Array:
        return peak * (jnp.asarray(count, jnp.float32) + 1) / warmup

    return rise, warmup, f"{warmup} warm-up steps, then "


def _joined(rise: Schedule, risen: int, after: Schedule) -> Schedule:
    """Builds the rate of a warm-up of `risen` updates, followed by `after`."""
    # Both rates are computed in every update, and `rise` would divide by 0.
    if risen == 0:
        return after
    return lambda count: jnp.where(count < risen, rise(count), after(count))


@dataclass(frozen=True, kw_only=True)
class LRRangeTest:
    """Learning rate that grows without limit, to find the largest usable rate
    (arXiv:1803.09820)."""

    lr_range_test_min_lr: float = 1e-3
    """Learning rate of the first update."""
    lr_range_test_step_size: int = 2000
    """Number of updates in which the rate grows by `lr_range_test_step_rate` times the first
    rate."""
    lr_range_test_step_rate: float = 1.0
    lr_range_test_staircase: bool = False
    """Whether the rate grows only after every `lr_range_test_step_size` updates, not
    continuously."""

    def __post_init__(self) -> None:
        coerce_fields(self)
        check_at_least(self, 0, "lr_range_test_min_lr", "lr_range_test_step_rate")
        check_positive(self, "lr_range_test_step_size")

    def rate(self, count: jax.Array) -> jax.Array:
        """Computes the learning rate of an update, float32 []."""
        size = self.lr_range_test_step_size
        passed = count // size if self.lr_range_test_staircase else count / size
        return self.lr_range_test_min_lr * (1 + self.lr_range_test_step_rate * passed)


@dataclass(frozen=True, kw_only=True)
class OneCycle:
    """Learning rate that rises and falls once, then decays; Adam's beta1 moves in the opposite
    direction (arXiv:1803.09820)."""

    cycle_min_lr: float
    """Learning rate of the first update and of the last update of the cycle."""
    cycle_max_lr: float
    """Learning rate at the middle of the cycle, between its two halves."""
    decay_lr_rate: float = 0.0
    """Decay after the cycle: the rate is `cycle_min_lr` / (1 + this value * updates since the cycle
    / `decay_step_size`)."""
    cycle_first_step_size: int = 2000
    """Number of updates in the rising half."""
    cycle_second_step_size: int | None = None
    """Number of updates in the falling half; None uses that of the rising half."""
    cycle_first_stair_count: int = 0
    """Number of stair steps in the rising half; 0 changes the rate at every update."""
    cycle_second_stair_count: int | None = None
    """Number of stair steps in the falling half; None uses that of the rising half."""
    decay_step_size: int = 0
    """Number of updates after the cycle in which `decay_lr_rate` and `decay_mom_rate` count once; 0
    does not decay."""
    cycle_momentum: bool = True
    """Whether Adam's betas change too: beta1 within the limits below; beta2 is set to 0.99."""
    cycle_min_mom: float = 0.8
    """beta1 of the first update and at the middle of the cycle."""
    cycle_max_mom: float = 0.9
    """Largest beta1 of the cycle: near the second update, and at the end of the cycle."""
    decay_mom_rate: float = 0.0
    """Growth of beta1 after the cycle: it is `cycle_max_mom` * (1 + this value * updates since the
    cycle / `decay_step_size`)."""

    def __post_init__(self) -> None:
        coerce_fields(self)
        check_at_least(self, 0, "cycle_min_lr", "cycle_max_lr", "decay_lr_rate", "decay_step_size")
        check_at_least(self, 0, "cycle_second_step_size", "decay_mom_rate")
        check_positive(self, "cycle_first_step_size")
        for name in ("cycle_min_mom", "cycle_max_mom"):
            if not 0 <= getattr(self, name) < 1:
                refuse(name, getattr(self, name), "must be in [0, 1)")

        names = ("cycle_first_stair_count", "cycle_second_stair_count")
        for name, stairs, size in zip(names, self._stairs, self._halves, strict=True):
            # `_climb` multiplies these numbers as int32.
            if stairs * size >= 2**31:
                given = name if getattr(self, name) is not None else names[0]
                raise ConfigError(
                    f"{stairs} stairs times {size} updates must be below 2**31; use {given}=0 "
                    "for a rate that changes at every update",
                    (given,),
                )

    @property
    def _halves(self) -> tuple[int, int]:
        """Numbers of updates in the rising and in the falling half."""
        first, second = self.cycle_first_step_size, self.cycle_second_step_size
        return first, first if second is None else second

    @property
    def _stairs(self) -> tuple[int, int]:
        """Numbers of stair steps in the rising and in the falling half."""
        first, second = self.cycle_first_stair_count, self.cycle_second_stair_count
        return first, first if second is None else second

    def _height(self, count: jax.Array) -> jax.Array:
        """Computes the position in the cycle: 0 at its ends, 1 in the middle."""
        first, second = self._halves
        up, down = self._stairs
        rising = _climb(count, first, up)
        # The half without updates is computed as well, although its value is not used.
        falling = _climb(first + second - count, max(second, 1), down)
        return jnp.where(count <= first, rising, falling)

    def _passed(self, count: jax.Array) -> jax.Array:
        """Computes the number of decay intervals since the end of the cycle, a fraction
        included."""
        return (count - sum(self._halves)) / self.decay_step_size

    def rate(self, count: jax.Array) -> jax.Array:
        """Computes the learning rate of an update, float32 []."""
        low, high = self.cycle_min_lr, self.cycle_max_lr
        after: jax.Array | float = low
        if self.decay_step_size:
            after = low / (1 + self.decay_lr_rate * self._passed(count))
        cycle = low + (high - low) * self._height(count)
        return jnp.where(count < sum(self._halves), cycle, after)

    def b1(self, count: ArrayLike) -> jax.Array:
        """Computes beta1 of an update, float32 []."""
        count = jnp.asarray(count, jnp.int32)
        low, high = self.cycle_min_mom, self.cycle_max_mom
        after: jax.Array | float = high
        if self.decay_step_size:
            after = high * (1 + self.decay_mom_rate * self._passed(count))
        cycle = high - (high - low) * self._height(count)
        later = jnp.where(count < sum(self._halves), cycle, after)
        # DeepSpeed starts at the minimum, and uses the maximum from its first step.
        return jnp.where(count == 0, low, later).astype(jnp.float32)

    @property
    def first_update_with_b1_of_one(self) -> int | None:
        """Index of the first update whose beta1 is 1 or more; None if there is none."""
        growth = self.cycle_max_mom * self.decay_mom_rate
        if not (self.cycle_momentum and self.decay_step_size and growth):
            return None
        steps = self.decay_step_size * (1 - self.cycle_max_mom) / growth
        return sum(self._halves) + math.ceil(steps)


@dataclass(frozen=True, kw_only=True)
class WarmupLR:
    """Learning rate with a warm-up, constant afterwards."""

    warmup_min_lr: float = 0.0
    """Learning rate of the first two updates."""
    warmup_max_lr: float | None = None
    """Learning rate after the warm-up; None uses the optimizer's."""
    warmup_num_steps: int = 1000
    """Number of updates until `warmup_max_lr` is reached; 1 is treated as 2."""
    warmup_type: WarmupType = "log"
    """Shape of the rise: "log" reaches two thirds of it after 100 of 1000 updates; "linear" is
    even."""

    def __post_init__(self) -> None:
        coerce_fields(self)
        check_at_least(self, 0, "warmup_min_lr", "warmup_max_lr")
        check_positive(self, "warmup_num_steps")

    def _after(self, count: jax.Array) -> Any:
        """Computes the rate after the warm-up, as a fraction of the rise from minimum to
        maximum."""
        return 1.0

    def rate(self, count: jax.Array) -> jax.Array:
        """Computes the learning rate of an update, float32 []."""
        assert self.warmup_max_lr is not None
        risen = _warm_up(count, self.warmup_num_steps, self.warmup_type)
        part = jnp.where(count <= max(2, self.warmup_num_steps), risen, self._after(count))
        return self.warmup_min_lr + (self.warmup_max_lr - self.warmup_min_lr) * part


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmupDecayLR(WarmupLR):
    """Learning rate with a warm-up, then a linear decay to `warmup_min_lr` at the end of the
    run."""

    total_num_steps: int
    """Number of updates in the whole run."""
    warmup_max_lr: float | None = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "total_num_steps")

    def _after(self, count: jax.Array) -> Any:
        left = self.total_num_steps - (count - 1)
        decay = max(1, self.total_num_steps - max(2, self.warmup_num_steps))
        return jnp.maximum(left / decay, 0.0)


@dataclass(frozen=True, kw_only=True)
class WarmupCosineLR:
    """Learning rate that is the optimizer's rate times a ratio, which rises in the warm-up and then
    falls as a cosine."""

    total_num_steps: int
    """Number of updates in the whole run."""
    warmup_min_ratio: float = 0.0
    """Ratio at the second update; at the first update it is always 0."""
    warmup_num_steps: int = 1000
    """Number of updates until the ratio is 1; 1 is treated as 2."""
    cos_min_ratio: float = 1e-4
    """Ratio at the end of the run and after it."""
    warmup_type: WarmupType = "log"

    def __post_init__(self) -> None:
        coerce_fields(self)
        check_at_least(self, 0, "warmup_min_ratio", "cos_min_ratio")
        check_positive(self, "total_num_steps", "warmup_num_steps")

    def part(self, count: jax.Array) -> jax.Array:
        """Computes the multiplier of the optimizer's rate at an update, float32 []."""
        warmup, low = max(2, self.warmup_num_steps), self.cos_min_ratio
        risen = _warm_up(count, self.warmup_num_steps, self.warmup_type)
        rising = self.warmup_min_ratio + (1 - self.warmup_min_ratio) * risen
        progress = jnp.minimum((count - warmup) / max(1, self.total_num_steps - warmup), 1.0)
        falling = low + (1 - low) * (1 + jnp.cos(math.pi * progress)) / 2
        return jnp.where(count == 0, 0.0, jnp.where(count <= warmup, rising, falling))


_Settings = LRRangeTest | OneCycle | WarmupLR | WarmupDecayLR | WarmupCosineLR

DEEPSPEED_SCHEDULES: Mapping[str, type[_Settings]] = {
    cls.__name__: cls for cls in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}
"""{`type` of a scheduler section: dataclass whose fields are the section's `params`}."""


@dataclass(frozen=True, kw_only=True)
class DeepSpeedSchedule:
    """Schedule of DeepSpeed as functions that zerojax's and optax's optimizers accept.

    Attributes:
      settings: parameters of the schedule, with DeepSpeed's defaults.
      learning_rate: function from the number of updates applied to the learning rate.
      b1: function from the number of updates applied to beta1; None keeps the optimizer's.
      b2: value of beta2; None keeps the optimizer's.
      notes: surprising properties of the schedule, one sentence each.
    """

    settings: _Settings
    learning_rate: Schedule
    b1: Schedule | None = None
    b2: float | None = None
    notes: tuple[str, ...] = ()


def build_deepspeed_schedule(
    kind: str, params: Mapping[str, Any], *, learning_rate: float
) -> DeepSpeedSchedule:
    """Builds the schedule of a `scheduler` section of a DeepSpeed configuration.

    Args:
      kind: value of `type` in the section: a key of `DEEPSPEED_SCHEDULES`.
      params: value of `params` in the section; a list of one number counts as that number.
      learning_rate: learning rate of the optimizer, which `WarmupLR` without `warmup_max_lr` and
        `WarmupCosineLR` use.

    Raises:
      ConfigError: a type or setting is unknown (the message names the nearest one); a number is out
        of range; there is a rate per parameter group; or `last_batch_iteration` is set, which would
        start in the middle of the schedule.
    """
    if kind not in DEEPSPEED_SCHEDULES:
        known = ", ".join(DEEPSPEED_SCHEDULES)
        raise ConfigError(
            f"{kind!r} is not one of DeepSpeed's own schedules ({known}); for another one, take "
            "the sections scheduler and optimizer out of the file and pass "
            "optimizer=optax.adamw(schedule), with any function of the number of updates as "
            "schedule",
            ("type",),
        )
    given = {name: _single(name, value) for name, value in params.items()}
    if given.pop("last_batch_iteration", -1) != -1:
        raise ConfigError(
            "last_batch_iteration is not supported: a schedule starts at the first step and "
            "continues from a checkpoint; leave this key out and load the checkpoint",
            ("last_batch_iteration",),
        )
    if kind == "WarmupLR" and given.get("warmup_max_lr") is None:
        given["warmup_max_lr"] = learning_rate
    settings = from_dict(DEEPSPEED_SCHEDULES[kind], given)

    def rate(count: ArrayLike) -> jax.Array:
        count = jnp.asarray(count, jnp.int32)
        if isinstance(settings, WarmupCosineLR):
            return (learning_rate * settings.part(count)).astype(jnp.float32)
        return settings.rate(count).astype(jnp.float32)

    built = DeepSpeedSchedule(settings=settings, learning_rate=rate, notes=tuple(_notes(settings)))
    if isinstance(settings, OneCycle) and settings.cycle_momentum:
        return dataclasses.replace(built, b1=settings.b1, b2=_ONE_CYCLE_B2)
    return built


def _single(name: str, value: object) -> Any:
    if not isinstance(value, list | tuple):
        return value
    if len(value) == 1:
        return value[0]
    raise ConfigError(
        f"{list(value)!r} has one value per torch parameter group, but zerojax has a single group; "
        "give one number; for different rates take the sections scheduler and optimizer out of the "
        "file and pass optimizer=zerojax.adamw(schedule, "
        "groups={'regex': {'learning_rate_factor': 0.1}})",
        (name,),
    )


def _notes(settings: _Settings) -> list[str]:
    notes = []
    if isinstance(settings, WarmupLR | WarmupCosineLR):
        first = settings.warmup_min_lr if isinstance(settings, WarmupLR) else 0.0
        notes.append(f"the first update has learning rate {first:g}, as in DeepSpeed")
        if settings.warmup_type == "log":
            notes.append(
                "warmup_type is log, DeepSpeed's default: half of the rise is done after "
                f"{math.sqrt(max(2, settings.warmup_num_steps)):.0f} of "
                f"{settings.warmup_num_steps} updates; set linear for an even rise"
            )
    if isinstance(settings, WarmupDecayLR | WarmupCosineLR):
        total, warmup = settings.total_num_steps, settings.warmup_num_steps
        if total < warmup:
            notes.append(f"total_num_steps ({total}) is below warmup_num_steps ({warmup})")
    if isinstance(settings, OneCycle) and settings.cycle_momentum:
        notes.append(
            "cycle_momentum is on, DeepSpeed's default: beta1 moves between "
            f"{settings.cycle_min_mom:g} and {settings.cycle_max_mom:g}, and beta2 is "
            f"{_ONE_CYCLE_B2}; optimizer.params.betas is ignored"
        )
        if (limit := settings.first_update_with_b1_of_one) is not None:
            notes.append(
                f"decay_mom_rate makes beta1 reach 1 at update {limit + 1}, as in DeepSpeed, where "
                "Adam is undefined; end before, or set decay_mom_rate to 0"
            )
    return notes


def _climb(passed: jax.Array, size: int, stairs: int) -> jax.Array:
    """Computes the completed fraction of `size` updates; in stair steps if `stairs` is above 0."""
    if stairs > 0:
        return jnp.clip(passed, 0, size) * stairs // size / stairs
    return passed / size


def _warm_up(count: jax.Array, num_steps: int, kind: WarmupType) -> jax.Array:
    """Computes the completed fraction of the warm-up; it is 0 at the first two updates."""
    num_steps, done = max(2, num_steps), jnp.maximum(count - 1, 0)
    if kind == "linear":
        return done / num_steps
    return jnp.log(done + 1.0) / math.log(num_steps)
