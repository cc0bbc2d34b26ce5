"""Divides the rows of a batch over data shards and microbatches. Imports no JAX."""

from __future__ import annotations

import math
from typing import Protocol

from zerojax.config.late_dataclasses import dataclass


@dataclass(frozen=True)
class BatchDivision:
    """Division of a batch into pieces of equal size: the rows of a microbatch on a data shard.

    Attributes:
      shards: number of data shards.
      parts: number of microbatches.
      name: name of the setting `parts`, for messages.
    """

    shards: int
    parts: int = 1
    name: str = "num_microbatches"

    @property
    def unit(self) -> int:
        """Number of pieces, by which the rows must be divisible."""
        return self.shards * self.parts

    def why_not(self, rows: int, setting: str | None = None) -> str | None:
        """Returns why a number of rows cannot be divided, with remedies; None if it can.

        The text continues "global_batch_size=20 ...".

        Args:
          rows: number of rows of a batch.
          setting: name of the setting that is the number of rows; None: it has none.
        """
        if rows and rows % self.unit == 0:
            return None
        by = f"{self.shards} data shard{'s' * (self.shards > 1)}"
        if self.parts > 1:
            of_parts = f"{self.name}={self.parts}"
            by = of_parts if self.shards == 1 else f"{self.unit} ({by} x {of_parts})"
        fewer = self._largest_below(rows)
        low = rows // self.unit * self.unit
        near = [size for size in (low, low + self.unit) if size]
        if setting is None:
            remedy = f"{' or '.join(map(str, near))} rows"
        else:
            remedy = " or ".join(f"{setting}={size}" for size in near)
        remedy += f", or {self.name}={fewer}" if fewer else ""
        return f"is not divisible by {by}; use {remedy}"

    def _largest_below(self, rows: int) -> int | None:
        """Returns the largest smaller number of microbatches that divides a number of rows."""
        of_shard, rest = divmod(rows, self.shards)
        if rest or not rows:
            return None
        small = [n for n in range(1, math.isqrt(of_shard) + 1) if of_shard % n == 0]
        divisors = (*small, *(of_shard // n for n in small))
        return max((n for n in divisors if n < self.parts), default=None)


class RowsOfSteps(Protocol):
    """Numbers of rows of the steps of a run whose global batch changes.

    Attributes:
      final: number of rows of the full batch.
    """

    @property
    def final(self) -> int: ...

    def rows(self, step: int) -> int:
        """Returns the number of rows of a step, counted from 1."""
        ...

    def rows_before(self, step: int) -> int:
        """Returns the number of rows of all steps before this one."""
        ...
