"""Defines `RunSpec`, the resolved description of a run, and makes the plan for a `RunSpec`.

`train`, run files and `initialize` translate their arguments into a `RunSpec`. Planning, the log,
checkpoints and the loop use only the `RunSpec`, and do not know which of the three made it.
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
from zerojax.config.late_dataclasses import dataclass
from zerojax.config.loader import user_path
from zerojax.data import Feed, RowSource, local_rows_of_mesh
from zerojax.forecasting.offload_choice import plan_choosing_offload
from zerojax.hardware.gpus import Gpu, gpu_of_device
from zerojax.plan.inputs import PlanInputs, plan_options
from zerojax.plan.make import Plan, plan_of
from zerojax.plan.rung_plans import with_rungs
from zerojax.runtime.start_clock import phase
from zerojax.step.host_budget import check_offload
from zerojax.training.run_record import RunNotes
from zerojax.training.train_arguments import LoopSettings
from zerojax.training.tuning import tune

CHECKPOINT_FOLDER, OFFLOAD_FOLDER = "checkpoints", "offload"
SLOW_SECONDS = 5.0
"""Seconds after which a slow phase of a run prints its name."""


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """Resolved description of a run: every default is set, but no file is open and no array exists.

    Attributes:
      inputs: model, loss, optimizer, and a global batch as shapes.
      mesh: mesh options, or the user's own mesh.
      mesh_options: options that apply to every mesh of the run, in addition to those in `mesh`.
      feed: batches of the run, none of which is consumed yet; None: the caller passes each batch.
      validation: validation data in any form that `zerojax.train` takes.
      seed: seed of parameters, dropout and shuffling.
      loop: settings of the training loop.
      folder: folder for metrics, plan and events; None: nothing is written.
      offload_folder: folder for state offloaded to disk; None: `offload.folder` must be set.
      log: settings of the log; None: the run has no log.
      watch: settings of the watchdog; None: the defaults.
      checkpoint: settings of checkpoints; None: the run saves no checkpoints.
      settings_of: function from a plan to the settings, as JSON values, that are written to the run
        folder and to checkpoints.
      reasons: one sentence for each default that was chosen before planning.
      notes: values for the record that `zerojax.load_run` reads; None: no record is written.
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
        """Number of batches of the whole run; None: until the batches end."""
        return self.inputs.steps

    @property
    def checkpoints(self) -> str | None:
        """Folder of the checkpoints; None: the run saves none."""
        return None if self.checkpoint is None else self.checkpoint.path


def plan_run(spec: RunSpec, mesh: Any = None) -> Plan:
    """Returns the plan of a run; implementations are measured if the options request it.

    Args:
      spec: description of the run.
      mesh: mesh options or a mesh that replaces `spec.mesh`; None: `spec.mesh`.

    Raises:
      ValueError, TypeError: the run cannot be planned, as in `make_plan`.
    """
    planning = "planning: tracing the model and its loss ..."
    with print_if_slow(spec.log, planning), phase("planning"):
        return with_rungs(tune(plan_untuned(spec, mesh), watch=spec.watch))


def plan_untuned(spec: RunSpec, mesh: Any = None) -> Plan:
    """Returns the plan of a run before anything is measured; arguments as of `plan_run`."""
    mesh = with_disk_folder(spec.mesh if mesh is None else mesh, spec.offload_folder)
    inputs = spec.inputs
    if spec.log is not None and spec.log.per_layer:
        inputs = dataclasses.replace(inputs, layer_norms=True)
    if isinstance(mesh, Mesh) or not as_mesh_config(mesh).offload.auto:
        return plan_of(inputs, mesh, **spec.mesh_options)
    settings = as_mesh_config(mesh)

    def make(offload: OffloadConfig) -> Plan:
        changed = dataclasses.replace(settings, offload=offload)
        return plan_of(inputs, changed, **spec.mesh_options)

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
    """Returns the plan of a run on a mesh whose devices may be absent.

    Args:
      inputs: model, loss, optimizer and batch of the run.
      settings: mesh options of the run; sizes of axes are taken from `mesh`.
      mesh: abstract mesh from `make_abstract_mesh`, or a mesh of devices.
      gpu: GPU for which `offload.auto` chooses; None: nothing is offloaded.
      **mesh_options: values that override fields of `settings`.
    """
    options = {**plan_options(settings), **mesh_options}

    def make(offload: OffloadConfig) -> Plan:
        return plan_of(inputs, mesh, zero=settings.zero, **{**options, "offload": offload})

    check = check_offload if isinstance(mesh, Mesh) else lambda plan: None
    return plan_choosing_offload(make, options["offload"], gpu, check=check)


@contextlib.contextmanager
def print_if_slow(log: LogConfig | None, text: str) -> Iterator[None]:
    """Prints `text` if a `with` block takes longer than `SLOW_SECONDS`, before the log is open.

    Prints only on process 0, and nothing if the console is quiet.

    Args:
      log: settings of the run's log; None: the defaults.
      text: name of the phase, such as "planning ...".
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


def with_disk_folder(mesh: object, folder: Path | None) -> Any:
    """Returns mesh options in which offload to disk has a folder: the user's, or the run's.

    Args:
      mesh: mesh options in any form that `zerojax.train` takes.
      folder: folder of the run; None if it has none.
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
    """Returns the absolute form of a path, valid in any working directory; None stays None."""
    return None if path is None else str(user_path(path).absolute())


def absolute_parts(parts: Sequence[MixturePart]) -> tuple[MixturePart, ...]:
    """Returns the parts of a mixture with absolute paths."""
    return tuple(dataclasses.replace(part, path=str(absolute(part.path))) for part in parts)


def external_checkpoints(checkpoints: str | None, folder: Path | None) -> str | None:
    """Returns the absolute path of a run's checkpoints; None if they are in `checkpoints` of the
    run folder, or if the run has no checkpoints or no folder."""
    if checkpoints is None or folder is None:
        return None
    path = Path(checkpoints).absolute()
    return None if path == (folder / CHECKPOINT_FOLDER).absolute() else str(path)


def rows_of_process(batches: Any, mesh: Mesh | AbstractMesh) -> tuple[int, int] | None:
    """Returns the range (first, end) of rows of a global batch that this process reads from a
    source; None for other batches, and for a single process.

    Processes that hold different stages of one pipeline read the same rows.
    """
    if not isinstance(batches, RowSource) or jax.process_count() == 1:
        return None
    return local_rows_of_mesh(mesh, batches.global_batch_size)
