"""Defines `RunSpec`, the resolved description of a run, and plans the run that it describes.

`train`, run files and `initialize` translate their arguments into a `RunSpec`; planning, the log,
checkpoints and the loop take nothing else, and do not know where it came from.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from zerojax.config import (
    CheckpointConfig,
    LogConfig,
    MeshConfig,
    MixturePart,
    OffloadConfig,
    WatchConfig,
    as_mesh_config,
)
from zerojax.config.display import show
from zerojax.config.loader import user_path
from zerojax.data import Feed, RowSource, local_rows_of_mesh
from zerojax.forecasting.offload_choice import plan_choosing_offload
from zerojax.hardware.gpus import Gpu, gpu_of_device
from zerojax.plan.host_budget import check_offload
from zerojax.plan.inputs import PlanInputs, plan_options
from zerojax.plan.make import Plan, plan_of
from zerojax.plan.rung_plans import with_rungs
from zerojax.runtime.start_clock import phase
from zerojax.training.run_record import RunNotes
from zerojax.training.train_arguments import LoopSettings
from zerojax.training.tuning import tune

CHECKPOINT_FOLDER, OFFLOAD_FOLDER = "checkpoints", "offload"
SLOW_SECONDS = 5.0
"""Time after which a slow phase of a run prints what it is doing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSpec:
    """Resolved description of a run: every default is filled in, nothing is open yet.

    Attributes:
      inputs: the model, its loss and optimizer, and a global batch as shapes.
      mesh: mesh options, or the user's own mesh.
      mesh_options: options that apply to every mesh of the run, besides those of `mesh`.
      feed: the batches, of which none is consumed yet; None: the caller passes each batch.
      validation: as in `zerojax.train`.
      seed: of parameters, dropout and shuffling.
      loop: settings of the training loop.
      folder: of metrics, plan and events; None: nothing is written.
      offload_folder: of state offloaded to disk; None: `offload.folder` must be set.
      log: settings of the log; None: the run has no log.
      watch: settings of the watchdog; None: the defaults.
      checkpoint: None: the run saves no checkpoints.
      settings_of: (plan) -> the settings in the run folder and in checkpoints, JSON-serialisable.
      reasons: one sentence for each default that was chosen before planning.
      notes: content of the record that `zerojax.load_run` needs; None: no record is written.
    """

    inputs: PlanInputs
    mesh: MeshConfig | Mesh
    mesh_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    feed: Feed | None = None
    validation: Any = None
    seed: int = 0
    loop: LoopSettings = dataclasses.field(default_factory=LoopSettings)
    folder: Path | None = None
    offload_folder: Path | None = None
    log: LogConfig | None = None
    watch: WatchConfig | None = None
    checkpoint: CheckpointConfig | None = None
    settings_of: Callable[[Plan], dict[str, Any]] = lambda plan: {}
    reasons: Sequence[str] = ()
    notes: RunNotes | None = None

    @property
    def steps(self) -> int | None:
        """Batches of the whole run; None: until the batches end."""
        return self.inputs.steps

    @property
    def checkpoints(self) -> str | None:
        """Folder of the checkpoints; None: the run saves none."""
        return None if self.checkpoint is None else self.checkpoint.path


def plan_run(spec: RunSpec, mesh: Any = None) -> Plan:
    """Returns the plan of a run, with measured choices if the options ask for them.

    Args:
      mesh: mesh options, or a mesh, in place of the run's own; None: `spec.mesh`.

    Raises:
      ValueError, TypeError: as in `make_plan`.
    """
    mesh = with_disk_folder(spec.mesh if mesh is None else mesh, spec.offload_folder)
    planning = "planning: tracing the model and its loss ..."
    with print_if_slow(spec.log, planning), phase("planning"):
        plan = _plan_here(spec, mesh)
        return with_rungs(tune(plan, watch=spec.watch))


