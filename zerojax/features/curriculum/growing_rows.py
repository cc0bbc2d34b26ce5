"""The curriculum as a feature of a run: its hooks. `plan.rung_plans` plans each length."""

from __future__ import annotations

import dataclasses

from zerojax.config import CurriculumConfig
from zerojax.config.checks import MAX_SIZE
from zerojax.features.curriculum.length_ladder import LengthLadder, ladder_of
from zerojax.features.seam import Feature
from zerojax.features.several_sizes import WORK_WITH_SIZES
from zerojax.optim.step_sizes import StepSizes
from zerojax.placement.decisions import Decisions


class GrowingRows(Feature[CurriculumConfig, None]):
    """Curriculum of the row length."""

    kind = CurriculumConfig
    works_with = WORK_WITH_SIZES

    def ladder(self, config: CurriculumConfig, plan: Decisions, *, own_loss: bool) -> LengthLadder:
        return ladder_of(plan, config, own_loss=own_loss)

    def sizes(self, config: CurriculumConfig, rows: int, seq_len: int | None) -> StepSizes | None:
        if seq_len is None:
            return None
        if config.schedule_type != "fixed_discrete" and config.max_length is None:
            config = dataclasses.replace(config, max_length=seq_len)
        after, lengths, step = [], [], 0
        while True:
            length = config.length(step + 1)
            after.append(step)
            lengths.append(length)
            following = config.first_step_above(length, step + 1)
            if following is None or following > MAX_SIZE:
                break
            step = following - 1
        return StepSizes(
            after=tuple(after),
            rows=(rows,) * len(after),
            tokens=tuple(rows * length for length in lengths),
        )
