"""Translates the section `compression_training`: pruning, and rounding of weights.

zerojax prunes parameters of any model, so these groups become a `PruningConfig`. Rounding is part
of the reference models, so the model must have the widths that the file describes.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from zerojax import models, tracing
from zerojax.config import BitScheduleConfig, ConfigError, PruningConfig, PruningGroup
from zerojax.config.late_dataclasses import dataclass
from zerojax.deepspeed_config.compression_keys_table import PRUNED_GROUP, ROUNDED_GROUP
from zerojax.deepspeed_config.ds_config import File
from zerojax.deepspeed_config.key_schema import Table, check

SECTION = "compression_training"
_UNITS = {"sparse": "weight", "row": "row", "head": "head", "channel": "channel"}
_DTYPES = {8: "fake_int8", 4: "fake_int4"}
_BITS = ("start_bits", "target_bits", "quantization_period")
_LAYERS = re.compile(r"^blocks/.*kernel$")
"""Names of the kernels that a reference model rounds."""


@dataclass(frozen=True)
class Rounding:
    """Rounding of weights that a ds_config describes.

    Attributes:
      matmul_dtype: "fake_int8" or "fake_int4".
      schedule: widths by step.
      patterns: regular expressions that match the names of the rounded kernels.
    """

    matmul_dtype: str
    schedule: BitScheduleConfig
    patterns: tuple[str, ...]

    def describe(self) -> str:
        """Returns one line on the widths of all steps, which the model must have."""
        [bits] = [bits for bits, dtype in _DTYPES.items() if dtype == self.matmul_dtype]
        return f"{self.matmul_dtype}, {self.schedule.describe(bits)}"


def pruning_of(file: File) -> PruningConfig:
    """Returns the pruning that a ds_config sets; one without groups if none is enabled.

    A value that has no meaning in zerojax is noted as refused.
    """
    groups: list[PruningGroup] = []
    for method, unit in _UNITS.items():
        name = f"{SECTION}.{method}_pruning"
        shared = f"{name}.shared_parameters"
        if not file[f"{shared}.enabled"]:
            continue
        if (by := file[f"{shared}.method"]) != "l1":
            file.notes.refuse(
                f"{shared}.method",
                by,
                "needs scores that are trained, or another library; use l1, which chooses by the "
                "initial weights",
            )
            continue
        common: dict[str, Any] = {"unit": unit, "start_step": file[f"{shared}.schedule_offset"]}
        if unit == "head":
            common["num_heads"] = file[f"{shared}.num_heads"]
            if common["num_heads"] is None:
                file.notes.refuse(f"{shared}.num_heads", None, "is required, as in DeepSpeed")
        for path, values in _groups(file, name, PRUNED_GROUP, ("params.dense_ratio",)):
            try:
                ratio = values[f"{path}.params.dense_ratio"]
                groups += [
                    PruningGroup(pattern=pattern, dense_ratio=ratio, **common)
                    for pattern in values[f"{path}.modules"]
                ]
            except ConfigError as error:
                field = error.key[-1] if error.key else ""
                key = "modules" if field == "pattern" else f"params.{field}"
                file.notes.refuse(f"{path}.{key}", values.get(f"{path}.{key}"), error.message)
    return PruningConfig(groups=tuple(groups))


def rounding_of(file: File) -> Rounding | None:
    """Returns the rounding of weights that a ds_config sets; None if it is not enabled, or refused
    (which is noted)."""
    name = f"{SECTION}.weight_quantization"
    shared = f"{name}.shared_parameters"
    if not file[f"{shared}.enabled"]:
        return None
    is_supported = True
    for key, wanted in (
        ("quantization_type", "symmetric"),
        ("rounding", "nearest"),
        ("fp16_mixed_quantize.enabled", False),
    ):
        if (value := file[f"{shared}.{key}"]) != wanted:
            file.notes.refuse(f"{shared}.{key}", value, f"is not supported; use {wanted}")
            is_supported = False
    required = ("params.start_bits", "params.target_bits")
    found = [
        (path, values, tuple(values.get(f"{path}.params.{key}") for key in _BITS))
        for path, values in _groups(file, name, ROUNDED_GROUP, required)
    ]
    if not found or not is_supported:
        return None
    path, _, (start, target, period) = found[0]
    if others := [other for other, _, bits in found if bits != found[0][2]]:
        file.notes.refuse(
            f"{others[0]}.params", None, f"differs from {path}; all groups need the same params"
        )
        return None
    if target not in _DTYPES:
        file.notes.refuse(
            f"{path}.params.target_bits",
            target,
            "has no export; use 8 (fake_int8) or 4 (fake_int4)",
        )
        return None
    in_forward = file[f"{shared}.quantize_weight_in_forward"]
    offset = file[f"{shared}.schedule_offset"]
    widths = {} if in_forward or start == target else {"start_bits": start, "period": period or 1}
    try:
        # DeepSpeed's optimizer rounds after the step in which the offset is reached.
        first = offset if in_forward or not offset else offset + 1
        schedule = BitScheduleConfig(start_step=first, **widths)
        schedule.check_target(target)
    except ConfigError as error:
        file.notes.refuse(f"{path}.params", {"start_bits": start}, error.message)
        return None
    patterns = [pattern for at, each, _ in found for pattern in each[f"{at}.modules"]]
    return Rounding(_DTYPES[target], schedule, tuple(patterns))


def _groups(
    file: File, name: str, table: Table, required: tuple[str, ...]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (path, {path of a key: value}) of each group of a method; notes refusals for others.

    Args:
      file: the ds_config.
      name: path of the method.
      table: keys of a group.
      required: keys that a group must have, besides modules.
    """
    key = f"{name}.different_groups"
    groups = file.optional(key)
    if not groups:
        file.notes.refuse(key, groups, "is required by an enabled method, as in DeepSpeed; set it")
        return
    for group, content in groups.items():
        path = f"{key}.{group}"
        if not isinstance(content, Mapping):
            file.notes.refuse(path, content, f"expected a section with {', '.join(table)}")
            continue
        values = check(content, table, file.notes, f"{path}.")
        absent = [each for each in ("modules", *required) if f"{path}.{each}" not in values]
        for each in absent:
            file.notes.refuse(f"{path}.{each}", None, "is required; set it")
        modules = values.get(f"{path}.modules", ())
        if strange := [each for each in modules if not isinstance(each, str) or each == "*"]:
            file.notes.refuse(
                f"{path}.modules",
                strange[0],
                "is not a regular expression; use '.' for all parameters",
            )
        elif not absent:
            yield path, values


