"""Defines the compiled sizes of a run whose steps differ in rows or tokens.

A step is compiled once for each of some sizes. `plan.rung_plans` plans them, and the runner takes
the program of a step's size; both know only this class.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Self

from zerojax.config.batch_division import RowsOfSteps
from zerojax.config.feature_settings import FeatureSettings
from zerojax.config.tree_types import Batch
from zerojax.placement.device_mesh import AXES

WORK_WITH_SIZES = frozenset(
    {"deterministic", "unroll", "wire.weights=fp8", "wire.weights=int8", "wire.weights=delta_int8"}
    | {"wire.gradients", "wire.secondary", "lookup", "sequence_sharding", "ema"}
    | {*AXES}
)
"""`Feature.works_with` of features whose steps have several sizes. An optimizer with two programs
(`one_bit`) is not in it."""


class Ladder:
    """Compiled sizes of a run; a size is a number of tokens per row, or of rows.

    Subclasses are dataclasses.

    Attributes:
      kind: type of the settings of the feature that changes the size.
      event: (name of the log's event at a new size, its field).
      remedy: what to change if the step of a size cannot be planned.
      plans: {compiled size: plan of its step}.
    """

    kind: ClassVar[type[FeatureSettings]]
    event: ClassVar[tuple[str, str]]
    remedy: ClassVar[str]
    plans: Mapping[int, Any]

    def planned(self, plans: Mapping[int, Any]) -> Self:
        """Returns the sizes with the plans of their steps."""
        return dataclasses.replace(self, plans=plans)  # type: ignore[type-var]

    @property
    def whole(self) -> int:
        """Size of a full step."""
        raise NotImplementedError

    @property
    def sizes(self) -> tuple[int, ...]:
        """All compiled sizes, from the smallest."""
        raise NotImplementedError

    def size(self, step: int) -> int:
        """Returns the size of a step, counted from 1."""
        raise NotImplementedError

    def rung_of(self, size: int) -> int:
        """Returns the compiled size for a step of this size."""
        return size

    def next_step(self, step: int) -> int | None:
        """Returns the first step after `step` that needs another program; None if no step does."""
        raise NotImplementedError

    def spans(self, after: int, until: int) -> Iterator[tuple[int, int]]:
        """Yields (size, number of successive steps) of the steps `after` + 1 to `until`."""
        raise NotImplementedError

    def describe(self) -> list[str]:
        """Returns lines for the plan."""
        raise NotImplementedError

    def describe_size(self, size: int) -> str:
        """Describes a step's size for the log."""
        raise NotImplementedError

    def describe_rung(self, rung: int) -> str:
        """Describes what the program of a compiled size computes."""
        raise NotImplementedError

    def structs(self, batch: Batch, size: int) -> Any:
        """Returns the shapes of the global batch of a compiled size, from those of the full one."""
        raise NotImplementedError

    def microbatches(self, number: int, size: int) -> int:
        """Returns the number of microbatches of a compiled size, given that of the full batch."""
        return number

    def is_plan_of_run(self, size: int) -> bool:
        """Returns whether the plan of the run is that of the step of this size."""
        return False

    def cut(self, batch: Batch, step: int) -> Any:
        """Returns the host batch of a step, from a host batch with whole rows."""
        return batch

    @property
    def rows_of_steps(self) -> RowsOfSteps | None:
        """Number of rows of each step; None if all steps have those of the data's batches."""
        return None

    def first_check(self, build_evaluation: Callable[[Any], Any]) -> Callable[..., bool] | None:
        """Returns a check of the run's model before its first step; None: nothing to check.

        Args:
          build_evaluation: `zerojax.step.build.build_evaluation`.

        Returns:
          `(state, batch on the devices, plan of the step, step) -> whether the check is done`,
          which raises ValueError if the size of steps changes what the model computes.
        """
        return None
