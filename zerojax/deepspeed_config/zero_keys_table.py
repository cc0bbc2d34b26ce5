"""Table of the keys of `zero_optimization`, with DeepSpeed's defaults and zerojax's handling.

The facts come from DeepSpeed 0.19.6 and 0.19.8: `deepspeed/runtime/zero/config.py`,
`offload_config.py` and `leaf_module_config.py`. Keys that only 0.19.6 has (MiCS) are still read.
"""

from __future__ import annotations

from zerojax.deepspeed_config.key_schema import AbsentFeature, Key, Table, is_enabled

_ALLOCATOR = "no effect; an option of eager PyTorch's buffers, which a compiled step does not have"
_HOOKS = (
    "no effect; an option of torch module hooks; here parameters are gathered where the model "
    "uses them"
)
_STREAM = "no effect; reading, updating and writing always overlap"

OFFLOAD_OPTIMIZER: Table = {
    "device": Key(
        "text",
        "none",
        "honoured",
        "none, cpu, nvme: mesh.offload.opt_state=device, host, nvme",
        ("none", "cpu", "nvme"),
        "use none, cpu or nvme",
    ),
    "nvme_path": Key("text", None, "honoured", "mesh.offload.folder"),
    "buffer_count": Key(
        "int", 4, "compiler", "no effect; there is one buffer for each slice being transferred"
    ),
    "pin_memory": Key("bool", True, "mapped", "no effect; host memory is always pinned"),
    "pipeline_read": Key("bool", False, "compiler", _STREAM),
    "pipeline_write": Key("bool", False, "compiler", _STREAM),
    "fast_init": Key(
        "bool",
        False,
        "compiler",
        "no effect; the state is created directly in its memory tier, slice by slice",
    ),
    "ratio": Key("float", 1.0, "honoured", "fraction of the optimizer state that is offloaded"),
    "super_offload": Key(
        "bool",
        False,
        "honoured",
        "off",
        (False,),
        "updates run on the device, not on the host; set this key to false",
    ),
    "cpuadam_cores_perc": Key("float", 0.8, "compiler", "no effect; the update runs on the device"),
}

OFFLOAD_PARAM: Table = {
    "device": Key(
        "text",
        "none",
        "honoured",
        "none, cpu, nvme: mesh.offload.params=device, host, nvme",
        ("none", "cpu", "nvme"),
        "use none, cpu or nvme",
    ),
    "nvme_path": Key(
        "text", None, "honoured", "mesh.offload.folder, shared with offload_optimizer"
    ),
    "buffer_count": Key(
        "int",
        5,
        "compiler",
        "no effect; each layer is prefetched one layer ahead, in three buffers",
    ),
    "buffer_size": Key(
        "int", 100_000_000, "compiler", "no effect; a buffer has the size of one layer"
    ),
    "max_in_cpu": Key(
        "int",
        1_000_000_000,
        "compiler",
        "no effect; cpu: all offloaded weights are in host memory; nvme: only the buffers are",
    ),
    "pin_memory": Key("bool", True, "mapped", "no effect; host memory is always pinned"),
}

