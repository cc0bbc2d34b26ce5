"""Decides the batch sizes and microbatches of a run whose global batch grows (batch ramp).

Every microbatch has the same number of rows, so a smaller batch has fewer microbatches, and the
memory of activations is the same in every step. `plan/rung_plans.py` makes the plans.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from zerojax.config import BatchRamp, BatchRampConfig, ConfigError
from zerojax.config.tree_types import Batch
from zerojax.features.several_sizes import Ladder
from zerojax.placement.device_mesh import STAGE, num_data_shards


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchLadder(Ladder):
    """Compiled batch sizes of a run with a batch ramp.

    Attributes:
      ramp: number of rows of each step.
    """

    kind = BatchRampConfig
    event = "batch_size", "rows"
    remedy = "use other batch sizes (start, increment), or settings that support this one"
    ramp: BatchRamp
    plans: Mapping[int, Any] = dataclasses.field(default_factory=dict)  # type: ignore[bad-override]

    @property
    def whole(self) -> int:
        return self.ramp.final

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.ramp.rungs

    def size(self, step: int) -> int:
        return self.ramp.rows(step)

    def next_step(self, step: int) -> int | None:
        return self.ramp.first_step_above(self.ramp.rows(step))

    def spans(self, after: int, until: int) -> Iterator[tuple[int, int]]:
        return self.ramp.spans(after, until)

    def describe(self) -> list[str]:
        sizes = zip(self.ramp.rungs, self.ramp.first_steps, strict=True)
        steps = ", ".join(f"{rows} from step {step}" for rows, step in sizes)
        config, last = self.ramp.config, self.ramp.first_steps[-1]
        return [
            f"batch ramp: rows of a step: {steps}; the ramp ends after "
            f"{self.ramp.rows_before(last)} rows (ramp_rows={config.ramp_rows})",
            "batch ramp: each size is compiled, in microbatches: "
            + ", ".join(f"{rows} in {one.num_microbatches}" for rows, one in self.plans.items()),
        ]

    def describe_size(self, size: int) -> str:
        return f"batch of {size} of {self.whole} rows"

    def describe_rung(self, rung: int) -> str:
        return f"a batch of {rung} rows"

    def structs(self, batch: Batch, size: int) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype), batch)

    def microbatches(self, number: int, size: int) -> int:
        return number * size // self.whole

    def is_plan_of_run(self, size: int) -> bool:
        return size == self.whole

    @property
    def rows_of_steps(self) -> BatchRamp:
        return self.ramp


def ramp_microbatches(
    config: BatchRampConfig, number: int | None, mesh: Mesh | AbstractMesh, batch: Batch
) -> tuple[int | None, list[str]]:
    """Returns (number of microbatches of the full batch, reasons), checked for every batch size.

    Args:
      config: batch ramp of the run.
      number: the user's number of microbatches; None: the smallest with which the rows of a
        microbatch divide all batch sizes, with pipeline stages the largest up to 4 per stage, if
        possible a multiple of the stages.
      mesh: mesh of the run.
      batch: global batch, as arrays or structs.

    Raises:
      ConfigError: the number, or the data shards of the mesh, do not divide a batch size.
    """
    rows = jax.tree.leaves(batch)[0].shape[0]
    ramp, shards = BatchRamp(config=config, final=rows), num_data_shards(mesh)
    unit = math.gcd(*ramp.rungs, rows)
    if unit % shards:
        raise ConfigError(
            f"the batch sizes {', '.join(map(str, ramp.rungs))} have to be divisible by {shards} "
            f"data shards; use multiples of {shards} for start and increment",
            ("batch_ramp", "start"),
        )
    least = rows // unit
    if number is not None and number % least:
        raise ConfigError(
            f"num_microbatches={number} microbatches of the full batch have {rows / number:g} rows,"
            " which do not divide every batch size "
            f"({', '.join(map(str, ramp.rungs))}); use num_microbatches={least} or a multiple, or "
            "leave it out",
            ("batch_ramp", "start"),
        )
    if number is not None:
        return number, []
    stages = mesh.shape[STAGE]
    fitting = [least * n for n in range(2, 4 * stages // least + 1) if unit // shards % n == 0]
    number = max([least, *fitting], key=lambda n: (n % stages == 0, n)) if stages > 1 else least
    return number, [
        f"num_microbatches={number}: microbatches of {rows // number} rows divide every batch of "
        "the ramp"
    ]
