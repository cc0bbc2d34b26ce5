"""Operators that models call: attention, routed experts, chunked losses, sums over the batch.

They depend on JAX, but not on Flax, shardings or optimizers. The sub-package `context` has
attention over a sequence that is split over devices.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerojax.operators.attending import attention
    from zerojax.operators.routed_experts import experts
    from zerojax.operators.sparse_layouts import BlockTable, layout_table
    from zerojax.operators.whole_batch import batch_mean, batch_sum, gather_batch, row_numbers

__all__ = [
    "BlockTable",
    "attention",
    "batch_mean",
    "batch_sum",
    "experts",
    "gather_batch",
    "layout_table",
    "row_numbers",
]

_HOME_OF_NAME = {
    "BlockTable": "sparse_layouts",
    "attention": "attending",
    "batch_mean": "whole_batch",
    "batch_sum": "whole_batch",
    "experts": "routed_experts",
    "gather_batch": "whole_batch",
    "layout_table": "sparse_layouts",
    "row_numbers": "whole_batch",
}


def __getattr__(name: str) -> Any:
    """Imports and caches a public name at its first use (PEP 562)."""
    if name not in _HOME_OF_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME_OF_NAME[name]}"), name)
    globals()[name] = value
    return value
