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
    honoured,
    is_enabled,
    is_enabled_inside,
    left_to_compiler,
    mapped,
    not_needed,
)
from zerojax.deepspeed_config.zero_keys_table import ZERO

_DTYPES = ("fp32", "fp16", "bf16")
_IN_PLAN = "the plan prints the bytes of every collective before the run"
_SAVES = "each process always writes its own shards in the background"
_PROFILE = "`zerojax profile` and the plan print FLOPs and times"

_FP16: Table = {
    "enabled": honoured(False, "true: precision=fp16"),
    **not_needed("floating-point inputs are always cast to the compute dtype", auto_cast=False),
    "loss_scale": honoured(0.0, "0: dynamic loss scale; other values set loss_scale.static"),
    "initial_scale_power": honoured(16, "loss_scale.initial = 2**value"),
    "loss_scale_window": honoured(1000, "loss_scale.window"),
    "hysteresis": honoured(2, "loss_scale.hysteresis"),
    "consecutive_hysteresis": honoured(False, "loss_scale.consecutive_hysteresis"),
    "min_loss_scale": honoured(1.0, "loss_scale.minimum"),
    "fp16_master_weights_and_grads": honoured(
        False,
        "false: master weights are float32",
        (False,),
        "float16 master weights lose small updates; set this key to false, or use bf16 with "
        "bf16_master_weights_and_grads",
    ),
}

_BF16: Table = {
    "enabled": honoured(False, "true: precision=bf16"),
    **left_to_compiler(
        "gradients are accumulated inside the compiled step", immediate_grad_update=False
    ),
    "check_grad_overflow": honoured(True, "a step with non-finite gradients changes no parameter"),
    "bf16_master_weights_and_grads": honoured(False, "param_dtype and accumulate_dtype"),
    "bf16_optimizer_states": honoured(False, "moments_dtype"),
}

_ACTIVATIONS: Table = {
    "partition_activations": mapped(False, "sets mesh.sequence_sharding if autotp_size is above 1"),
    "cpu_checkpointing": honoured(
        False, "mesh.offload.activations=host; no key of DeepSpeed means activations=nvme"
    ),
    **left_to_compiler("XLA allocates all buffers", contiguous_memory_optimization=False),
    **not_needed(
        "the model's own remat decides which activations are stored", number_checkpoints=int
    ),
    **not_needed("a step never waits for the host", synchronize_checkpoint_boundary=False),
    **not_needed(_PROFILE, profile=False),
}

_PIPELINE: Table = {
    "stages": honoured(int, "mesh.stage"),
    "partition": mapped("best", "mesh.partition"),
    **not_needed("one seed gives the same initial weights on every mesh", seed_layers=False),
    **not_needed(
        "the model's own remat decides, and mesh.stash=input stores only the input of a stage",
        activation_checkpoint_interval=0,
    ),
    **left_to_compiler(
        "activations and gradients are sent only to devices that use them",
        pipe_partitioned=True,
        grad_partitioned=True,
    ),
}

_TENSOR_PARALLEL: Table = {
    "autotp_size": honoured(0, "mesh.model"),
    **not_needed(
        "the model's own tensor_parallel_rules define the split",
        vocab_parallel_lm_head=bool,
        preset_model=str,
    ),
    **not_needed("the loss is part of the model's code", vocab_parallel_ce_backend="torch"),
    **left_to_compiler(
        "XLA's latency-hiding scheduler overlaps communication", tp_overlap_comm=False
    ),
    "partition_config": {
        "use_default_specs": mapped(
            False, "the model's own tensor_parallel_rules apply where layer_specs has none"
        ),
        "layer_specs": mapped(list, "mesh.rules"),
    },
    "tp": AbsentFeature("a key for inference; for training use autotp_size", bool),
    "tensor_parallel": AbsentFeature("a key for inference; for training use autotp_size", bool),
    **not_needed("the sections fp16 and bf16 set the dtype", dtype=object),
    "injection_policy_tuple": AbsentFeature(
        "names torch modules; the model's own tensor_parallel_rules replace this key: remove it",
        bool,
    ),
    **not_needed("weights are created directly in their shards", keep_module_on_host=False),
    "replace_with_kernel_inject": AbsentFeature("a key for inference; remove it", bool),
    "kernel_inject": AbsentFeature("a key for inference; remove it", bool),
}

