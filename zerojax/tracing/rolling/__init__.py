"""Finds layers that a Python loop calls in a traced loss, and converts them to one `jax.lax.scan`.

Such a conversion is called rolling: equal layers become the iterations of one loop over stacked
parameters.
"""

from zerojax.tracing.rolling.finding import FoundLoops, Loop, find_loops
from zerojax.tracing.rolling.flat_program import Mismatch
from zerojax.tracing.rolling.kept_values import (
    ELEMENTWISE,
    has_checkpoints,
    kept_bytes,
    trained_flops,
)
from zerojax.tracing.rolling.layer_names import find_lists, stack_name
from zerojax.tracing.rolling.mapped_rows import MappedRows, map_rows
from zerojax.tracing.rolling.rolled_model import RolledModel, StackedRows

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
    "trained_flops",
]
