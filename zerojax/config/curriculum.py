"""Curricula of the row length: settings, the length of each step, the lengths that are compiled.

Arithmetic only; imports no JAX. The schedules are DeepSpeed's (`data_pipeline/
curriculum_scheduler.py`): fixed_linear, fixed_root and fixed_discrete. A step is counted from 1, as
DeepSpeed does for the number that it passes to the model.
"""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Literal

from zerojax.config.checks import check_positive, check_size, names_keywords, refuse
from zerojax.config.loader import ConfigError, coerce_fields

MAX_RUNGS = 8
"""Maximum number of compiled lengths. Lengths between two of them are computed at the longer one,
with weights of 0 at the end of each row."""
_COUNTED_STEPS = 100_000
"""A schedule that reaches its end within so many steps is followed step by step."""
_NEVER = 2**62


@names_keywords()
@dataclass(frozen=True, kw_only=True)
class CurriculumConfig:
    """Curriculum of the row length (arXiv:2108.06084): early steps train on the first tokens of
    each row only."""

    type: Literal["seqlen"] | None = None
    """seqlen: the length of rows grows with the steps. null: rows always have full length."""
    schedule_type: Literal["fixed_linear", "fixed_root", "fixed_discrete"] = "fixed_linear"
    """Growth, as in DeepSpeed: linear in the step, by a root of the step, or by a list."""
    min_length: int | None = None
    """Tokens of a row in the first step. null: length_step."""
    max_length: int | None = None
    """Tokens of a row at the end of the curriculum and after it. null: those of the data's rows."""
    total_steps: int | None = None
    """Steps until the length is max_length (fixed_linear, fixed_root)."""
    length_step: int = 8
    """Lengths below max_length are multiples of this; at least 8 suits tensor cores."""
    root_degree: float = 2.0
    """Degree of the root, for fixed_root: 2 is the square root."""
    lengths: tuple[int, ...] = ()
    """Tokens of a row in each phase of fixed_discrete."""
    until_steps: tuple[int, ...] = ()
    """Last step of each phase except the last, for fixed_discrete."""
    keys: tuple[str, ...] = ()
    """Names of the batch arrays [rows, tokens, ...] that are shortened. (): tokens, targets and
    weights, for a next-token loss of zerojax."""

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
        """Lower limit of the schedule, with `length_step` for null, before it is rounded down."""
        return self.length_step if self.min_length is None else self.min_length

    @property
    def last_length(self) -> int:
        """Tokens of a row after the curriculum.

        Raises:
          ConfigError: `max_length` is null, so that it depends on the data.
        """
        if self.schedule_type == "fixed_discrete":
            return self.lengths[-1]
        if self.max_length is None:
            raise ConfigError(
                "null is the length of the data's rows, which is not known here; set max_length",
                ("max_length",),
            )
        return self.max_length

    def length(self, step: int) -> int:
        """Returns the tokens of a row in a step.

        DeepSpeed's formulas, with its rounding in float64. Its schedule stops at max_length, which
        is the same for schedules that never fall.

        Args:
          step: from 1; `max_length` must not be null.
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
        """Yields (length, number of successive steps with it) of steps `after` + 1 to `until`."""
        while after < until:
            length = self.length(after + 1)
            end = _first(lambda step, now=length: self.length(step) > now, after + 1, until + 1) - 1
            yield length, end - after
            after = end

    def first_step_above(self, length: int, after: int) -> int | None:
        """Returns the first step after `after` whose rows are longer than `length`; None if there
        is none."""
        if length >= self.last_length:
            return None
        found = _first(lambda step: self.length(step) > length, after + 1, _NEVER)
        return None if found == _NEVER else found

    @property
    def all_lengths(self) -> tuple[int, ...]:
        """The lengths of the schedule, rising; of a slow schedule, all that it may have."""
        return _all_lengths(self)

    @property
    def rungs(self) -> tuple[int, ...]:
        """The compiled lengths, rising, at most `MAX_RUNGS`: each equally many lengths apart."""
        falling = self.all_lengths[::-1]
        return falling[:: -(-len(falling) // MAX_RUNGS)][::-1]

    def rung(self, length: int) -> int:
        """Returns the smallest compiled length that holds `length` tokens."""
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
    """Returns the first number from `low` on for which `holds`; `high` if there is none below it.

    Args:
      holds: once true, true for all larger numbers.
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
