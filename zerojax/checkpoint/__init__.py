"""Checkpoints: named arrays in verified folders, and byte buckets on a disk.

Knows trees of arrays, JSON, and where a Hugging Face folder has the weights that a checkpoint does
not store; never what a model computes, plans or how a state is padded. Sub-package: `store` (the
buckets).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerojax.checkpoint.checkpointer import Checkpointer, Restored
    from zerojax.checkpoint.errors import (
        BaseWeightsError,
        CheckpointError,
        Damage,
        DamagedError,
        FolderInUseError,
        MachineError,
    )
    from zerojax.checkpoint.metadata import Metadata
    from zerojax.checkpoint.retention import Retention, named_step
    from zerojax.checkpoint.verification import Verification

__all__ = [
    "BaseWeightsError",
    "CheckpointError",
    "Checkpointer",
    "Damage",
    "DamagedError",
    "FolderInUseError",
    "MachineError",
    "Metadata",
    "Restored",
    "Retention",
    "Verification",
    "named_step",
]

_HOME_OF_NAME = {
    "BaseWeightsError": "errors",
    "CheckpointError": "errors",
    "Checkpointer": "checkpointer",
    "Damage": "errors",
    "DamagedError": "errors",
    "FolderInUseError": "errors",
    "MachineError": "errors",
    "Metadata": "metadata",
    "Restored": "checkpointer",
    "Retention": "retention",
    "Verification": "verification",
    "named_step": "retention",
}


def __getattr__(name: str) -> Any:
    """Imports the module of a name at its first use (PEP 562)."""
    if name not in _HOME_OF_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME_OF_NAME[name]}"), name)
    globals()[name] = value
    return value
