"""Checkpoints: complete, atomic, verified steps in one folder, written in the background.

The package handles named arrays and JSON; it knows no model and no plan.
"""

from zerojax.checkpoint.checkpointer import Checkpointer, Restored
from zerojax.checkpoint.errors import CheckpointError, Damage, DamagedError
from zerojax.checkpoint.kept import named_step
from zerojax.checkpoint.metadata import Metadata
from zerojax.checkpoint.retention import Retention
from zerojax.checkpoint.verification import Verification

__all__ = [
    "CheckpointError",
    "Checkpointer",
    "Damage",
    "DamagedError",
    "Metadata",
    "Restored",
    "Retention",
    "Verification",
    "named_step",
]
