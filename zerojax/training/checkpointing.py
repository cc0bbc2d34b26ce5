"""Training state in a checkpoint, also where it is larger than memory."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax.parallel.initialization import init_state
from zerojax.parallel.offload.disk_durable import AnotherPlanError, resume, resume_step
from zerojax.parallel.offload.disk_saving import saved_names, write_pieces
from zerojax.parallel.reshard import (
    canonical_to_read,
    from_canonical,
    model_parts,
    to_canonical,
)
from zerojax.plan.make import Plan
from zerojax.plan.state import TrainState
from zerojax.runtime.memory import allocating_for


@allocating_for("saving a checkpoint")
def save_state(
    checkpointer: Any, plan: Plan, state: TrainState, *, step: int, about: Mapping[str, Any]
) -> None:
    """Saves a state; parameters with slices on the host or in files are copied slice by slice.

    Stacked layers are joined on the host instead: their rows are written under their own names.

    Args:
      checkpointer: a `zerojax.checkpoint.Checkpointer`.
      plan: which `state` follows.
      state: may be donated when this returns.
      step: batches consumed.
      about: "data_state", "config" and "plan" as `Checkpointer.save` takes them.

    Raises:
      CheckpointError: see there.
    """
    apart = plan.offload is not None and bool(plan.offload.off_device) and not plan.stacks
    sums = checkpointer.fingerprints
    pieces = functools.partial(write_pieces, plan, state, with_fingerprints=sums)
    canonical = to_canonical(plan, state, joined=not apart, rows_on_host=True)
    checkpointer.save(
        step,
        canonical,
        data_state=about["data_state"],
        config=about["config"],
        plan=about["plan"],
        write_pieces=pieces if apart else None,
    )


@allocating_for("restoring a checkpoint")
def restore_state(
    checkpointer: Any, plan: Plan, step: int | None = None, *, at_start: bool = False
) -> tuple[Any, Any]:
    """(what `Checkpointer.restore` returns, the state as `plan` stores it).

    Args:
      checkpointer: a `zerojax.checkpoint.Checkpointer`.
      plan: of the run.
      step: a saved step; None: the newest that is whole.
      at_start: a run begins: where damaged steps had to be passed over, its durable files may hold
        a later one than the step that is left, and are taken instead.
    """
    unread = []
    if plan.offload is not None and plan.offload.off_device and not plan.stacks:
        unread = [name for arrays in saved_names(plan).values() for name in arrays.values()]
    restored = checkpointer.restore(canonical_to_read(plan), step, unread=unread)
    durable = resume_step(plan) if at_start else None
    if durable is not None and durable > restored.step:
        restored = dataclasses.replace(restored, step=durable, state=None)
        state, data_state = resume(plan)
        return dataclasses.replace(restored, data_state=data_state or {}), state
    data_state = restored.data_state or None
    return restored, from_canonical(plan, restored.state, data_state=data_state)


@allocating_for("making the first state")
def first_state(
    plan: Plan, seed: int, latest_step: int | None
) -> tuple[TrainState, dict[str, Any] | None] | None:
    """(state, position of the data) of a run that starts; None: it goes on from a checkpoint.

    Args:
      plan: of the run.
      seed: of new parameters.
      latest_step: of the newest checkpoint that looks whole, or None.
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


@allocating_for("handing over the model")
def model_of(plan: Plan, state: TrainState) -> Any:
    """The model as the user's kind of object: `nnx.Module`, linen variables or tree of arrays.

    Every process gets whole arrays, so the model has to fit on one device.
    """
    named = model_parts(plan, state)
    replicated = NamedSharding(plan.mesh, P())
    whole = jax.jit(lambda tree: tree, out_shardings=replicated)(named)
    host = jax.tree.map(np.asarray, whole)
    values = {**host["params"], **host["frozen"]}
    params = {name: jnp.asarray(values[name]) for name in plan.users_placement.leaves}
    extras = {name: jnp.asarray(value) for name, value in host["extras"].items()}
    return plan.users_model.to_source(params, extras)


def end_state(state: TrainState | None) -> None:
    """Gives up what a state holds besides arrays: its files."""
    if state is not None and (disk := state.get("disk")):
        disk.close()
