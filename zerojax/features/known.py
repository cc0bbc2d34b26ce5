"""Lists the optional features that change a plan or a step, and calls their hooks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from zerojax.config.features import Features
from zerojax.config.tree_types import Batch
from zerojax.features.batch_ramp.growing_batches import GrowingBatches
from zerojax.features.curriculum.growing_rows import GrowingRows
from zerojax.features.layer_drop.layer_dropping import LayerDropping
from zerojax.features.pruning.weight_pruning import WeightPruning
from zerojax.features.seam import Facts, Feature
from zerojax.features.several_sizes import Ladder
from zerojax.optim.step_sizes import StepSizes
from zerojax.placement.decisions import Decisions
from zerojax.placement.layer_stacks import Stacks
from zerojax.placement.state import TrainState
from zerojax.placement.table import Placement

KNOWN: tuple[Feature[Any, Any], ...] = (
    LayerDropping(),
    WeightPruning(),
    GrowingRows(),
    GrowingBatches(),
)
PAIRS = (
    frozenset({"layer_drop", "pruning"}),
    frozenset({"layer_drop", "curriculum"}),
    frozenset({"layer_drop", "batch_ramp"}),
    frozenset({"pruning", "curriculum"}),
    frozenset({"pruning", "batch_ramp"}),
)
"""Pairs of features that were shown to equal the plain way together; all other pairs are refused.
Curriculum and batch ramp are no such pair: each pair of sizes would be a compiled step."""


def works_with(feature: Feature[Any, Any]) -> frozenset[str]:
    """Returns the names of all settings and features with which a feature may be combined."""
    own = feature.kind.keyword
    return feature.works_with.union(*(pair for pair in PAIRS if own in pair))


def need_loop(features: Features) -> bool:
    """Returns whether a feature of the run needs layers that run in a loop."""
    return any(x.needs_loop and not features.get(x.kind).is_off for x in KNOWN)


def sizes_of_features(features: Features, rows: int, seq_len: int | None) -> StepSizes | None:
    """Returns the rows and tokens of each step; None if no feature changes them, or if a feature
    changes a `seq_len` that is not known.

    Args:
      features: settings of the run.
      rows: rows of the whole batch.
      seq_len: tokens of a row; None: not known.
    """
    on = [x for x in KNOWN if not features.get(x.kind).is_off]
    found = [x.sizes(features.get(x.kind), rows, seq_len) for x in on]
    given = [sizes for sizes in found if sizes is not None]
    assert len(given) <= 1, "PAIRS has no two features that change the size of steps"
    return given[0] if given else None


def ladder_of(features: Features, plan: Decisions, *, own_loss: bool) -> Ladder | None:
    """Returns the compiled sizes of a run, without plans; None if all steps have one size.

    Args:
      features: settings of the run.
      plan: plan of a full step.
      own_loss: whether the caller passed a loss.
    """
    on = [x for x in KNOWN if not features.get(x.kind).is_off]
    found = [x.ladder(features.get(x.kind), plan, own_loss=own_loss) for x in on]
    return next((ladder for ladder in found if ladder is not None), None)


def choose_microbatches(
    features: Features, number: int | None, mesh: Mesh | AbstractMesh, batch: Batch
) -> tuple[int | None, list[str]]:
    """Returns (number of microbatches with which the features of a run can run, reasons).

    Args:
      features: settings of the run.
      number: the user's number; None: not given.
      mesh: mesh of the run.
      batch: global batch, as arrays or structs.
    """
    reasons: list[str] = []
    for feature in KNOWN:
        if not (config := features.get(feature.kind)).is_off:
            number, why = feature.microbatches(config, number, mesh, batch)
            reasons += why
    return number, reasons


def plan_features(features: Features, facts: Facts) -> dict[str, Any]:
    """Returns {feature: its decision} of the features of a run."""
    found = {}
    for feature in KNOWN:
        if not (config := features.get(feature.kind)).is_off:
            found[feature.kind.keyword] = feature.plan(config, facts)
    return {keyword: decision for keyword, decision in found.items() if decision is not None}


def describe_features(decisions: Mapping[str, Any], placement: Placement) -> list[str]:
    """Returns the lines of a plan's page about features."""
    on = (x for x in KNOWN if x.kind.keyword in decisions)
    return [line for x in on for line in x.describe(decisions[x.kind.keyword], placement)]


def with_parts(state: TrainState, decisions: Mapping[str, Any], stacks: Stacks) -> TrainState:
    """Adds the parts of features to an abstract state.

    Args:
      state: state under stored names, or under the user's.
      decisions: result of `plan_features`.
      stacks: {stack of rolled layers: the user's names of its rows}.
    """
    parts = {
        x.kind.part: x.state(decisions[x.kind.keyword], state["params"], stacks)
        for x in KNOWN
        if x.kind.part is not None and x.kind.keyword in decisions
    }
    return {**state, **parts}  # type: ignore[return-value]


def active(plan: Decisions) -> list[tuple[Feature[Any, Any], Any]]:
    """Returns (feature, its decision) of the features of a plan."""
    on = (x for x in KNOWN if x.kind.keyword in plan.features)
    return [(x, plan.features[x.kind.keyword]) for x in on]


def work_of_features(plan: Decisions) -> float:
    """Returns the FLOPs of a step, divided by those of a step without features."""
    return math.prod(x.work(decision) for x, decision in active(plan))


def times_used(plan: Decisions, name: str) -> float:
    """Returns the expected fraction of steps that read a parameter and reduce its gradient."""
    return math.prod(x.times_used(decision, name) for x, decision in active(plan))
