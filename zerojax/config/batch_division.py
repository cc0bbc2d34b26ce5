"""Divides the rows of a batch over data shards and microbatches. Imports no JAX."""

from __future__ import annotations

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
        of_shards, of_parts = f"{self.shards} data shards", f"{self.name}={self.parts}"
        by = f"{of_shards} x {of_parts} = {self.unit}" if self.parts > 1 else of_shards
        by = of_parts if self.shards == 1 and self.parts > 1 else by
        fewer = [n for n in range(1, self.parts) if rows and rows % (self.shards * n) == 0]
        low = rows // self.unit * self.unit
        near = [size for size in (low, low + self.unit) if size]
        if setting is None:
            remedy = f"{' or '.join(map(str, near))} rows"
        else:
            remedy = " or ".join(f"{setting}={size}" for size in near)
        remedy += f", or {self.name}={fewer[-1]}" if fewer else ""
        return f"is not divisible by {by}; use {remedy}"
