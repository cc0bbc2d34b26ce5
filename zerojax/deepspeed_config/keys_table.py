"""Table of ds_config keys, with DeepSpeed's defaults and how zerojax handles each key.

The facts come from DeepSpeed 0.19.6 and 0.19.8: `runtime/config.py`, `constants.py` and
`precision_config.py`; the `config.py` of `monitor`, `comm`, `profiling`, `elasticity` and
`compile`; and, in `runtime/`, of `activation_checkpointing`, `tensor_parallel` and
`model_checkpointing`. Facts on `expert_parallel` come from `auto_ep_config.py` and
`auto_ep_presets/base.py` in `deepspeed/module_inject` at commit 0067b11. Keys that only 0.19.6 has
(elasticity) are still read. `zero_keys_table` has the keys of `zero_optimization`.
"""

from __future__ import annotations

from zerojax.deepspeed_config.compression_keys_table import COMPRESSION
from zerojax.deepspeed_config.key_schema import (
    AbsentFeature,
    Key,
    Table,
    is_enabled,
    is_enabled_inside,
)
from zerojax.deepspeed_config.zero_keys_table import ZERO

_DTYPES = ("fp32", "fp16", "bf16")
_IN_PLAN = "no effect; the plan prints the bytes of every collective before the run"
_ALWAYS = "no effect; these values are always written to metrics.jsonl"
_STORE = (
    "no effect; `zerojax.checkpoint.store` chooses its I/O itself; `zerojax bench io` measures "
    "the disk"
)
_SAVES = "no effect; each process always writes its own shards in the background"
_PROFILE = "no effect; `zerojax profile` and the plan print FLOPs and times"
_RESCALED = (
    "no effect; gradients are divided once, in float32, and another order would only change "
    "rounding"
)
_MOMENTS = "chooses a fused kernel in DeepSpeed; here the compiler fuses the update"

_FP16: Table = {
    "enabled": Key("bool", False, "honoured", "precision=fp16"),
    "auto_cast": Key(
        "bool",
        False,
        "mapped",
        "no effect; floating-point inputs are always cast to the compute dtype",
    ),
    "loss_scale": Key(
        "float", 0.0, "honoured", "0: dynamic loss scale; other values set loss_scale.static"
    ),
    "initial_scale_power": Key("int", 16, "honoured", "loss_scale.initial = 2**value"),
    "loss_scale_window": Key("int", 1000, "honoured", "loss_scale.window"),
    "hysteresis": Key("int", 2, "honoured", "loss_scale.hysteresis"),
    "consecutive_hysteresis": Key("bool", False, "honoured", "loss_scale.consecutive_hysteresis"),
    "min_loss_scale": Key("float", 1.0, "honoured", "loss_scale.minimum"),
    "fp16_master_weights_and_grads": Key(
        "bool",
        False,
        "honoured",
        "false: master weights are float32",
        (False,),
        "float16 master weights lose small updates; set this key to false, or use bf16 with "
        "bf16_master_weights_and_grads",
    ),
}

_BF16: Table = {
    "enabled": Key("bool", False, "honoured", "precision=bf16"),
    "immediate_grad_update": Key(
        "bool", False, "compiler", "gradients are accumulated inside the compiled step"
    ),
    "check_grad_overflow": Key(
        "bool", True, "honoured", "a step with non-finite gradients changes no parameter"
    ),
    "bf16_master_weights_and_grads": Key(
        "bool", False, "honoured", "param_dtype and accumulate_dtype"
    ),
    "bf16_optimizer_states": Key("bool", False, "honoured", "moments_dtype"),
}

_ACTIVATIONS: Table = {
    "partition_activations": Key(
        "bool", False, "mapped", "sets mesh.sequence_sharding if autotp_size is above 1"
    ),
    "cpu_checkpointing": Key(
        "bool",
        False,
        "honoured",
        "mesh.offload.activations=host; no key of DeepSpeed means activations=nvme",
    ),
    "contiguous_memory_optimization": Key(
        "bool", False, "compiler", "no effect; XLA allocates all buffers"
    ),
    "number_checkpoints": Key(
        "int",
        None,
        "compiler",
        "no effect; the model's own remat decides which activations are stored",
    ),
    "synchronize_checkpoint_boundary": Key(
        "bool", False, "compiler", "no effect; a step never waits for the host"
    ),
    "profile": Key("bool", False, "mapped", _PROFILE),
}

