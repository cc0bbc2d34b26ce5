"""The batch ramp as a feature of a run: its hooks. `plan.rung_plans` plans each size."""

from __future__ import annotations

from jax.sharding import AbstractMesh, Mesh

from zerojax.config import BatchRamp, BatchRampConfig
from zerojax.config.tree_types import Batch
from zerojax.features.batch_ramp.batch_ladder import BatchLadder, ramp_microbatches
from zerojax.features.seam import Feature
from zerojax.features.several_sizes import WORK_WITH_SIZES
from zerojax.optim.step_sizes import StepSizes
from zerojax.placement.decisions import Decisions


class GrowingBatches(Feature[BatchRampConfig, None]):
    """Ramp of the batch size."""

    kind = BatchRampConfig
    works_with = WORK_WITH_SIZES

    def sizes(self, config: BatchRampConfig, rows: int, seq_len: int | None) -> StepSizes:
        found = BatchRamp(config=config, final=rows)
        return StepSizes(
            after=tuple(step - 1 for step in found.first_steps),
            rows=found.rungs,
            tokens=None if seq_len is None else tuple(size * seq_len for size in found.rungs),
        )

    def ladder(self, config: BatchRampConfig, plan: Decisions, *, own_loss: bool) -> BatchLadder:
        return BatchLadder(ramp=BatchRamp(config=config, final=plan.global_batch_size))

    def microbatches(
        self, config: BatchRampConfig, number: int | None, mesh: Mesh | AbstractMesh, batch: Batch
    ) -> tuple[int | None, list[str]]:
        return ramp_microbatches(config, number, mesh, batch)
