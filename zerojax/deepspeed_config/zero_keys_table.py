"""Table of the keys of `zero_optimization`, with DeepSpeed's defaults and zerojax's handling.

The facts come from DeepSpeed 0.19.6 and 0.19.8: `deepspeed/runtime/zero/config.py`,
`offload_config.py` and `leaf_module_config.py`. Keys that only 0.19.6 has (MiCS) are still read.
"""

from __future__ import annotations

from zerojax.deepspeed_config.key_schema import (
    AbsentFeature,
    Table,
    honoured,
    is_enabled,
    left_to_compiler,
    mapped,
    not_needed,
)

_HOOKS = "an option of torch module hooks; here parameters are gathered where the model uses them"

OFFLOAD_OPTIMIZER: Table = {
    "device": honoured(
        "none",
        "none, cpu, nvme: mesh.offload.opt_state=device, host, nvme",
        ("none", "cpu", "nvme"),
        "use none, cpu or nvme",
    ),
    "nvme_path": honoured(str, "mesh.offload.folder"),
    **not_needed("there is one buffer for each slice being transferred", buffer_count=4),
    **not_needed("host memory is always pinned", pin_memory=True),
    **not_needed(
        "reading, updating and writing always overlap", pipeline_read=False, pipeline_write=False
    ),
    **not_needed(
        "the state is created directly in its memory tier, slice by slice", fast_init=False
    ),
    "ratio": honoured(1.0, "fraction of the optimizer state that is offloaded"),
    "super_offload": honoured(
        False, "off", (False,), "updates run on the device, not on the host; set this key to false"
    ),
    **not_needed("the update runs on the device", cpuadam_cores_perc=0.8),
}

OFFLOAD_PARAM: Table = {
    "device": honoured(
        "none",
        "none, cpu, nvme: mesh.offload.params=device, host, nvme",
        ("none", "cpu", "nvme"),
        "use none, cpu or nvme",
    ),
    "nvme_path": honoured(str, "mesh.offload.folder, shared with offload_optimizer"),
    **not_needed("each layer is prefetched one layer ahead, in three buffers", buffer_count=5),
    **not_needed("a buffer has the size of one layer", buffer_size=100_000_000),
    **not_needed(
        "cpu: all offloaded weights are in host memory; nvme: only the buffers are",
        max_in_cpu=1_000_000_000,
    ),
    **not_needed("host memory is always pinned", pin_memory=True),
}

ZERO: Table = {
    "stage": honoured(0, "mesh.zero", (0, 1, 2, 3), "use 0, 1, 2 or 3"),
    **left_to_compiler(
        "an option of eager PyTorch's buffers, which a compiled step does not have",
        contiguous_gradients=True,
        parameter_alignment=False,
        round_robin_gradients=False,
        memory_efficient_linear=True,
    ),
    "reduce_scatter": honoured(
        True, "true: stages 1 to 3 reduce-scatter gradients, stage 0 all-reduces them"
    ),
    "reduce_bucket_size": honoured(500_000_000, "mesh.reduce_bucket_size, in elements"),
    **not_needed("each bucket is one collective", use_multi_rank_bucket_allreduce=True),
    **not_needed("each bucket is one all-gather, without broadcasts", allgather_partitions=True),
    "allgather_bucket_size": honoured(500_000_000, "mesh.allgather_bucket_size, in elements"),
    **left_to_compiler("XLA's latency-hiding scheduler overlaps communication", overlap_comm=bool),
    "load_from_fp32_weights": honoured(
        True,
        "true: checkpoints hold float32 master weights",
        (True,),
        "checkpoints have no 16-bit weights to load instead; set this key to true",
    ),
    **not_needed(
        "a checkpoint can be loaded on any mesh and at any stage", elastic_checkpoint=False
    ),
    "offload_param": OFFLOAD_PARAM,
    "offload_optimizer": OFFLOAD_OPTIMIZER,
    "sub_group_size": mapped(
        1_000_000_000, "mesh.offload.slice_elements with offload; no effect without"
    ),
    "cpu_offload": mapped(bool, "old name of offload_optimizer.device: cpu"),
    "cpu_offload_param": mapped(bool, "old name of offload_param.device: cpu"),
    **not_needed("host memory is always pinned", cpu_offload_use_pin_memory=bool),
    **left_to_compiler(
        "the compiler gathers one layer ahead where that is faster",
        stage3_prefetch_bucket_size=50_000_000,
    ),
    "stage3_param_persistence_threshold": honoured(
        100_000,
        "mesh.persistence_threshold, in elements; a stack of layers counts as one parameter",
    ),
    "stage3_model_persistence_threshold": honoured(
        int, "the sum of unsharded parameters has no limit; 0: all are sharded"
    ),
    **left_to_compiler(
        "layers of a scan are gathered one at a time, layers of a Python loop together, as the "
        "plan counts them",
        stage3_max_live_parameters=1_000_000_000,
    ),
    **left_to_compiler(
        "weights are gathered again at each use", stage3_max_reuse_distance=1_000_000_000
    ),
    **not_needed(
        "`zerojax checkpoint export` writes unsharded weights at any stage",
        stage3_gather_16bit_weights_on_model_save=False,
    ),
    "stage3_gather_fp16_weights_on_model_save": mapped(
        False, "old name of stage3_gather_16bit_weights_on_model_save"
    ),
    **not_needed(
        _HOOKS,
        stage3_module_granularity_threshold=0,
        stage3_use_all_reduce_for_fetch_params=False,
        stage3_allgather_sequential=False,
        override_module_apply=True,
    ),
    **not_needed(
        "the plan lists parameters that the loss does not use", ignore_unused_parameters=True
    ),
    **not_needed("every report has the gradient norm", compute_grad_norm=True),
    **not_needed("there is only one implementation of stage 1", legacy_stage1=False),
    "zero_hpz_partition_size": honoured(
        1, "above 1: sets wire.secondary and mesh.node, so that weights cross nodes once per step"
    ),
    "zero_quantized_weights": honoured(False, "wire.weights"),
    "zero_quantized_nontrainable_weights": honoured(
        False,
        "off",
        (False,),
        "Precision.freeze_dtype (int8, nf4) stores and gathers frozen weights in codes; use it, "
        "and set this key to false",
    ),
    "zero_quantized_gradients": honoured(False, "off"),
    "zeropp_loco_param": AbsentFeature(
        "LoCo, which corrects quantized reductions, is not implemented; remove the key", bool
    ),
    "mics_shard_size": honoured(
        -1,
        "mesh.data; mesh.replica is the number of groups. Each group has a complete state, "
        "including "
        "the optimizer's",
    ),
    **not_needed("NCCL chooses by the topology", mics_hierarchical_params_gather=False),
    **not_needed("each process reads its own shards", pipeline_loading_checkpoint=False),
    **not_needed("there is no trace cache at run time", log_trace_cache_warnings=False),
    **not_needed("the plan checks everything before the run", enable_sanity_checks=False),
    **not_needed(
        "the momentum is part of the optimizer state, in the same memory",
        save_muon_momentum_buffer_in_memory=False,
    ),
    "leaf_module": not_needed(_HOOKS, classes=list, names=list, name_suffixes=list),
    "zenflow": AbsentFeature(
        "ZenFlow updates with stale gradients, which is not supported; remove the section", bool
    ),
    "grad_hooks": AbsentFeature(
        "documented by DeepSpeed, but refused by its code; remove it", is_enabled
    ),
}
