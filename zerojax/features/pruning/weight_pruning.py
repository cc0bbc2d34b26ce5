"""Pruning as a feature of a run: its hooks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from zerojax.config import PruningConfig
from zerojax.features.pruning import prune_masks
from zerojax.features.pruning.pruned_parameters import (
    PrunedLeaf,
    describe_pruning,
    masked_names,
    plan_pruning,
)
from zerojax.features.seam import Arrays, Facts, Feature
from zerojax.placement.decisions import Decisions
from zerojax.placement.device_mesh import AXES
from zerojax.placement.layer_stacks import Stacks
from zerojax.placement.state import TrainState
from zerojax.placement.table import Placement

Pruned = Mapping[str, PrunedLeaf]


class WeightPruning(Feature[PruningConfig, Pruned]):
    """Pruning of weights by their magnitude."""

    kind = PruningConfig
    # Not with copies of weights that follow by differences: they only approach 0.
    works_with = frozenset(
        {"offload.tile_bytes", "deterministic", "unroll", "lookup", "sequence_sharding", "ema"}
        | {"wire.weights=fp8", "wire.weights=int8", "wire.gradients", "wire.secondary"}
        | {*AXES}
    )

    def plan(self, config: PruningConfig, facts: Facts) -> Pruned:
        return plan_pruning(config, facts.trace, facts.placement, facts.stacks)

    def describe(self, decision: Pruned, placement: Placement) -> list[str]:
        return describe_pruning(decision, placement)

    def state(
        self, decision: Pruned, trained: Mapping[str, jax.ShapeDtypeStruct], stacks: Stacks
    ) -> dict[str, jax.ShapeDtypeStruct]:
        names = {*decision, *masked_names(decision, stacks)}
        return {
            name: jax.ShapeDtypeStruct(x.shape, jnp.bool, sharding=x.sharding)
            for name, x in trained.items()
            if name in names
        }

    def begin(
        self, plan: Decisions, decision: Pruned, params: Arrays
    ) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        masks = prune_masks.first_masks(decision, plan.placement, params)
        return masks, prune_masks.weights_at(decision, params, masks, 0)

    def begun(self, plan: Decisions, decision: Pruned, state: TrainState) -> TrainState:
        return prune_masks.begin_pruned(plan, decision, state)

    def gradients(
        self,
        plan: Decisions,
        decision: Pruned,
        grads: dict[str, jax.Array],
        state: TrainState,
        scale: jax.Array,
    ) -> dict[str, jax.Array]:
        return prune_masks.mask_gradients(decision, grads, state)

    def updated(self, plan: Decisions, decision: Pruned, state: TrainState) -> tuple[Any, Any]:
        return prune_masks.masked_weights(decision, state)
