"""Public names of zerojax, imported on first use.

`import zerojax` and `zerojax --help` therefore load no JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerojax.api import train
    from zerojax.callbacks import EarlyStopping, KeepBest
    from zerojax.checkpoint import Checkpointer, CheckpointError
    from zerojax.checkpoint.errors import DamagedError, FolderInUseError, MachineError
    from zerojax.compiler import CompileError, CompilerMissing
    from zerojax.config import (
        ConfigError,
        LoraConfig,
        LossScale,
        MeshConfig,
        OptimizerConfig,
        RunConfig,
    )
    from zerojax.data import TokenSource, shard_batch
    from zerojax.distributed import join_processes
    from zerojax.engine import Engine, initialize
    from zerojax.forecasting import forecast
    from zerojax.hugging_face import Pretrained, UnsupportedError, from_hugging_face
    from zerojax.interruption import Interrupted
    from zerojax.loading import LoadedRun, load_run
    from zerojax.mesh import make_abstract_mesh, make_mesh
    from zerojax.models import Stages, add_lora, merge_lora
    from zerojax.optim import adam8bit, adamw, lamb, lion, sgd
    from zerojax.peers import PeerLostError
    from zerojax.plan import Plan
    from zerojax.plan_making import make_plan
    from zerojax.precision import Precision
    from zerojax.publishing import to_hugging_face, to_peft
    from zerojax.resharding import from_canonical, reshard_state, to_canonical
    from zerojax.runs import run_from_config
    from zerojax.state import TrainState
    from zerojax.state_birth import init_state
    from zerojax.step import build_evaluation, build_step
    from zerojax.trainer import Trainer
    from zerojax.training.equality import CheckResult, DisagreementError, check

__version__ = "0.1.0"

__all__ = [
    "CheckResult",
    "CheckpointError",
    "Checkpointer",
    "CompileError",
    "CompilerMissing",
    "ConfigError",
    "DamagedError",
    "DisagreementError",
    "EarlyStopping",
    "Engine",
    "FolderInUseError",
    "Interrupted",
    "KeepBest",
    "LoadedRun",
    "LoraConfig",
    "LossScale",
    "MachineError",
    "MeshConfig",
    "OptimizerConfig",
    "PeerLostError",
    "Plan",
    "Precision",
    "Pretrained",
    "RunConfig",
    "Stages",
    "TokenSource",
    "TrainState",
    "Trainer",
    "UnsupportedError",
    "__version__",
    "adam8bit",
    "adamw",
    "add_lora",
    "build_evaluation",
    "build_step",
    "check",
    "forecast",
    "from_canonical",
    "from_hugging_face",
    "init_state",
    "initialize",
    "join_processes",
    "lamb",
    "lion",
    "load_run",
    "make_abstract_mesh",
    "make_mesh",
    "make_plan",
    "merge_lora",
    "reshard_state",
    "run_from_config",
    "sgd",
    "shard_batch",
    "to_canonical",
    "to_hugging_face",
    "to_peft",
    "train",
]

# Name -> module: what the block above says to type checkers (tests/test_public_api.py).
_HOME_OF_NAME = {
    "CheckResult": "training.equality",
    "CheckpointError": "checkpoint",
    "Checkpointer": "checkpoint",
    "CompileError": "compiler",
    "CompilerMissing": "compiler",
    "ConfigError": "config",
    "DamagedError": "checkpoint.errors",
    "DisagreementError": "training.equality",
    "EarlyStopping": "callbacks",
    "Engine": "engine",
    "FolderInUseError": "checkpoint.errors",
    "Interrupted": "interruption",
    "KeepBest": "callbacks",
    "LoadedRun": "loading",
    "LoraConfig": "config",
    "LossScale": "config",
    "MachineError": "checkpoint.errors",
    "MeshConfig": "config",
    "OptimizerConfig": "config",
    "PeerLostError": "peers",
    "Plan": "plan",
    "Precision": "precision",
    "Pretrained": "hugging_face",
    "RunConfig": "config",
    "Stages": "models",
    "TokenSource": "data",
    "TrainState": "state",
    "Trainer": "trainer",
    "UnsupportedError": "hugging_face",
    "adam8bit": "optim",
    "adamw": "optim",
    "add_lora": "models",
    "build_evaluation": "step",
    "build_step": "step",
    "check": "training.equality",
    "forecast": "forecasting",
    "from_canonical": "resharding",
    "from_hugging_face": "hugging_face",
    "init_state": "state_birth",
    "initialize": "engine",
    "join_processes": "distributed",
    "lamb": "optim",
    "lion": "optim",
    "load_run": "loading",
    "make_abstract_mesh": "mesh",
    "make_mesh": "mesh",
    "make_plan": "plan_making",
    "merge_lora": "models",
    "reshard_state": "resharding",
    "run_from_config": "runs",
    "sgd": "optim",
    "shard_batch": "data",
    "to_canonical": "resharding",
    "to_hugging_face": "publishing",
    "to_peft": "publishing",
    "train": "api",
}
_PUBLIC_MODULES = (
    "chunked_loss",
    "config",
    "data",
    "losses",
    "models",
    "optim",
    "precision",
    "schedules",
    "store",
)
"""Modules that are attributes after `import zerojax`: those that pages and messages name."""


def __getattr__(name: str) -> Any:
    """Imports what a public name needs (PEP 562); the next access no longer comes here."""
    if name in _PUBLIC_MODULES:
        return importlib.import_module(f"zerojax.{name}")
    if name not in _HOME_OF_NAME:
        raise AttributeError(f"module 'zerojax' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"zerojax.{_HOME_OF_NAME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PUBLIC_MODULES})