_WRITER = (
    "type decoupled io_buffer_size io_buffer_double show_statistics data_parallel io_multiplier"
)
_CHECKPOINT: Table = {
    "tag_validation": honoured("WARN", "what happens if processes pass different tags"),
    **not_needed("every checkpoint can be loaded on any mesh", load_universal=False),
    "use_node_local_storage": honoured(
        False,
        "false: a checkpoint is one folder that all nodes share",
        (False,),
        "a checkpoint is one folder that all nodes share; set it to false",
    ),
    **not_needed(_SAVES, checkpoint_serialization=True),
    "parallel_write": not_needed(_SAVES, pipeline_stage=False),
    "writer": not_needed(_SAVES, **dict.fromkeys(_WRITER.split(), object)),
}

_MONITORS: Table = {
    "tensorboard": {
        "enabled": honoured(False, "log.tensorboard"),
        "output_path": mapped("", "with job_name: the run folder"),
        "job_name": mapped("DeepSpeedJobName", "see output_path"),
    },
    "csv_monitor": {
        **not_needed("metrics.jsonl is always written to the run folder", enabled=False),
        "output_path": mapped("", "with job_name: the run folder"),
        "job_name": mapped("DeepSpeedJobName", "see output_path"),
    },
    "wandb": {
        "enabled": honoured(False, "log.wandb"),
        "project": honoured("deepspeed", "log.wandb"),
        "group": honoured(str, "set it by the environment variable WANDB_RUN_GROUP instead"),
        "team": honoured(str, "set it by the environment variable WANDB_ENTITY instead"),
    },
    "comet": AbsentFeature("Comet is not supported; use tensorboard or wandb", is_enabled),
}

_ELASTICITY: Table = {
    "enabled": honoured(False, "elasticity.enabled"),
    "max_train_batch_size": honoured(2000, "elasticity.max_global_batch_size"),
    "micro_batch_sizes": honoured([2, 4, 6], "elasticity.micro_batch_sizes"),
    "min_gpus": honoured(1, "elasticity.min_devices"),
    "max_gpus": honoured(10_000, "elasticity.max_devices"),
    "num_gpus_per_node": honoured(1, "elasticity.devices_per_node"),
    "model_parallel_size": honoured(1, "must equal autotp_size x pipeline.stages"),
    **not_needed("the number of devices changes only at a restart", min_time=0),
    "prefer_larger_batch": honoured(True, "elasticity.prefer_larger_batch"),
    "ignore_non_elastic_batch_info": honoured(
        False, "true: the file may have batch keys beside elasticity"
    ),
    "version": honoured(0.2, "version of the batch arithmetic", (0.1, 0.2), "use 0.1 or 0.2"),
}

_LAYOUT = "the layout of the model's calls of zerojax.attention"
_SPARSE_ATTENTION: Table = {
    "mode": honoured(
        "fixed",
        f"{_LAYOUT}; a model with its own attention_layout must have the same",
        ("dense", "fixed", "variable", "bigbird", "bslongformer"),
        "use dense, fixed, variable, bigbird or bslongformer",
    ),
    "block": honoured(16, _LAYOUT),
    "different_layout_per_head": honoured(False, _LAYOUT),
    "num_local_blocks": honoured(4, _LAYOUT),
    "num_global_blocks": honoured(1, _LAYOUT),
    "attention": honoured("bidirectional", _LAYOUT),
    "horizontal_global_attention": honoured(False, _LAYOUT),
    "num_different_global_patterns": honoured(1, _LAYOUT),
    "num_random_blocks": honoured(0, f"{_LAYOUT}; random blocks are drawn with seed 0"),
    "local_window_blocks": honoured([4], _LAYOUT),
    "global_block_indices": honoured([0], _LAYOUT),
    "global_block_end_indices": honoured(list, _LAYOUT),
    "num_sliding_window_blocks": honoured(3, _LAYOUT),
}

