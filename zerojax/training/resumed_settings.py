"""Settings of an optimizer when a run goes on: the saved value, that of the call, which counts.

`optax.inject_hyperparams` keeps numbers in the state, where the saved ones count; a schedule is the
call's, and may stand elsewhere than that of the run that saved.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from zerojax.plan.make import Plan

NEXT_RATE = "next_learning_rate"
"""Where the configuration in a checkpoint has the learning rate that the next step would take."""
_TOLERANCE = 1e-5  # of numbers that a schedule computes, on whatever device


@jax.transfer_guard("allow")
def next_rate(plan: Plan, updates: int) -> float | None:
    """The learning rate after so many updates; None where the optimizer does not tell it."""
    return None if plan.learning_rate is None else float(plan.learning_rate(updates))


def settings_that_differ(plan: Plan, restored: Any, config: Mapping[str, Any]) -> list[str]:
    """A line for each setting of the optimizer that is another one than that of the call.

    Args:
      plan: of the run that goes on; restored: of `checkpointing.restore_state`.
      config: of the run, as `restored.config` is of the one that saved.
    """
    if restored.state is None:  # of durable files
        return []
    return [*_kept(plan, restored), *_jumped(plan, restored, config)]


def _kept(plan: Plan, restored: Any) -> list[str]:
    """Numbers that the optimizer has in its state."""
    if not _settings_of(plan.abstract_stored["opt_state"]):
        return []
    params = plan.abstract_stored["params"]

    def of_the_call() -> dict[str, jax.Array]:
        # The compiler leaves out all but the numbers.
        zeros = {name: jnp.zeros(leaf.shape, leaf.dtype) for name, leaf in params.items()}
        return _settings_of(plan.tx.init(zeros))

    new, saved = jax.device_get((jax.jit(of_the_call)(), _settings_of(restored.state["opt_state"])))
    return [
        f"{name}={float(saved[name]):g} goes on as saved, and not {float(value):g} of this call: "
        "it is part of the optimizer's state (optax.inject_hyperparams). To change it, assign to "
        "trainer.state['opt_state'] in a callback's on_start, or give a schedule"
        for name, value in new.items()
        if not math.isclose(value, saved[name], rel_tol=_TOLERANCE)
    ]


def _settings_of(opt_state: Any) -> dict[str, Any]:
    """{name: number} of `optax.inject_hyperparams`, without those that a schedule computes."""
    found: dict[str, Any] = {}
    is_injected = lambda node: hasattr(node, "hyperparams_states")  # noqa: E731
    for node in jax.tree.leaves(opt_state, is_leaf=is_injected):
        if is_injected(node):
            fixed = node.hyperparams.keys() - node.hyperparams_states.keys()
            found |= {name: node.hyperparams[name] for name in sorted(fixed)}
            found |= _settings_of(node.inner_state)
    return found


def _jumped(plan: Plan, restored: Any, config: Mapping[str, Any]) -> list[str]:
    """A schedule that does not go on where the one of the saved run was."""
    old = restored.config.get(NEXT_RATE)
    new = next_rate(plan, restored.step - int(restored.state["skipped"]))
    if old is None or new is None or math.isclose(new, old, rel_tol=_TOLERANCE):
        return []
    steps = [f"steps={settings.get('steps')}" for settings in (restored.config, config)]
    lengths = "" if steps[0] == steps[1] else f" ({steps[0]} there, {steps[1]} here)"
    return [
        f"the learning rate of step {restored.step + 1} is {new:.4g}, and would have been "
        f"{old:.4g} in the run that was saved{lengths}: the schedule of this call counts"
    ]
