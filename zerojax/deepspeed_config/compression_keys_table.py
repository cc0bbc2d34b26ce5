"""Table of the keys of `compression_training`, with DeepSpeed's defaults and how zerojax handles
each.

The facts come from DeepSpeed 0.19.6: `constants.py`, `config.py`, `scheduler.py` and
`basic_layer.py` in `deepspeed/compression`, and `runtime/quantize.py`. The names inside
`different_groups` are the user's; `compression_keys` checks each group against the tables here.
"""

from __future__ import annotations

from zerojax.deepspeed_config.key_schema import (
    AbsentFeature,
    Key,
    Table,
    honoured,
    is_enabled,
    is_enabled_inside,
    left_to_compiler,
    not_needed,
)

_GROUPS = "each group has modules, related_modules and params, see below"


def _pruning(unit: str, method: str, **more: Key) -> Table:
    return {
        "shared_parameters": {
            "enabled": honoured(False, f"true: pruning.groups with unit={unit}"),
            "method": honoured(
                method,
                "l1: by the sums of absolute values of the initial weights; topk (learned "
                "scores) and snip_momentum are refused if enabled",
            ),
            "schedule_offset": honoured(1000, "start_step of the groups"),
            **more,
        },
        "different_groups": honoured(dict, f"pruning.groups; {_GROUPS}"),
    }


WEIGHTS: Table = {
    "shared_parameters": {
        "enabled": honoured(
            False,
            "true: the model must round all kernels of its layers, by model.matmul_dtype and "
            "model.bit_schedule",
        ),
        **left_to_compiler("XLA fuses the rounding", quantizer_kernel=False),
        "schedule_offset": honoured(
            0,
            "bit_schedule.start_step; without quantize_weight_in_forward one step later if it is "
            "above 0, as in DeepSpeed",
        ),
        **not_needed(
            "a code's scale belongs to one output (8 bits) or 32 inputs of it (4 bits)",
            quantize_groups=1,
        ),
        **not_needed("the plan has the schedule", quantize_verbose=False),
        "quantization_type": honoured("symmetric", "symmetric; asymmetric is refused if enabled"),
        "quantize_weight_in_forward": honoured(
            False, "true: target_bits from the start; false: widths from start_bits to target_bits"
        ),
        "rounding": honoured("nearest", "nearest; stochastic is refused if enabled"),
        "fp16_mixed_quantize": {
            "enabled": honoured(False, "false; true is refused if enabled"),
            **not_needed("used only with enabled, which is refused", quantize_change_ratio=0.001),
        },
    },
    "different_groups": honoured(
        dict, f"all groups together match the kernels of all layers, with one width; {_GROUPS}"
    ),
}

COMPRESSION: Table = {
    "weight_quantization": WEIGHTS,
    "activation_quantization": AbsentFeature(
        "activations are not rounded; remove the section, or use model.matmul_dtype=fp8 for 8-bit "
        "products",
        is_enabled_inside,
        ("shared_parameters", "different_groups"),
    ),
    "sparse_pruning": _pruning(
        "weight",
        "l1",
        **not_needed(
            "a key of method snip_momentum, which is refused",
            block_pattern="4x1",
            dense_ratio=0.1,
            schedule_offset_stride=1,
            schedule_offset_end=int,
            excluded_modules=[],
        ),
    ),
    "row_pruning": _pruning("row", "l1"),
    "head_pruning": _pruning(
        "head",
        "topk",
        num_heads=honoured(int, "must be the heads of the parameter"),
    ),
    "channel_pruning": _pruning("channel", "l1"),
    "layer_reduction": AbsentFeature(
        "layers are not removed when a run starts; build the model with keep_number_layer layers, "
        "copy the teacher's rows teacher_layer into it (docs/pruning.md shows how), and remove the "
        "section",
        is_enabled,
        (
            *("enabled", "keep_number_layer", "module_name_prefix"),
            *("teacher_layer", "other_module_name"),
        ),
    ),
}

_OF_EACH: Table = {
    "modules": honoured(list, "regular expressions on names of parameters"),
    **not_needed(
        "an export keeps the shapes of related modules, with zeros", related_modules=object
    ),
}
PRUNED_GROUP: Table = {
    **_OF_EACH,
    "params": {"dense_ratio": honoured(float, "PruningGroup.dense_ratio")},
}
"""Keys of a group of a pruning method."""
ROUNDED_GROUP: Table = {
    **_OF_EACH,
    "params": {
        "start_bits": honoured(int, "bit_schedule.start_bits"),
        "target_bits": honoured(int, "8: fake_int8; 4: fake_int4; others refused"),
        "quantization_period": honoured(1, "bit_schedule.period"),
    },
}
"""Keys of a group of `weight_quantization`."""
