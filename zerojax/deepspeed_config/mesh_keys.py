"""Translates ds_config keys for mesh, ZeRO, pipeline and offload into a `MeshConfig`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from zerojax.config import ConfigError, MeshConfig, OffloadConfig
from zerojax.config.mesh import DEVICE, HOST, NVME, SLICE_ELEMENTS, WireConfig
from zerojax.config.tree_types import Tree
from zerojax.deepspeed_config.ds_config import File
from zerojax.deepspeed_config.expert_keys import data_size, expert_size

_TIERS = {"none": DEVICE, "cpu": HOST, "nvme": NVME}
_PARTITIONS = {"uniform": "uniform", "parameters": "parameters", "best": "flops"}
ZERO, OPTIMIZER, PARAM = (
    "zero_optimization",
    "zero_optimization.offload_optimizer",
    "zero_optimization.offload_param",
)


def mesh_of(file: File, num_devices: int | None) -> MeshConfig:
    """Translates ds_config keys for mesh, ZeRO, pipeline and offload into mesh options.

    Args:
      file: the ds_config.
      num_devices: number of devices of the run. None if it is not known: the number of replicas is
        then 1.
    """
    fields: dict[str, Any] = {"zero": file[f"{ZERO}.stage"]}
    fields["model"] = max(1, file["tensor_parallel.autotp_size"])
    fields["stage"] = max(1, file.optional("pipeline.stages") or 1)
    fields["context"] = max(1, file["sequence_parallel_size"])
    fields["expert"] = expert_size(file)
    fields["data"] = data_size(file, fields["expert"])
    fields |= _buckets(file) | _partition(file) | _replicas(file, num_devices, fields)
    if file["activation_checkpointing.partition_activations"] and fields["model"] > 1:
        fields["sequence_sharding"] = True
    if file["sparse_gradients"]:
        fields["lookup"] = "owners"
    fields["rules"] = _rules(file)
    fields |= _node(file, num_devices)
    codes = _weight_codes(file) | _gradient_codes(file)
    fields["wire"] = WireConfig(secondary="node" in fields, **codes)
    fields["offload"] = _offload(file, fields["zero"])
    try:
        return MeshConfig(**fields)
    except ConfigError as error:
        if not any(line.key.startswith(f"{ZERO}.") for line in file.notes.refused):
            file.notes.refuse(ZERO, ".".join(error.key), error.message)
        return MeshConfig()


def _buckets(file: File) -> dict[str, Any]:
    """Returns the bucket sizes, in elements, that a ds_config sets. Where it sets none, zerojax's
    defaults apply."""
    fields: dict[str, Any] = {}
    for name in ("reduce_bucket_size", "allgather_bucket_size"):
        size = file.optional(f"{ZERO}.{name}")
        if size is not None:
            fields[name] = max(1, size)
    persistent = file.optional(f"{ZERO}.stage3_param_persistence_threshold")
    if persistent is not None:
        # DeepSpeed does not shard a parameter of at most this size, zerojax of less than this size.
        fields["persistence_threshold"] = persistent + 1
    limit = f"{ZERO}.stage3_model_persistence_threshold"
    if file.optional(limit) == 0:
        fields["persistence_threshold"] = 0
        file.notes.change(
            limit, "honoured", "mesh.persistence_threshold=0: all parameters are sharded"
        )
    elif file.has(limit) and file[limit] < 2**31:
        file.notes.refuse(
            limit,
            file[limit],
            "a limit on the sum of unsharded parameters is not supported; lower "
            "stage3_param_persistence_threshold, or "
            "remove this key",
        )
    if not file[f"{ZERO}.reduce_scatter"] and file[f"{ZERO}.stage"] >= 2:
        file.notes.refuse(
            f"{ZERO}.reduce_scatter",
            False,
            "from stage 2 on gradients are always reduce-scattered; set this key to true",
        )
    return fields


def _gradient_codes(file: File) -> dict[str, Any]:
    """Returns the `WireConfig` fields for quantized gradient reduction (qgZ of ZeRO++); {} if it is
    off."""
    key = f"{ZERO}.zero_quantized_gradients"
    if not file[key]:
        return {}
    if file[f"{ZERO}.stage"] == 0:
        file.notes.refuse(
            key,
            True,
            "needs stage 1, 2 or 3, which reduce-scatter gradients; set it to false",
        )
        return {}
    file.notes.change(
        key, "mapped", "wire.gradients=int8: 8 bits everywhere; DeepSpeed uses 4 between nodes"
    )
    return {"gradients": "int8"}


def _weight_codes(file: File) -> dict[str, Any]:
    """Returns the `WireConfig` fields for quantized weight gathering (qwZ of ZeRO++); {} if it is
    off."""
    key, stage = f"{ZERO}.zero_quantized_weights", file[f"{ZERO}.stage"]
    if not file[key]:
        return {}
    if stage != 3:
        what = f"needs stage 3, but the stage is {stage}: weights are sent unquantized"
        file.notes.change(
            key, "ignored", f"{what}; wire.weights=int8 quantizes them at stages 1 and 2"
        )
        file.notes.warnings.append(f"{key}=true {what}")
        return {}
    file.notes.change(key, "honoured", "wire.weights=int8")
    return {"weights": "int8"}


def _node(file: File, num_devices: int | None) -> dict[str, Any]:
    """Translates hpZ of ZeRO++: layers gather weights only within groups of consecutive ranks."""
    key = f"{ZERO}.zero_hpz_partition_size"
    size, stage = file[key], file[f"{ZERO}.stage"]
    if size <= 1:
        return {}
    if stage != 3:
        what = f"needs stage 3, but the stage is {stage}: no weights are gathered in the layers"
        file.notes.change(key, "ignored", what)
        file.notes.warnings.append(f"{key}={size} {what}")
        return {}
    if num_devices is not None and num_devices <= size:
        file.notes.change(key, "honoured", f"off: {num_devices} devices are one group")
        return {}
    if num_devices is not None and num_devices % size:
        divisors = [count for count in range(1, size) if num_devices % count == 0]
        why = f"does not divide the {num_devices} devices; use {divisors[-1]}"
        file.notes.refuse(key, size, why)
        return {}
    file.notes.change(
        key,
        "honoured",
        f"wire.secondary=true and mesh.node={size}; the node's shards exist only during a step, "
        "not as a second stored copy",
    )
    return {"node": size}


def _partition(file: File) -> dict[str, Any]:
    if not file.has("pipeline.partition"):
        return {}
    name = file["pipeline.partition"]
    if name not in _PARTITIONS:
        file.notes.refuse(
            "pipeline.partition",
            name,
            f"is not one of {', '.join(_PARTITIONS)}, because all layers of a stack have one type",
        )
        return {}
    file.notes.change("pipeline.partition", "mapped", f"mesh.partition={_PARTITIONS[name]}")
    return {"partition": _PARTITIONS[name]}


def _replicas(file: File, num_devices: int | None, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Translates MiCS: the state is sharded over the devices of a group, and every group has a
    replica."""
    key = f"{ZERO}.mics_shard_size"
    size = file[key]
    if size <= 0:
        file.notes.change(key, "honoured", "off: shards over all devices")
        return {}
    if fields["zero"] != 3:
        file.notes.refuse(key, size, f"needs stage 3, but the stage is {fields['zero']}; remove it")
        return {}
    if num_devices is None:
        file.notes.reasons.append(
            f"mesh.data={size}; mesh.replica = number of devices / mics_shard_size"
        )
        return {"data": size}
    group = size * fields["model"] * fields["stage"] * fields["context"]
    if num_devices % group:
        file.notes.refuse(
            key,
            size,
            f"{num_devices} devices are not a multiple of {group}; use a size that divides the "
            "number of devices",
        )
        return {}
    return {"data": size, "replica": num_devices // group}


def _rules(file: File) -> tuple[tuple[str, tuple[str | None, ...]], ...] | None:
    """Translates `layer_specs` into tensor-parallel rules, with Flax's names and weight shapes
    [in, out]."""
    key = "tensor_parallel.partition_config.layer_specs"
    rules = []
    for spec in file.optional(key) or ():
        kind = spec.get("partition_type", "column") if isinstance(spec, Mapping) else None
        strange = isinstance(spec, Mapping) and set(spec) - {"patterns", "partition_type"}
        if strange:
            names = ", ".join(sorted(strange))
            file.notes.refuse(
                key,
                spec,
                f"{names} splits a fused torch weight; zerojax's models store these weights "
                "separately",
            )
            return None
        if kind == "skip":
            axes: tuple[str | None, ...] = ()
        elif kind in ("row", "column"):
            axes = ("model", None) if kind == "row" else (None, "model")
        else:
            file.notes.refuse(key, spec, "partition_type is not one of row, column, skip")
            return None
        rules += [(as_flax_pattern(pattern), axes) for pattern in spec.get("patterns", ())]
    if not rules:
        return None
    shown = ", ".join(f"{pattern} {list(axes)}" for pattern, axes in rules)
    file.notes.change(key, "mapped", f"mesh.rules: {shown}")
    return tuple(rules)


def as_flax_pattern(pattern: str) -> str:
    r"""Converts a regular expression for torch names to one for zerojax's names.

    `\.q_proj\.weight$` becomes `/q_proj/kernel$`.
    """
    return re.sub(r"\bweight\b", "kernel", pattern.replace(r"\.", "/"))


def _offload(file: File, stage: int) -> OffloadConfig:
    optimizer = _device(file, OPTIMIZER, "cpu_offload")
    param = _device(file, PARAM, "cpu_offload_param")
    optimizer, param = _on_stage(file, optimizer, param, stage)
    fields: dict[str, Any] = {"opt_state": _shares(file, optimizer, stage)}
    fields["params"] = _TIERS[param]
    if param == "nvme":
        fields["opt_state"] = _state_of_pages(file, fields["opt_state"])
    if file["activation_checkpointing.cpu_checkpointing"]:
        fields["activations"] = HOST
    fields["folder"] = _folder(file, optimizer, param)
    if optimizer != "none" and file.has(f"{ZERO}.sub_group_size"):
        size, why = _slice_of_tile(file[f"{ZERO}.sub_group_size"])
        fields["slice_elements"] = size
        file.notes.change(
            f"{ZERO}.sub_group_size", "mapped", f"mesh.offload.slice_elements={size}: {why}"
        )
    for section in (OPTIMIZER, PARAM):
        key = f"{section}.pin_memory"
        if file.optional(key) is False:
            file.notes.warnings.append(
                f"{key}=false has no effect: offload always uses pinned host memory"
            )
    return OffloadConfig(**fields)


def _state_of_pages(file: File, opt_state: Tree) -> str:
    """Returns the memory tier of the optimizer's state if layers are in files: files as well."""
    if opt_state == NVME:
        return NVME
    key, what = f"{OPTIMIZER}.device", file[f"{OPTIMIZER}.device"]
    if not isinstance(opt_state, str):
        file.notes.refuse(
            f"{OPTIMIZER}.ratio",
            file[f"{OPTIMIZER}.ratio"],
            "with offload_param.device=nvme all of the optimizer's state is in files; set ratio "
            "to 1",
        )
        return NVME
    why = (
        "mesh.offload.opt_state=nvme, because the update of layers in files reads and writes files"
    )
    file.notes.change(key, "mapped", why)
    file.notes.warnings.append(f"{key}={what} with offload_param.device=nvme: {why}")
    return NVME


def _folder(file: File, optimizer: str, param: str) -> str | None:
    """Returns the folder of offload files, shared by state and weights; None without files."""
    sections = [name for name, at in ((OPTIMIZER, optimizer), (PARAM, param)) if at == "nvme"]
    paths = {name: file.optional(f"{name}.nvme_path") for name in sections}
    named = {name: path for name, path in paths.items() if path is not None}
    if len(set(named.values())) > 1:
        file.notes.refuse(
            f"{PARAM}.nvme_path",
            named[PARAM],
            f"differs from {named[OPTIMIZER]} of offload_optimizer; weights and optimizer state "
            "share one folder: use the same path in both",
        )
    return next(iter(named.values()), None)


def _slice_of_tile(sub_group_size: int) -> tuple[int, str]:
    """Converts DeepSpeed's `sub_group_size` to (elements of a slice in zerojax, reason).

    DeepSpeed 0.19.8 (`_create_fp16_sub_groups` in `runtime/zero/stage3.py`) adds whole parameters
    to a tile until the tile has `sub_group_size` elements, and never splits a parameter. So 0, or a
    size below that of any parameter, means one parameter per tile, and is no size of a slice.
    """
    largest, smallest = SLICE_ELEMENTS, OffloadConfig.min_elements
    if sub_group_size < smallest:
        return largest, (
            f"a size below {smallest} means one parameter per tile in DeepSpeed, which never "
            "splits "
            "a parameter; a slice of zerojax is a part of one parameter"
        )
    return min(sub_group_size, largest), (
        "DeepSpeed's tiles are in host memory, zerojax's slices on the device, so a slice has "
        "at most "
        f"{largest}"
    )


def _device(file: File, section: str, old_name: str) -> str:
    """Returns the offload device of a section, or of the section's old key: none, cpu or nvme."""
    device = file[f"{section}.device"]
    if not file.optional(f"{ZERO}.{old_name}"):
        return device if device in _TIERS else "none"
    name = section.rpartition(".")[2]
    file.notes.warnings.append(f'{old_name} is an old name: write "{name}": {{"device": "cpu"}}')
    if file.has(f"{section}.device"):
        file.notes.refuse(
            f"{ZERO}.{old_name}", True, f"the file also has {name}; remove this old name"
        )
    return "cpu"


def _on_stage(file: File, optimizer: str, param: str, stage: int) -> tuple[str, str]:
    """Returns the offload devices of optimizer and parameters that take effect at ZeRO `stage`.

    DeepSpeed 0.19.8 uses offload_optimizer only at stages 1 to 3, and offload_param only at stage 3
    (`_configure_zero_optimizer` in `runtime/engine.py`). At other stages it silently ignores the
    section.
    """
    stays = "stays on the device; DeepSpeed ignores this key in that case, too"
    if optimizer != "none" and stage == 0:
        what = f"needs stage 1, 2 or 3, but the stage is 0: the optimizer's state {stays}"
        file.notes.change(f"{OPTIMIZER}.device", "ignored", what)
        file.notes.warnings.append(f"{OPTIMIZER}.device={optimizer} {what}")
        optimizer = "none"
    if param != "none" and stage != 3:
        what = (
            f"needs stage 3, but the stage is {stage}: the weights of forward and backward {stays}"
        )
        file.notes.change(f"{PARAM}.device", "ignored", what)
        file.notes.warnings.append(f"{PARAM}.device={param} {what}")
        param = "none"
    return optimizer, param


def _shares(file: File, device: str, stage: int) -> Any:
    """Returns the memory tier of the optimizer state, or {tier: share} if only a part of the state
    is offloaded."""
    ratio, key = file[f"{OPTIMIZER}.ratio"], f"{OPTIMIZER}.ratio"
    if device == "none":
        return DEVICE
    if not 0 <= ratio <= 1:
        file.notes.refuse(key, ratio, "must be between 0 and 1")
        return DEVICE
    if ratio < 1 and stage != 3:
        file.notes.refuse(
            key, ratio, f"needs stage 3, as in DeepSpeed, but the stage is {stage}; set it to 1"
        )
    if ratio in (0, 1):
        return _TIERS[device] if ratio else DEVICE
    return {DEVICE: 1 - ratio, _TIERS[device]: ratio}
