"""The gradients that wait in a state for the update of the next step: how they are put there, used,
and told from none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from zerojax.config.checks import warn_user
from zerojax.optim import Optimizer
from zerojax.passes.update import ThisStep, clipped_scale
from zerojax.placement.decisions import Decisions
from zerojax.placement.state import DELAYED, TrainState

Arrays = dict[str, Any]


def as_waiting(plan: Decisions, grads: Arrays, now: ThisStep) -> dict[str, Any]:
    """Returns the `DELAYED` part of a state after a step: gradients, and how to use them.

    Args:
      grads: {name: gradient in the dtype of the state}.
      now: facts of the step that computed them.
    """
    assert isinstance(plan.tx, Optimizer)
    return {
        "grads": grads,
        "scale": clipped_scale(plan.tx, now),
        "skip": now.skip,
        "key": jax.random.key_data(now.key),
    }


def waiting_update(update: Callable[..., dict[str, Any]], state: TrainState) -> dict[str, Any]:
    """Runs an update with the gradients that wait in a state; traced.

    Args:
      update: result of `zerojax.offload.sliced_update.build_offload_update`.

    Returns:
      The result of `update`.
    """
    old, zero = state[DELAYED], jnp.float32(0)
    key = jax.random.wrap_key_data(old["key"])
    # The scale includes clipping already, so that the norm is not needed.
    late = ThisStep(scale=old["scale"], norm=zero, skip=old["skip"], key=key, loss=zero)
    return update(old["grads"], state, late)


def finished(update: Callable[..., dict[str, Any]], state: TrainState) -> TrainState:
    """Returns a state whose waiting update is done, so that nothing waits; traced.

    Args:
      update: result of `zerojax.offload.sliced_update.build_offload_update`, of all parameters.
    """
    result: Any = {**state, **waiting_update(update, state)}
    result[DELAYED] = {**state[DELAYED], "skip": jnp.ones_like(state[DELAYED]["skip"])}
    return result


def is_waiting(plan: Decisions, state: TrainState) -> bool:
    """Returns whether the weights of a state lack an update that waits for the next forward pass;
    waits for the step that computed its gradients.

    Not with `offload.delayed_update`, whose weights are late by design.
    """
    if plan.offload is None or not plan.offload.in_forward:
        return False
    return not bool(state[DELAYED]["skip"])


def check_nothing_waits(plan: Decisions, state: TrainState, what: str) -> None:
    """Raises if the weights of a state lack an update.

    Args:
      what: what would be wrong, such as "an evaluation".

    Raises:
      ValueError: an update waits; the message states the remedy.
    """
    if is_waiting(plan, state):
        raise ValueError(
            f"{what} would read weights before the update of the last step, which waits in the "
            "state (offload.update_in_forward); write state = zerojax.build_finish(plan)(state) "
            "first, and continue with the returned state"
        )


def warn_of_dropped() -> None:
    """Warns that a state goes on under a plan that has no place for its waiting gradients."""
    warn_user(
        "the gradients of the last step wait in this state (offload.delayed_update), and the new "
        "plan has no delay: that one update is left out; keep offload.delayed_update to use it"
    )
