"""Table of ds_config keys with DeepSpeed's defaults and their treatment.

Facts are those of DeepSpeed 0.19.6 and 0.19.8: `runtime/config.py`, `constants.py` and
`precision_config.py`, and the `config.py` of `monitor`, `comm`, `profiling`, `elasticity`,
`compile`, and in `runtime/` those of `activation_checkpointing`, `tensor_parallel` and
`model_checkpointing`; for `zero_optimization` those of `deepspeed/runtime/zero/config.py`,
`offload_config.py` and `leaf_module_config.py`; for `expert_parallel` those of the commit 0067b11,
`auto_ep_config.py` and `auto_ep_presets/base.py` in `deepspeed/module_inject`. What the later one
dropped (elasticity, MiCS) is still read.
"""

from __future__ import annotations

from zerojax.deepspeed_config.key_schema import (
    AbsentFeature,
    Key,
    Table,
    is_enabled,
    is_enabled_inside,
)

_DTYPES = ("fp32", "fp16", "bf16")
_IN_PLAN = "the plan says it before the run"
_ALWAYS = "always there: metrics.jsonl has it"
_STORE = (
    "files are read and written by `zerojax.checkpoint.store`; `zerojax bench io` measures the disk"
)
_SAVES = "checkpoints are written in parallel, each process its shards, in the background"
_PROFILE = "`zerojax profile` and the plan say it; no step runs slower for it"
_RESCALED = "gradients are summed and divided once, in float32; only rounding would differ"
_MOMENTS = "which fused kernel updates"

_FP16: Table = {
    "enabled": Key("bool", False, "honoured", "precision fp16"),
    "auto_cast": Key("bool", False, "mapped", "floating-point inputs are always cast"),
    "loss_scale": Key("float", 0.0, "honoured", "0 is dynamic; else loss_scale.static"),
    "initial_scale_power": Key("int", 16, "honoured", "loss_scale.initial, 2 to this power"),
    "loss_scale_window": Key("int", 1000, "honoured", "loss_scale.window"),
    "hysteresis": Key("int", 2, "honoured", "loss_scale.hysteresis"),
    "consecutive_hysteresis": Key("bool", False, "honoured", "loss_scale.consecutive_hysteresis"),
    "min_loss_scale": Key("float", 1.0, "honoured", "loss_scale.minimum"),
    "fp16_master_weights_and_grads": Key(
        "bool",
        False,
        "honoured",
        "off: masters are float32",
        (False,),
        "float16 masters lose small updates for good; set it to false, or use bf16 with "
        "bf16_master_weights_and_grads",
    ),
}

_BF16: Table = {
    "enabled": Key("bool", False, "honoured", "precision bf16"),
    "immediate_grad_update": Key("bool", False, "compiler", "gradients are summed in the step"),
    "check_grad_overflow": Key(
        "bool", True, "honoured", "a step whose gradients are not finite changes nothing"
    ),
    "bf16_master_weights_and_grads": Key(
        "bool", False, "honoured", "param_dtype and accumulate_dtype"
    ),
    "bf16_optimizer_states": Key("bool", False, "honoured", "moments_dtype"),
}

_ACTIVATIONS: Table = {
    "partition_activations": Key(
        "bool", False, "mapped", "mesh.sequence_sharding where autotp_size is above 1"
    ),
    "cpu_checkpointing": Key("bool", False, "honoured", "mesh.offload.activations: host"),
    "contiguous_memory_optimization": Key("bool", False, "compiler", "XLA places every buffer"),
    "number_checkpoints": Key(
        "int", None, "compiler", "the model's own remat says what is kept: one input per layer"
    ),
    "synchronize_checkpoint_boundary": Key("bool", False, "compiler", "no step waits for the host"),
    "profile": Key("bool", False, "mapped", _PROFILE),
}

_PIPELINE: Table = {
    "stages": Key("int", None, "honoured", "mesh.stage"),
    "partition": Key("text", "best", "mapped", "mesh.partition"),
    "seed_layers": Key("bool", False, "compiler", "one seed makes all layers, on any mesh alike"),
    "activation_checkpoint_interval": Key(
        "int", 0, "mapped", "the model's own remat; mesh.stash=input keeps a stage's input only"
    ),
    "pipe_partitioned": Key("bool", True, "compiler", "activations go where they are read"),
    "grad_partitioned": Key("bool", True, "compiler", "gradients go where they are read"),
}

