"""Table of `zero_optimization` keys with DeepSpeed's defaults and their treatment.

Facts are those of DeepSpeed 0.19.6 and 0.19.8: `deepspeed/runtime/zero/config.py`,
`offload_config.py` and `leaf_module_config.py`. What the later one dropped (MiCS) is still read.
"""

from __future__ import annotations

from zerojax.training.deepspeed.keys import Absent, Key, Table, is_enabled

_ALLOCATOR = "how buffers of eager PyTorch are kept; the compiled step has none"
_HOOKS = "how hooks of torch modules gather; here a parameter is gathered where it is read"
_STREAM = "reading, updating and writing overlap by themselves"

OFFLOAD_OPTIMIZER: Table = {
    "device": Key(
        "text",
        "none",
        "honoured",
        "none, cpu or nvme: mesh.offload.opt_state device, host or nvme",
        ("none", "cpu", "nvme"),
        "is not one of none, cpu, nvme",
    ),
    "nvme_path": Key("text", None, "honoured", "mesh.offload.folder"),
    "buffer_count": Key("int", 4, "compiler", "buffers are as many as slices in flight"),
    "pin_memory": Key("bool", True, "mapped", "host memory is always pinned"),
    "pipeline_read": Key("bool", False, "compiler", _STREAM),
    "pipeline_write": Key("bool", False, "compiler", _STREAM),
    "fast_init": Key("bool", False, "compiler", "state is born in its tier, slice by slice"),
    "ratio": Key("float", 1.0, "honoured", "share of the state that leaves the device"),
    "super_offload": Key(
        "bool",
        False,
        "honoured",
        "off, as here",
        (False,),
        "updates on the host while the device goes on; here the update runs on the device: set it "
        "to false",
    ),
    "cpuadam_cores_perc": Key("float", 0.8, "compiler", "the update runs on the device"),
}

OFFLOAD_PARAM: Table = {
    "device": Key(
        "text",
        "none",
        "honoured",
        "none or cpu: mesh.offload.params device or host",
        ("none", "cpu"),
        "weights can wait in host memory, not in files; use cpu, and nvme for offload_optimizer",
    ),
    "nvme_path": Key("text", None, "compiler", "weights do not go to files"),
    "buffer_count": Key("int", 5, "compiler", "layers come one ahead of their use"),
    "buffer_size": Key("int", 100_000_000, "compiler", "a buffer is one layer"),
    "max_in_cpu": Key("int", 1_000_000_000, "compiler", "all offloaded weights are in host memory"),
    "pin_memory": Key("bool", True, "mapped", "host memory is always pinned"),
}

