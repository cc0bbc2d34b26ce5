"""Builds the training step (ZeRO, pipeline, offload, update); initializes and reshards states.

Depends on plans and arrays, never on run folders, logs or the training loop. Sub-packages: `zero`,
`pipeline`, `offload`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerojax.parallel.initialization import init_state
    from zerojax.parallel.reshard import from_portable_state, reshard_state, to_portable_state
    from zerojax.parallel.step import build_evaluation, build_step

__all__ = [
    "build_evaluation",
    "build_step",
    "from_portable_state",
    "init_state",
    "reshard_state",
    "to_portable_state",
]

_HOME_OF_NAME = {
    "build_evaluation": "step",
    "build_step": "step",
    "from_portable_state": "reshard",
    "init_state": "initialization",
    "reshard_state": "reshard",
    "to_portable_state": "reshard",
}


def __getattr__(name: str) -> Any:
    """Imports the module of a name on first access (PEP 562)."""
    if name not in _HOME_OF_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME_OF_NAME[name]}"), name)
    globals()[name] = value
    return value