_TENSOR_PARALLEL: Table = {
    "autotp_size": Key("int", 0, "honoured", "mesh.model"),
    "vocab_parallel_lm_head": Key(
        "bool", None, "mapped", "the model's own tensor_parallel_rules say what is split"
    ),
    "vocab_parallel_ce_backend": Key("text", "torch", "compiler", "the loss is the model's own"),
    "preset_model": Key(
        "text", None, "mapped", "the model's own tensor_parallel_rules say what is split"
    ),
    "tp_overlap_comm": Key("bool", False, "compiler", "the latency-hiding scheduler"),
    "partition_config": {
        "use_default_specs": Key(
            "bool", False, "mapped", "the model's own rules are used where no spec is given"
        ),
        "layer_specs": Key("list", None, "mapped", "mesh.rules"),
    },
    "tp": AbsentFeature("is for inference; training has autotp_size", bool),
    "tensor_parallel": AbsentFeature("is for inference; training has autotp_size", bool),
    "dtype": Key("any", None, "compiler", "the precision says it"),
    "injection_policy_tuple": AbsentFeature(
        "names torch modules; the model's own rules say it", bool
    ),
    "keep_module_on_host": Key("bool", False, "compiler", "weights are born sharded"),
    "replace_with_kernel_inject": AbsentFeature("is for inference; take it out", bool),
    "kernel_inject": AbsentFeature("is for inference; take it out", bool),
}

_CHECKPOINT: Table = {
    "tag_validation": Key("text", "WARN", "honoured", "whether processes may differ in the tag"),
    "load_universal": Key("bool", False, "compiler", "every checkpoint goes on any mesh"),
    "use_node_local_storage": Key(
        "bool",
        False,
        "honoured",
        "off: one folder that all nodes see",
        (False,),
        "a checkpoint is one folder that all nodes see; set it to false",
    ),
    "checkpoint_serialization": Key("bool", True, "compiler", _SAVES),
    "parallel_write": {"pipeline_stage": Key("bool", False, "compiler", _SAVES)},
    "writer": {
        name: Key("any", None, "compiler", _SAVES)
        for name in (
            "type",
            "decoupled",
            "io_buffer_size",
            "io_buffer_double",
            "show_statistics",
            "data_parallel",
            "io_multiplier",
        )
    },
}

_MONITORS: Table = {
    "tensorboard": {
        "enabled": Key("bool", False, "honoured", "log.tensorboard"),
        "output_path": Key("text", "", "mapped", "with job_name, the folder of the run"),
        "job_name": Key("text", "DeepSpeedJobName", "mapped", "see output_path"),
    },
    "csv_monitor": {
        "enabled": Key("bool", False, "mapped", "metrics.jsonl in the run's folder, always"),
        "output_path": Key("text", "", "mapped", "with job_name, the folder of the run"),
        "job_name": Key("text", "DeepSpeedJobName", "mapped", "see output_path"),
    },
    "wandb": {
        "enabled": Key("bool", False, "honoured", "log.wandb"),
        "project": Key("text", "deepspeed", "honoured", "log.wandb"),
        "group": Key("text", None, "honoured", "the environment's WANDB_RUN_GROUP says it"),
        "team": Key("text", None, "honoured", "the environment's WANDB_ENTITY says it"),
    },
    "comet": AbsentFeature("Comet is not written to; tensorboard and wandb are", is_enabled),
}

_ELASTICITY: Table = {
    "enabled": Key("bool", False, "honoured", "elasticity.enabled"),
    "max_train_batch_size": Key("int", 2000, "honoured", "elasticity.max_global_batch_size"),
    "micro_batch_sizes": Key("list", [2, 4, 6], "honoured", "elasticity.micro_batch_sizes"),
    "min_gpus": Key("int", 1, "honoured", "elasticity.min_devices"),
    "max_gpus": Key("int", 10_000, "honoured", "elasticity.max_devices"),
    "num_gpus_per_node": Key("int", 1, "honoured", "elasticity.devices_per_node"),
    "model_parallel_size": Key("int", 1, "honoured", "has to be autotp_size x pipeline.stages"),
    "min_time": Key("int", 0, "compiler", "for DeepSpeed's scheduler; devices change at restarts"),
    "prefer_larger_batch": Key("bool", True, "honoured", "elasticity.prefer_larger_batch"),
    "ignore_non_elastic_batch_info": Key("bool", False, "honoured", "whether batch keys may stand"),
    "version": Key("float", 0.2, "honoured", "of the arithmetic", (0.1, 0.2), "is not 0.1 or 0.2"),
}

