"""Runs opened by `zerojax eval` and `zerojax generate`, on chosen devices and mesh.

The number of CPU devices is set before JAX is imported.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerojax.cli.devices import run_one_program_at_a_time, use_cpu_devices
from zerojax.config import MeshConfig
from zerojax.config.loader import coerce_fields, load_dataclass
from zerojax.runtime import bounded_json
from zerojax.runtime.host_memory import keep_freed_memory

RECORD_FILE = "run.json"


@dataclass(frozen=True, kw_only=True)
class ReadSettings:
    """What can be said of a run that is read back."""

    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    """Options laid over the run's own."""
    cpu_devices: int | None = None
    """Virtual CPU devices to make. Not given: as many as the run had, where it ran on CPUs."""

    def __post_init__(self) -> None:
        coerce_fields(self)


def open_run(run: str, overrides: Sequence[str], step: int | str | None = None) -> Any:
    """The `LoadedRun` in a folder.

    Args:
      run: the folder.
      overrides: KEY=VALUE of `ReadSettings`.
      step: as `zerojax.load_run` takes it.

    Raises:
      ConfigError: an unknown key or a wrong value; else what `zerojax.load_run` raises.
    """
    settings = load_dataclass(ReadSettings, None, overrides)
    given = {part for word in overrides for part in word.partition("=")[0].strip().split(".")}
    names = [field.name for field in dataclasses.fields(MeshConfig) if field.name in given]
    count = settings.cpu_devices if "cpu_devices" in given else _cpu_devices_of(Path(run))
    if count is not None:
        try:
            use_cpu_devices(count)
        except RuntimeError:  # within a program whose devices are there already
            if "cpu_devices" in given:
                raise
        else:
            keep_freed_memory()
            run_one_program_at_a_time()
    loading = importlib.import_module("zerojax.training.loading")
    mesh = {name: getattr(settings.mesh, name) for name in names}
    return loading.load_run(run, step, mesh=mesh or None)


def _cpu_devices_of(folder: Path) -> int | None:
    """How many CPU devices a run had; None where it ran on others, or does not say."""
    try:
        record = bounded_json.load(folder / RECORD_FILE)
    except (OSError, ValueError):
        return None  # `load_run` says what is wrong with it
    if not isinstance(record, dict) or record.get("platform") != "cpu":
        return None
    count = record.get("num_devices")
    return count if isinstance(count, int) and 0 < count <= 4096 else None