_NAMES_OF_EXPERTS = (
    "preset_model moe_layer_pattern expert_pattern router_pattern expert_w1 expert_w2 expert_w3 "
    "num_experts_attr top_k_attr shared_experts_pattern shared_experts_gate_pattern"
)
_SAME_ROUTER = "must equal the model's router (model.moe)"
_EXPERTS: Table = {
    "enabled": honoured(False, "true: autoep_size is used"),
    "autoep_size": honoured(1, "mesh.expert"),
    "expert_tensor_parallel_size": Key(
        "int",
        1,
        "mapped",
        "mesh.model splits experts by the model's own tensor_parallel_rules",
        (1,),
        "experts have no tensor parallelism of their own; set it to 1, and autotp_size",
    ),
    **not_needed(
        "the model's attribute expert_parameters names the expert weights",
        **dict.fromkeys(_NAMES_OF_EXPERTS.split(), str),
    ),
    "top_k": Key("int", "auto", "honoured", f"{_SAME_ROUTER}: experts_per_token"),
    "score_func": honoured(
        "auto", f"{_SAME_ROUTER}: scores", ("softmax", "sigmoid"), "use softmax or sigmoid"
    ),
    "score_apply": honoured(
        "auto",
        "scores multiply the outputs of experts",
        ("post",),
        "scores multiply the outputs of experts, not their inputs; use post",
    ),
    "route_norm": honoured(bool, f"{_SAME_ROUTER}: renormalize"),
    "route_scale": honoured(1.0, f"{_SAME_ROUTER}: scale"),
    "routed_scaling_factor": Key("float", "auto", "honoured", f"{_SAME_ROUTER}: scale"),
    "num_expert_groups": honoured(int, f"{_SAME_ROUTER}: num_groups"),
    "num_limited_groups": honoured(int, f"{_SAME_ROUTER}: groups_per_token"),
    "has_shared_experts": honoured(bool, f"{_SAME_ROUTER}: shared_dim above 0"),
    "expert_activation": honoured(
        str,
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
    **not_needed(
        "one batched product computes all experts, on any GPU",
        use_grouped_mm=True,
        disable_triton_grouped_mm=False,
        grouped_mm_backend="auto",
        gate_up_impl="separate",
    ),
    **not_needed(
        "results are gathered and summed in float32", combine_impl="auto", row_weighting_impl="auto"
    ),
    **not_needed(
        "all-to-alls use static buffers, in as many rounds as the fullest expert needs",
        comm_backend="comm",
        comm_num_sm=12,
        comm_qp_margin=4,
        comm_max_tokens_per_rank=0,
    ),
    **not_needed("a step never waits for the host", async_split_plan=False),
    **not_needed(
        "expert ids out of range make the loss NaN on every mesh", validate_folding_routing=False
    ),
}

_AUTOTUNING = (
    "enabled fast results_dir exps_dir overwrite start_profile_step end_profile_step metric "
    "metric_path tuner_type tuner_early_stopping tuner_num_trials arg_mappings model_info "
    "model_info_path mp_size max_train_batch_size min_train_batch_size "
    "num_tuning_micro_batch_sizes max_train_micro_batch_size_per_gpu "
    "min_train_micro_batch_size_per_gpu"
)

_ONE_PROGRAM = "the whole step is one compiled program"
_COMPILE = (
    "deepcompile autoep_non_moe free_activation free_activation_threshold offload_activation "
    "offload_activation_pin_memory offload_opt_states double_buffer symmetric_memory debug_log "
    "offload_parameters sync_before_reduce sync_after_reduce sync_before_allgather "
    "sync_after_allgather keep_int_input_tensors keep_all_input_tensors passes "
    # Keys of torch.compile, in files of Axolotl and of older DeepSpeed.
    "enabled disable backend kwargs"
)

_EIGENVALUE = "enabled verbose max_iter tol stability gas_boundary_resolution layer_name layer_num"
_HYBRID = (
    "enabled max_out_tokens inference_tp_size release_inference_cache pin_parameters "
    "tp_gather_partition_size enable_cuda_graph"
)
_NEBULA = (
    "enabled persistent_storage_path persistent_time_interval "
    "num_of_version_in_retention enable_nebula_load nebula_load_path"
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
        tuple(_EIGENVALUE.split()),
    ),
    "hybrid_engine": AbsentFeature(
        "there is no inference engine; remove this key and use `zerojax.load_run`",
        is_enabled,
        tuple(_HYBRID.split()),
    ),
    "nebula": AbsentFeature(
        "no effect; checkpoints are always saved in the background",
        is_enabled,
        tuple(_NEBULA.split()),
    ),
    "datastates_ckpt": AbsentFeature(
        "checkpoints are saved in the background without it", lambda value: value is not False
    ),
}