_LAYOUT = "the layout of the model's calls of zerojax.attention"
_SPARSE_ATTENTION: Table = {
    "mode": Key(
        "text",
        "fixed",
        "honoured",
        f"{_LAYOUT}; a model with an attention_layout of its own has to have the same",
        ("dense", "fixed", "variable", "bigbird", "bslongformer"),
        "is not one of dense, fixed, variable, bigbird, bslongformer",
    ),
    "block": Key("int", 16, "honoured", _LAYOUT),
    "different_layout_per_head": Key("bool", False, "honoured", _LAYOUT),
    "num_local_blocks": Key("int", 4, "honoured", _LAYOUT),
    "num_global_blocks": Key("int", 1, "honoured", _LAYOUT),
    "attention": Key("text", "bidirectional", "honoured", _LAYOUT),
    "horizontal_global_attention": Key("bool", False, "honoured", _LAYOUT),
    "num_different_global_patterns": Key("int", 1, "honoured", _LAYOUT),
    "num_random_blocks": Key("int", 0, "honoured", f"{_LAYOUT}; they are drawn with seed 0"),
    "local_window_blocks": Key("list", [4], "honoured", _LAYOUT),
    "global_block_indices": Key("list", [0], "honoured", _LAYOUT),
    "global_block_end_indices": Key("list", None, "honoured", _LAYOUT),
    "num_sliding_window_blocks": Key("int", 3, "honoured", _LAYOUT),
}

_NAMED = "the model says which parameters are experts' (expert_parameters), and its loss is checked"
_SAME_ROUTER = "has to be what the model's router does (model.moe)"
_PRODUCTS = "products of all experts are batched, on any GPU"
_EXCHANGE = "all-to-alls in static buffers, in as many rounds as the fullest expert needs"
_EXPERTS: Table = {
    "enabled": Key("bool", False, "honoured", "whether autoep_size is taken"),
    "autoep_size": Key("int", 1, "honoured", "mesh.expert"),
    "expert_tensor_parallel_size": Key(
        "int",
        1,
        "mapped",
        "the model's own tensor_parallel_rules say what mesh.model splits of an expert",
        (1,),
        "experts have no tensor parallelism of their own; set it to 1, and autotp_size",
    ),
    "preset_model": Key("text", None, "mapped", _NAMED),
    **{
        name: Key("text", None, "mapped", _NAMED)
        for name in (
            "moe_layer_pattern",
            "expert_pattern",
            "router_pattern",
            "expert_w1",
            "expert_w2",
            "expert_w3",
            "num_experts_attr",
            "top_k_attr",
            "shared_experts_pattern",
            "shared_experts_gate_pattern",
        )
    },
    "top_k": Key("int", "auto", "honoured", f"{_SAME_ROUTER}: experts_per_token"),
    "score_func": Key(
        "text",
        "auto",
        "honoured",
        f"{_SAME_ROUTER}: scores",
        ("softmax", "sigmoid"),
        "is not one of softmax, sigmoid",
    ),
    "score_apply": Key(
        "text",
        "auto",
        "honoured",
        "scores multiply what experts give",
        ("post",),
        "scores multiply what experts give, and not what they are given; use post",
    ),
    "route_norm": Key("bool", None, "honoured", f"{_SAME_ROUTER}: renormalize"),
    "route_scale": Key("float", 1.0, "honoured", f"{_SAME_ROUTER}: scale"),
    "routed_scaling_factor": Key("float", "auto", "honoured", f"{_SAME_ROUTER}: scale"),
    "num_expert_groups": Key("int", None, "honoured", f"{_SAME_ROUTER}: num_groups"),
    "num_limited_groups": Key("int", None, "honoured", f"{_SAME_ROUTER}: groups_per_token"),
    "has_shared_experts": Key("bool", None, "honoured", f"{_SAME_ROUTER}: shared_dim above 0"),
    "expert_activation": Key(
        "text",
        None,
        "honoured",
        "experts of zerojax.zoo.MoE are gated by silu",
        ("silu",),
        "experts of zerojax.zoo.MoE are gated by silu; use silu, which a model of your own may "
        "replace in `apply` of zerojax.experts",
    ),
    "load_balance_coeff": AbsentFeature(
        "a bias of the router, moved by the experts' load, is set by no key of a ds_config, and "
        "DeepSpeed refuses any value but null; take it out (the model has moe.bias_rate)",
        bool,
    ),
    "use_grouped_mm": Key("bool", True, "compiler", _PRODUCTS),
    "disable_triton_grouped_mm": Key("bool", False, "compiler", _PRODUCTS),
    "grouped_mm_backend": Key("text", "auto", "compiler", _PRODUCTS),
    "gate_up_impl": Key("text", "separate", "compiler", _PRODUCTS),
    "combine_impl": Key("text", "auto", "compiler", "results are gathered and summed in float32"),
    "row_weighting_impl": Key(
        "text", "auto", "compiler", "results are gathered and summed in float32"
    ),
    "comm_backend": Key("text", "comm", "compiler", _EXCHANGE),
    "comm_num_sm": Key("int", 12, "compiler", _EXCHANGE),
    "comm_qp_margin": Key("int", 4, "compiler", _EXCHANGE),
    "comm_max_tokens_per_rank": Key("int", 0, "compiler", _EXCHANGE),
    "async_split_plan": Key("bool", False, "compiler", "no step waits for the host"),
    "validate_folding_routing": Key(
        "bool", False, "compiler", "ids out of range make the loss NaN, on every mesh"
    ),
}

