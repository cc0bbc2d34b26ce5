"""Saves and restores the training state of a run, including state that is larger than memory."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

from zerojax.checkpoint import CheckpointError
from zerojax.checkpoint.base_weights import BaseWeights, base_weights
from zerojax.checkpoint.checkpointer import Checkpointer, Restored
from zerojax.checkpoint.export import without_average
from zerojax.checkpoint.metadata import check_json
from zerojax.checkpoint.restoring import fingerprints_of
from zerojax.data.feed import ITERATOR, REGROUPED
from zerojax.features.one_bit.sign_plan import errors_begin_anew
from zerojax.offload.disk_durable import AnotherPlanError, resume, resume_step
from zerojax.offload.disk_saving import saved_names, write_pieces
from zerojax.offload.sliced_state import average_like
from zerojax.offload.waiting import warn_of_dropped
from zerojax.optim import COUNT, EMA, EmaState, Weights
from zerojax.optim.parameter_tree import ParameterTree
from zerojax.placement.optional_parts import copies_begin_anew
from zerojax.placement.state import DELAYED, MESH_PARTS, OPTIONAL_PARTS, TrainState, zero_counter
from zerojax.plan.make import Plan
from zerojax.runtime.memory import allocating_for
from zerojax.step.initialization import init_state
from zerojax.step.reshard import (
    from_portable_state,
    frozen_part,
    portable_to_read,
    to_portable_state,
)
from zerojax.tracing.trees import flatten_names, format_bytes, num_bytes
from zerojax.zoo.hugging_face import Pretrained

AVERAGE_COUNT = f"opt_state/{COUNT}"
"""Name of the EMA's step count in a checkpoint; only checkpoints with an EMA have it."""


def base_of(
    plan: Plan, frozen: Literal["auto", "source", "saved"] = "auto"
) -> tuple[BaseWeights | None, str | None]:
    """Decides which frozen weights checkpoints leave out, because a pretrained folder holds them.

    Args:
      plan: plan of a run that has not begun.
      frozen: value of `CheckpointConfig.frozen`.

    Returns:
      (frozen weights that are not saved, sentence for the log). The first is None if checkpoints
      hold all weights; the second is None if no parameter is frozen.

    Raises:
      ValueError: `frozen` is "source", but the weights do not come from a folder, or the run has
        `offload.durable`.
    """
    names = [name for name, leaf in plan.users_placement.leaves.items() if leaf.frozen]
    if not names:
        return None, None
    model, why = plan.users_model, None
    read = model.stored.keys() & names if isinstance(model, Pretrained) else set()
    if not read:
        why = "they do not come from a Hugging Face folder"
    elif plan.settings.offload.durable:
        why = "a run with offload.durable may resume from its own files"
    if why is not None and frozen == "source":
        raise ValueError(
            f"checkpoint.frozen=source: {why}; use checkpoint.frozen=saved, or start with "
            "model.pretrained=FOLDER (zerojax.from_hugging_face) and without offload.durable"
        )
    leaves = plan.abstract_portable["frozen"]
    if why is not None or frozen == "saved":
        size = format_bytes(num_bytes(leaves))
        return None, f"checkpoints hold frozen weights ({size}): {why or 'checkpoint.frozen=saved'}"
    assert isinstance(model, Pretrained)
    left = format_bytes(num_bytes({name: leaves[name] for name in read}))
    return base_weights(model.folder, read), (
        f"checkpoints do not store {left} of frozen weights, which are in {model.folder.path}; do "
        "not change that folder (checkpoint.frozen=saved: checkpoints hold all weights)"
    )


def as_begun(base: BaseWeights, plan: Plan, state: TrainState) -> BaseWeights | None:
    """Returns `base` with fingerprints of its weights, computed from the state of a new run.

    Args:
      base: frozen weights that are not saved, from `base_of`.
      plan: plan of `state`.
      state: a new state, whose frozen weights were read from the folder.
    """
    named = flatten_names({"frozen": frozen_part(plan, state)})
    return base.as_read(fingerprints_of({name: named[name] for name in base.arrays}))


