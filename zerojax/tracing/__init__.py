"""Traced programs of models: reads of parameters, loops over layers, FLOPs, rewriting.

Knows traced programs; never a mesh, a sharding or an optimizer. Sub-packages: `loops` (the loop
over layers), `rolling` (a list of layers as one loop), `splitting` (dimensions split together).
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
