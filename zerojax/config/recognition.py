"""Distinguishes a DeepSpeed configuration dict from a dict of `MeshConfig` fields by the names of
its keys.

`tests/deepspeed/test_deepspeed.py` compares the DeepSpeed keys with the table of translated keys.
No name is both a DeepSpeed key and a `MeshConfig` field.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any, NoReturn

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
OTHER_NAMES = {
    "cp": "context",
    "dp": "data",
    "ep": "expert",
    "fsdp": "zero",
    "pipe": "stage",
    "pp": "stage",
    "sp": "context",
    "tensor": "model",
    "tp": "model",
}
"""{name of a mesh axis in other libraries: field of a MeshConfig}."""
_MAX_NAME = 100
"""Limit of the comparison with known names, for a dict without a known key."""


def is_deepspeed(values: Mapping[str, Any]) -> bool:
    """Returns whether a dict has the keys of a ds_config; an empty dict has not.

    Raises:
      ConfigError: the dict has keys of a ds_config and fields of a MeshConfig, or neither.
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
    if values and not of_deepspeed and not of_mesh:
        _refuse_unknown([str(key) for key in values])
    return bool(of_deepspeed)


def _refuse_unknown(names: list[str]) -> NoReturn:
    """Raises ConfigError for a dict without a known key; names the key that was probably meant."""
    meant = {name: name for name in (*DEEPSPEED_KEYS, *MESH_KEYS)} | OTHER_NAMES
    found = [(n, difflib.get_close_matches(n[:_MAX_NAME], sorted(meant), 1)) for n in names[:10]]
    name, near = next(((name, near) for name, near in found if near), (names[0], []))
    fields = ", ".join(field.name for field in dataclasses.fields(MeshConfig))
    hint = f"a dict has fields of a MeshConfig ({fields}) or keys of a DeepSpeed configuration"
    if near:
        key = meant[near[0]]
        kind = "a field of MeshConfig" if key in MESH_KEYS else "a key of DeepSpeed"
        hint = f"did you mean '{key}' ({kind})?"
    raise ConfigError(f"unknown key; {hint}", (name,))
