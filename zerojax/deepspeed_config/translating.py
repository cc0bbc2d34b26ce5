"""Translates a whole ds_config: every key gets a line, and unsupported keys are refused.

The caller's arguments are translated together with the file, and again when the first batch is
known.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from zerojax.config import ConfigError, LogConfig, MeshConfig
from zerojax.config.checks import warn_user
from zerojax.config.display import cut, quoted
from zerojax.config.features import Features
from zerojax.config.late_dataclasses import dataclass
from zerojax.config.loader import user_path
from zerojax.deepspeed_config.attention_keys import layout_of
from zerojax.deepspeed_config.auto_values import Auto
from zerojax.deepspeed_config.batch_keys import (
    TRAIN,
    Batch,
    check_rows,
    elasticity_of,
    settle_batch,
    settle_elastic,
)
from zerojax.deepspeed_config.compression_keys import pruning_of, rounding_of
from zerojax.deepspeed_config.curriculum_keys import curriculum_of, layer_drop_of
from zerojax.deepspeed_config.ds_config import File, read
from zerojax.deepspeed_config.expert_keys import check_experts_of_mesh, router_of
from zerojax.deepspeed_config.key_schema import KeyNotes, as_kind
from zerojax.deepspeed_config.mesh_keys import mesh_of
from zerojax.deepspeed_config.optimizer_keys import update_of
from zerojax.deepspeed_config.precision_keys import precision_of
from zerojax.deepspeed_config.translation import CallerValues, Line, Translation

Source = str | Path | Mapping[str, Any]
"""A ds_config: the path of its file, its text or the base64 of it, or its content as a dict."""
_TAGS = ("WARN", "IGNORE", "FAIL")
_SHOWN = 3
_MAX_KEY = 200

_LEVELS = ("debug", "info", "warning", "error", "critical")


_FEATURES = (curriculum_of, layer_drop_of, pruning_of)
"""Functions that read the settings of an optional feature from a file."""


def translate(
    source: Source, *, num_devices: int | None = None, given: CallerValues | None = None
) -> Translation:
    """Translates a ds_config into zerojax settings.

    Args:
      source: path of a JSON or hjson file, its text or base64, or a dict.
      num_devices: number of devices of the run. None if it is not known: settings that depend on it
        are then not resolved.
      given: the caller's values, which replace "auto" and must not contradict the file.

    Raises:
      ConfigError: the source cannot be read, or a setting is not supported; the message has the
        key, the reason and the remedy.
    """
    translation = explain(source, num_devices=num_devices, given=given)
    refused = [line for line in translation.lines if line.verdict == "refused"]
    if not refused:
        return translation
    shown = [
        f"{cut(line.key, _MAX_KEY)}={quoted(line.value, 60)}: {line.why}"
        for line in refused[:_SHOWN]
    ]
    more = f"; and {len(refused) - _SHOWN} more" if len(refused) > _SHOWN else ""
    raise ConfigError(
        "; ".join(shown)
        + more
        + " (`zerojax deepspeed explain FILE` prints the verdict on every key)",
        where=translation.source,
    )


def explain(
    source: Source, *, num_devices: int | None = None, given: CallerValues | None = None
) -> Translation:
    """Translates a ds_config without raising for refused keys.

    Lines of the result report the refused keys, and defaults replace their values.

    Args:
      source: path of a JSON or hjson file, its text or base64, or a dict.
      num_devices: number of devices of the run; None if it is not known.
      given: the caller's values, which replace "auto" and must not contradict the file.

    Raises:
      ConfigError: the source cannot be read.
    """
    given = given or CallerValues()
    values, name = read(source)
    notes = KeyNotes()
    resolved = Auto(values, given, notes).fill()
    file = File(resolved, notes)
    mesh = mesh_of(file, num_devices)
    elasticity = elasticity_of(file)
    shards = _data_shards(file, mesh, num_devices)
    check_experts_of_mesh(file, mesh, shards)
    if elasticity.enabled:
        batch = settle_elastic(file, elasticity, num_devices, mesh.devices_per_shard)
        check_rows(file, batch, given)
        _check_elastic_mesh(file, mesh)
    else:
        batch = settle_batch(file, shards, given)
    update = update_of(file, given)
    precision = precision_of(file, given)
    log, run_dir = log_of(file, given)
    _check_small_things(file, batch, mesh)
    return Translation(
        source=name,
        mesh=mesh,
        optimizer=update.optimizer,
        learning_rate=update.learning_rate,
        precision=precision,
        train_batch_size=batch.train,
        micro_batch_size=batch.micro,
        num_microbatches=batch.parts or 1,
        num_data_shards=shards,
        gradient_clipping=update.clip,
        total_steps=_total_steps(file),
        log=log,
        steps_per_print=file.optional("steps_per_print"),
        run_dir=run_dir,
        elasticity=elasticity,
        features=Features(tuple(x for read in _FEATURES if not (x := read(file)).is_off)),
        rounding=rounding_of(file),
        attention_layout=layout_of(file),
        router=router_of(file),
        tag_validation=file["checkpoint.tag_validation"].upper(),
        resolved=copy.deepcopy(resolved),
        lines=_in_order(notes, file.nested),
        warnings=tuple(dict.fromkeys(notes.warnings)),
        reasons=tuple(notes.reasons),
    )


def _in_order(notes: KeyNotes, values: Mapping[str, Any]) -> tuple[Line, ...]:
    """Returns the lines in the order of the file. A section whose keys all have lines has no line
    of its own."""
    order = {path: place for place, path in enumerate(_paths(values))}
    lines = notes.lines
    parents = {line.key.rpartition(".")[0] for line in lines}
    shown = [line for line in lines if line.verdict == "refused" or line.key not in parents]
    return tuple(sorted(shown, key=lambda line: order.get(line.key, len(order))))


def _paths(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in values.items():
        yield f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from _paths(value, f"{prefix}{name}.")


def _total_steps(file: File) -> int | None:
    """Returns the number of steps of the run from the schedule; None if it is absent or invalid
    (the error was noted before)."""
    try:
        return as_kind("int", (file.optional("scheduler.params") or {}).get("total_num_steps"))
    except ValueError:
        return None


def _data_shards(file: File, mesh: MeshConfig, num_devices: int | None) -> int | None:
    """Returns the number of data shards; None if it is not known, or does not fit the devices
    (which is noted as a refusal)."""
    if num_devices is None:
        return None if mesh.data == -1 or mesh.replica == 1 else mesh.data * mesh.replica
    group = mesh.devices_per_shard
    shards = num_devices // group
    axes = f"autotp_size {mesh.model} x pipeline.stages {mesh.stage}"
    if mesh.context > 1:
        axes = f"{axes} x sequence_parallel_size {mesh.context}"
    if num_devices % group:
        key = "tensor_parallel.autotp_size" if mesh.model > 1 else "pipeline.stages"
        key = "sequence_parallel_size" if mesh.context > 1 else key
        file.notes.refuse(
            key, file[key], f"{num_devices} devices are not a multiple of {axes} = {group}"
        )
        return None
    if mesh.data != -1 and mesh.data * mesh.replica * mesh.expert != shards:
        file.notes.refuse(
            "data_parallel_size",
            mesh.data * mesh.expert,
            f"{num_devices} devices with {axes} have {shards} data shards; set {shards}, or "
            "remove the key",
        )
    return shards


def _check_elastic_mesh(file: File, mesh: MeshConfig) -> None:
    wanted, key = mesh.model * mesh.stage, "elasticity.model_parallel_size"
    if file.has(key) and file[key] != wanted:
        file.notes.refuse(
            key, file[key], f"must equal autotp_size {mesh.model} x pipeline.stages {mesh.stage}"
        )
    nodes = "elasticity.num_gpus_per_node"
    if file["elasticity.version"] == 0.1 and (file[nodes] > 1 or file[key] > 1):
        file.notes.refuse(
            "elasticity.version", 0.1, "supports neither nodes nor model parallelism; set 0.2"
        )


def _check_small_things(file: File, batch: Batch, mesh: MeshConfig) -> None:
    tag = file["checkpoint.tag_validation"]
    if tag.upper() not in _TAGS:
        file.notes.refuse("checkpoint.tag_validation", tag, f"is not one of {', '.join(_TAGS)}")
    size = file.optional("vocabulary_size")
    if size and size % 8:
        file.notes.warnings.append(
            f"vocabulary_size={size} is not divisible by 8, which slows its matrix products; "
            f"use {-(-size // 8) * 8}"
        )
    if batch.train is not None and batch.micro is not None:
        file.notes.change(
            TRAIN,
            "honoured",
            f"{batch.train} rows of one step over all devices: {batch.micro} at once "
            f"x {batch.parts} microbatches x data shards",
        )
    if mesh.stage > 1 and batch.parts == 1:
        file.notes.warnings.append(
            f"pipeline.stages={mesh.stage} with one microbatch: all stages but one are idle; "
            f"set gradient_accumulation_steps to {4 * mesh.stage}"
        )


@dataclass(frozen=True)
class DsConfig:
    """A ds_config together with the caller's values, as `zerojax.train` and `initialize` use it.

    Attributes:
      source: path of the file, its text or base64, or its content.
      num_devices: number of devices of the run.
      given: values that the caller passed.
    """

    source: Source
    num_devices: int
    given: CallerValues

    def translate(self) -> Translation:
        """Returns the translation of the ds_config before the batches are known.

        Raises:
          ConfigError: a setting is not supported.
        """
        return translate(self.source, num_devices=self.num_devices, given=self.given)

    def with_rows(self, rows: int | None) -> Translation:
        """Returns the translation of the ds_config for batches with `rows` rows over all devices.

        Args:
          rows: number of rows of a global batch; None if the batches have no rows.

        Raises:
          ConfigError: a setting is not supported, or `rows` does not fit the batch sizes.
        """
        given = dataclasses.replace(self.given, global_batch_size=rows)
        return dataclasses.replace(self, given=given).translate()


def warn_of(translation: Translation) -> None:
    """Issues the warnings of a translated ds_config."""
    for text in translation.warnings:
        warn_user(f"{translation.source}: {text}")


def log_of(file: File, given: CallerValues) -> tuple[LogConfig, Path | None]:
    """Returns the log settings of a ds_config, and the run folder if a monitor names one. If
    the caller passes log settings, only steps_per_print and the run folder are read."""
    every = file.optional("steps_per_print")
    if every is not None and every < 1:
        file.notes.refuse("steps_per_print", every, "must be at least 1")
        every = None
    log = given.log or LogConfig()
    if every is not None:
        if log.every not in (None, every):
            file.notes.refuse(
                "steps_per_print",
                every,
                f"differs from log.every={log.every}; set only one of them",
            )
        log = dataclasses.replace(log, every=every)
    if given.log is not None:
        return log, _run_dir(file)
    changes: dict[str, Any] = {}
    if file.has("tensorboard.enabled"):
        changes["tensorboard"] = file["tensorboard.enabled"]
    if file["wandb.enabled"]:
        changes["wandb"] = file["wandb.project"]
        for name, variable in (("group", "WANDB_RUN_GROUP"), ("team", "WANDB_ENTITY")):
            if file.optional(f"wandb.{name}"):
                file.notes.refuse(
                    f"wandb.{name}",
                    file[f"wandb.{name}"],
                    f"is set by the environment: set {variable}, and remove this key",
                )
    level = file.optional("log_level")
    if level is not None and level not in _LEVELS:
        file.notes.refuse("log_level", level, f"is not one of {', '.join(_LEVELS)}")
    elif level in ("error", "critical"):
        changes["console"] = "quiet"
    return dataclasses.replace(log, **changes), _run_dir(file)


def _run_dir(file: File) -> Path | None:
    for monitor in ("tensorboard", "csv_monitor"):
        if file[f"{monitor}.enabled"] and file[f"{monitor}.output_path"]:
            return user_path(file[f"{monitor}.output_path"]) / file[f"{monitor}.job_name"]
    return None
