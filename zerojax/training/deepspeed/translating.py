"""Translation of a whole ds_config: every key has a line, unsupported keys are refused."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from zerojax.config import ConfigError, MeshConfig
from zerojax.config.display import cut, quoted
from zerojax.training.deepspeed.auto import Auto
from zerojax.training.deepspeed.batches import (
    TRAIN,
    Batch,
    check_rows,
    elasticity_of,
    settle_batch,
    settle_elastic,
)
from zerojax.training.deepspeed.dtypes import precision_of
from zerojax.training.deepspeed.file import File
from zerojax.training.deepspeed.keys import Notes, as_kind
from zerojax.training.deepspeed.optimizers import update_of
from zerojax.training.deepspeed.placing import mesh_of
from zerojax.training.deepspeed.reading import read
from zerojax.training.deepspeed.reports import log_of
from zerojax.training.deepspeed.result import Given, Line, Translation

Source = str | Path | Mapping[str, Any]
_TAGS = ("WARN", "IGNORE", "FAIL")
_SHOWN = 3
_MAX_KEY = 200


def translate(
    source: Source, *, num_devices: int | None = None, given: Given | None = None
) -> Translation:
    """A ds_config in zerojax's words.

    Args:
      source: a file of JSON or hjson, either as text or in base64, or a dict.
      num_devices: of the run; None: open, and with it what follows from it.
      given: what the caller says beside the file: fills "auto", and must not contradict it.

    Raises:
      ConfigError: what the file asks for cannot be, with the key, the reason and what to write.
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
        "; ".join(shown) + more + " (`zerojax deepspeed explain FILE` says it of every key)",
        where=translation.source,
    )


def explain(
    source: Source, *, num_devices: int | None = None, given: Given | None = None
) -> Translation:
    """The same where something is refused: its lines say what; of the rest defaults stand in.

    Raises:
      ConfigError: the source cannot be read at all.
    """
    given = given or Given()
    values, name = read(source)
    notes = Notes()
    resolved = Auto(values, given, notes).fill()
    file = File(resolved, notes)
    mesh = mesh_of(file, num_devices)
    elasticity = elasticity_of(file)
    shards = _data_shards(file, mesh, num_devices)
    if elasticity.enabled:
        batch = settle_elastic(file, elasticity, num_devices, mesh.model * mesh.stage)
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
        tag_validation=file["checkpoint.tag_validation"].upper(),
        resolved=copy.deepcopy(resolved),
        lines=_in_order(notes, file.nested),
        warnings=tuple(dict.fromkeys(notes.warnings)),
        reasons=tuple(notes.reasons),
    )


def _in_order(notes: Notes, values: Mapping[str, Any]) -> tuple[Line, ...]:
    """The lines in the order of the file; a section of which each key has a line has none."""
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
    """The run's length, where a schedule is made for one; the schedule has said what is wrong."""
    try:
        return as_kind("int", (file.optional("scheduler.params") or {}).get("total_num_steps"))
    except ValueError:
        return None


def _data_shards(file: File, mesh: MeshConfig, num_devices: int | None) -> int | None:
    """Into how many parts a batch goes; None where the number of devices is open."""
    if num_devices is None:
        return None if mesh.data == -1 or mesh.replica == 1 else mesh.data * mesh.replica
    group = mesh.model * mesh.stage
    shards = num_devices // group
    axes = f"autotp_size {mesh.model} x pipeline.stages {mesh.stage}"
    if num_devices % group:
        key = "tensor_parallel.autotp_size" if mesh.model > 1 else "pipeline.stages"
        file.notes.refuse(
            key, file[key], f"{num_devices} devices are no multiple of {axes} = {group}"
        )
        return None
    if mesh.data != -1 and mesh.data * mesh.replica != shards:
        file.notes.refuse(
            "data_parallel_size",
            mesh.data,
            f"{num_devices} devices and {axes} leave {shards}; write that, or take it out",
        )
    return shards


def _check_elastic_mesh(file: File, mesh: MeshConfig) -> None:
    wanted, key = mesh.model * mesh.stage, "elasticity.model_parallel_size"
    if file.has(key) and file[key] != wanted:
        file.notes.refuse(
            key, file[key], f"is not autotp_size {mesh.model} x pipeline.stages {mesh.stage}"
        )
    nodes = "elasticity.num_gpus_per_node"
    if file["elasticity.version"] == 0.1 and (file[nodes] > 1 or file[key] > 1):
        file.notes.refuse(
            "elasticity.version", 0.1, "knows neither nodes nor model parallelism; set 0.2"
        )


def _check_small_things(file: File, batch: Batch, mesh: MeshConfig) -> None:
    tag = file["checkpoint.tag_validation"]
    if tag.upper() not in _TAGS:
        file.notes.refuse("checkpoint.tag_validation", tag, f"is not one of {', '.join(_TAGS)}")
    size = file.optional("vocabulary_size")
    if size and size % 8:
        file.notes.warnings.append(
            f"vocabulary_size={size} is not divisible by 8, which slows its matrix products; "
            f"{-(-size // 8) * 8} is"
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
            f"pipeline.stages={mesh.stage} with one microbatch: all stages but one stand still; "
            f"set gradient_accumulation_steps to {4 * mesh.stage}"
        )
