"""The curriculum as a feature of a run: its hooks. `plan.rung_plans` plans each length."""

from __future__ import annotations

from zerojax.config import CurriculumConfig
from zerojax.features.seam import Combination, Feature
from zerojax.features.several_sizes import check_sizes


class GrowingRows(Feature[CurriculumConfig, None]):
    """Curriculum of the row length."""

    kind = CurriculumConfig

    def check(self, config: CurriculumConfig, run: Combination) -> None:
        check_sizes(run, "a curriculum", ("curriculum", "type"))