def _settings(matmul_dtype: str | None, schedule: BitScheduleConfig | None) -> str:
    dtype = f"matmul_dtype={matmul_dtype}"
    if schedule is None or schedule.is_off:
        return f"{dtype} and no bit_schedule"
    return f"{dtype} and bit_schedule={dataclasses.asdict(schedule)}"


def check_rounding(model: tracing.Model, rounding: Rounding | None) -> None:
    """Raises if the rounding described in a ds_config does not match the model's.

    Args:
      model: the model of the run.
      rounding: the description, from `rounding_of`.

    Raises:
      ConfigError: the model rounds to other widths or other kernels, or does not round.
    """
    if rounding is None:
        return
    key = (SECTION, "weight_quantization")
    config = models.bound_attribute(model, "config")
    own = getattr(config, "matmul_dtype", None), getattr(config, "bit_schedule", None)
    needed = rounding.matmul_dtype, rounding.schedule
    if own != needed:
        raise ConfigError(
            f"needs a model with {_settings(*needed)}; this one has {_settings(*own)}: build a "
            "reference model (zerojax.zoo) with these settings, or remove the section",
            key,
        )
    names = jax.tree.leaves(model.parameter_names())
    matched = {n for n in names if any(re.search(pattern, n) for pattern in rounding.patterns)}
    rounded = {name for name in names if _LAYERS.search(name)}
    kernels = {name for name in matched if name.endswith(("kernel", "embedding"))}
    if wrong := sorted(kernels ^ rounded):
        verb = "do not match" if wrong[0] in rounded else "match"
        raise ConfigError(
            f"modules {list(rounding.patterns)} {verb} {wrong[0]}, but the model rounds the "
            "kernels of all layers and no other; use modules ['blocks/']",
            key,
        )
