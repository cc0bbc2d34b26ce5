"""Analyzes and rewrites traced programs of models: parameter reads, loops over layers, FLOPs.

The package works on traced programs and never sees a mesh, a sharding or an optimizer.
Sub-packages: `loops` (finds the loop over layers), `rolling` (turns a list of layers into one
loop), `splitting` (finds dimensions that have to be split together).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerojax.tracing.index_limits import IndexLimit
    from zerojax.tracing.protocol import Arrays, LazyArray, Loss, Model, ModelLike, OnRead
    from zerojax.tracing.trace import ModelTrace, trace_model

__all__ = [
    "Arrays",
    "IndexLimit",
    "LazyArray",
    "Loss",
    "Model",
    "ModelLike",
    "ModelTrace",
    "OnRead",
    "trace_model",
]

_HOME_OF_NAME = {
    "Arrays": "protocol",
    "IndexLimit": "index_limits",
    "LazyArray": "protocol",
    "Loss": "protocol",
    "Model": "protocol",
    "ModelLike": "protocol",
    "ModelTrace": "trace",
    "OnRead": "protocol",
    "trace_model": "trace",
}


def __getattr__(name: str) -> Any:
    """Imports and caches a public name at its first use (PEP 562)."""
    if name not in _HOME_OF_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME_OF_NAME[name]}"), name)
    globals()[name] = value
    return value
