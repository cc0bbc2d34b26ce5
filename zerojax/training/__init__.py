"""The training loop: `train`, run files, reports, evaluation, checkpoints of runs, and exports.

This package carries out a run as its plan describes it, and makes no decision that belongs to a
plan. Sub-packages: `metrics` (logs and reports) and `tuning` (measured choices of kernels).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerojax.training.entry import train
    from zerojax.training.evaluation import EarlyStopping, KeepBest
    from zerojax.training.hugging_face_export import to_hugging_face, to_peft
    from zerojax.training.loading import LoadedRun, load_run
    from zerojax.training.run_file import run_from_config
    from zerojax.training.trainer import Trainer

__all__ = [
    "EarlyStopping",
    "KeepBest",
    "LoadedRun",
    "Trainer",
    "load_run",
    "run_from_config",
    "to_hugging_face",
    "to_peft",
    "train",
]

_HOME_OF_NAME = {
    "EarlyStopping": "evaluation",
    "KeepBest": "evaluation",
    "LoadedRun": "loading",
    "Trainer": "trainer",
    "load_run": "loading",
    "run_from_config": "run_file",
    "to_hugging_face": "hugging_face_export",
    "to_peft": "hugging_face_export",
    "train": "entry",
}


def __getattr__(name: str) -> Any:
    """Imports the module that defines `name` on first access (PEP 562)."""
    if name not in _HOME_OF_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME_OF_NAME[name]}"), name)
    globals()[name] = value
    return value
