"""The batch ramp as a feature of a run: its hooks. `plan.rung_plans` plans each size."""

from __future__ import annotations

from typing import Any

from jax.sharding import AbstractMesh, Mesh

from zerojax.config import BatchRamp, BatchRampConfig
from zerojax.features.batch_ramp.batch_rungs import ramp_microbatches
from zerojax.features.seam import Combination, Feature
from zerojax.features.several_sizes import check_sizes
from zerojax.optim.step_sizes import StepSizes


class GrowingBatches(Feature[BatchRampConfig, None]):
    """Ramp of the batch size."""

    kind = BatchRampConfig

    def check(self, config: BatchRampConfig, run: Combination) -> None:
        check_sizes(run, "a batch ramp", ("batch_ramp", "start"))

    def sizes(self, config: BatchRampConfig, rows: int, seq_len: int | None) -> StepSizes:
        found = BatchRamp(config=config, final=rows)
        return StepSizes(
            after=tuple(step - 1 for step in found.first_steps),
            rows=found.rungs,
            tokens=None if seq_len is None else tuple(size * seq_len for size in found.rungs),
        )

    def microbatches(
        self, config: BatchRampConfig, number: int | None, mesh: Mesh | AbstractMesh, batch: Any
    ) -> tuple[int | None, list[str]]:
        return ramp_microbatches(config, number, mesh, batch)