_AUTOTUNING = (
    "enabled fast results_dir exps_dir overwrite start_profile_step end_profile_step metric "
    "metric_path tuner_type tuner_early_stopping tuner_num_trials arg_mappings model_info "
    "model_info_path mp_size max_train_batch_size min_train_batch_size "
    "num_tuning_micro_batch_sizes max_train_micro_batch_size_per_gpu "
    "min_train_micro_batch_size_per_gpu"
)

_COMPILE = (
    "deepcompile autoep_non_moe free_activation free_activation_threshold offload_activation "
    "offload_activation_pin_memory offload_opt_states double_buffer symmetric_memory debug_log "
    "offload_parameters sync_before_reduce sync_after_reduce sync_before_allgather "
    "sync_after_allgather keep_int_input_tensors keep_all_input_tensors passes "
    # Of torch.compile, in files of Axolotl and of older DeepSpeed.
    "enabled disable backend kwargs"
)

_ABSENT: Table = {
    "amp": AbsentFeature("Apex has no part here; use bf16 or fp16", is_enabled),
    "moe": AbsentFeature(
        "is for inference, and DeepSpeed's training reads no such section; experts are a part of "
        "the model (zerojax.zoo.MoE), and expert_parallel.autoep_size splits them",
        bool,
    ),
    "progressive_layer_drop": AbsentFeature(
        "layers are not dropped; take it out", is_enabled, ("enabled", "theta", "gamma")
    ),
    "curriculum_learning": AbsentFeature(
        "batches are what you pass: grow their length in your own batches", is_enabled
    ),
    "data_efficiency": AbsentFeature(
        "batches are what you pass: choose them in your own batches", is_enabled_inside
    ),
    "compression_training": AbsentFeature(
        "models are not compressed; take it out", is_enabled_inside
    ),
    "quantize_training": AbsentFeature("weights are not quantised; take it out", is_enabled_inside),
    "weight_quantization": AbsentFeature("weights are not quantised; take it out", bool),
    "eigenvalue": AbsentFeature(
        "serves quantize_training alone; take it out",
        is_enabled,
        (
            "enabled",
            "verbose",
            "max_iter",
            "tol",
            "stability",
            "gas_boundary_resolution",
            "layer_name",
            "layer_num",
        ),
    ),
    "hybrid_engine": AbsentFeature(
        "no inference engine; `zerojax.load_run` gives the model",
        is_enabled,
        (
            "enabled",
            "max_out_tokens",
            "inference_tp_size",
            "release_inference_cache",
            "pin_parameters",
            "tp_gather_partition_size",
            "enable_cuda_graph",
        ),
    ),
    "nebula": AbsentFeature(
        "checkpoints are saved in the background without it",
        is_enabled,
        (
            "enabled",
            "persistent_storage_path",
            "persistent_time_interval",
            "num_of_version_in_retention",
            "enable_nebula_load",
            "nebula_load_path",
        ),
    ),
    "datastates_ckpt": AbsentFeature(
        "checkpoints are saved in the background without it", lambda value: value is not False
    ),
}

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
        "off; above 1 wire.secondary with mesh.node: weights cross nodes once per step",
    ),
    "zero_quantized_weights": Key("bool", False, "honoured", "wire.weights"),
    "zero_quantized_nontrainable_weights": Key(
        "bool",
        False,
        "honoured",
        "off",
        (False,),
        "frozen weights are stored and gathered in codes with Precision.freeze_dtype int8 or nf4; "
        "give that, and set it to false",
    ),
    "zero_quantized_gradients": Key("bool", False, "honoured", "off"),
    "zeropp_loco_param": AbsentFeature("corrects quantised reductions, which are not built", bool),
    "mics_shard_size": Key(
        "int",
        -1,
        "honoured",
        "mesh.data, and mesh.replica for the rest: groups hold all of the state, optimizer's too",
    ),
    "mics_hierarchical_params_gather": Key("bool", False, "compiler", "NCCL knows the topology"),
    "memory_efficient_linear": Key("bool", True, "compiler", _ALLOCATOR),
    "pipeline_loading_checkpoint": Key(
        "bool", False, "compiler", "each process reads its own shards"
    ),
    "override_module_apply": Key("bool", True, "compiler", _HOOKS),
    "log_trace_cache_warnings": Key("bool", False, "compiler", "nothing is traced at run time"),
    "enable_sanity_checks": Key("bool", False, "compiler", "the plan checks before the run"),
    "save_muon_momentum_buffer_in_memory": Key(
        "bool", False, "compiler", "momentum is part of the state, and lies where that lies"
    ),
    "leaf_module": {
        "classes": Key("list", None, "compiler", _HOOKS),
        "names": Key("list", None, "compiler", _HOOKS),
        "name_suffixes": Key("list", None, "compiler", _HOOKS),
    },
    "zenflow": AbsentFeature("updates with stale gradients; take the section out", bool),
    "grad_hooks": AbsentFeature(
        "is in DeepSpeed's documents, and its own code refuses it", is_enabled
    ),
}