def folder_of(plan: Plan) -> Path | None:
    """Returns the Hugging Face folder of a plan's model; None for a model from elsewhere."""
    model = plan.users_model
    return model.folder.path if isinstance(model, Pretrained) else None


@allocating_for("saving a checkpoint")
def save_state(
    checkpointer: Checkpointer,
    plan: Plan,
    state: TrainState,
    *,
    step: int,
    about: Mapping[str, Any],
    base: BaseWeights | None = None,
) -> None:
    """Saves a state; parameters with slices on the host or on disk are copied slice by slice.

    If the plan stacks layers, each layer is written under its own name.

    Args:
      checkpointer: a `zerojax.checkpoint.Checkpointer`.
      plan: plan of `state`.
      state: train state; it may be donated when this function returns.
      step: number of batches consumed.
      about: {"data_state", "config", "plan": arguments of `Checkpointer.save` of these names}.
      base: frozen weights that are not saved, from `as_begun` or from a restore.

    Raises:
      CheckpointError: this or the previous save failed.
    """
    apart = plan.offload is not None and bool(plan.offload.off_device)
    sums = checkpointer.fingerprints
    pieces = functools.partial(write_pieces, plan, state, with_fingerprints=sums)
    portable = to_portable_state(plan, state, joined=not apart, rows_on_host=True)
    checkpointer.save(
        step,
        portable,
        data_state=about["data_state"],
        config=about["config"],
        plan=about["plan"],
        write_pieces=pieces if apart else None,
        base=base,
    )


def check_data_state(state: Mapping[str, Any]) -> None:
    """Checks before a run that a checkpoint can store what the user's iterator of batches returns.

    Args:
      state: state of a feed.

    Raises:
      TypeError: the result of `get_state` contains a value that is not JSON.
    """
    own = state.get(REGROUPED, {}).get("feed", state)
    if ITERATOR in own:
        check_json(own[ITERATOR], "the result of get_state() of the data")


@allocating_for("restoring a checkpoint")
def restore_state(
    checkpointer: Checkpointer,
    plan: Plan,
    step: int | None = None,
    *,
    at_start: bool = False,
) -> tuple[Any, Any]:
    """Returns (the result of `Checkpointer.restore`, the state as `plan` stores it).

    If the checkpoint has no EMA but the run keeps one, the EMA starts as a copy of the weights. An
    EMA that the run does not keep is not read.

    Args:
      checkpointer: a `zerojax.checkpoint.Checkpointer`.
      plan: plan of the run.
      step: number of a saved step; None: the newest complete step.
      at_start: True if the run is starting. Durable offload files are then used if they hold a
        later step than the newest undamaged checkpoint; the first result has their step and data
        state, and its own `state` is None.

    Warns:
      UserWarning: gradients wait in the checkpoint (`offload.delayed_update`), and the plan has no
        delay. Their update is left out.
    """
    unread = []
    if plan.offload is not None and plan.offload.off_device:
        arrays = [each for arrays in saved_names(plan).values() for each in arrays.values()]
        unread = [name for names in arrays for name in names]
    abstract = portable_to_read(plan)
    names = average_names(abstract["params"])
    has_average = isinstance(abstract["opt_state"], EmaState)
    averages, kept = [*names, AVERAGE_COUNT], [f"{part}/" for part in OPTIONAL_PARTS]
    restored = checkpointer.restore(
        abstract,
        step,
        unread=unread,
        pretrained=folder_of(plan),
        optional=averages if has_average else (),
        optional_groups=_optional_groups(abstract),
        passed_over=kept if has_average else [*kept, *averages],
    )
    durable = resume_step(plan) if at_start else None
    if durable is not None and durable > restored.step:
        restored = dataclasses.replace(restored, step=durable, state=None, base={})
        state, data_state = resume(plan)
        return dataclasses.replace(restored, data_state=data_state or {}), state
    data_state = restored.data_state or None
    portable = restored.state
    if DELAYED not in abstract and any(name.startswith(f"{DELAYED}/") for name in restored.arrays):
        warn_of_dropped()
    if has_average and AVERAGE_COUNT not in restored.arrays:
        portable = {**portable, "opt_state": _with_new_average(portable)}
    return restored, from_portable_state(plan, portable, data_state=data_state)


