"""Settings of a run: every option, its default and the reason; read from YAML, text or Python.

Knows no JAX and no devices; `loader` alone reads files.
"""

from zerojax.config.elastic import ElasticBatch, ElasticityConfig
from zerojax.config.files import CheckpointConfig, LogConfig
from zerojax.config.loader import ConfigError, from_dict, to_dict
from zerojax.config.lora import LoraConfig
from zerojax.config.loss_scale import LossScale, describe_loss_scale
from zerojax.config.mesh import MeshConfig, as_mesh_config
from zerojax.config.offload import OffloadConfig
from zerojax.config.run import (
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParameterGroup,
    RunConfig,
    load,
)
from zerojax.config.watch import WatchConfig

__all__ = [
    "CheckpointConfig",
    "ConfigError",
    "DataConfig",
    "ElasticBatch",
    "ElasticityConfig",
    "LogConfig",
    "LoraConfig",
    "LossScale",
    "MeshConfig",
    "ModelConfig",
    "OffloadConfig",
    "OptimizerConfig",
    "ParameterGroup",
    "RunConfig",
    "WatchConfig",
    "as_mesh_config",
    "describe_loss_scale",
    "from_dict",
    "load",
    "to_dict",
]
