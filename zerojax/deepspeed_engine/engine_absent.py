"""Lists methods and attributes of DeepSpeed's engine that zerojax lacks, with replacements.

The names are those of DeepSpeed 0.19.8's `DeepSpeedEngine`
(`tests/data/deepspeed_engine_names.json`) and of its base class `torch.nn.Module`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NoReturn

ONE_CALL = (
    "forward, backward and update are one compiled program: write loss = engine.train_batch(batch) "
    "in place of loss = engine(batch), engine.backward(loss) and engine.step(), with the rows of "
    "all gradient_accumulation_steps() micro-batches in one batch"
)
_ONE_RESULT = (
    "zerojax.initialize returns only the engine, which has optimizer, schedule and step: write "
    "engine = zerojax.initialize(...) in place of engine, optimizer, loader, scheduler = ..."
)
_INSIDE = "gradients exist only inside train_batch; remove this call"
_FIXED = (
    "batch sizes are part of the compiled step; initialize another engine, and load a "
    "checkpoint into it"
)
_COMPILED = "the whole step is always compiled; remove this call"
_ON_DEVICE = (
    "arrays are moved and cast automatically: train_batch takes numpy arrays and places each "
    "row on its "
    "device, and the configuration sets the precision; remove this call"
)
_WEIGHTS = "engine.to_model() is the trained model, and engine.state['params'] its arrays"
_AXES = (
    "a process may have many devices, so it has no single rank in a group: engine.mesh has "
    "the axes, and engine.local_rows() the rows of each batch that this process passes"
)
_CONFIGURED = "read engine.config or engine.translation instead"
_DATA = "pass each batch to train_batch, or a loader's micro-batches: train_batch(data_iter=...)"
_TIMES = "reports have the step times (run_dir=...), and `zerojax profile` prints their parts"
_NO_EXPERTS = "the mesh axis expert splits the experts automatically; remove this call"
_WHOLE = (
    "load_checkpoint reads parameters, optimizer state and counters together; to start anew from "
    "trained weights, initialize an engine with the result of to_model()"
)
ABSENT: Mapping[str, str] = {
    "backward": ONE_CALL,
    "step": ONE_CALL,
    "forward": ONE_CALL,
    "zero_grad": _INSIDE,
    "allreduce_gradients": _INSIDE,
    "no_sync": _INSIDE,
    "coalesce_grad_reduction": _INSIDE,
    "set_gradient_accumulation_boundary": _INSIDE,
    "set_train_batch_size": _FIXED,
    "set_train_micro_batch_size": _FIXED,
    "module": _WEIGHTS,
    "module_state_dict": "engine.to_model() is the trained model",
    "save_16bit_model": "zerojax.to_hugging_face(engine, folder); or save engine.to_model()",
    "optimizer": "the optimizer is a part of the compiled step; its state is in engine.state",
    "lr_scheduler": "the schedule is a part of the compiled step; engine.get_lr() is its value",
    "get_mom": "betas are a part of the compiled step; read them from engine.config",
    "training_dataloader": _DATA,
    "training_data": _DATA,
    "deepspeed_io": _DATA,
    "collate_fn": _DATA,
    "set_data_post_process_func": _DATA,
    "world_size": "a process may have many devices: jax.process_count() and jax.device_count()",
    "local_rank": (
        "one process drives all devices of its host that it sees; engine.global_rank is its number "
        "over all hosts, and 0 prints"
    ),
    "device": _ON_DEVICE,
    "save_fp16_model": "zerojax.to_hugging_face(engine, folder); or save engine.to_model()",
    "load_module_state_dict": _WHOLE,
    "client_optimizer": "the optimizer is a part of the compiled step",
    "basic_optimizer": "the optimizer is a part of the compiled step",
    "client_lr_scheduler": "the schedule is a part of the compiled step; engine.get_lr()",
    "empty_partition_cache": "gathered weights exist only inside the step; remove this call",
    "offload_states": "the configuration sets the memory of the state: offload_optimizer",
    "reload_states": "the configuration sets the memory of the state: offload_optimizer",
    "monitor": "reports are written by the configuration's monitors, or to run_dir=...",
    "summary_events": "reports are written by the configuration's monitors, or to run_dir=...",
    "losses": "train_batch returns the loss; engine.metrics has the numbers of the last step",
    "loss_scale": "engine.metrics['loss_scale'] is the loss scale of the last step (float16 only)",
    "scale": "train_batch scales the loss in float16 automatically; remove this call",
    "clip_fp32_gradients": "train_batch clips gradients by gradient_clipping; remove this call",
    "checkpoint_engine": "only save_checkpoint saves checkpoints",
    "param_names": "engine.plan.users_placement.leaves has the names of the parameters",
    "flops": "engine.plan counts products; `zerojax profile` measures them",
    "get_type": "the optimizer's name is engine.optimizer_name()",
    "get_pld_theta": "this value is not available; remove this call",
    "parameters": _WEIGHTS,
    "named_parameters": _WEIGHTS,
    "state_dict": f"save_checkpoint saves all of it; {_WEIGHTS}",
    "load_state_dict": _WHOLE,
    "modules": _WEIGHTS,
    "children": _WEIGHTS,
    "buffers": _WEIGHTS,
    "apply": _WEIGHTS,
    "requires_grad_": "name the parameters that are not trained: initialize(..., freeze='regex')",
    "to": _ON_DEVICE,
    "cuda": _ON_DEVICE,
    "cpu": _ON_DEVICE,
    "half": _ON_DEVICE,
    "bfloat16": _ON_DEVICE,
    "float": _ON_DEVICE,
}
"""{name in DeepSpeed's engine that zerojax lacks: sentence that says what to use instead}."""
_FAMILIES = (
    (r".*(allreduce|all_gather|sparse_tensor)|(un)?flatten$|gradient_average$", _INSIDE),
    (r"register_compile|(is_|get_)?.*(compile|autosp|autotp_backend)", _COMPILED),
    (r".*(timers?(_cache)?|duration|breakdown)$|tput_", _TIMES),
    (r".*(expert|moe|gate_modules|all_to_all)", _NO_EXPERTS),
    (r".*(_group|_rank|_world_size|_device|mpu)$|is_first_weights", _AXES),
    (
        r"(zero|zeropp|flops_profiler|autotuning|curriculum|pld|eigenvalue|random_ltd|amp|fp16|bf16"
        r"|torch_autocast|data|checkpoint|scheduler|optimizer|dynamic_loss|initial_dynamic|aio"
        r"|zenflow|swap_tensor|tensor_parallel|sparse_gradients|communication|gradient_predivide"
        r"|postscale|managed_gradient|load_universal|use_node_local|mics|super_offload|cpuadam"
        r"|quantize|dataloader|dump_state|log_level|graph_harvesting|autotp|get_data_types"
        r"|is_sanity|sequence_parallel|is_elastic|set_custom|uses_parallelization|optimized_linear"
        r"|progressive|pipeline_parallelism|quantizer|compression|block_eigenvalue)(_|$)",
        _CONFIGURED,
    ),
)
"""(regular expression of names in DeepSpeed's engine, sentence that says what to use instead)."""


def sentence_for(name: str) -> str | None:
    """Returns what to use instead of a name of DeepSpeed's engine; None for an unknown name."""
    if name in ABSENT:
        return ABSENT[name]
    found = (text for pattern, text in _FAMILIES if re.match(pattern, name))
    return next(found, None) if not name.startswith("_") else None


class AbsentMethods:
    """Base class that raises an error with a remedy if a user calls a method of DeepSpeed's engine
    that zerojax lacks."""

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(f"engine(batch): {ONE_CALL}")

    def __iter__(self) -> NoReturn:
        raise TypeError(_ONE_RESULT)

    def __getitem__(self, _: object) -> NoReturn:
        raise TypeError(_ONE_RESULT)

    def __getattr__(self, name: str) -> NoReturn:
        sentence = sentence_for(name)
        reason = "" if sentence is None else f": {sentence}"
        raise AttributeError(f"the engine has no {name!r}{reason}")
