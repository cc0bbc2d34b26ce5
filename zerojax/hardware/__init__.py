"""Capabilities of GPUs, links and disks, published or measured, and compiling for absent GPUs.

Absent GPUs are GPUs that this machine does not have. The package knows nothing about models and
plans.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerojax.hardware.compile_client import CompileError, CompilerMissing
    from zerojax.hardware.gpus import Gpu, find_gpu

__all__ = [
    "CompileError",
    "CompilerMissing",
    "Gpu",
    "find_gpu",
]

_HOME_OF_NAME = {
    "CompileError": "compile_client",
    "CompilerMissing": "compile_client",
    "Gpu": "gpus",
    "find_gpu": "gpus",
}


def __getattr__(name: str) -> Any:
    """Imports the module that defines `name` when the name is first accessed (PEP 562)."""
    if name not in _HOME_OF_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME_OF_NAME[name]}"), name)
    globals()[name] = value
    return value
