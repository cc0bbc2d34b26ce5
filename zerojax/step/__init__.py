"""The training step from its parts; first states, changed meshes, and the memory of the host.

Depends on plans and arrays, never on run folders, logs or the training loop.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerojax.step.build import build_evaluation, build_finish, build_step
    from zerojax.step.initialization import init_state
    from zerojax.step.joint import Average, JointPlan, Objective, make_joint_plan
    from zerojax.step.reshard import from_portable_state, reshard_state, to_portable_state

__all__ = [
    "Average",
    "JointPlan",
    "Objective",
    "build_evaluation",
    "build_finish",
    "build_step",
    "from_portable_state",
    "init_state",
    "make_joint_plan",
    "reshard_state",
    "to_portable_state",
]

_HOME_OF_NAME = {
    "Average": "joint",
    "JointPlan": "joint",
    "Objective": "joint",
    "build_evaluation": "build",
    "build_finish": "build",
    "build_step": "build",
    "from_portable_state": "reshard",
    "init_state": "initialization",
    "make_joint_plan": "joint",
    "reshard_state": "reshard",
    "to_portable_state": "reshard",
}


def __getattr__(name: str) -> Any:
    """Returns the public object `name`; imports its module on first access (PEP 562)."""
    if name not in _HOME_OF_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME_OF_NAME[name]}"), name)
    globals()[name] = value
    return value
