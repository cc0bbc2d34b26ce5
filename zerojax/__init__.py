"""Public names of zerojax, imported on first use.

`import zerojax` and `zerojax --help` therefore load no JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from zerojax.runtime.plugin_errors import hide_plugin_errors

hide_plugin_errors()  # a script may use JAX before it calls zerojax

if TYPE_CHECKING:
    from zerojax.checkpoint import Checkpointer
    from zerojax.config import (
        BatchRampConfig,
        BitScheduleConfig,
        CheckpointConfig,
        CurriculumConfig,
        ExpectConfig,
        LayerDropConfig,
        LogConfig,
        LoraConfig,
        LossScale,
        MeshConfig,
        OptimizerConfig,
        PruningConfig,
        PruningGroup,
        RunConfig,
        SamplesConfig,
        WatchConfig,
    )
    from zerojax.data import TokenSource, shard_batch
    from zerojax.deepspeed_engine import Engine, initialize
    from zerojax.equality import CheckResult, check
    from zerojax.forecasting import forecast
    from zerojax.forecasting.program_rules import expect
    from zerojax.operators import (
        attention,
        batch_mean,
        batch_sum,
        experts,
        gather_batch,
        row_numbers,
    )
    from zerojax.optim import adam8bit, adamw, lamb, lion, muon, sgd, with_ema
    from zerojax.optim.precision import Precision
    from zerojax.placement.device_mesh import make_abstract_mesh, make_mesh
    from zerojax.placement.state import TrainState
    from zerojax.plan.make import Plan, make_plan
    from zerojax.plan.rule_proposal import RuleProposal, propose_rules
    from zerojax.runtime.distributed import join_processes
    from zerojax.step.build import build_evaluation, build_finish, build_step
    from zerojax.step.initialization import init_state
    from zerojax.step.joint import Average, JointPlan, Objective, make_joint_plan
    from zerojax.step.reshard import from_portable_state, reshard_state, to_portable_state
    from zerojax.training.entry import train
    from zerojax.training.evaluation import EarlyStopping, KeepBest
    from zerojax.training.hugging_face_export import to_hugging_face, to_peft
    from zerojax.training.loading import LoadedRun, load_run
    from zerojax.training.run_file import run_from_config
    from zerojax.training.search_runs import search
    from zerojax.training.trainer import Trainer
    from zerojax.training.tuning import tune
    from zerojax.zoo import Stages, add_lora, merge_lora
    from zerojax.zoo.hugging_face import Pretrained, from_hugging_face

__version__ = "0.1.0"
"""Version of the package, as in CHANGELOG.md."""

__all__ = [
    "Average",
    "BatchRampConfig",
    "BitScheduleConfig",
    "CheckResult",
    "CheckpointConfig",
    "Checkpointer",
    "CurriculumConfig",
    "EarlyStopping",
    "Engine",
    "ExpectConfig",
    "JointPlan",
    "KeepBest",
    "LayerDropConfig",
    "LoadedRun",
    "LogConfig",
    "LoraConfig",
    "LossScale",
    "MeshConfig",
    "Objective",
    "OptimizerConfig",
    "Plan",
    "Precision",
    "Pretrained",
    "PruningConfig",
    "PruningGroup",
    "RuleProposal",
    "RunConfig",
    "SamplesConfig",
    "Stages",
    "TokenSource",
    "TrainState",
    "Trainer",
    "WatchConfig",
    "__version__",
    "adam8bit",
    "adamw",
    "add_lora",
    "attention",
    "batch_mean",
    "batch_sum",
    "build_evaluation",
    "build_finish",
    "build_step",
    "check",
    "expect",
    "experts",
    "forecast",
    "from_hugging_face",
    "from_portable_state",
    "gather_batch",
    "init_state",
    "initialize",
    "join_processes",
    "lamb",
    "lion",
    "load_run",
    "make_abstract_mesh",
    "make_joint_plan",
    "make_mesh",
    "make_plan",
    "merge_lora",
    "muon",
    "propose_rules",
    "reshard_state",
    "row_numbers",
    "run_from_config",
    "search",
    "sgd",
    "shard_batch",
    "to_hugging_face",
    "to_peft",
    "to_portable_state",
    "train",
    "tune",
    "with_ema",
]

# Name -> module: what the block above says to type checkers (tests/repo/test_public_api.py).
_HOME_OF_NAME = {
    "BatchRampConfig": "config",
    "CheckResult": "equality",
    "CheckpointConfig": "config",
    "Checkpointer": "checkpoint",
    "CurriculumConfig": "config",
    "EarlyStopping": "training.evaluation",
    "Engine": "deepspeed_engine",
    "ExpectConfig": "config",
    "KeepBest": "training.evaluation",
    "LoadedRun": "training.loading",
    "BitScheduleConfig": "config",
    "LayerDropConfig": "config",
    "PruningConfig": "config",
    "PruningGroup": "config",
    "LogConfig": "config",
    "LoraConfig": "config",
    "LossScale": "config",
    "MeshConfig": "config",
    "OptimizerConfig": "config",
    "Plan": "plan.make",
    "Precision": "optim.precision",
    "Pretrained": "zoo.hugging_face",
    "RuleProposal": "plan.rule_proposal",
    "RunConfig": "config",
    "SamplesConfig": "config",
    "Stages": "zoo",
    "TokenSource": "data",
    "TrainState": "placement.state",
    "Trainer": "training.trainer",
    "WatchConfig": "config",
    "adam8bit": "optim",
    "adamw": "optim",
    "add_lora": "zoo",
    "attention": "operators",
    "batch_mean": "operators",
    "batch_sum": "operators",
    "build_evaluation": "step.build",
    "build_finish": "step.build",
    "build_step": "step.build",
    "check": "equality",
    "expect": "forecasting.program_rules",
    "experts": "operators",
    "forecast": "forecasting",
    "from_portable_state": "step.reshard",
    "from_hugging_face": "zoo.hugging_face",
    "gather_batch": "operators",
    "init_state": "step.initialization",
    "initialize": "deepspeed_engine",
    "join_processes": "runtime.distributed",
    "lamb": "optim",
    "lion": "optim",
    "load_run": "training.loading",
    "make_abstract_mesh": "placement.device_mesh",
    "make_mesh": "placement.device_mesh",
    "make_plan": "plan.make",
    "merge_lora": "zoo",
    "muon": "optim",
    "propose_rules": "plan.rule_proposal",
    "reshard_state": "step.reshard",
    "row_numbers": "operators",
    "run_from_config": "training.run_file",
    "search": "training.search_runs",
    "sgd": "optim",
    "shard_batch": "data",
    "to_portable_state": "step.reshard",
    "to_hugging_face": "training.hugging_face_export",
    "to_peft": "training.hugging_face_export",
    "train": "training.entry",
    "tune": "training.tuning",
    "with_ema": "optim",
    "Average": "step.joint",
    "JointPlan": "step.joint",
    "Objective": "step.joint",
    "make_joint_plan": "step.joint",
}
_PUBLIC_MODULES = {
    "checkpoint": "checkpoint",
    "config": "config",
    "data": "data",
    "deepspeed_config": "deepspeed_config",
    "deepspeed_engine": "deepspeed_engine",
    "equality": "equality",
    "errors": "errors",
    "forecasting": "forecasting",
    "hardware": "hardware",
    "losses": "models.losses",
    "models": "models",
    "operators": "operators",
    "optim": "optim",
    "parallel": "step",
    "pipeline_schedules": "schedules",
    "plan": "plan",
    "runtime": "runtime",
    "tracing": "tracing",
    "training": "training",
    "zoo": "zoo",
}
"""Attribute after `import zerojax` -> module: the packages, and two modules by the short names that
pages and messages use."""


def __getattr__(name: str) -> Any:
    """Imports what a public name needs (PEP 562); the next access no longer comes here."""
    if name in _PUBLIC_MODULES:
        return importlib.import_module(f"zerojax.{_PUBLIC_MODULES[name]}")
    if name not in _HOME_OF_NAME:
        raise AttributeError(f"module 'zerojax' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"zerojax.{_HOME_OF_NAME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PUBLIC_MODULES})