_PIPELINE: Table = {
    "stages": Key("int", None, "honoured", "mesh.stage"),
    "partition": Key("text", "best", "mapped", "mesh.partition"),
    "seed_layers": Key(
        "bool",
        False,
        "compiler",
        "no effect; one seed gives the same initial weights on every mesh",
    ),
    "activation_checkpoint_interval": Key(
        "int",
        0,
        "mapped",
        "no effect; the model's own remat decides, and mesh.stash=input stores only the input "
        "of a stage",
    ),
    "pipe_partitioned": Key(
        "bool", True, "compiler", "no effect; activations are sent only to devices that use them"
    ),
    "grad_partitioned": Key(
        "bool", True, "compiler", "no effect; gradients are sent only to devices that use them"
    ),
}

_TENSOR_PARALLEL: Table = {
    "autotp_size": Key("int", 0, "honoured", "mesh.model"),
    "vocab_parallel_lm_head": Key(
        "bool", None, "mapped", "no effect; the model's own tensor_parallel_rules define the split"
    ),
    "vocab_parallel_ce_backend": Key(
        "text", "torch", "compiler", "no effect; the loss is part of the model's code"
    ),
    "preset_model": Key(
        "text", None, "mapped", "no effect; the model's own tensor_parallel_rules define the split"
    ),
    "tp_overlap_comm": Key(
        "bool",
        False,
        "compiler",
        "no effect; XLA's latency-hiding scheduler overlaps communication",
    ),
    "partition_config": {
        "use_default_specs": Key(
            "bool",
            False,
            "mapped",
            "the model's own tensor_parallel_rules apply where layer_specs has none",
        ),
        "layer_specs": Key("list", None, "mapped", "mesh.rules"),
    },
    "tp": AbsentFeature("a key for inference; for training use autotp_size", bool),
    "tensor_parallel": AbsentFeature("a key for inference; for training use autotp_size", bool),
    "dtype": Key("any", None, "compiler", "no effect; the sections fp16 and bf16 set the dtype"),
    "injection_policy_tuple": AbsentFeature(
        "names torch modules; the model's own tensor_parallel_rules replace this key: remove it",
        bool,
    ),
    "keep_module_on_host": Key(
        "bool", False, "compiler", "no effect; weights are created directly in their shards"
    ),
    "replace_with_kernel_inject": AbsentFeature("a key for inference; remove it", bool),
    "kernel_inject": AbsentFeature("a key for inference; remove it", bool),
}

_CHECKPOINT: Table = {
    "tag_validation": Key(
        "text", "WARN", "honoured", "what happens if processes pass different tags"
    ),
    "load_universal": Key(
        "bool", False, "compiler", "no effect; every checkpoint can be loaded on any mesh"
    ),
    "use_node_local_storage": Key(
        "bool",
        False,
        "honoured",
        "false: a checkpoint is one folder that all nodes share",
        (False,),
        "a checkpoint is one folder that all nodes share; set it to false",
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
        "output_path": Key("text", "", "mapped", "with job_name: the run folder"),
        "job_name": Key("text", "DeepSpeedJobName", "mapped", "see output_path"),
    },
    "csv_monitor": {
        "enabled": Key(
            "bool", False, "mapped", "no effect; metrics.jsonl is always written to the run folder"
        ),
        "output_path": Key("text", "", "mapped", "with job_name: the run folder"),
        "job_name": Key("text", "DeepSpeedJobName", "mapped", "see output_path"),
    },
    "wandb": {
        "enabled": Key("bool", False, "honoured", "log.wandb"),
        "project": Key("text", "deepspeed", "honoured", "log.wandb"),
        "group": Key(
            "text", None, "honoured", "set it by the environment variable WANDB_RUN_GROUP instead"
        ),
        "team": Key(
            "text", None, "honoured", "set it by the environment variable WANDB_ENTITY instead"
        ),
    },
    "comet": AbsentFeature("Comet is not supported; use tensorboard or wandb", is_enabled),
}

_ELASTICITY: Table = {
    "enabled": Key("bool", False, "honoured", "elasticity.enabled"),
    "max_train_batch_size": Key("int", 2000, "honoured", "elasticity.max_global_batch_size"),
    "micro_batch_sizes": Key("list", [2, 4, 6], "honoured", "elasticity.micro_batch_sizes"),
    "min_gpus": Key("int", 1, "honoured", "elasticity.min_devices"),
    "max_gpus": Key("int", 10_000, "honoured", "elasticity.max_devices"),
    "num_gpus_per_node": Key("int", 1, "honoured", "elasticity.devices_per_node"),
    "model_parallel_size": Key("int", 1, "honoured", "must equal autotp_size x pipeline.stages"),
    "min_time": Key(
        "int", 0, "compiler", "no effect; the number of devices changes only at a restart"
    ),
    "prefer_larger_batch": Key("bool", True, "honoured", "elasticity.prefer_larger_batch"),
    "ignore_non_elastic_batch_info": Key(
        "bool", False, "honoured", "true: the file may have batch keys beside elasticity"
    ),
    "version": Key(
        "float", 0.2, "honoured", "version of the batch arithmetic", (0.1, 0.2), "use 0.1 or 0.2"
    ),
}

