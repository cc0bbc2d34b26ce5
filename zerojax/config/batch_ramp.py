"""Ramps of the batch size: their settings, and the number of rows of each step.

This module only computes numbers and imports no JAX. The schedule is that of Megatron's option
`--rampup-batch-size` (`megatron/core/num_microbatches_calculator.py`). The first step has number 1.
"""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from zerojax.config.checks import check_size, names_keywords, refuse
from zerojax.config.feature_settings import FeatureSettings
from zerojax.config.loader import ConfigError, coerce_fields

MAX_BATCH_SIZES = 8
"""Largest number of batch sizes of a ramp; each size is a compiled step."""


@names_keywords()
@dataclass(frozen=True, kw_only=True)
class BatchRampConfig(FeatureSettings):
    """Ramp of the global batch: early steps have fewer rows. The three settings are those of
    Megatron's `--rampup-batch-size`."""

    keyword = "batch_ramp"
    switch = "start"
    changes_work = True
    regroups = True

    start: int | None = None
    """Number of rows of the batch in the first step. null: every step has the run's batch."""
    increment: int | None = None
    """Number of rows by which the batch grows each time, up to the run's batch."""
    ramp_rows: int | None = None
    """Number of rows, summed over steps, until the batch has its full size. Each size before gets
    an equal share of them."""

    def __post_init__(self) -> None:
        coerce_fields(self)
        given = [field.name for field in fields(self) if getattr(self, field.name) is not None]
        missing = [field.name for field in fields(self) if field.name not in given]
        if given and missing:
            others = " and ".join(missing)
            reason = f"needs the other settings of the ramp: set {others} too"
            refuse(given[0], getattr(self, given[0]), reason)
        check_size(self, "start", "increment")
        check_size(self, "ramp_rows", most=2**62)

    def check_batch(self, rows: int, *, elastic: bool) -> None:
        if self.is_off:
            return
        if elastic:
            raise ConfigError(
                f"a batch ramp (start={self.start}) together with elasticity, which chooses the "
                "batch, is not supported; leave elasticity or batch_ramp out",
                ("batch_ramp", "start"),
            )
        BatchRamp(config=self, final=rows)

    def summary(self) -> list[tuple[str, str]]:
        return [("batch", f"start={self.start}, then {self.increment} rows more each time")]

    @staticmethod
    def resume_note(old: Mapping[str, Any], new: Mapping[str, Any], step: int) -> str:
        return (
            f"the batch_ramp of this call, {new or 'none'}, is used from step {step} on; the saved "
            f"run had {old or 'none'}; tokens_seen counts earlier steps by that of this call"
        )

    def check_steps(self, steps: int | None) -> None:
        if steps is None and not self.is_off:
            refuse(
                "start",
                self.start,
                "makes early batches smaller, so the number of steps is not the number of batches; "
                "pass steps=...",
            )


class _Phase(NamedTuple):
    """Successive steps with one batch size: the steps after `after`, before which `rows_before`
    rows were consumed; each has `rows` rows."""

    after: int
    rows_before: int
    rows: int


@names_keywords()
@dataclass(frozen=True, kw_only=True)
class BatchRamp:
    """Batch sizes of a run whose global batch grows.

    Attributes:
      config: settings of the ramp, which is not off.
      final: number of rows of the run's global batch.

    Raises:
      ConfigError: the sizes do not end at `final`, or there are too many.
    """

    config: BatchRampConfig
    final: int

    def __post_init__(self) -> None:
        start, increment = self._sizes
        if start >= self.final:
            text = f"is not below the run's batch ({self.final} rows); lower it"
            self._refuse("start", start, f"{text}, or leave the ramp out")
        grown = self.final - start
        fitting = [grown // n for n in range(1, MAX_BATCH_SIZES) if grown % n == 0]
        near = min(fitting, key=lambda number: abs(number - increment))
        if grown % increment:
            text = f"does not divide the growth of {grown} rows, from start={start} to {self.final}"
            self._refuse("increment", increment, f"{text}; use {near}")
        if (count := grown // increment + 1) > MAX_BATCH_SIZES:
            text = f"gives {count} batch sizes, and at most {MAX_BATCH_SIZES} are compiled"
            self._refuse("increment", increment, f"{text}; use {near}")

    @staticmethod
    def _refuse(name: str, value: int, reason: str) -> None:
        raise ConfigError(f"{value} {reason}", ("batch_ramp", name))

    @property
    def _sizes(self) -> tuple[int, int]:
        start, increment = self.config.start, self.config.increment
        assert start is not None
        assert increment is not None
        return start, increment

    @functools.cached_property
    def _phases(self) -> tuple[_Phase, ...]:
        """Phases of the run. A size is left out if one step consumes the rows of its share."""
        (start, increment), ramp_rows = self._sizes, self.config.ramp_rows
        assert ramp_rows is not None
        growths = (self.final - start) // increment
        phases, consumed, step, grown = [], 0, 0, 0
        while grown < growths:
            rows = start + grown * increment
            phases.append(_Phase(step, consumed, rows))
            end = -(-(grown + 1) * ramp_rows // growths)
            count = -(-(end - consumed) // rows)
            step, consumed = step + count, consumed + count * rows
            grown = min(consumed * growths // ramp_rows, growths)
        return (*phases, _Phase(step, consumed, self.final))

    def _phase(self, step: int) -> _Phase:
        return next(phase for phase in reversed(self._phases) if phase.after < step)

    def rows(self, step: int) -> int:
        """Returns the number of rows of the global batch of a step, counted from 1."""
        return self._phase(step).rows

    def rows_before(self, step: int) -> int:
        """Returns the number of rows that the steps before `step` consume."""
        phase = self._phase(step)
        return phase.rows_before + (step - 1 - phase.after) * phase.rows

    @property
    def rungs(self) -> tuple[int, ...]:
        """Batch sizes that steps have, ascending."""
        return tuple(phase.rows for phase in self._phases)

    @property
    def first_steps(self) -> tuple[int, ...]:
        """First step of each batch size, ascending; the first is 1."""
        return tuple(phase.after + 1 for phase in self._phases)

    def first_step_above(self, rows: int) -> int | None:
        """Returns the first step whose batch has more than `rows` rows; None if no step has."""
        return next((phase.after + 1 for phase in self._phases if phase.rows > rows), None)

    def spans(self, after: int, until: int) -> Iterator[tuple[int, int]]:
        """Groups the steps from `after` + 1 to `until` by their batch size: yields (rows, number of
        successive steps with so many rows)."""
        ends = [phase.after for phase in self._phases[1:]]
        for phase, end in zip(self._phases, [*ends, until], strict=True):
            low, high = max(phase.after, after), min(end, until)
            if low < high:
                yield phase.rows, high - low