_CURRICULUM: Table = {
    "enabled": honoured(False, "true: a curriculum of the row length is used"),
    "curriculum_type": honoured(
        "seqlen",
        "seqlen: rows are cut to their first tokens; the model is unchanged",
        ("seqlen",),
        "only seqlen (the row length) works for any model; use seqlen",
    ),
    "min_difficulty": honoured(int, "CurriculumConfig.min_length, in tokens"),
    "max_difficulty": honoured(int, "CurriculumConfig.max_length, in tokens"),
    "schedule_type": honoured(
        str,
        "CurriculumConfig.schedule_type",
        ("fixed_linear", "fixed_root", "fixed_discrete"),
        "custom needs a Python function, which a file cannot contain; use fixed_linear, "
        "fixed_root or fixed_discrete",
    ),
    "schedule_config": {
        "total_curriculum_step": honoured(int, "CurriculumConfig.total_steps"),
        "difficulty_step": honoured(int, "CurriculumConfig.length_step"),
        "root_degree": honoured(float, "CurriculumConfig.root_degree"),
        "difficulty": honoured(list, "CurriculumConfig.lengths"),
        "max_step": honoured(list, "CurriculumConfig.until_steps"),
    },
}

_LAYER_DROP: Table = {
    "enabled": honoured(False, "true: the step drops layers; the model is unchanged"),
    "theta": honoured(1.0, "LayerDropConfig.theta"),
    "gamma": honoured(0.001, "LayerDropConfig.gamma"),
}

