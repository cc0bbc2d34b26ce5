"""Distinguishes a DeepSpeed configuration dict from a dict of `MeshConfig` fields by the names of
its keys.

`tests/deepspeed/test_deepspeed.py` compares the DeepSpeed keys with the table of translated keys.
No name is both a DeepSpeed key and a `MeshConfig` field.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from zerojax.config.loader import ConfigError
from zerojax.config.mesh import MeshConfig

DEEPSPEED_KEYS = frozenset(
    [
        "activation_checkpointing",
        "aio",
        "allgather_size",
        "amp",
        "autotuning",
        "bf16",
        "bfloat16",
        "checkpoint",
        "comet",
        "comms_logger",
        "communication_data_type",
        "compile",
        "compression_training",
        "csv_monitor",
        "curriculum_learning",
        "data_efficiency",
        "data_parallel_size",
        "data_types",
        "dataloader_drop_last",
        "datastates_ckpt",
        "disable_allgather",
        "disable_python_gc",
        "dump_state",
        "eigenvalue",
        "elasticity",
        "expert_parallel",
        "flops_profiler",
        "fp16",
        "gradient_accumulation_steps",
        "gradient_allreduce_op",
        "gradient_clipping",
        "gradient_predivide_factor",
        "graph_harvesting",
        "hybrid_engine",
        "keep_in_fp32_modules",
        "log_level",
        "managed_gradient_accumulation",
        "memory_breakdown",
        "moe",
        "nebula",
        "optimizer",
        "pipeline",
        "prescale_gradients",
        "progressive_layer_drop",
        "quantize_training",
        "scheduler",
        "seq_parallel_communication_data_type",
        "sequence_parallel_size",
        "sparse_attention",
        "sparse_gradients",
        "steps_per_print",
        "tensor_parallel",
        "tensorboard",
        "timers",
        "torch_autocast",
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "use_data_before_expert_parallelism",
        "vocabulary_size",
        "wall_clock_breakdown",
        "wandb",
        "weight_quantization",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
        "zero_optimization",
    ]
)
"""Top-level keys of a ds_config, including old names."""
MESH_KEYS = frozenset(field.name for field in dataclasses.fields(MeshConfig))
_MAX_NAME, _MAX_NAMES = 100, 100
"""Limits of the comparison with known names, for a dict without a known key."""


def is_deepspeed(values: Mapping[str, Any]) -> bool:
    """Returns whether a dict has the keys of a ds_config. A dict without any known key is
    classified by the known name most similar to one of its keys.

    Raises:
      ConfigError: the dict has keys of a ds_config and fields of a MeshConfig.
    """
    of_deepspeed = [key for key in values if key in DEEPSPEED_KEYS]
    of_mesh = [key for key in values if key in MESH_KEYS]
    if of_deepspeed and of_mesh:
        mesh = ", ".join(of_mesh)
        raise ConfigError(
            f"{mesh} belongs to a MeshConfig, and {', '.join(of_deepspeed)} to a DeepSpeed "
            f"configuration; a dict must be one or the other: remove {mesh} (write zero=N "
            f"as zero_optimization: {{stage: N}}), or pass a MeshConfig and write the other "
            "keys as keywords"
        )
    if of_deepspeed or of_mesh:
        return bool(of_deepspeed)
    names = [str(key)[:_MAX_NAME] for key in values][:_MAX_NAMES]
    return _likeness(names, DEEPSPEED_KEYS) > _likeness(names, MESH_KEYS)


def _likeness(names: list[str], known: frozenset[str]) -> float:
    """Returns the highest similarity between one of `names` and a known name; 0 if none is
    similar."""
    return max(
        (
            difflib.SequenceMatcher(None, name, match[0]).ratio()
            for name in names
            if (match := difflib.get_close_matches(name, sorted(known), 1))
        ),
        default=0.0,
    )
