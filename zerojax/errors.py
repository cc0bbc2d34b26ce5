"""Exceptions of zerojax that a program may catch, imported on first use.

Invalid arguments raise `ValueError` or `TypeError`; the exceptions here say more.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerojax.checkpoint import CheckpointError
    from zerojax.checkpoint.errors import (
        BaseWeightsError,
        DamagedError,
        FolderInUseError,
        MachineError,
    )
    from zerojax.config import ConfigError
    from zerojax.equality import DisagreementError
    from zerojax.forecasting.program_rules import ExpectationError
    from zerojax.hardware.compile_client import CompileError, CompilerMissing
    from zerojax.runtime.distributed import PeerLostError
    from zerojax.runtime.preemption import Interrupted
    from zerojax.zoo.hugging_face import UnsupportedError

__all__ = [
    "BaseWeightsError",
    "CheckpointError",
    "CompileError",
    "CompilerMissing",
    "ConfigError",
    "DamagedError",
    "DisagreementError",
    "ExpectationError",
    "FolderInUseError",
    "Interrupted",
    "MachineError",
    "PeerLostError",
    "UnsupportedError",
]

_HOME_OF_NAME = {
    "BaseWeightsError": "checkpoint.errors",
    "CheckpointError": "checkpoint",
    "CompileError": "hardware.compile_client",
    "CompilerMissing": "hardware.compile_client",
    "ConfigError": "config",
    "DamagedError": "checkpoint.errors",
    "DisagreementError": "equality",
    "ExpectationError": "forecasting.program_rules",
    "FolderInUseError": "checkpoint.errors",
    "Interrupted": "runtime.preemption",
    "MachineError": "checkpoint.errors",
    "PeerLostError": "runtime.distributed",
    "UnsupportedError": "zoo.hugging_face",
}


def __getattr__(name: str) -> Any:
    """Imports the module that defines an exception when the exception is first used (PEP 562)."""
    if name not in _HOME_OF_NAME:
        raise AttributeError(f"module 'zerojax.errors' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"zerojax.{_HOME_OF_NAME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
