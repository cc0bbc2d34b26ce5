"""The plan: shape, dtype, sharding and reason of every array, and the pages that show them."""

from __future__ import annotations

import dataclasses
from typing import Any

from zerojax.plan.decisions import Decisions
from zerojax.plan.explain import explain_parameter
from zerojax.plan.show import plan_dict, plan_line, plan_table


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Plan(Decisions):
    """Every decision about a run before its first array exists; fields as `Decisions` has them."""

    def __repr__(self) -> str:
        return f"Plan({plan_line(self)}; plan.table() has every parameter and reason)"

    def table(self) -> str:
        """The plan for people: bytes per device by role, each parameter, every exception."""
        return plan_table(self)

    def explain(self, name: str) -> str:
        """One parameter as a page: sharding, collectives and their bytes, update, memory tier,
        names in a checkpoint.

        Args:
          name: of the parameter, as `table` has it: "blocks/mlp/up/kernel".

        Raises:
          ValueError: there is no such parameter; names the nearest one.
        """
        return explain_parameter(self, name)

    def describe(self) -> str:
        """One line."""
        return plan_line(self)

    def as_dict(self) -> dict[str, Any]:
        """The plan for programs, as JSON takes it."""
        return plan_dict(self)


def require_plan(plan: Any, taker: str) -> Plan:
    """The plan itself.

    Args:
      taker: the public function that was given it.

    Raises:
      TypeError: it is something else, for example a model.
    """
    if not isinstance(plan, Plan):
        given = plan.__name__ if isinstance(plan, type) else f"a {type(plan).__name__}"
        raise TypeError(
            f"{taker} takes a Plan, not {given}; make one: "
            "zerojax.make_plan(model, mesh_config, ...)"
        )
    return plan
