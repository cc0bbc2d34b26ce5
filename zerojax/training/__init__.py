"""The training loop: `train`, run files, DeepSpeed's interface, reports and export.

Knows everything below; decides nothing that a plan decides. Sub-packages: `metrics`, `deepspeed`,
`equality`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerojax.training.deepspeed.engine import Engine, initialize
    from zerojax.training.entry import train
    from zerojax.training.equality import CheckResult, DisagreementError, check
    from zerojax.training.evaluation import EarlyStopping, KeepBest
    from zerojax.training.hugging_face_export import to_hugging_face, to_peft
    from zerojax.training.loading import LoadedRun, load_run
    from zerojax.training.run_file import run_from_config
    from zerojax.training.trainer import Trainer

__all__ = [
    "CheckResult",
    "DisagreementError",
    "EarlyStopping",
    "Engine",
    "KeepBest",
    "LoadedRun",
    "Trainer",
    "check",
    "initialize",
    "load_run",
    "run_from_config",
    "to_hugging_face",
    "to_peft",
    "train",
]

_HOME_OF_NAME = {
    "CheckResult": "equality",
    "DisagreementError": "equality",
    "EarlyStopping": "evaluation",
    "Engine": "deepspeed.engine",
    "KeepBest": "evaluation",
    "LoadedRun": "loading",
    "Trainer": "trainer",
    "check": "equality",
    "initialize": "deepspeed.engine",
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