ZERO: Table = {
    "stage": Key("int", 0, "honoured", "mesh.zero", (0, 1, 2, 3), "use 0, 1, 2 or 3"),
    "contiguous_gradients": Key("bool", True, "compiler", _ALLOCATOR),
    "reduce_scatter": Key(
        "bool",
        True,
        "honoured",
        "true: stages 1 to 3 reduce-scatter gradients, stage 0 all-reduces them",
    ),
    "reduce_bucket_size": Key(
        "int", 500_000_000, "honoured", "mesh.reduce_bucket_size, in elements"
    ),
    "use_multi_rank_bucket_allreduce": Key(
        "bool", True, "compiler", "no effect; each bucket is one collective"
    ),
    "allgather_partitions": Key(
        "bool", True, "compiler", "no effect; each bucket is one all-gather, without broadcasts"
    ),
    "allgather_bucket_size": Key(
        "int", 500_000_000, "honoured", "mesh.allgather_bucket_size, in elements"
    ),
    "overlap_comm": Key(
        "bool", None, "compiler", "no effect; XLA's latency-hiding scheduler overlaps communication"
    ),
    "load_from_fp32_weights": Key(
        "bool",
        True,
        "honoured",
        "true: checkpoints hold float32 master weights",
        (True,),
        "checkpoints have no 16-bit weights to load instead; set this key to true",
    ),
    "elastic_checkpoint": Key(
        "bool",
        False,
        "compiler",
        "no effect; a checkpoint can be loaded on any mesh and at any stage",
    ),
    "offload_param": OFFLOAD_PARAM,
    "offload_optimizer": OFFLOAD_OPTIMIZER,
    "sub_group_size": Key(
        "int",
        1_000_000_000,
        "mapped",
        "mesh.offload.slice_elements with offload; no effect without",
    ),
    "cpu_offload": Key("bool", None, "mapped", "old name of offload_optimizer.device: cpu"),
    "cpu_offload_param": Key("bool", None, "mapped", "old name of offload_param.device: cpu"),
    "cpu_offload_use_pin_memory": Key(
        "bool", None, "mapped", "no effect; host memory is always pinned"
    ),
    "stage3_prefetch_bucket_size": Key(
        "int",
        50_000_000,
        "compiler",
        ("no effect; the compiler gathers one layer ahead where that is faster"),
    ),
    "stage3_param_persistence_threshold": Key(
        "int",
        100_000,
        "honoured",
        "mesh.persistence_threshold, in elements; a stack of layers counts as one parameter",
    ),
    "stage3_model_persistence_threshold": Key(
        "int",
        None,
        "honoured",
        "the sum of unsharded parameters has no limit; 0: all are sharded",
    ),
    "stage3_max_live_parameters": Key(
        "int",
        1_000_000_000,
        "compiler",
        "no effect; layers of a scan are gathered one at a time, layers of a Python loop "
        "together, as the "
        "plan counts them",
    ),
    "stage3_max_reuse_distance": Key(
        "int", 1_000_000_000, "compiler", "no effect; weights are gathered again at each use"
    ),
    "stage3_gather_16bit_weights_on_model_save": Key(
        "bool",
        False,
        "mapped",
        "no effect; `zerojax checkpoint export` writes unsharded weights at any stage",
    ),
    "stage3_gather_fp16_weights_on_model_save": Key(
        "bool", False, "mapped", "old name of stage3_gather_16bit_weights_on_model_save"
    ),
    "stage3_module_granularity_threshold": Key("int", 0, "compiler", _HOOKS),
    "stage3_use_all_reduce_for_fetch_params": Key("bool", False, "compiler", _HOOKS),
    "stage3_allgather_sequential": Key("bool", False, "compiler", _HOOKS),
    "ignore_unused_parameters": Key(
        "bool", True, "compiler", "no effect; the plan lists parameters that the loss does not use"
    ),
    "compute_grad_norm": Key(
        "bool", True, "compiler", "no effect; every report has the gradient norm"
    ),
    "parameter_alignment": Key("bool", False, "compiler", _ALLOCATOR),
    "legacy_stage1": Key(
        "bool", False, "compiler", "no effect; there is only one implementation of stage 1"
    ),
    "round_robin_gradients": Key("bool", False, "compiler", _ALLOCATOR),
    "zero_hpz_partition_size": Key(
        "int",
        1,
        "honoured",
        "above 1: sets wire.secondary and mesh.node, so that weights cross nodes once per step",
    ),
    "zero_quantized_weights": Key("bool", False, "honoured", "wire.weights"),
    "zero_quantized_nontrainable_weights": Key(
        "bool",
        False,
        "honoured",
        "off",
        (False,),
        "Precision.freeze_dtype (int8, nf4) stores and gathers frozen weights in codes; use it, "
        "and set this key to false",
    ),
    "zero_quantized_gradients": Key("bool", False, "honoured", "off"),
    "zeropp_loco_param": AbsentFeature(
        "LoCo, which corrects quantized reductions, is not implemented; remove the key", bool
    ),
    "mics_shard_size": Key(
        "int",
        -1,
        "honoured",
        "mesh.data; mesh.replica is the number of groups. Each group has a complete state, "
        "including "
        "the optimizer's",
    ),
    "mics_hierarchical_params_gather": Key(
        "bool", False, "compiler", "no effect; NCCL chooses by the topology"
    ),
    "memory_efficient_linear": Key("bool", True, "compiler", _ALLOCATOR),
    "pipeline_loading_checkpoint": Key(
        "bool", False, "compiler", "no effect; each process reads its own shards"
    ),
    "override_module_apply": Key("bool", True, "compiler", _HOOKS),
    "log_trace_cache_warnings": Key(
        "bool", False, "compiler", "no effect; there is no trace cache at run time"
    ),
    "enable_sanity_checks": Key(
        "bool", False, "compiler", "no effect; the plan checks everything before the run"
    ),
    "save_muon_momentum_buffer_in_memory": Key(
        "bool",
        False,
        "compiler",
        "no effect; the momentum is part of the optimizer state, in the same memory",
    ),
    "leaf_module": {
        "classes": Key("list", None, "compiler", _HOOKS),
        "names": Key("list", None, "compiler", _HOOKS),
        "name_suffixes": Key("list", None, "compiler", _HOOKS),
    },
    "zenflow": AbsentFeature(
        "ZenFlow updates with stale gradients, which is not supported; remove the section", bool
    ),
    "grad_hooks": AbsentFeature(
        "documented by DeepSpeed, but refused by its code; remove it", is_enabled
    ),
}
