"""Curricula of the row length: their settings, the row length of each step, and the lengths that
are compiled.

This module only computes numbers and imports no JAX. The schedules fixed_linear, fixed_root and
fixed_discrete are DeepSpeed's (`data_pipeline/curriculum_scheduler.py`). The first step has number
1, as in the step number that DeepSpeed passes to the model.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from zerojax.config.checks import check_positive, check_size, names_keywords, refuse
from zerojax.config.feature_settings import FeatureSettings
from zerojax.config.loader import ConfigError, coerce_fields

MAX_RUNGS = 8
"""Largest number of row lengths that are compiled. A step whose length is between two compiled
lengths runs at the longer one, and the loss weights of the surplus tokens at the end of each row
are 0."""
_COUNTED_STEPS = 100_000
"""A schedule that reaches its end within so many steps is followed step by step."""
_NEVER = 2**62


@names_keywords()
@dataclass(frozen=True, kw_only=True)
class CurriculumConfig(FeatureSettings):
    """Curriculum of the row length (arXiv:2108.06084): early steps train only on the first tokens
    of each row."""

    keyword = "curriculum"
    switch = "type"
    ds_section = "curriculum_learning"
    changes_work = True

    type: Literal["seqlen"] | None = None
    """seqlen: the length of rows grows with the steps. null: rows always have full length."""
    schedule_type: Literal["fixed_linear", "fixed_root", "fixed_discrete"] = "fixed_linear"
    """How the length grows, as in DeepSpeed: linearly with the step, with a root of the step, or by
    a list of lengths."""
    min_length: int | None = None
    """Number of tokens per row in the first step. null: length_step."""
    max_length: int | None = None
    """Number of tokens per row at the end of the curriculum and after it. null: the row length of
    the data."""
    total_steps: int | None = None
    """Number of steps until the length reaches max_length (fixed_linear, fixed_root)."""
    length_step: int = 8
    """Lengths below max_length are multiples of this; at least 8 suits tensor cores."""
    root_degree: float = 2.0
    """Degree of the root, for fixed_root: 2 is the square root."""
    lengths: tuple[int, ...] = ()
    """Number of tokens per row in each phase of fixed_discrete."""
    until_steps: tuple[int, ...] = ()
    """Last step of each phase of fixed_discrete. The last phase has no entry because it has no
    end."""
    keys: tuple[str, ...] = ()
    """Names of the batch arrays [rows, tokens, ...] that are shortened. (): tokens, targets and
    weights, the arrays of zerojax's next-token losses."""

    def __post_init__(self) -> None:
        coerce_fields(self)
        changed = [
            field.name for field in fields(self) if getattr(self, field.name) != field.default
        ]
        if self.type is None:
            if changed:
                refuse(changed[0], getattr(self, changed[0]), "needs a curriculum: set type=seqlen")
            return
        check_size(self, "min_length", "max_length", "total_steps", "length_step")
        check_positive(self, "root_degree")
        is_discrete = self.schedule_type == "fixed_discrete"
        others = ("min_length", "max_length", "total_steps", "length_step")
        others = (*others, "root_degree") if is_discrete else ("lengths", "until_steps")
        for name in others:
            if name in changed:
                value = getattr(self, name)
                refuse(
                    name,
                    value,
                    f"has no effect with schedule_type={self.schedule_type}; leave it out",
                )
        if is_discrete:
            self._check_lists()
        else:
            self._check_growth()

    def summary(self) -> list[tuple[str, str]]:
        last = "the whole row" if self.max_length is None else str(self.max_length)
        lengths = self.lengths or (self.first_length, last)
        return [("rows", f"{lengths[0]} to {lengths[-1]} tokens, {self.schedule_type}")]

    @staticmethod
    def resume_note(old: Mapping[str, Any], new: Mapping[str, Any], step: int) -> str:
        return (
            f"the curriculum of this call is used from step {step} on, and differs from that of "
            "the saved run; tokens_seen counts earlier steps by this curriculum, too"
        )

    def _check_growth(self) -> None:
        if self.total_steps is None:
            raise ConfigError(
                f"{self.schedule_type} needs the number of steps until max_length; set "
                "total_steps, such as 40 % of the run",
                ("total_steps",),
            )
        if self.first_length < self.length_step:
            refuse(
                "min_length",
                self.min_length,
                f"is rounded down to a multiple of length_step ({self.length_step}), which leaves "
                "no tokens; raise it, or lower length_step",
            )
        if self.max_length is not None and self.max_length < self.first_length:
            refuse(
                "max_length",
                self.max_length,
                f"is below min_length ({self.first_length}); raise max_length",
            )

    def _check_lists(self) -> None:
        lengths, steps = self.lengths, self.until_steps
        if not lengths or min(lengths) < 1 or list(lengths) != sorted(lengths):
            refuse(
                "lengths",
                [*lengths],
                "must be ascending integers of at least 1, such as [64, 128, 256]",
            )
        if len(steps) != len(lengths) - 1:
            refuse(
                "until_steps",
                [*steps],
                f"must have one entry less than lengths ({len(lengths)}): the last length has "
                "no end",
            )
        if any(low >= high for low, high in zip((0, *steps), steps, strict=False)):
            refuse(
                "until_steps",
                [*steps],
                "must be strictly ascending integers of at least 1, such as [100, 200]",
            )

    @property
    def first_length(self) -> int:
        """Smallest length of the schedule: `min_length`, or `length_step` if `min_length` is null.
        The schedule rounds it down to a multiple of `length_step`."""
        return self.length_step if self.min_length is None else self.min_length

    @property
    def last_length(self) -> int:
        """Number of tokens per row after the end of the curriculum.

        Raises:
          ConfigError: `max_length` is null, so the value depends on the data.
        """
        if self.schedule_type == "fixed_discrete":
            return self.lengths[-1]
        if self.max_length is None:
            raise ConfigError(
                "null means the row length of the data, which is not known here; set max_length",
                ("max_length",),
            )
        return self.max_length

    def length(self, step: int) -> int:
        """Returns the number of tokens per row in a training step.

        The formulas and their rounding in float64 are DeepSpeed's. DeepSpeed's schedule stays at
        max_length once reached, and so does this one, because its lengths never fall.

        Args:
          step: number of the step; the first step is 1. `max_length` must not be null.
        """
        if self.schedule_type == "fixed_discrete":
            place = sum(step > last for last in self.until_steps)
            return self.lengths[place]
        low, high = self.first_length, self.last_length
        if low >= high:
            return high
        assert self.total_steps is not None
        degree = 1.0 if self.schedule_type == "fixed_linear" else self.root_degree
        try:
            share = (float(step) / self.total_steps) ** (1.0 / degree)
        except OverflowError:  # far beyond total_steps
            return high
        grown = math.floor(share * (high - low) + low)
        return min(grown - grown % self.length_step, high)

    def spans(self, after: int, until: int) -> Iterator[tuple[int, int]]:
        """Groups the steps from `after` + 1 to `until` by their length: yields (length, number of
        successive steps with this length)."""
        while after < until:
            length = self.length(after + 1)
            # By bisection, because lengths never fall.
            end = _first(lambda step, now=length: self.length(step) > now, after + 1, until + 1) - 1
            yield length, end - after
            after = end

    def first_step_above(self, length: int, after: int) -> int | None:
        """Returns the first step after `after` whose rows are longer than `length`; None if no step
        is."""
        if length >= self.last_length:
            return None
        found = _first(lambda step: self.length(step) > length, after + 1, _NEVER)
        return None if found == _NEVER else found

    @property
    def all_lengths(self) -> tuple[int, ...]:
        """All lengths that the schedule has, ascending. For a schedule of very many steps, all
        multiples of `length_step` in its range."""
        return _all_lengths(self)

    @property
    def rungs(self) -> tuple[int, ...]:
        """Row lengths that are compiled, ascending: at most `MAX_RUNGS`, evenly spaced among all
        lengths, always with the longest."""
        falling = self.all_lengths[::-1]
        return falling[:: -(-len(falling) // MAX_RUNGS)][::-1]

    def rung(self, length: int) -> int:
        """Returns the compiled length for rows of `length` tokens: the smallest that is not
        shorter."""
        return min(rung for rung in self.rungs if rung >= length)


@functools.lru_cache(maxsize=64)
def _all_lengths(config: CurriculumConfig) -> tuple[int, ...]:
    if config.schedule_type == "fixed_discrete":
        return tuple(sorted({*config.lengths}))
    last, low = config.last_length, config.length(1)
    end = _first(lambda step: config.length(step) >= last, 1, _COUNTED_STEPS)
    if end < _COUNTED_STEPS:
        return tuple(sorted({config.length(step) for step in range(1, end + 1)}))
    return (*range(low, last, config.length_step), last)


def _first(holds: Callable[[int], bool], low: int, high: int) -> int:
    """Finds by bisection the first number from `low` on for which `holds` is true; returns `high`
    if `holds` is false for all numbers below `high`.

    Args:
      holds: condition on a number; if it is true for a number, it is true for all larger numbers.
    """
    reach = 1
    while low + reach < high and not holds(low + reach - 1):
        low, reach = low + reach, 2 * reach
    high = min(low + reach, high)
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low
