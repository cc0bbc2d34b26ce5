"""Compares optimizer settings of a resumed run with those in its checkpoint.

Hyperparameters of `optax.inject_hyperparams` are part of the state, so their saved values are used.
A schedule comes from the current call, so its learning rate may differ from that of the saved run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from zerojax.checkpoint.checkpointer import Restored
from zerojax.config.features import resume_notes
from zerojax.config.tree_types import Tree
from zerojax.plan.make import Plan

NEXT_RATE = "next_learning_rate"
"""Key in a checkpoint's configuration for the learning rate of the step after the checkpoint."""
_TOLERANCE = 1e-5  # relative; float32 results of a schedule differ between kinds of devices


@jax.transfer_guard("allow")
def next_rate(plan: Plan, updates: int) -> float | None:
    """Returns the learning rate after `updates` updates; None if the optimizer hides it."""
    return None if plan.learning_rate is None else float(plan.learning_rate(updates))


def settings_that_differ(plan: Plan, restored: Restored, config: Mapping[str, Any]) -> list[str]:
    """Returns one line per optimizer setting that differs between the saved run and this call.

    Args:
      plan: plan of the resumed run.
      restored: result of `checkpointing.restore_state`; its `config` is that of the saved run.
      config: configuration of the resumed run.
    """
    if restored.state is None:  # the state is in durable offload files
        return []
    return [
        *_kept(plan, restored),
        *_jumped(plan, restored, config),
        *resume_notes(restored.config, config, restored.step + 1),
    ]


def _kept(plan: Plan, restored: Restored) -> list[str]:
    """Returns a line for each hyperparameter whose saved value (in the optimizer state) is used
    instead of the value of this call.
    """
    if not _settings_of(plan.abstract_stored["opt_state"]):
        return []
    params = plan.abstract_stored["params"]

    def of_the_call() -> dict[str, jax.Array]:
        # XLA removes everything except the hyperparameters, so no state is allocated.
        zeros = {name: jnp.zeros(leaf.shape, leaf.dtype) for name, leaf in params.items()}
        return _settings_of(plan.tx.init(zeros))

    new, saved = jax.device_get((jax.jit(of_the_call)(), _settings_of(restored.state["opt_state"])))
    return [
        f"{name}={float(saved[name]):g} of the checkpoint is used, not {float(value):g} of this "
        "call: it is part of the optimizer's state (optax.inject_hyperparams). To change it, "
        "assign to trainer.state['opt_state'] in a callback's on_start, or pass a schedule"
        for name, value in new.items()
        if not math.isclose(value, saved[name], rel_tol=_TOLERANCE)
    ]


def _settings_of(opt_state: Tree) -> dict[str, Any]:
    """Returns {name: value} in `optax.inject_hyperparams` states, except values from schedules."""
    found: dict[str, Any] = {}
    is_injected = lambda node: hasattr(node, "hyperparams_states")  # noqa: E731
    for node in jax.tree.leaves(opt_state, is_leaf=is_injected):
        if is_injected(node):
            fixed = node.hyperparams.keys() - node.hyperparams_states.keys()
            found |= {name: node.hyperparams[name] for name in sorted(fixed)}
            found |= _settings_of(node.inner_state)
    return found


def _jumped(plan: Plan, restored: Restored, config: Mapping[str, Any]) -> list[str]:
    """Returns a line if the learning rate of the next step differs from that in the saved run."""
    old = restored.config.get(NEXT_RATE)
    new = next_rate(plan, restored.step - int(restored.state["skipped"]))
    if old is None or new is None or math.isclose(new, old, rel_tol=_TOLERANCE):
        return []
    steps = [f"steps={settings.get('steps')}" for settings in (restored.config, config)]
    lengths = "" if steps[0] == steps[1] else f" (saved run: {steps[0]}, this call: {steps[1]})"
    return [
        f"the learning rate of step {restored.step + 1} is {new:.4g}; in the saved run it would "
        f"have been {old:.4g}{lengths}: the schedule of this call is used"
    ]