TABLE: Table = {
    "train_batch_size": Key("int", None, "honoured", "rows of one step over all devices"),
    "train_micro_batch_size_per_gpu": Key(
        "int", None, "honoured", "rows of a data shard that go through the model at once"
    ),
    "gradient_accumulation_steps": Key("int", None, "honoured", "num_microbatches"),
    "managed_gradient_accumulation": Key(
        "bool",
        True,
        "honoured",
        "a step sums its microbatches",
        (True,),
        "a step here is always forward, backward and update of all microbatches; set it to true",
    ),
    "optimizer": {
        "type": Key("text", None, "honoured", "the update rule"),
        "params": Key("dict", None, "honoured", "its numbers"),
        "legacy_fusion": Key("bool", False, "compiler", _MOMENTS),
    },
    "scheduler": {
        "type": Key("text", None, "honoured", "the learning rate, stepped once per update"),
        "params": Key("dict", None, "honoured", "its numbers"),
    },
    "gradient_clipping": Key(
        "float", 1.0, "honoured", "limit of the global gradient norm; 0 is none"
    ),
    "fp16": _FP16,
    "bf16": _BF16,
    "torch_autocast": {
        "enabled": Key("bool", False, "mapped", "precision: float32 masters, this compute dtype"),
        "dtype": Key("text", None, "honoured", "compute and reduce dtype"),
        "lower_precision_safe_modules": AbsentFeature(
            "names torch modules; here every layer computes in the dtype, norms and losses in "
            "float32: take it out",
            bool,
        ),
    },
    "data_types": {
        "grad_accum_dtype": Key(
            "text",
            None,
            "honoured",
            "accumulate_dtype",
            ("fp32", "bf16"),
            "sums of gradients are float32 or bfloat16; use fp32",
        ),
        "param_dtype": Key("text", None, "honoured", "has to be that of fp16 or bf16", _DTYPES),
        "buffer_dtype": Key("text", None, "mapped", "a model's own state keeps its dtypes"),
    },
    "keep_in_fp32_modules": Key("any", "auto", "mapped", "a model's own state keeps its dtypes"),
    "communication_data_type": Key(
        "text", None, "honoured", "reduce_dtype", _DTYPES, "is not one of fp32, fp16, bf16"
    ),
    "seq_parallel_communication_data_type": Key(
        "text", "fp32", "compiler", "sequences are not split", _DTYPES, "is not fp32, fp16 or bf16"
    ),
    "prescale_gradients": Key("bool", False, "mapped", _RESCALED),
    "gradient_predivide_factor": Key("float", 1.0, "mapped", _RESCALED),
    "gradient_allreduce_op": Key(
        "text",
        "mean",
        "honoured",
        "the mean over the batch",
        ("mean",),
        "the loss is divided once, over all rows; use mean, and multiply the learning rate",
    ),
    "sparse_gradients": Key(
        "bool",
        False,
        "honoured",
        "true is mesh.lookup=owners: rows of untied embeddings travel, at stages 1 to 3",
    ),
    "zero_allow_untested_optimizer": Key(
        "bool", False, "honoured", "every optimizer is given what makes shards equal to one device"
    ),
    "zero_force_ds_cpu_optimizer": Key("bool", True, "compiler", "the update runs on the device"),
    "zero_optimization": ZERO,
    "allgather_size": Key("int", 500_000_000, "mapped", "old name of allgather_bucket_size"),
    "activation_checkpointing": _ACTIVATIONS,
    "pipeline": _PIPELINE,
    "tensor_parallel": _TENSOR_PARALLEL,
    "sequence_parallel_size": Key(
        "int",
        1,
        "mapped",
        "mesh.context, for the reference decoders; Ulysses is one of its ways",
    ),
    "data_parallel_size": Key("int", None, "honoured", "mesh.data"),
    "use_data_before_expert_parallelism": Key(
        "bool", False, "compiler", "the order of axes is the mesh's"
    ),
    "aio": {
        name: Key(kind, default, "compiler", _STORE)
        for name, kind, default in (
            ("block_size", "int", 1_048_576),
            ("queue_depth", "int", 8),
            ("intra_op_parallelism", "int", 1),
            ("single_submit", "bool", False),
            ("overlap_events", "bool", True),
            ("use_gds", "bool", False),
            # What DeepSpeed's documents and older files say for intra_op_parallelism.
            ("thread_count", "int", 1),
        )
    },
    "checkpoint": _CHECKPOINT,
    "steps_per_print": Key("int", None, "honoured", "log.every; inf: never"),
    "wall_clock_breakdown": Key("bool", False, "mapped", _PROFILE),
    "memory_breakdown": Key("bool", False, "mapped", _IN_PLAN),
    "dump_state": Key("bool", False, "mapped", "the resolved run is always written in its folder"),
    "log_level": Key("text", None, "mapped", "log.console: quiet for error and critical"),
    "flops_profiler": {
        "enabled": Key("bool", False, "mapped", _PROFILE),
        "recompute_fwd_factor": Key("float", 0.0, "mapped", "what is computed again is counted"),
        "profile_step": Key("int", 1, "mapped", _PROFILE),
        "module_depth": Key("int", -1, "mapped", _PROFILE),
        "top_modules": Key("int", 1, "mapped", _PROFILE),
        "detailed": Key("bool", True, "mapped", _PROFILE),
        "output_file": Key("text", None, "mapped", _PROFILE),
    },
    "comms_logger": {
        "enabled": Key("bool", False, "mapped", _IN_PLAN),
        "verbose": Key("bool", False, "mapped", _IN_PLAN),
        "prof_all": Key("bool", True, "mapped", _IN_PLAN),
        "debug": Key("bool", False, "mapped", _IN_PLAN),
        "prof_ops": Key("list", [], "mapped", _IN_PLAN),
    },
    **_MONITORS,
    "timers": {
        "throughput": {
            "enabled": Key("bool", True, "mapped", _ALWAYS),
            "synchronized": Key(
                "bool", True, "mapped", "reports wait for the device, steps do not"
            ),
        }
    },
    "elasticity": _ELASTICITY,
    "autotuning": {
        name: Key(
            "any", None, "mapped", "`zerojax plan --search` finds the cheapest plan that fits"
        )
        for name in _AUTOTUNING.split()
    },
    "compile": {
        name: Key("any", None, "compiler", "the whole step is one compiled program")
        for name in _COMPILE.split()
    },
    "sparse_attention": _SPARSE_ATTENTION,
    "expert_parallel": _EXPERTS,
    **_ABSENT,
    "disable_python_gc": Key("bool", False, "compiler", "a step makes next to no Python objects"),
    "dataloader_drop_last": Key(
        "bool", False, "compiler", "a step needs whole batches; a shorter one is refused by name"
    ),
    "vocabulary_size": Key("int", None, "honoured", "a warning where 8 does not divide it"),
    "graph_harvesting": Key("bool", False, "compiler", "the whole step is one compiled program"),
    "disable_allgather": Key(
        "bool", False, "honoured", "does nothing, as in DeepSpeed, which reads it and goes on"
    ),
}


ALIASES = {
    name.removeprefix("stage3_"): name
    for name in ZERO
    if name.startswith("stage3_") and name != "stage3_gather_fp16_weights_on_model_save"
}
"""Names without "stage3_", which DeepSpeed takes as well."""
