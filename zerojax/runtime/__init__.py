"""Processes of a run: how they join, start, are watched, are preempted, shut down, and end.

This package knows environment variables, signals, files and memory of the host, but no models,
arrays or plans. Only `distributed`, `preemption`, `kept_programs` and `start_clock` import JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerojax.runtime.distributed import PeerLostError, join_processes
    from zerojax.runtime.preemption import Interrupted, StopRequest
    from zerojax.runtime.shutdown import leave
    from zerojax.runtime.watchdog import Watchdog

__all__ = [
    "Interrupted",
    "PeerLostError",
    "StopRequest",
    "Watchdog",
    "join_processes",
    "leave",
]

_HOME_OF_NAME = {
    "Interrupted": "preemption",
    "PeerLostError": "distributed",
    "StopRequest": "preemption",
    "Watchdog": "watchdog",
    "join_processes": "distributed",
    "leave": "shutdown",
}


def __getattr__(name: str) -> Any:
    """Imports the module that defines a name when the name is first used (PEP 562)."""
    if name not in _HOME_OF_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME_OF_NAME[name]}"), name)
    globals()[name] = value
    return value
