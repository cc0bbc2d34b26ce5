"""Pipeline layout: layers of each stage, transferred values and schedule."""

from __future__ import annotations

import dataclasses
import itertools
from functools import cached_property
from typing import Any

from zerojax.plan.schedules import ExecutorTable, Schedule


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PipelineLayout:
    """A pipeline, before anything runs.

    "Virtual stages" are the parts of the model in its own order; a stage that holds several calls
    them chunks (see `zerojax.schedules.Schedule`).

    Attributes:
      table: the schedule as the executor reads it.
      layers: number of layers on each virtual stage.
      stacked: names of the parameters that the layer loop slices; a stage holds only its rows of
        them. All others are on every stage.
      activations: what travels from stage to stage for one microbatch of one data shard, as
        `ShapeDtypeStruct`s.
      embed_flops, layer_flops, head_flops: of the forward pass of one microbatch of one data shard;
        matrix products alone.
      stash_bytes: what one chunk keeps of one microbatch of one data shard between its forward and
        its backward.
      skips_padding: whether a stage with fewer layers than another waits instead of computing rows
        that hold none.
    """

    table: ExecutorTable
    layers: tuple[int, ...]
    stacked: frozenset[str]
    activations: tuple[Any, ...]
    embed_flops: float
    layer_flops: float
    head_flops: float
    stash_bytes: int
    skips_padding: bool = False

    @property
    def schedule(self) -> Schedule:
        return self.table.schedule

    @property
    def num_layers(self) -> int:
        return sum(self.layers)

    @property
    def chunk_rows(self) -> int:
        """Rows of a stack that each chunk has: as many as the longest needs."""
        return max(self.layers)

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """For each row of a stored stack the layer in it, -1 for padding.

        Ordered by stage, then chunk, then layer, so that cutting the stack evenly over the stages
        gives each its own.
        """
        return layer_rows(self.schedule, self.layers)


def layer_rows(schedule: Schedule, layers: tuple[int, ...]) -> tuple[int, ...]:
    """See `PipelineLayout.rows`.

    >>> from zerojax.plan.schedules import make_schedule
    >>> layer_rows(make_schedule("1f1b", stages=2, microbatches=2), (2, 1))
    (0, 1, 2, -1)
    """
    starts = [0, *itertools.accumulate(layers)]
    longest = max(layers)
    rows = [-1] * (schedule.num_virtual_stages * longest)
    for virtual, count in enumerate(layers):
        stage, chunk = schedule.locate(virtual)
        place = (stage * schedule.num_chunks + chunk) * longest
        rows[place : place + count] = range(starts[virtual], starts[virtual] + count)
    return tuple(rows)
