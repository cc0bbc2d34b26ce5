"""Settings of a run: every option, its default and the reason; read from YAML, text or Python.

The package imports no JAX and does not look at devices. Only its modules `loader` and
`regular_files` read files.
"""

from zerojax.config.attention_layouts import (
    BigBirdLayout,
    BSLongformerLayout,
    FixedLayout,
    LayoutConfig,
    SlidingWindowLayout,
    VariableLayout,
)
from zerojax.config.batch_ramp import BatchRamp, BatchRampConfig
from zerojax.config.compression import BitScheduleConfig, PruningConfig, PruningGroup
from zerojax.config.curriculum import CurriculumConfig
from zerojax.config.elasticity import ElasticBatch, ElasticityConfig
from zerojax.config.expect import ExpectConfig
from zerojax.config.expert_settings import MoEConfig
from zerojax.config.layer_drop import LayerDropConfig
from zerojax.config.loader import ConfigError, from_dict, to_dict
from zerojax.config.mesh import MeshConfig, OffloadConfig, WireConfig, as_mesh_config
from zerojax.config.run import (
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParameterGroup,
    RunConfig,
    load,
    run_file_lines,
)
from zerojax.config.sections import (
    CheckpointConfig,
    LogConfig,
    LoraConfig,
    LossScale,
    MixturePart,
    SamplesConfig,
    WatchConfig,
    describe_loss_scale,
)
from zerojax.config.sweep_settings import SweepAxis, SweepConfig

__all__ = [
    "BSLongformerLayout",
    "BatchRamp",
    "BatchRampConfig",
    "BigBirdLayout",
    "BitScheduleConfig",
    "CheckpointConfig",
    "ConfigError",
    "CurriculumConfig",
    "DataConfig",
    "ElasticBatch",
    "ElasticityConfig",
    "ExpectConfig",
    "FixedLayout",
    "LayerDropConfig",
    "LayoutConfig",
    "LogConfig",
    "LoraConfig",
    "LossScale",
    "MeshConfig",
    "MixturePart",
    "MoEConfig",
    "ModelConfig",
    "OffloadConfig",
    "OptimizerConfig",
    "ParameterGroup",
    "PruningConfig",
    "PruningGroup",
    "RunConfig",
    "SamplesConfig",
    "SlidingWindowLayout",
    "SweepAxis",
    "SweepConfig",
    "VariableLayout",
    "WatchConfig",
    "WireConfig",
    "as_mesh_config",
    "describe_loss_scale",
    "from_dict",
    "load",
    "run_file_lines",
    "to_dict",
]
