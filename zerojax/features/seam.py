"""Defines the seam of an optional feature: what it may add to a plan, a state and a step.

A feature overrides the hooks that it needs. Plan, first state and step call the hooks of the
features of a run (`zerojax.features.known`), and name none of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import jax
import optax
from jax.sharding import AbstractMesh, Mesh

from zerojax.config import MeshConfig
from zerojax.config.attention_layouts import BlockLayout
from zerojax.config.batch_division import BatchDivision
from zerojax.config.feature_settings import FeatureSettings
from zerojax.config.features import Features
from zerojax.config.late_dataclasses import dataclass
from zerojax.config.tree_types import Batch
from zerojax.features.several_sizes import Ladder
from zerojax.optim.precision import Precision
from zerojax.optim.step_sizes import StepSizes
from zerojax.placement.decisions import Decisions
from zerojax.placement.layer_stacks import Stacks
from zerojax.placement.state import TrainState
from zerojax.placement.state_layout import PipelineLayout
from zerojax.placement.table import Placement
from zerojax.tracing.protocol import Model
from zerojax.tracing.trace import ModelTrace

Arrays = Mapping[str, jax.Array]
S = TypeVar("S", bound=FeatureSettings)
D = TypeVar("D")


@dataclass(frozen=True, kw_only=True)
class Combination:
    """Settings of a run that may exclude each other.

    Attributes:
      settings: mesh options.
      mesh: the device mesh.
      precision: dtypes of the run.
      tx: the optimizer, before it is fitted to the precision.
      features: settings of the features of the run.
      attention_layout: layout that all calls of `zerojax.attention` use; None: not known, and
        checked when the loss is traced.
      layer_norms: as in `PlanInputs`.
    """

    settings: MeshConfig
    mesh: Mesh | AbstractMesh
    precision: Precision
    tx: optax.GradientTransformation
    features: Features
    attention_layout: BlockLayout | None = None
    layer_norms: bool = False


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts from which a feature decides: the traced loss, and the decisions before it.

    Attributes:
      settings: mesh options.
      model: model that is trained.
      trace: trace of the loss of one microbatch.
      params: {name: shape and dtype of the parameter}.
      placement: placement table.
      stacks: {stack of rolled layers: the user's names of its rows}.
      pipeline: pipeline of the plan, if it has one.
      division: division of a batch over data shards and microbatches.
    """

    settings: MeshConfig
    model: Model
    trace: ModelTrace
    params: Mapping[str, Any]
    placement: Placement
    stacks: Stacks
    pipeline: PipelineLayout | None
    division: BatchDivision


class Feature(Generic[S, D]):
    """An optional feature of a run; every hook of this class does nothing.

    Attributes:
      kind: type of its settings, which has its name.
      works_with: names of other settings with which it was shown to equal the plain way
        (`zerojax.features.other_settings.OTHERS`); it is refused with all others. Pairs of features
        are in `zerojax.features.known.PAIRS`.
      needs_loop: whether it needs layers that run in a loop.
    """

    kind: type[S]
    works_with: frozenset[str] = frozenset()
    needs_loop = False

    def sizes(self, config: S, rows: int, seq_len: int | None) -> StepSizes | None:
        """Returns the rows and tokens of each step; None: all steps have the whole batch, or the
        feature changes a `seq_len` that is not known.

        Args:
          config: settings of the feature.
          rows: rows of the whole batch.
          seq_len: tokens of a row; None: not known.
        """
        return None

    def ladder(self, config: S, plan: Decisions, *, own_loss: bool) -> Ladder | None:
        """Returns the sizes for which the step is compiled, without plans; None: one size.

        Args:
          config: settings of the feature.
          plan: plan of a full step.
          own_loss: whether the caller passed a loss.

        Raises:
          ConfigError: the batch, the loss or a setting does not fit.
        """
        return None

    def microbatches(
        self, config: S, number: int | None, mesh: Mesh | AbstractMesh, batch: Batch
    ) -> tuple[int | None, list[str]]:
        """Returns (number of microbatches that the feature can run with, reasons).

        Args:
          config: settings of the feature.
          number: the number so far; None: not given.
          mesh: mesh of the run.
          batch: global batch, as arrays or structs.
        """
        return number, []

    def plan(self, config: S, facts: Facts) -> D | None:
        """Returns the decision of the feature, from settings that are not off; None: there is
        nothing to decide, and none of the hooks below is called.

        Raises:
          ConfigError: the model does not have what the feature needs.
        """
        return None

    def describe(self, decision: D, placement: Placement) -> list[str]:
        """Returns lines of the plan's page."""
        return []

    def work(self, decision: D) -> float:
        """Returns the FLOPs of a step, divided by those of a step without the feature."""
        return 1.0

    def times_used(self, decision: D, name: str) -> float:
        """Returns the expected fraction of steps that read a parameter and reduce its gradient."""
        return 1.0

    def state(
        self, decision: D, trained: Mapping[str, jax.ShapeDtypeStruct], stacks: Stacks
    ) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the feature's part of a state, {parameter: struct like the parameter's}.

        Args:
          decision: decision of the feature.
          trained: trained parameters, under their stored names or under the user's.
          stacks: as in `Facts`.
        """
        return {}

    def begin(
        self, plan: Decisions, decision: D, params: Arrays
    ) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        """Returns (the feature's part of a new state, the parameters of that state), from the
        initial parameters; traced."""
        return {}, dict(params)

    def begun(self, plan: Decisions, decision: D, state: TrainState) -> TrainState:
        """Returns a new state, whose parameters were placed one at a time, with the feature's
        changes."""
        return state

    def pass_options(self, decision: D) -> dict[str, Any]:
        """Returns fields of `passes.PassConfig`."""
        return {}

    def draw(self, plan: Decisions, decision: D, state: TrainState) -> dict[str, jax.Array]:
        """Returns arguments of the gradient function that differ by step; traced."""
        return {}

    def gradients(
        self,
        plan: Decisions,
        decision: D,
        grads: dict[str, jax.Array],
        state: TrainState,
        scale: jax.Array,
    ) -> dict[str, jax.Array]:
        """Returns the gradients that the update reads; traced.

        Args:
          plan: the plan.
          decision: decision of the feature.
          grads: {name: summed gradient with the stored shape, padding included}.
          state: state before the step.
          scale: float32 [], by which gradients are multiplied later: it depends on the weight of
            the batch, on the loss scale and on the number of devices.
        """
        return grads

    def updated(self, plan: Decisions, decision: D, state: TrainState) -> tuple[Any, Any]:
        """Returns (parameters, optimizer state) of a state after an update; traced."""
        return state["params"], state["opt_state"]
