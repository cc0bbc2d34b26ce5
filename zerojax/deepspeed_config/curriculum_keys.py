"""Translates the sections `curriculum_learning` and `progressive_layer_drop`.

DeepSpeed passes the row length, or the probability of keeping a layer, to the user's forward pass,
which must shorten the rows or drop layers. In zerojax the trainer shortens the rows, and the step
drops layers. The keys of a schedule and its formula are equal in both.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from zerojax.config import ConfigError, CurriculumConfig, LayerDropConfig
from zerojax.deepspeed_config.ds_config import File
from zerojax.deepspeed_config.key_schema import as_kind

_SECTION = "curriculum_learning"
_SCHEDULE = f"{_SECTION}.schedule_config"
_OF_GROWTH = {
    "min_length": f"{_SECTION}.min_difficulty",
    "max_length": f"{_SECTION}.max_difficulty",
    "total_steps": f"{_SCHEDULE}.total_curriculum_step",
    "length_step": f"{_SCHEDULE}.difficulty_step",
}
"""{field: key} of the schedules fixed_linear and fixed_root; all are required, as in DeepSpeed."""
_OF_ROOT = {"root_degree": f"{_SCHEDULE}.root_degree"}
_OF_LISTS = {"lengths": f"{_SCHEDULE}.difficulty", "until_steps": f"{_SCHEDULE}.max_step"}


def curriculum_of(file: File) -> CurriculumConfig:
    """Returns the curriculum that a ds_config sets; one without a type if none is enabled.

    A value that DeepSpeed would refuse, or that has no meaning in zerojax, is noted as refused.
    """
    none = CurriculumConfig()
    if not file[f"{_SECTION}.enabled"]:
        return none
    schedule = file.optional(f"{_SECTION}.schedule_type")
    if schedule is None:
        _refuse_absent(file, f"{_SECTION}.schedule_type")
        return none
    is_discrete = schedule == "fixed_discrete"
    fields = _OF_LISTS if is_discrete else _OF_GROWTH
    fields = {**fields, **(_OF_ROOT if schedule == "fixed_root" else {})}
    for key in {**_OF_GROWTH, **_OF_ROOT, **_OF_LISTS}.values():
        if key.startswith(_SCHEDULE) and key not in fields.values() and file.has(key):
            why = f"neither DeepSpeed nor zerojax uses this key with schedule_type {schedule}"
            file.notes.change(key, "ignored", why)
            file.notes.warnings.append(f"{key}={file[key]} has no effect: {why}")
    absent = [key for key in fields.values() if not file.has(key)]
    for key in absent:
        _refuse_absent(file, key)
    if absent or (is_discrete and _stops_early(file)):
        return none
    try:
        values = dict(_values(file, fields))
        return CurriculumConfig(type="seqlen", schedule_type=schedule, **values)
    except ConfigError as error:
        key = fields.get(error.key[-1] if error.key else "", f"{_SECTION}.schedule_type")
        file.notes.refuse(key, file.optional(key), error.message)
        return none


def layer_drop_of(file: File) -> LayerDropConfig:
    """Returns the layer drop that a ds_config sets; one without effect if it is not enabled.

    A value without meaning is noted as refused.
    """
    none, section = LayerDropConfig(), "progressive_layer_drop"
    theta, gamma = (file[f"{section}.{name}"] for name in ("theta", "gamma"))
    if not file[f"{section}.enabled"]:
        return none
    if theta == 1:
        file.notes.warnings.append(
            f"{section}.enabled=true has no effect with theta 1: every layer is kept; set theta, "
            "such as 0.5, or remove the section"
        )
        return none
    try:
        return LayerDropConfig(theta=theta, gamma=gamma)
    except ConfigError as error:
        key = f"{section}.{error.key[-1] if error.key else 'theta'}"
        file.notes.refuse(key, file.optional(key), error.message)
        return none


def _values(file: File, fields: dict[str, str]) -> Iterator[tuple[str, Any]]:
    for name, key in fields.items():
        value = file[key]
        if isinstance(value, list | tuple):
            try:
                value = tuple(as_kind("int", each) for each in value)
            except ValueError as error:
                raise ConfigError(str(error), (name,)) from None
        yield name, value


def _refuse_absent(file: File, key: str) -> None:
    file.notes.refuse(key, None, "is required by this schedule, as in DeepSpeed; set it")


def _stops_early(file: File) -> bool:
    """Refuses a list of lengths whose end DeepSpeed's scheduler would not reach, because it stops
    at max_difficulty; returns True in that case."""
    key = f"{_SECTION}.max_difficulty"
    most, lengths = file.optional(key), file[_OF_LISTS["lengths"]]
    low = file.optional(f"{_SECTION}.min_difficulty")
    numbers = [length for length in lengths if isinstance(length, int)]
    if most is None or not numbers:
        return False
    if most >= max(numbers) and (low is None or low < most):
        return False
    file.notes.refuse(
        key,
        most,
        f"ends the schedule before the last of the lengths {numbers}; set it to {max(numbers)}, "
        "and min_difficulty below it",
    )
    return True