ZERO: Table = {
    "stage": Key("int", 0, "honoured", "mesh.zero", (0, 1, 2, 3), "is not valid; use 0, 1, 2 or 3"),
    "contiguous_gradients": Key("bool", True, "compiler", _ALLOCATOR),
    "reduce_scatter": Key("bool", True, "honoured", "stages 1 to 3 scatter, stage 0 reduces"),
    "reduce_bucket_size": Key("int", 500_000_000, "honoured", "mesh.reduce_bucket_size, elements"),
    "use_multi_rank_bucket_allreduce": Key("bool", True, "compiler", "a bucket is one collective"),
    "allgather_partitions": Key("bool", True, "compiler", "one gather per bucket, no broadcasts"),
    "allgather_bucket_size": Key(
        "int", 500_000_000, "honoured", "mesh.allgather_bucket_size, elements"
    ),
    "overlap_comm": Key(
        "bool", None, "compiler", "the latency-hiding scheduler; the plan says what it overlaps"
    ),
    "load_from_fp32_weights": Key(
        "bool",
        True,
        "honoured",
        "checkpoints hold float32 masters",
        (True,),
        "checkpoints hold no 16-bit copy to start from; set it to true",
    ),
    "elastic_checkpoint": Key(
        "bool", False, "compiler", "a checkpoint goes on any mesh and any stage"
    ),
    "offload_param": OFFLOAD_PARAM,
    "offload_optimizer": OFFLOAD_OPTIMIZER,
    "sub_group_size": Key(
        "int", 1_000_000_000, "mapped", "without offload there is nothing to cut into tiles"
    ),
    "cpu_offload": Key("bool", None, "mapped", "old name of offload_optimizer.device: cpu"),
    "cpu_offload_param": Key("bool", None, "mapped", "old name of offload_param.device: cpu"),
    "cpu_offload_use_pin_memory": Key("bool", None, "mapped", "host memory is always pinned"),
    "stage3_prefetch_bucket_size": Key(
        "int", 50_000_000, "compiler", "the compiler gathers one layer ahead where that helps"
    ),
    "stage3_param_persistence_threshold": Key(
        "int",
        100_000,
        "honoured",
        "mesh.persistence_threshold, elements; layers in one stack count together",
    ),
    "stage3_model_persistence_threshold": Key(
        "int", None, "honoured", "no limit on what stays whole"
    ),
    "stage3_max_live_parameters": Key(
        "int",
        1_000_000_000,
        "compiler",
        "layers of one scan are gathered one at a time; layers of a Python loop live together, as "
        "the plan counts them",
    ),
    "stage3_max_reuse_distance": Key(
        "int", 1_000_000_000, "compiler", "weights are gathered at each use"
    ),
    "stage3_gather_16bit_weights_on_model_save": Key(
        "bool", False, "mapped", "`zerojax checkpoint export` writes whole weights, at any stage"
    ),
    "stage3_gather_fp16_weights_on_model_save": Key(
        "bool", False, "mapped", "old name of stage3_gather_16bit_weights_on_model_save"
    ),
    "stage3_module_granularity_threshold": Key("int", 0, "compiler", _HOOKS),
    "stage3_use_all_reduce_for_fetch_params": Key("bool", False, "compiler", _HOOKS),
    "stage3_allgather_sequential": Key("bool", False, "compiler", _HOOKS),
    "ignore_unused_parameters": Key(
        "bool", True, "compiler", "what the loss does not read is named when the run is planned"
    ),
    "compute_grad_norm": Key("bool", True, "compiler", "every report has the gradient norm"),
    "parameter_alignment": Key("bool", False, "compiler", _ALLOCATOR),
    "legacy_stage1": Key("bool", False, "compiler", "there is one stage 1"),
    "round_robin_gradients": Key("bool", False, "compiler", _ALLOCATOR),
    "zero_hpz_partition_size": Key(
        "int",
        1,
        "honoured",
        "no second copy of the weights",
        (0, 1),
        "a second copy of the weights in each node is not built; mics_shard_size shards in a node "
        "and replicates across: set that, or 1",
    ),
    "zero_quantized_weights": Key(
        "bool", False, "honoured", "off", (False,), "gathers are not quantised; set it to false"
    ),
    "zero_quantized_nontrainable_weights": Key(
        "bool", False, "honoured", "off", (False,), "weights are not quantised; set it to false"
    ),
    "zero_quantized_gradients": Key(
        "bool", False, "honoured", "off", (False,), "reductions are not quantised; set it to false"
    ),
    "zeropp_loco_param": Absent("corrects quantised reductions, which are not built", bool),
    "mics_shard_size": Key("int", -1, "honoured", "mesh.data, and mesh.replica for the rest"),
    "mics_hierarchical_params_gather": Key("bool", False, "compiler", "NCCL knows the topology"),
    "memory_efficient_linear": Key("bool", True, "compiler", _ALLOCATOR),
    "pipeline_loading_checkpoint": Key(
        "bool", False, "compiler", "each process reads its own shards"
    ),
    "override_module_apply": Key("bool", True, "compiler", _HOOKS),
    "log_trace_cache_warnings": Key("bool", False, "compiler", "nothing is traced at run time"),
    "enable_sanity_checks": Key("bool", False, "compiler", "the plan checks before the run"),
    "save_muon_momentum_buffer_in_memory": Key(
        "bool", False, "compiler", "Muon is no optimizer of these files"
    ),
    "leaf_module": {
        "classes": Key("list", None, "compiler", _HOOKS),
        "names": Key("list", None, "compiler", _HOOKS),
        "name_suffixes": Key("list", None, "compiler", _HOOKS),
    },
    "zenflow": Absent("updates with stale gradients; take the section out", bool),
    "grad_hooks": Absent("is in DeepSpeed's documents, and its own code refuses it", is_enabled),
}

ALIASES = {
    name.removeprefix("stage3_"): name
    for name in ZERO
    if name.startswith("stage3_") and name != "stage3_gather_fp16_weights_on_model_save"
}
"""Names without "stage3_", which DeepSpeed takes as well."""
