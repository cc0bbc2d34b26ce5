"""Settings of `zerojax sweep`: which settings of a run vary, and how trials are dropped early.

Settings only. `zerojax.training.sweep_trials` makes the trials.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from zerojax.config.checks import check_at_least, check_size, names_keywords, refuse
from zerojax.config.loader import CommandText, ConfigError, coerce_fields, parse_text

MAX_TRIALS = 1000


@names_keywords()
@dataclass(frozen=True, kw_only=True)
class SweepAxis:
    """Values of one setting in a sweep: a list, or a range from which numbers are drawn."""

    values: tuple[object, ...] = ()
    """Values to try."""
    low: float | None = None
    """Lowest number of a range."""
    high: float | None = None
    """Highest number of a range."""
    scale: Literal["linear", "log"] = "linear"
    """Whether numbers, or their logarithms, are drawn evenly from the range."""

    def __post_init__(self) -> None:
        coerce_fields(self)
        if (self.low is None) != (self.high is None):
            raise ConfigError("a range needs low and high; set both, or a list of values")
        if bool(self.values) == (self.low is not None):
            raise ConfigError("an axis needs a list of values, or a range {low: 1e-4, high: 1e-2}")
        if self.low is None:
            if self.scale != "linear":
                refuse("scale", self.scale, "has no effect on a list; leave it out")
            return
        assert self.high is not None
        if not self.low < self.high:
            refuse("low", self.low, f"must be below high ({self.high:g})")
        if self.scale == "log" and self.low <= 0:
            refuse("low", self.low, "must be above 0 with scale=log; raise it, or use linear")


@names_keywords()
@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """Trials of `zerojax sweep`, which no other command reads."""

    axes: tuple[tuple[str, SweepAxis], ...] = ()
    """Settings that vary: {optimizer.learning_rate: [1e-3, 3e-3], optimizer.weight_decay: {low:
    0.01, high: 0.3, scale: log}}. The value of a key is a list or a range."""
    trials: int | None = None
    """Number of trials, drawn at random from the axes. null: every combination of the lists, which
    is possible without ranges only."""
    seed: int = 0
    """Seed with which trials are drawn."""
    eta: int = 3
    """Factor of successive halving: the best 1 / eta of the trials of a rung go on to the next
    rung, and train eta times as many steps."""
    min_steps: int = 1
    """Least number of steps of the first rung. A higher number gives fewer rungs, and more trials
    train to the end."""

    def __post_init__(self) -> None:
        axes: Any = self.axes
        if isinstance(axes, CommandText):
            axes = parse_text(axes)
        if isinstance(axes, Mapping):
            axes = {key: _as_axis(value) for key, value in axes.items()}
        # Before the fields are coerced, which does not know that a list stands for an axis.
        object.__setattr__(self, "axes", axes)
        coerce_fields(self)
        check_size(self, "trials", most=MAX_TRIALS)
        check_at_least(self, 0, "seed")
        check_at_least(self, 2, "eta")
        check_at_least(self, 1, "min_steps")


def _as_axis(value: object) -> Any:
    """Returns the fields of an axis; a list stands for its values."""
    return {"values": value} if isinstance(value, list | tuple) else value