def _optional_groups(abstract: Mapping[str, Any]) -> list[list[str]]:
    """Returns groups of names of optional arrays; a checkpoint has all arrays of a group or none.

    Optional arrays are those of `OPTIONAL_PARTS`.
    """
    waiting = {DELAYED: abstract[DELAYED]} if DELAYED in abstract else {}
    return [list(flatten_names(waiting))] * bool(waiting) + [
        list(flatten_names({kind: {name: part}}))
        for kind in MESH_PARTS
        for name, part in abstract.get(kind, {}).items()
    ]


def average_names(params: Iterable[str]) -> dict[str, str]:
    """Returns {name of a parameter's average in a checkpoint: name of the parameter}."""
    return {f"opt_state/{EMA}/{name}": name for name in params}


def read_parts(
    checkpointer: Checkpointer,
    plan: Plan,
    step: int | None,
    weights: Weights,
    pretrained: str | Path | None = None,
) -> tuple[Any, dict[str, Any]]:
    """Reads a model without optimizer state from a checkpoint: weights, other state, random key.

    Args:
      checkpointer: a `zerojax.checkpoint.Checkpointer`.
      plan: plan of the model; its parameters must be float32 if the EMA is read.
      step: number of a saved step; None: the newest complete step.
      weights: "ema" reads the averaged weights instead of the trained ones.
      pretrained: folder of frozen weights that the step does not hold; None: the folder that the
        run used.

    Returns:
      (result of `Checkpointer.restore`, argument for `reshard.from_model_parts`).

    Raises:
      CheckpointError: the step does not exist, belongs to another model, or has no EMA.
    """
    names = "params", "frozen", "extras", "rng"
    abstract: dict[str, Any] = {name: {**plan.abstract_portable}[name] for name in names}
    if weights == "trained":
        restored = checkpointer.restore(abstract, step, subset=True, pretrained=pretrained)
        return restored, restored.state
    params = abstract.pop("params")
    abstract["opt_state"] = {EMA: params}
    options = {"optional": average_names(params), "pretrained": pretrained}
    restored = checkpointer.restore(abstract, step, subset=True, **options)
    if AVERAGE_COUNT not in restored.arrays:
        raise CheckpointError(without_average(f"step {restored.step} in {checkpointer.path}"))
    parts = dict(restored.state)
    parts["params"] = parts.pop("opt_state")[EMA]
    return restored, parts


def what_differs(plan: Plan, restored: Restored) -> list[str]:
    """Returns one line for each difference between the saved and the resumed run that may matter.

    Compares the EMA of the weights, the error feedback of 1-bit optimizers, copies of weights, and
    kernels.

    Args:
      plan: plan of the resumed run.
      restored: result of `restore_state`.
    """
    return [
        *_average_that_differs(plan, restored),
        *_errors_that_differ(plan, restored),
        *_copies_that_differ(plan, restored),
        *choices_that_differ(plan, restored.plan, restored.step),
    ]


def _average_that_differs(plan: Plan, restored: Restored) -> list[str]:
    """Returns a line if only the run or only the checkpoint has an EMA."""
    is_kept = isinstance(plan.abstract_portable["opt_state"], EmaState)
    if is_kept == (AVERAGE_COUNT in restored.arrays):
        return []
    step = f"step {restored.step} was saved"
    if is_kept:
        return [f"{step} without an ema; the ema starts as a copy of the weights"]
    return [f"{step} with an ema; this run does not keep it"]


