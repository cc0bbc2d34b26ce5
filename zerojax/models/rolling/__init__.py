"""Layers that a Python loop calls, found in a traced loss and rolled into one loop."""

from zerojax.models.rolling.finding import FoundLoops, Loop, find_loops
from zerojax.models.rolling.flat_program import Mismatch
from zerojax.models.rolling.kept_values import ELEMENTWISE, has_checkpoints, kept_bytes
from zerojax.models.rolling.layer_names import find_lists, stack_name
from zerojax.models.rolling.mapped_rows import MappedRows, map_rows
from zerojax.models.rolling.rolled_model import RolledModel, StackedRows

__all__ = [
    "ELEMENTWISE",
    "FoundLoops",
    "Loop",
    "MappedRows",
    "Mismatch",
    "RolledModel",
    "StackedRows",
    "find_lists",
    "find_loops",
    "has_checkpoints",
    "kept_bytes",
    "map_rows",
    "stack_name",
]
