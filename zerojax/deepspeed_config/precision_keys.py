"""Translates ds_config keys for precision into a `Precision`."""

from __future__ import annotations

from typing import Any

from zerojax.config import ConfigError, LossScale
from zerojax.deepspeed_config.auto_values import compute_name
from zerojax.deepspeed_config.ds_config import File
from zerojax.deepspeed_config.translation import CallerValues
from zerojax.optim.precision import Precision, as_precision

_AUTOCAST = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16"}


def precision_of(file: File, given: CallerValues) -> Precision:
    """Returns the dtypes that a ds_config sets, or the caller's dtypes if the file sets none."""
    name = _compute(file)
    if name is None and isinstance(given.precision, Precision):
        return _with_wire(file, given, given.precision, {})
    _compare_compute(file, name, given)
    if name is None and given.precision is None:
        file.notes.reasons.append("precision fp32: the file enables neither fp16 nor bf16")
    name = name or compute_name(given.precision) or "fp32"
    fields: dict[str, Any] = {}
    if name == "fp16":
        fields["loss_scale"] = _loss_scale(file)
    if file["bf16.bf16_master_weights_and_grads"]:
        fields |= _bf16_masters(file, name)
    elif file["bf16.bf16_optimizer_states"]:
        file.notes.refuse(
            "bf16.bf16_optimizer_states",
            True,
            "needs bf16_master_weights_and_grads, as in DeepSpeed",
        )
    wanted = file.optional("data_types.param_dtype")
    if wanted is not None and wanted != name:
        file.notes.refuse(
            "data_types.param_dtype",
            wanted,
            f"differs from the precision of the file, {name}; remove this key",
        )
    try:
        precision = as_precision(name)
        built = _with_wire(file, given, precision, fields)
    except ValueError as error:
        file.notes.refuse(name, True, str(error))
        return Precision()
    if isinstance(given.precision, Precision) and given.precision != built:
        file.notes.refuse(
            name,
            True,
            f"the file sets {built.describe()}, but the call has precision="
            f"{given.precision.describe()}; set it in one place",
        )
    return built


def _compute(file: File) -> str | None:
    """Returns the compute dtype ("fp16", "bf16" or "fp32") of a ds_config; None if not set."""
    on = [name for name in ("fp16", "bf16") if file[f"{name}.enabled"]]
    if len(on) > 1:
        file.notes.refuse("bf16.enabled", True, "fp16 is enabled as well; enable only one of them")
    autocast = _autocast(file) if file["torch_autocast.enabled"] else None
    if not on:
        spoken = any(file.has(f"{name}.enabled") for name in ("fp16", "bf16", "torch_autocast"))
        return autocast or ("fp32" if spoken else None)
    if autocast not in (None, on[0]) and file.has("torch_autocast.dtype"):
        file.notes.refuse(
            "torch_autocast.dtype",
            file.optional("torch_autocast.dtype"),
            f"sets {autocast}, but {on[0]} is enabled as well; write the dtype of {on[0]}, or "
            "remove torch_autocast",
        )
    elif autocast is not None:
        file.notes.change(
            "torch_autocast.enabled",
            "not needed",
            f"no effect; {on[0]} is enabled and sets the same dtype",
        )
    return on[0]


def _autocast(file: File) -> str:
    """Returns the compute dtype that the section torch_autocast sets."""
    text = (file.optional("torch_autocast.dtype") or "bfloat16").removeprefix("torch.")
    dtype = _AUTOCAST.get(text, text)
    if dtype not in ("bf16", "fp16"):
        file.notes.refuse("torch_autocast.dtype", text, "is not bfloat16 or float16")
        return "bf16"
    return dtype


def _compare_compute(file: File, name: str | None, given: CallerValues) -> None:
    wanted = compute_name(given.precision)
    if name is None or wanted is None or wanted == name:
        return
    key = f"{name}.enabled" if name in ("fp16", "bf16") else "bf16.enabled"
    file.notes.refuse(
        key,
        name in ("fp16", "bf16"),
        f"the file sets {name}, but the call has precision={wanted!r}: set it in one place",
    )


def _loss_scale(file: File) -> LossScale | None:
    static = file["fp16.loss_scale"]
    try:
        if static:
            return LossScale(static=static)
        if file["zero_optimization.stage"] == 0:
            file.notes.reasons.append(
                "the loss scale follows the rules of DeepSpeed's stages 1 to 3; its stage 0 has no "
                "hysteresis (write fp16.hysteresis: 1 for that) and continues at "
                "min_loss_scale, where "
                "zerojax ends the run"
            )
        return LossScale(
            initial=2.0 ** file["fp16.initial_scale_power"],
            window=file["fp16.loss_scale_window"],
            hysteresis=file["fp16.hysteresis"],
            consecutive_hysteresis=file["fp16.consecutive_hysteresis"],
            minimum=file["fp16.min_loss_scale"],
        )
    except (ConfigError, OverflowError) as error:
        file.notes.refuse("fp16", "loss scale", str(error))
        return None


def _bf16_masters(file: File, name: str) -> dict[str, Any]:
    key = "bf16.bf16_master_weights_and_grads"
    if name != "bf16" or file["zero_optimization.stage"] == 0:
        file.notes.refuse(key, True, "needs bf16.enabled and ZeRO stage 1, 2 or 3, as in DeepSpeed")
        return {}
    file.notes.change(
        key,
        "mapped",
        "param_dtype and accumulate_dtype bf16; updates are rounded stochastically, so that "
        "updates far "
        "below one unit in the last place have an effect on average (DeepSpeed rounds to nearest)",
    )
    moments = {"moments_dtype": "bf16"} if file["bf16.bf16_optimizer_states"] else {}
    return {"param_dtype": "bf16", "accumulate_dtype": "bf16", **moments}


def _with_wire(
    file: File, given: CallerValues, precision: Precision, fields: dict[str, Any]
) -> Precision:
    """Adds the dtypes of communication and accumulation, from the ds_config, from the caller, or
    zerojax's defaults."""
    reduce = _agreed(file, "communication_data_type", given.reduce_dtype, "reduce_dtype")
    key = "data_types.grad_accum_dtype"
    total = _agreed(file, key, given.accumulate_dtype, "accumulate_dtype")
    if total is not None:
        fields["accumulate_dtype"] = total
    elif "accumulate_dtype" not in fields and precision.compute_dtype != precision.param_dtype:
        file.notes.reasons.append(
            "gradients of microbatches are summed in float32 (DeepSpeed sums them in the compute "
            f"dtype); set {key} to bf16 for that"
        )
    return as_precision(precision, reduce_dtype=reduce, **fields)


def _agreed(file: File, key: str, wanted: str | None, keyword: str) -> str | None:
    found = file.optional(key)
    if found is not None and wanted is not None and found != wanted:
        file.notes.refuse(key, found, f"the call has {keyword}={wanted!r}: set it in one place")
    return wanted if found is None else found
