"""Updates layers with the gradients of the step before, beside the forward pass that uses them.

Weights, and the gradients that wait for their update, are on the device; master weights and moments
are in host memory. What is outside of the layers is updated before the pass. A forward iteration
computes one layer, updates the next one, and loads the state of the one after it. So each weight is
new when it is used, and losses and weights are those of an update after the step. Between steps the
last update waits: `zerojax.build_finish` completes it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from zerojax.offload.delayed_update import DelayedUpdates, build_delayed_gradients
from zerojax.offload.sliced_update import build_offload_update
from zerojax.offload.streaming_rows import put_rows, split_by_name
from zerojax.offload.waiting import as_waiting, waiting_update
from zerojax.passes import PassConfig
from zerojax.passes.update import ThisStep
from zerojax.placement.decisions import Decisions
from zerojax.placement.slices import without_moments
from zerojax.placement.state import DELAYED, TrainState

Arrays = dict[str, Any]


def build_forward_gradients(
    plan: Decisions, config: PassConfig
) -> Callable[..., tuple[Arrays, Arrays, Arrays, TrainState]]:
    """Builds the gradient function that first completes the update of the step before; it is traced
    in a jitted step.

    Returns:
      A function `(state, key_data, batch, loss_factor) -> (sums, grads, extras, state)`. `sums`,
      `grads` and `extras` are those of `zerojax.passes.build_gradients`. In the returned state all
      weights, master weights and moments are new; the gradients that waited are still in it.
    """
    update = build_offload_update(plan)
    run = build_delayed_gradients(plan, config, ForwardUpdates)

    def gradients(state: TrainState, key_data: jax.Array, batch: Arrays, loss_factor: Any):
        bare = without_moments(state["opt_state"])
        after: Any = {**state, **waiting_update(update, state)}
        return run(after, key_data, batch, loss_factor, bare)

    return gradients


def leave_gradients(
    plan: Decisions,
) -> Callable[[Arrays, TrainState, ThisStep], dict[str, Any]]:
    """Returns an update that only puts gradients into the state, to wait for the next step."""

    def updated(grads: Arrays, state: TrainState, now: ThisStep) -> dict[str, Any]:
        kept = {name: state[name] for name in ("params", "opt_state", "masters")}  # type: ignore[literal-required]
        return {**kept, DELAYED: as_waiting(plan, grads, now)}

    return updated


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForwardUpdates(DelayedUpdates):
    """Updates layers in the forward pass with gradients that wait, and receives new ones in the
    backward pass: implements `zerojax.offload.streaming_layers.UpdatesInForward`.

    Its totals are those of `DelayedUpdates`, without sums of squares: the norm reads the gradients
    after the pass, in the order of a step without offload.
    """

    def totals(self, slices: Arrays) -> Arrays:
        """Returns the totals before the pass: see the class."""
        found = DelayedUpdates.start(self, DelayedUpdates.totals(self, slices), {})
        return {**found, "squares": {}}

    def start(self, totals: Arrays, sums: Arrays) -> Arrays:
        """Returns `totals`: the update has run."""
        del sums
        return totals

    def divide(self, totals: Arrays) -> tuple[Arrays, Arrays]:
        """Divides the totals after the forward pass into (what the update changed, the rest)."""
        return split_by_name(totals, ("weights", "slices"))

    def load_new(self, updated: Arrays, index: jax.Array | int) -> Arrays:
        """Loads the new weights of a layer, and gathers them."""
        return self.complete(self.load(updated, index, self.rows.streamed), index)

    def take(self, totals: Arrays, index: jax.Array | int, grads: Arrays) -> Arrays:
        """Sums a layer's gradients over devices, and puts them where the used ones were."""
        new, here = split_by_name(self.rows.reduce(grads), self.rows.streamed)
        return {
            **totals,
            "device": put_rows(totals["device"], here, index, adds=False),
            "grads": self._stacks.store(totals["grads"], new, index),
        }
