"""Trains a few steps from a run's newest checkpoint in a child process, and records them.

Started as `python -m zerojax.training.resumed_steps REQUEST.json FOLDER` by
`zerojax.training.resume_check`, with JAX's devices set in the environment. Nothing of the run is
written; FOLDER gets RECORD and the two files of arrays.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from zerojax.checkpoint.errors import CheckpointError
from zerojax.checkpoint.folders import list_steps
from zerojax.config import RunConfig, load
from zerojax.config.late_dataclasses import dataclass
from zerojax.config.loader import user_path
from zerojax.data import Feed
from zerojax.models.adapt import as_model, evaluation_mode
from zerojax.placement.state import run_key_data
from zerojax.step.reshard import to_portable_state
from zerojax.tracing.trees import flatten_names
from zerojax.training.run_file import spec_from_config
from zerojax.training.trainer import Trainer
from zerojax.training.trial_runs import as_trial, check_no_files, open_trial

RECORD, BEFORE, AFTER = "record.json", "before.npz", "after.npz"
"""Files that the child process writes; BEFORE and AFTER have {name: float32 or wider array} of the
trained parameters before the first step and after the last one."""
OTHER_SEED = 1_234_567_891
"""Seed of the random key that replaces the run's key if the request says so."""


@dataclass(frozen=True, kw_only=True)
class StepsRequest:
    """What the child process does.

    Attributes:
      config: path of the run's config.json.
      words: overrides of its settings, as `KEY=VALUE`.
      steps: number of steps to train.
      other_key: whether to replace the run's random key, so that random numbers differ.
      without_dropout: whether the model trains in evaluation mode, which uses no dropout.
    """

    config: str
    words: tuple[str, ...]
    steps: int
    other_key: bool = False
    without_dropout: bool = False


@dataclass(frozen=True, kw_only=True)
class StepsRecord:
    """What the child process saw.

    Attributes:
      first_step: number of batches that the run had consumed when it was saved.
      axes: {mesh axis: size}.
      num_microbatches: number of microbatches per step.
      is_deterministic: whether results are the same on every mesh (`mesh.deterministic`).
      plan: description of the plan in one line.
      compute_dtype: name of the dtype of forward and backward pass.
      state: {name of an array of the state: SHA-256 of its shape, dtype and bytes}, in the form
        that does not depend on the mesh.
      batches: SHA-256 of the global batch of each step.
      steps: metrics of each step.
      notes: lines that a resumed run logs about settings that differ from the saved run.
    """

    first_step: int
    axes: dict[str, int]
    num_microbatches: int
    is_deterministic: bool
    plan: str
    compute_dtype: str
    state: dict[str, str]
    batches: list[str]
    steps: list[dict[str, float]]
    notes: list[str]


def take_steps(request: StepsRequest, folder: Path) -> StepsRecord:
    """Trains the steps of a request and writes the parameters before and after them.

    Args:
      request: what to do.
      folder: existing folder for the files of arrays.

    Raises:
      ValueError: a setting is invalid on these devices, or the run keeps state in files.
      CheckpointError: the checkpoint cannot be read.
    """
    config = load(RunConfig, request.config, request.words).on_devices(jax.device_count())
    check_no_files(config.mesh, "a trial")
    spec = spec_from_config(config)
    assert spec.checkpoint is not None
    feed = spec.feed
    assert isinstance(feed, Feed)
    first = max(list_steps(user_path(str(spec.checkpoint.path))), default=None)
    if first is None:
        raise ValueError(
            f"{spec.checkpoint.path} has no checkpoint; train the run until it saves one, and "
            "leave checkpoint.path as in that run"
        )
    # The run keeps its length, from which its schedule follows, unless it ends before these steps.
    steps = max(config.steps, first + request.steps)
    model = spec.inputs.model
    if request.without_dropout:
        model = evaluation_mode(as_model(model))
    inputs = dataclasses.replace(spec.inputs, model=model, steps=steps)
    spec = dataclasses.replace(spec, inputs=inputs)
    observer = _Observer(request, feed, folder)
    run = open_trial(as_trial(spec, observer), saved=True)
    # Not `fit` of a run: the last step is known only when the checkpoint is restored.
    trainer = Trainer(run.plan, run.spec, checkpointer=run.checkpointer, base=run.base)
    trainer.fit(feed, trainer.num_steps + request.steps)
    _write_parameters(trainer, folder / AFTER)
    trainer.close()
    return observer.record(trainer)


class _Observer:
    """Callback that records the restored state, the coming batches and the steps."""

    def __init__(self, request: StepsRequest, feed: Feed, folder: Path) -> None:
        self._request, self._feed, self._folder = request, feed, folder
        self._first = 0
        self._state: dict[str, str] = {}
        self._batches: list[str] = []
        self._steps: list[dict[str, float]] = []
        self._notes: list[str] = []

    def on_start(self, trainer: Trainer) -> None:
        """Records the state and the batches before the first step; replaces the random key if
        requested."""
        self._first, self._notes = trainer.num_steps, trainer.take_notes()
        portable = flatten_names(to_portable_state(trainer.plan, trainer.state))
        self._state = {name: _digest(leaf) for name, leaf in portable.items()}
        _write_parameters(trainer, self._folder / BEFORE)
        position = self._feed.state()
        for _ in range(self._request.steps):
            batch = next(self._feed, None)
            if batch is None:
                break
            self._batches.append(_digest(*jax.tree.leaves(batch)))
        # The batches were only looked at; the steps train on them.
        self._feed.restore(position)
        if self._request.other_key:
            old = trainer.state["rng"]
            new = jax.device_put(run_key_data(OTHER_SEED), old.sharding)
            trainer.state = {**trainer.state, "rng": new}

    def __call__(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """Records one step."""
        self._steps.append(dict(metrics))

    def record(self, trainer: Trainer) -> StepsRecord:
        """Returns everything that was recorded."""
        plan = trainer.plan
        return StepsRecord(
            first_step=self._first,
            axes=dict(plan.mesh.shape),
            num_microbatches=plan.num_microbatches,
            is_deterministic=plan.settings.fixed_pieces is not None,
            plan=plan.describe(),
            compute_dtype=np.dtype(plan.precision.compute_dtype).name,
            state=self._state,
            batches=self._batches,
            steps=self._steps,
            notes=self._notes,
        )


def _write_parameters(trainer: Trainer, path: Path) -> None:
    """Writes {name: array} of the trained parameters, in float32 or wider."""
    found = to_portable_state(trainer.plan, trainer.state)["params"]
    arrays: dict[str, Any] = {}
    for name, leaf in found.items():
        value = np.asarray(leaf)
        arrays[name] = value.astype(np.promote_types(value.dtype, np.float32))
    np.savez(path, **arrays)


def _digest(*leaves: Any) -> str:
    total = hashlib.sha256()
    for leaf in leaves:
        array = np.asarray(leaf)
        total.update(f"{array.shape} {array.dtype.name} ".encode())
        total.update(np.ascontiguousarray(array).tobytes())
    return total.hexdigest()


def main(request: str, folder: str) -> None:
    """Writes the record of a request, or {"error": message}, to a folder."""
    # Two concurrent programs with collectives can deadlock, each waiting for the other's threads.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    given: dict[str, Any] = json.loads(Path(request).read_text())
    given["words"] = tuple(given["words"])
    asked = StepsRequest(**given)
    try:
        found: dict[str, Any] = dataclasses.asdict(take_steps(asked, Path(folder)))
    except (ValueError, TypeError, OSError, FloatingPointError, CheckpointError) as error:
        found = {"error": str(error)}
    (Path(folder) / RECORD).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
