"""Monitoring keys, as a `LogConfig` and a folder."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from zerojax.config import LogConfig
from zerojax.training.deepspeed.file import File
from zerojax.training.deepspeed.result import Given

_LEVELS = ("debug", "info", "warning", "error", "critical")


def log_of(file: File, given: Given) -> tuple[LogConfig, Path | None]:
    """What is reported, and the folder of the run where a monitor names one."""
    every = file.optional("steps_per_print")
    if every is not None and every < 1:
        file.notes.refuse("steps_per_print", every, "must be at least 1")
        every = None
    if given.log is not None:
        if every is not None and every != given.log.every:
            file.notes.refuse(
                "steps_per_print", every, f"log.every is {given.log.every}: say it in one place"
            )
        return given.log, _run_dir(file)
    log = LogConfig() if every is None else LogConfig(every=every)
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
                    f"is said by the environment: set {variable}, and take this out",
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
            return Path(file[f"{monitor}.output_path"]) / file[f"{monitor}.job_name"]
    return None
