"""Ways to train a small model whose offloaded update runs beside a later pass."""

import dataclasses
from typing import Any

from tests.support.pipeline_runs import function_model
from tests.support.small_models import regression_loss
from tests.support.trajectories import plan_for, regression_batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class LateRow:
    """One way to train; without `has_bits` XLA sums a gradient in another order."""

    zero: int
    devices: int = 4
    mesh: tuple[tuple[str, int], ...] = ()
    share: float = 0.0
    has_bits: bool = True
    is_slow: bool = True

    def __str__(self) -> str:
        return f"zero{self.zero}-{self.devices}-{dict(self.mesh)}-{self.share}"


ROWS = [
    LateRow(zero=1, is_slow=False),
    LateRow(zero=3, share=0.05, is_slow=False),
    LateRow(zero=1, devices=1, share=0.1),
    LateRow(zero=0, has_bits=False),
    LateRow(zero=2, mesh=(("replica", 2), ("data", 2))),
    LateRow(zero=3, devices=2, has_bits=False),
]


def late_plan(row: LateRow, offload: dict[str, Any], **changes: Any) -> Any:
    """The plan of a row with these offload settings; `changes` are arguments of `plan_for`."""
    state = {"device": row.share, "host": 1 - row.share} if row.share else "host"
    options = {
        "loss": regression_loss,
        "batch": regression_batch,
        "devices": row.devices,
        "mesh": dict(row.mesh),
        "zero": row.zero,
        "persistence_threshold": 10,
        **changes,
    }
    return plan_for(function_model()[0], offload={**offload, "opt_state": state}, **options)
