"""Trial runs: steps that begin at a run's newest checkpoint and save nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jax.sharding import Mesh

from zerojax.checkpoint import Checkpointer
from zerojax.config import MeshConfig
from zerojax.config.checks import MAX_SIZE
from zerojax.training.checkpointing import base_of
from zerojax.training.run_lifecycle import Run, open_run
from zerojax.training.run_spec import RunSpec, plan_run
from zerojax.training.train_arguments import LoopSettings


def check_no_files(mesh: MeshConfig | Mesh, name: str) -> None:
    """Raises ValueError if the run keeps state in files, which any training would change.

    Args:
      mesh: mesh of the run.
      name: what the trial is called in the error, such as "this test".
    """
    if isinstance(mesh, MeshConfig) and mesh.offload.on_disk:
        raise ValueError(
            f"mesh.offload keeps state in files, which {name} would change; set "
            "mesh.offload.opt_state=host and mesh.offload.params=host for the test"
        )


def as_trial(spec: RunSpec, callback: Callable[[Any, dict[str, float]], Any]) -> RunSpec:
    """Returns the run without output, validation and saves, which reports every step.

    Args:
      spec: description of the run.
      callback: called with `(trainer, metrics)` after every step; returns True to end the trial.
    """
    return dataclasses.replace(
        spec,
        validation=None,
        folder=None,
        log=None,
        notes=None,
        loop=LoopSettings(
            log_every=1, save_every=MAX_SIZE, save_on_exit=False, callbacks=(callback,)
        ),
    )


def open_trial(spec: RunSpec, *, saved: bool) -> Run:
    """Plans and checks a trial; opens the checkpoints of the run for reading.

    Args:
      spec: description of the trial, from `as_trial`.
      saved: whether the run has a checkpoint; if not, the trial begins with a new state.
    """
    plan = plan_run(spec)
    # Without checkpoints, since `open_run` would open the folder for saves and check that it can be
    # written.
    run = open_run(dataclasses.replace(spec, checkpoint=None), plan)
    if not saved:
        return run
    assert spec.checkpoint is not None
    base, _ = base_of(plan, spec.checkpoint.frozen)
    return dataclasses.replace(run, checkpointer=Checkpointer(str(spec.checkpoint.path)), base=base)
