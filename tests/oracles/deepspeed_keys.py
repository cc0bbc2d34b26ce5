"""Writes tests/data/deepspeed_keys.json: keys and defaults as DeepSpeed's own classes have them.

Needs `deepspeed` (0.19.8 was run, with torch 2.13 for CPUs); it is not among what the tests need:

    DS_ACCELERATOR=cpu python tests/oracles/deepspeed_keys.py
"""

from __future__ import annotations

import enum
import inspect
import json
from pathlib import Path

import deepspeed
from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.compile.config import CompileConfig
from deepspeed.monitor.config import CSVConfig, TensorBoardConfig, WandbConfig
from deepspeed.ops.adam.fused_adam import FusedAdam
from deepspeed.ops.lamb.fused_lamb import FusedLamb
from deepspeed.ops.lion.fused_lion import FusedLion
from deepspeed.profiling import constants as profiling
from deepspeed.runtime.activation_checkpointing.config import ACT_CHKPT_DEFAULT
from deepspeed.runtime.config import HybridEngineConfig, get_pipeline_config
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.swap_tensor.aio_config import AIO_DEFAULT_DICT
from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
from deepspeed.runtime.zero.offload_config import (
    DeepSpeedZeroOffloadOptimizerConfig,
    DeepSpeedZeroOffloadParamConfig,
)
from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

TARGET = Path(__file__).parents[1] / "data" / "deepspeed_keys.json"

MODELS = {
    "zero_optimization": DeepSpeedZeroConfig,
    "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
    "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
    "zero_optimization.leaf_module": DeepSpeedZeroLeafModuleConfig,
    "fp16": DeepSpeedFP16Config,
    "bf16": DeepSpeedBF16Config,
    "tensorboard": TensorBoardConfig,
    "csv_monitor": CSVConfig,
    "wandb": WandbConfig,
    "comms_logger": CommsLoggerConfig,
    "timers.throughput": DeepSpeedThroughputTimerConfig,
    "compile": CompileConfig,
    "tensor_parallel": TPTrainingConfig,
    "hybrid_engine": HybridEngineConfig,
}


def plain(value):
    """A default as JSON has it; None for what JSON cannot say."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, tuple):
        return [*value]
    return value if isinstance(value, bool | int | float | str | list) else None


def of_model(cls) -> dict:
    return {
        field.alias or name: plain(None if field.default_factory else field.default)
        for name, field in cls.model_fields.items()
    }


def of_constants(module, prefix: str) -> dict:
    """{key: default} of a module that says NAME = "key" and NAME_DEFAULT = value."""
    names = [name for name in vars(module) if f"{name}_DEFAULT" in vars(module)]
    return {
        getattr(module, name): plain(getattr(module, f"{name}_DEFAULT"))
        for name in names
        if name.startswith(prefix)
    }


def of_function(function) -> dict:
    parameters = inspect.signature(function).parameters.values()
    return {p.name: plain(p.default) for p in parameters if p.default is not p.empty}


sections = {name: of_model(cls) for name, cls in MODELS.items()}
sections |= {
    "flops_profiler": of_constants(profiling, "FLOPS_PROFILER"),
    "activation_checkpointing": ACT_CHKPT_DEFAULT,
    "aio": AIO_DEFAULT_DICT,
    "pipeline": get_pipeline_config({}),
    "optimizer adam": of_function(FusedAdam),
    "optimizer lamb": of_function(FusedLamb),
    "optimizer lion": of_function(FusedLion),
}
text = json.dumps({"deepspeed": deepspeed.__version__, "sections": sections}, indent=1)
TARGET.write_text(text + "\n")
print(f"wrote {TARGET}")
