"""Layer drop as a feature of a run: the hooks, and the layers that a step draws."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax.config import LayerDropConfig
from zerojax.features.layer_drop.dropped_layers import draw_scales, drop_layers
from zerojax.features.layer_drop.layer_choice import LayerDrop, plan_layer_drop
from zerojax.features.seam import Facts, Feature
from zerojax.placement.decisions import Decisions
from zerojax.placement.state import TrainState, step_key
from zerojax.placement.table import Placement

_LAYER_DROP = 0x64726F70
"""Number folded into a step's key to draw which layers the step runs; no data shard has it."""


class LayerDropping(Feature[LayerDropConfig, LayerDrop]):
    """Progressive layer drop."""

    kind, needs_loop = LayerDropConfig, True
    works_with = frozenset(
        {"wire.weights=int8", "wire.weights=delta_int8", "wire.gradients", "wire.secondary"}
        | {"lookup", "replica", "model", "stage", "sequence_sharding", "ema"}
    )

    def plan(self, config: LayerDropConfig, facts: Facts) -> LayerDrop:
        given = facts.model, facts.trace, facts.params, facts.settings.zero
        return plan_layer_drop(config, *given, facts.pipeline, facts.division)

    def describe(self, decision: LayerDrop, placement: Placement) -> list[str]:
        return decision.describe()

    def work(self, decision: LayerDrop) -> float:
        return decision.work()

    def times_used(self, decision: LayerDrop, name: str) -> float:
        return decision.times_used(name)

    def pass_options(self, decision: LayerDrop) -> dict[str, Any]:
        return {"scale_layers": functools.partial(drop_layers, share=decision.kept)}

    def draw(self, plan: Decisions, decision: LayerDrop, state: TrainState) -> dict[str, jax.Array]:
        """Draws the layers of a step: {"scales": float32 [microbatches, layers]}.

        The scales (see `dropped_layers.draw_scales`) depend only on seed, step, microbatch
        and layer, so they are the same on any mesh.
        """
        step = state["step"]
        key = jax.random.fold_in(step_key(state["rng"], step), _LAYER_DROP)
        theta = decision.config.theta_of(step.astype(jnp.float32), jnp.exp)
        scales = draw_scales(key, theta, plan.num_microbatches, decision.num_layers)
        return {"scales": jax.lax.with_sharding_constraint(scales, NamedSharding(plan.mesh, P()))}
