"""Checkpoints: saves training states as named arrays, verifies them, and restores them.

A checkpoint is a folder with arrays, JSON metadata and checksums. This package knows trees of
arrays, JSON, and the Hugging Face folder that holds frozen weights which a checkpoint does not
store. It does not know models, plans or the padding of a state. The sub-package `store` keeps
numbered buckets of bytes in files, for states that do not fit into memory.
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