_LAYOUT = "the layout of the model's calls of zerojax.attention"
_SPARSE_ATTENTION: Table = {
    "mode": Key(
        "text",
        "fixed",
        "honoured",
        f"{_LAYOUT}; a model with its own attention_layout must have the same",
        ("dense", "fixed", "variable", "bigbird", "bslongformer"),
        "use dense, fixed, variable, bigbird or bslongformer",
    ),
    "block": Key("int", 16, "honoured", _LAYOUT),
    "different_layout_per_head": Key("bool", False, "honoured", _LAYOUT),
    "num_local_blocks": Key("int", 4, "honoured", _LAYOUT),
    "num_global_blocks": Key("int", 1, "honoured", _LAYOUT),
    "attention": Key("text", "bidirectional", "honoured", _LAYOUT),
    "horizontal_global_attention": Key("bool", False, "honoured", _LAYOUT),
    "num_different_global_patterns": Key("int", 1, "honoured", _LAYOUT),
    "num_random_blocks": Key(
        "int", 0, "honoured", f"{_LAYOUT}; random blocks are drawn with seed 0"
    ),
    "local_window_blocks": Key("list", [4], "honoured", _LAYOUT),
    "global_block_indices": Key("list", [0], "honoured", _LAYOUT),
    "global_block_end_indices": Key("list", None, "honoured", _LAYOUT),
    "num_sliding_window_blocks": Key("int", 3, "honoured", _LAYOUT),
}