def _errors_that_differ(plan: Plan, restored: Restored) -> list[str]:
    if not errors_begin_anew({**plan.abstract_stored}, restored.arrays):
        return []
    return [
        f"step {restored.step} was saved with the 1-bit error feedback of other devices, or "
        "of other parts of parameters; it starts at zero here, which loses one step's error"
    ]


def _copies_that_differ(plan: Plan, restored: Restored) -> list[str]:
    if not copies_begin_anew({**plan.abstract_stored}, restored.arrays):
        return []
    dtype = jnp.dtype(plan.precision.compute_dtype).name
    return [
        f"step {restored.step} was saved without the copies of weights that wire.weights="
        f"{plan.settings.wire.weights} keeps; they start as the master weights in {dtype}"
    ]


def _with_new_average(portable: dict[str, Any]) -> EmaState:
    """Returns the optimizer state with an EMA that starts as a copy of the parameters.

    Args:
      portable: restored state in which `ShapeDtypeStruct`s replace the EMA.
    """
    state = portable["opt_state"]

    def begin(name: str, wanted: jax.ShapeDtypeStruct) -> Any:
        param = portable["params"][name]
        return average_like(param, wanted) if isinstance(param, jax.Array) else param

    count = jax.jit(zero_counter, out_shardings=state.count.sharding)()
    ema = {name: begin(name, wanted) for name, wanted in state.ema.items()}
    return EmaState(state.inner, count, ema)


def choices_that_differ(plan: Plan, saved: Mapping[str, Any], step: int) -> list[str]:
    """Returns one line for each kernel that differs between the resumed run and a checkpoint.

    Other kernels may change the last digits of losses. Other slice sizes compute the same bits and
    are not reported.

    Args:
      plan: plan of the resumed run.
      saved: plan stored in the checkpoint, from `plan_dict`.
      step: step of the checkpoint.
    """
    now = {what: one.implementation for what, one in plan.program.kernels.items()}
    lines = []
    for what, before in saved.get("kernels", {}).items():
        # A computation that only one of the two runs has does not count as changed.
        if now.get(what, before) != before:
            setting = "model.attention" if what.startswith("attention of") else "kernels"
            lines.append(
                f"{what} by {now[what]}, but by {before} when the checkpoint of step {step} was "
                f"written: losses may differ in the last digits; set {setting}: {before} to keep "
                "them"
            )
    return lines


@allocating_for("making the first state")
def first_state(
    plan: Plan, seed: int, latest_step: int | None
) -> tuple[TrainState, dict[str, Any] | None] | None:
    """Returns (state, position in the data) of a new run; None if a checkpoint must be restored.

    Args:
      plan: plan of the run.
      seed: seed of new parameters.
      latest_step: step of the newest checkpoint that looks complete; None if there is none.

    Raises:
      AnotherPlanError: the durable offload files have a later step than the newest checkpoint, but
        belong to another plan.
    """
    durable = resume_step(plan)
    if durable is not None and (latest_step is None or durable >= latest_step):
        try:
            return resume(plan)
        except AnotherPlanError:
            if durable != latest_step:
                raise
            return None  # the checkpoint holds the same step, and fits any mesh
    if latest_step is not None:
        return None
    return init_state(plan, seed), None


@allocating_for("handing over the optimizer's state")
def optimizer_state_of(plan: Plan, state: TrainState) -> Any:
    """Returns the optimizer state in optax's form: as a tree like the user's, without padding.

    Args:
      plan: plan of `state`.
      state: train state; it stays valid.
    """
    portable = to_portable_state(plan, state)["opt_state"]
    return ParameterTree(plan.users_model.parameter_names()).nest_state(portable)


def end_state(state: TrainState | None) -> None:
    """Closes the files of a state that is partly offloaded to disk."""
    if state is not None and (disk := state.get("disk")):
        disk.close()
