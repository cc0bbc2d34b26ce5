"""Plans of runs before any array exists: choices, refusals, bytes, costs, and the reasons.

The package works with abstract models and settings; it makes no array and runs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerojax.plan.make import Plan, make_plan
    from zerojax.plan.rule_proposal import RuleProposal, propose_rules

__all__ = [
    "Plan",
    "RuleProposal",
    "make_plan",
    "propose_rules",
]

_HOME_OF_NAME = {
    "Plan": "make",
    "RuleProposal": "rule_proposal",
    "make_plan": "make",
    "propose_rules": "rule_proposal",
}


def __getattr__(name: str) -> Any:
    """Imports the module that defines `name` when the name is first accessed (PEP 562)."""
    if name not in _HOME_OF_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME_OF_NAME[name]}"), name)
    globals()[name] = value
    return value
