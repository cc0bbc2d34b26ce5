"""Converts any Flax module or function to one internal form of a model with a loss.

These modules depend on Flax and on traced programs, but not on meshes, shardings or optimizers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerojax.models.adapt import as_loss, as_model, bound_attribute, default_loss, width_of
    from zerojax.models.step_count import StepCount

__all__ = [
    "StepCount",
    "as_loss",
    "as_model",
    "bound_attribute",
    "default_loss",
    "width_of",
]

_HOME_OF_NAME = {
    "StepCount": "step_count",
    "as_loss": "adapt",
    "as_model": "adapt",
    "bound_attribute": "adapt",
    "default_loss": "adapt",
    "width_of": "adapt",
}


def __getattr__(name: str) -> Any:
    """Imports the module of a name on first access (PEP 562)."""
    if name not in _HOME_OF_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME_OF_NAME[name]}"), name)
    globals()[name] = value
    return value