def _plan_here(spec: RunSpec, mesh: Any) -> Plan:
    if isinstance(mesh, Mesh) or not as_mesh_config(mesh).offload.auto:
        return plan_of(spec.inputs, mesh, **spec.mesh_options)
    settings = as_mesh_config(mesh)
    if jax.process_count() > 1:
        raise ValueError(
            f"offload.auto=True compiles in one process, and this job has {jax.process_count()}; "
            "set the offload that `zerojax plan` chooses for these GPUs"
        )

    def make(offload: OffloadConfig) -> Plan:
        changed = dataclasses.replace(settings, offload=offload)
        return plan_of(spec.inputs, changed, **spec.mesh_options)

    is_quiet = spec.log is not None and spec.log.console == "quiet"
    return plan_choosing_offload(
        make,
        settings.offload,
        gpu_of_device(jax.devices()[0].device_kind),
        check=check_offload,
        report=lambda text: None if is_quiet else show(f"offload.auto: {text} ..."),
    )


def plan_elsewhere(
    inputs: PlanInputs,
    settings: MeshConfig,
    mesh: Mesh | AbstractMesh,
    *,
    gpu: Gpu | None = None,
    **mesh_options: Any,
) -> Plan:
    """Returns the plan of a run on a mesh, which may be of devices that are not here.

    Args:
      inputs: of the run.
      settings: mesh options of the run; the sizes are those of `mesh`.
      mesh: from `make_abstract_mesh`, or of devices.
      gpu: the card for which `offload.auto` chooses; None offloads nothing.
      **mesh_options: override fields of `settings`.
    """
    options = {**plan_options(settings), **mesh_options}

    def make(offload: OffloadConfig) -> Plan:
        return plan_of(inputs, mesh, zero=settings.zero, **{**options, "offload": offload})

    check = check_offload if isinstance(mesh, Mesh) else lambda plan: None
    return plan_choosing_offload(make, options["offload"], gpu, check=check)


@contextlib.contextmanager
def print_if_slow(log: LogConfig | None, text: str) -> Iterator[None]:
    """Prints `text` if the block takes longer than `SLOW_SECONDS`, before the log is open.

    Prints on process 0 only, and nothing if the console is quiet.

    Args:
      log: settings of the run's log; None means the defaults.
      text: such as "planning ...".
    """
    is_quiet = log is not None and log.console == "quiet"
    if is_quiet or jax.process_index() != 0:
        yield
        return
    timer = threading.Timer(SLOW_SECONDS, lambda: print(text, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def with_disk_folder(mesh: Any, folder: Path | None) -> Any:
    """Returns mesh options in which offload to disk has a folder: their own, or the run's.

    Args:
      mesh: as in `zerojax.train`.
      folder: of the run; None if it has none.
    """
    if folder is None or not isinstance(mesh, MeshConfig | Mapping):
        return mesh
    settings = as_mesh_config(mesh)
    uses_files = settings.offload.on_disk or settings.offload.auto
    if not uses_files or settings.offload.folder is not None:
        return settings
    offload = dataclasses.replace(settings.offload, folder=str(folder / OFFLOAD_FOLDER))
    return dataclasses.replace(settings, offload=offload)


def absolute(path: str | Path | None) -> str | None:
    """Returns the absolute path, valid in any working directory; None stays None."""
    return None if path is None else str(user_path(path).absolute())


def absolute_parts(parts: Sequence[MixturePart]) -> tuple[MixturePart, ...]:
    """Returns the parts of a mixture with absolute paths."""
    return tuple(dataclasses.replace(part, path=str(absolute(part.path))) for part in parts)


def external_checkpoints(checkpoints: str | None, folder: Path | None) -> str | None:
    """Returns the absolute path of a run's checkpoints; None if they are in its folder."""
    if checkpoints is None or folder is None:
        return None
    path = Path(checkpoints).absolute()
    return None if path == (folder / CHECKPOINT_FOLDER).absolute() else str(path)


def rows_of_process(batches: Any, mesh: Mesh | AbstractMesh) -> tuple[int, int] | None:
    """Returns the range of rows of a text batch that this process reads; None for others.

    Processes that hold different stages of one pipeline read the same rows.
    """
    if not isinstance(batches, RowSource) or jax.process_count() == 1:
        return None
    return local_rows_of_mesh(mesh, batches.global_batch_size)
