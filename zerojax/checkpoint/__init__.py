"""What a run resumes from: one folder of complete, atomic checkpoints, written in the background.

Knows trees of arrays and JSON; never touches models, plans or how a state is padded.
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