_NAMED = "no effect; the model's attribute expert_parameters names the expert weights"
_SAME_ROUTER = "must equal the model's router (model.moe)"
_PRODUCTS = "no effect; one batched product computes all experts, on any GPU"
_EXCHANGE = (
    "no effect; all-to-alls use static buffers, in as many rounds as the fullest expert needs"
)
_EXPERTS: Table = {
    "enabled": Key("bool", False, "honoured", "true: autoep_size is used"),
    "autoep_size": Key("int", 1, "honoured", "mesh.expert"),
    "expert_tensor_parallel_size": Key(
        "int",
        1,
        "mapped",
        "mesh.model splits experts by the model's own tensor_parallel_rules",
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
        "use softmax or sigmoid",
    ),
    "score_apply": Key(
        "text",
        "auto",
        "honoured",
        "scores multiply the outputs of experts",
        ("post",),
        "scores multiply the outputs of experts, not their inputs; use post",
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
        "DeepSpeed refuses any value but null; take it out, and set moe.bias_rate of the model "
        "for a router bias that follows the load of experts",
        bool,
    ),
    "use_grouped_mm": Key("bool", True, "compiler", _PRODUCTS),
    "disable_triton_grouped_mm": Key("bool", False, "compiler", _PRODUCTS),
    "grouped_mm_backend": Key("text", "auto", "compiler", _PRODUCTS),
    "gate_up_impl": Key("text", "separate", "compiler", _PRODUCTS),
    "combine_impl": Key(
        "text", "auto", "compiler", "no effect; results are gathered and summed in float32"
    ),
    "row_weighting_impl": Key(
        "text", "auto", "compiler", "no effect; results are gathered and summed in float32"
    ),
    "comm_backend": Key("text", "comm", "compiler", _EXCHANGE),
    "comm_num_sm": Key("int", 12, "compiler", _EXCHANGE),
    "comm_qp_margin": Key("int", 4, "compiler", _EXCHANGE),
    "comm_max_tokens_per_rank": Key("int", 0, "compiler", _EXCHANGE),
    "async_split_plan": Key(
        "bool", False, "compiler", "no effect; a step never waits for the host"
    ),
    "validate_folding_routing": Key(
        "bool",
        False,
        "compiler",
        "no effect; expert ids out of range make the loss NaN on every mesh",
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
    # Keys of torch.compile, in files of Axolotl and of older DeepSpeed.
    "enabled disable backend kwargs"
)

_ABSENT: Table = {
    "amp": AbsentFeature("Apex is not supported; use bf16 or fp16", is_enabled),
    "moe": AbsentFeature(
        "a section of inference, which DeepSpeed's training does not read; experts are part of "
        "the model (zerojax.zoo.MoE), and expert_parallel.autoep_size splits them: take it out",
        bool,
    ),
    "data_efficiency": AbsentFeature(
        "no data sampler exists; select the rows in your batches, and remove this section",
        is_enabled_inside,
    ),
    "quantize_training": AbsentFeature(
        "quantized training is not supported; remove this key", is_enabled_inside
    ),
    "weight_quantization": AbsentFeature(
        "weight quantization is not supported; remove this key", bool
    ),
    "eigenvalue": AbsentFeature(
        "only for quantize_training, which is not supported; remove this key",
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
        "there is no inference engine; remove this key and use `zerojax.load_run`",
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
        "no effect; checkpoints are always saved in the background",
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

_CURRICULUM: Table = {
    "enabled": Key("bool", False, "honoured", "true: a curriculum of the row length is used"),
    "curriculum_type": Key(
        "text",
        "seqlen",
        "honoured",
        "seqlen: rows are cut to their first tokens; the model is unchanged",
        ("seqlen",),
        "only seqlen (the row length) works for any model; use seqlen",
    ),
    "min_difficulty": Key("int", None, "honoured", "CurriculumConfig.min_length, in tokens"),
    "max_difficulty": Key("int", None, "honoured", "CurriculumConfig.max_length, in tokens"),
    "schedule_type": Key(
        "text",
        None,
        "honoured",
        "CurriculumConfig.schedule_type",
        ("fixed_linear", "fixed_root", "fixed_discrete"),
        "custom needs a Python function, which a file cannot contain; use fixed_linear, "
        "fixed_root or fixed_discrete",
    ),
    "schedule_config": {
        "total_curriculum_step": Key("int", None, "honoured", "CurriculumConfig.total_steps"),
        "difficulty_step": Key("int", None, "honoured", "CurriculumConfig.length_step"),
        "root_degree": Key("float", None, "honoured", "CurriculumConfig.root_degree"),
        "difficulty": Key("list", None, "honoured", "CurriculumConfig.lengths"),
        "max_step": Key("list", None, "honoured", "CurriculumConfig.until_steps"),
    },
}

_LAYER_DROP: Table = {
    "enabled": Key(
        "bool", False, "honoured", "true: the step drops layers; the model is unchanged"
    ),
    "theta": Key("float", 1.0, "honoured", "LayerDropConfig.theta"),
    "gamma": Key("float", 0.001, "honoured", "LayerDropConfig.gamma"),
}

TABLE: Table = {
    "train_batch_size": Key("int", None, "honoured", "rows of one step, over all devices"),
    "train_micro_batch_size_per_gpu": Key(
        "int", None, "honoured", "rows of one microbatch on each data shard"
    ),
    "gradient_accumulation_steps": Key("int", None, "honoured", "num_microbatches"),
    "managed_gradient_accumulation": Key(
        "bool",
        True,
        "honoured",
        "true: a step sums the gradients of its microbatches",
        (True,),
        "a step always runs all microbatches and one update; set this key to true",
    ),
    "optimizer": {
        "type": Key("text", None, "honoured", "the update rule"),
        "params": Key("dict", None, "honoured", "parameters of the update rule"),
        "legacy_fusion": Key("bool", False, "compiler", _MOMENTS),
    },
    "scheduler": {
        "type": Key("text", None, "honoured", "learning-rate schedule, advanced once per update"),
        "params": Key("dict", None, "honoured", "parameters of the schedule"),
    },
    "gradient_clipping": Key(
        "float", 1.0, "honoured", "limit of the global gradient norm; 0: no limit"
    ),
    "curriculum_learning": _CURRICULUM,
    "progressive_layer_drop": _LAYER_DROP,
    "fp16": _FP16,
    "bf16": _BF16,
    "torch_autocast": {
        "enabled": Key(
            "bool", False, "mapped", "true: float32 master weights, and `dtype` as compute dtype"
        ),
        "dtype": Key("text", None, "honoured", "compute and reduce dtype"),
        "lower_precision_safe_modules": AbsentFeature(
            "names torch modules; in zerojax every layer computes in `dtype`, and norms and "
            "losses in "
            "float32: remove this key",
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
            "gradients are accumulated in float32 or bfloat16; use fp32",
        ),
        "param_dtype": Key(
            "text", None, "honoured", "must match the sections fp16 and bf16", _DTYPES
        ),
        "buffer_dtype": Key(
            "text", None, "mapped", "no effect; non-parameter state keeps the model's dtypes"
        ),
    },
    "keep_in_fp32_modules": Key(
        "any", "auto", "mapped", "no effect; non-parameter state keeps the model's dtypes"
    ),
    "communication_data_type": Key(
        "text", None, "honoured", "reduce_dtype", _DTYPES, "use fp32, fp16 or bf16"
    ),
    "seq_parallel_communication_data_type": Key(
        "text",
        "fp32",
        "compiler",
        "no effect; sequence-parallel gradients are summed in the dtype of the other gradients",
        _DTYPES,
        "use fp32, fp16 or bf16",
    ),
    "prescale_gradients": Key("bool", False, "mapped", _RESCALED),
    "gradient_predivide_factor": Key("float", 1.0, "mapped", _RESCALED),
    "gradient_allreduce_op": Key(
        "text",
        "mean",
        "honoured",
        "gradients are means over the batch",
        ("mean",),
        "gradients are means over all rows; use mean, and scale the learning rate instead",
    ),
    "sparse_gradients": Key(
        "bool",
        False,
        "honoured",
        "true: mesh.lookup=owners, which sends rows of untied embeddings at stages 1 to 3",
    ),
    "zero_allow_untested_optimizer": Key(
        "bool",
        False,
        "honoured",
        "no effect; every supported optimizer gives the results of one device",
    ),
    "zero_force_ds_cpu_optimizer": Key(
        "bool", True, "compiler", "no effect; the update runs on the device"
    ),
    "zero_optimization": ZERO,
    "allgather_size": Key("int", 500_000_000, "mapped", "old name of allgather_bucket_size"),
    "activation_checkpointing": _ACTIVATIONS,
    "pipeline": _PIPELINE,
    "tensor_parallel": _TENSOR_PARALLEL,
    "sequence_parallel_size": Key(
        "int",
        1,
        "mapped",
        "mesh.context, for the reference decoders (Ulysses, ring or all-gather)",
    ),
    "data_parallel_size": Key("int", None, "honoured", "mesh.data"),
    "use_data_before_expert_parallelism": Key(
        "bool", False, "compiler", "no effect; the mesh has a fixed order of axes"
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
            # The name of intra_op_parallelism in DeepSpeed's documents and in older files.
            ("thread_count", "int", 1),
        )
    },
    "checkpoint": _CHECKPOINT,
    "steps_per_print": Key("int", None, "honoured", "log.every (inf: never)"),
    "wall_clock_breakdown": Key("bool", False, "mapped", _PROFILE),
    "memory_breakdown": Key("bool", False, "mapped", _IN_PLAN),
    "dump_state": Key(
        "bool", False, "mapped", "no effect; the run folder always has the resolved settings"
    ),
    "log_level": Key("text", None, "mapped", "error and critical set log.console=quiet"),
    "flops_profiler": {
        "enabled": Key("bool", False, "mapped", _PROFILE),
        "recompute_fwd_factor": Key(
            "float", 0.0, "mapped", "no effect; recomputed operations are always counted"
        ),
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
                "bool", True, "mapped", "no effect; only reports wait for the device"
            ),
        }
    },
    "elasticity": _ELASTICITY,
    "autotuning": {
        name: Key(
            "any",
            None,
            "mapped",
            "no effect; `zerojax plan --search` finds the cheapest plan that fits",
        )
        for name in _AUTOTUNING.split()
    },
    "compile": {
        name: Key("any", None, "compiler", "no effect; the whole step is one compiled program")
        for name in _COMPILE.split()
    },
    "sparse_attention": _SPARSE_ATTENTION,
    "expert_parallel": _EXPERTS,
    "compression_training": COMPRESSION,
    **_ABSENT,
    "disable_python_gc": Key(
        "bool", False, "compiler", "no effect; a step creates hardly any Python objects"
    ),
    "dataloader_drop_last": Key(
        "bool", False, "compiler", "no effect; a batch with fewer rows is refused with a message"
    ),
    "vocabulary_size": Key(
        "int", None, "honoured", "used only for a warning if it is not divisible by 8"
    ),
    "graph_harvesting": Key(
        "bool", False, "compiler", "no effect; the whole step is one compiled program"
    ),
    "disable_allgather": Key("bool", False, "honoured", "no effect, as in DeepSpeed"),
}


ALIASES = {
    name.removeprefix("stage3_"): name
    for name in ZERO
    if name.startswith("stage3_") and name != "stage3_gather_fp16_weights_on_model_save"
}
"""{name without "stage3_", which DeepSpeed accepts as well: full name}."""