TABLE: Table = {
    "train_batch_size": honoured(int, "rows of one step, over all devices"),
    "train_micro_batch_size_per_gpu": honoured(int, "rows of one microbatch on each data shard"),
    "gradient_accumulation_steps": honoured(int, "num_microbatches"),
    "managed_gradient_accumulation": honoured(
        True,
        "true: a step sums the gradients of its microbatches",
        (True,),
        "a step always runs all microbatches and one update; set this key to true",
    ),
    "optimizer": {
        "type": honoured(str, "the update rule"),
        "params": honoured(dict, "parameters of the update rule"),
        **left_to_compiler("here the compiler fuses the update", legacy_fusion=False),
    },
    "scheduler": {
        "type": honoured(str, "learning-rate schedule, advanced once per update"),
        "params": honoured(dict, "parameters of the schedule"),
    },
    "gradient_clipping": honoured(1.0, "limit of the global gradient norm; 0: no limit"),
    "curriculum_learning": _CURRICULUM,
    "progressive_layer_drop": _LAYER_DROP,
    "fp16": _FP16,
    "bf16": _BF16,
    "torch_autocast": {
        "enabled": mapped(False, "true: float32 master weights, and `dtype` as compute dtype"),
        "dtype": honoured(str, "compute and reduce dtype"),
        "lower_precision_safe_modules": AbsentFeature(
            "names torch modules; in zerojax every layer computes in `dtype`, and norms and "
            "losses in "
            "float32: remove this key",
            bool,
        ),
    },
    "data_types": {
        "grad_accum_dtype": honoured(
            str,
            "accumulate_dtype",
            ("fp32", "bf16"),
            "gradients are accumulated in float32 or bfloat16; use fp32",
        ),
        "param_dtype": honoured(str, "must match the sections fp16 and bf16", _DTYPES),
        **not_needed("non-parameter state keeps the model's dtypes", buffer_dtype=str),
    },
    "keep_in_fp32_modules": Key(
        "any", "auto", "not needed", "no effect; non-parameter state keeps the model's dtypes"
    ),
    "communication_data_type": honoured(str, "reduce_dtype", _DTYPES, "use fp32, fp16 or bf16"),
    "seq_parallel_communication_data_type": Key(
        "text",
        "fp32",
        "compiler",
        "no effect; sequence-parallel gradients are summed in the dtype of the other gradients",
        _DTYPES,
        "use fp32, fp16 or bf16",
    ),
    **not_needed(
        "gradients are divided once, in float32, and another order would only change rounding",
        prescale_gradients=False,
        gradient_predivide_factor=1.0,
    ),
    "gradient_allreduce_op": honoured(
        "mean",
        "gradients are means over the batch",
        ("mean",),
        "gradients are means over all rows; use mean, and scale the learning rate instead",
    ),
    "sparse_gradients": honoured(
        False, "true: mesh.lookup=owners, which sends rows of untied embeddings at stages 1 to 3"
    ),
    **not_needed(
        "every supported optimizer gives the results of one device",
        zero_allow_untested_optimizer=False,
    ),
    **not_needed("the update runs on the device", zero_force_ds_cpu_optimizer=True),
    "zero_optimization": ZERO,
    "allgather_size": mapped(500_000_000, "old name of allgather_bucket_size"),
    "activation_checkpointing": _ACTIVATIONS,
    "pipeline": _PIPELINE,
    "tensor_parallel": _TENSOR_PARALLEL,
    "sequence_parallel_size": mapped(
        1, "mesh.context, for the reference decoders (Ulysses, ring or all-gather)"
    ),
    "data_parallel_size": honoured(int, "mesh.data"),
    **not_needed("the mesh has a fixed order of axes", use_data_before_expert_parallelism=False),
    "aio": not_needed(
        "`zerojax.checkpoint.store` chooses its I/O itself; `zerojax bench io` measures the disk",
        block_size=1_048_576,
        queue_depth=8,
        intra_op_parallelism=1,
        single_submit=False,
        overlap_events=True,
        use_gds=False,
        # The name of intra_op_parallelism in DeepSpeed's documents and in older files.
        thread_count=1,
    ),
    "checkpoint": _CHECKPOINT,
    "steps_per_print": honoured(int, "log.every (inf: never)"),
    **not_needed(_PROFILE, wall_clock_breakdown=False),
    **not_needed(_IN_PLAN, memory_breakdown=False),
    **not_needed("the run folder always has the resolved settings", dump_state=False),
    "log_level": mapped(str, "error and critical set log.console=quiet"),
    "flops_profiler": {
        **not_needed(_PROFILE, enabled=False),
        **not_needed("recomputed operations are always counted", recompute_fwd_factor=0.0),
        **not_needed(
            _PROFILE, profile_step=1, module_depth=-1, top_modules=1, detailed=True, output_file=str
        ),
    },
    "comms_logger": not_needed(
        _IN_PLAN, enabled=False, verbose=False, prof_all=True, debug=False, prof_ops=[]
    ),
    **_MONITORS,
    "timers": {
        "throughput": {
            **not_needed("these values are always written to metrics.jsonl", enabled=True),
            **not_needed("only reports wait for the device", synchronized=True),
        }
    },
    "elasticity": _ELASTICITY,
    "autotuning": not_needed(
        "`zerojax plan --search` finds the cheapest plan that fits",
        **dict.fromkeys(_AUTOTUNING.split(), object),
    ),
    "compile": left_to_compiler(_ONE_PROGRAM, **dict.fromkeys(_COMPILE.split(), object)),
    "sparse_attention": _SPARSE_ATTENTION,
    "expert_parallel": _EXPERTS,
    "compression_training": COMPRESSION,
    **_ABSENT,
    **not_needed("a step creates hardly any Python objects", disable_python_gc=False),
    **not_needed("a batch with fewer rows is refused with a message", dataloader_drop_last=False),
    "vocabulary_size": honoured(int, "used only for a warning if it is not divisible by 8"),
    **left_to_compiler(_ONE_PROGRAM, graph_harvesting=False),
    "disable_allgather": honoured(False, "no effect, as in DeepSpeed"),
}


ALIASES = {
    name.removeprefix("stage3_"): name
    for name in ZERO
    if name.startswith("stage3_") and name != "stage3_gather_fp16_weights_on_model_save"
}
"""{name without "stage3_", which DeepSpeed accepts as well: full name}."""
