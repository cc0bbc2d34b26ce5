"""Fields of a plan: every decision about a run before its first array exists."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax
from jax.extend.core import Jaxpr
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.choice import Choice
from zerojax.config import MeshConfig
from zerojax.config.batch_division import BatchDivision
from zerojax.config.late_dataclasses import dataclass
from zerojax.config.tree_types import Tree
from zerojax.models.adapt import bound_attribute
from zerojax.models.batch_weight import BatchWeight
from zerojax.operators.attending import Call
from zerojax.operators.context import ContextSplit
from zerojax.optim import Schedule
from zerojax.optim.precision import Precision
from zerojax.placement.device_mesh import DATA_AXES, num_data_shards
from zerojax.placement.layer_stacks import Stacks, row_placement
from zerojax.placement.state import OPTIONAL_PARTS, TrainState
from zerojax.placement.state_layout import LayerTiles, OffloadLayout, PipelineLayout
from zerojax.placement.table import Placement
from zerojax.tracing import trees
from zerojax.tracing.index_limits import IndexLimit
from zerojax.tracing.protocol import Loss, Model
from zerojax.tracing.rolling import RolledModel


@dataclass(frozen=True, kw_only=True)
class TracedLoss:
    """Facts from tracing the loss of one microbatch on one data shard.

    Attributes:
      forward: jaxpr of the forward pass, for counting.
      index_limits: {array of the batch: upper bounds for its integers that index rows of a
        parameter}.
      exact_leaves: {floating-point array of the batch whose exact values matter: why}.
      has_weight: whether the loss returns (sum, weight) instead of a mean.
      metric_names: names of the loss's own metrics, sorted.
      counted_state: names of arrays of the model's state to which a step adds sums over the batch.
      written_state: names of arrays of the model's state whose new values depend on the batch.
      attention_calls: calls of `zerojax.attention`, each distinct call once.
      batch_weight: weight by which the loss of a batch is divided before the backward pass, for a
        model with custom derivatives. None: gradients are divided after the backward pass, which is
        equal if the backward pass is linear.
    """

    forward: Jaxpr
    index_limits: Mapping[str, tuple[IndexLimit, ...]]
    exact_leaves: Mapping[str, str]
    has_weight: bool
    metric_names: tuple[str, ...]
    counted_state: frozenset[str]
    written_state: frozenset[str]
    attention_calls: tuple[Call, ...]
    batch_weight: BatchWeight | None


@dataclass(frozen=True, kw_only=True)
class ProgramChoices:
    """Choices for compiling the step on the plan's devices.

    Attributes:
      options: compiler options that are known to help.
      dropped: {compiler option: reason why this compiler does not use it}.
      kernels: {"update" or "statistics" (of the gradients): Pallas kernel or XLA, and the reason}.
        After a measurement also {kind of attention call: implementation}.
      regather: whether the backward pass gathers parameters again (zero=3).
      unroll: whether loops over layers are unrolled.
    """

    options: Mapping[str, Any]
    dropped: Mapping[str, str]
    kernels: Mapping[str, Choice]
    regather: bool
    unroll: bool


@dataclass(frozen=True, kw_only=True, repr=False)
class Decisions:
    """All decisions about a run, made before the first array exists.

    Attributes:
      mesh: `Mesh` of the devices, or `AbstractMesh` if the devices do not exist here.
      model: the package's own representation of the user's model.
      loss: function `loss(model, batch)`.
      settings: mesh options in which every size is resolved.
      placement: placement table with one row per parameter.
      precision: dtypes of computation, storage and communication.
      tx: the optimizer.
      learning_rate: learning rate as a function of the number of applied updates; None if unknown.
      num_microbatches: number of parts into which a device's rows are split.
      pipeline: layers of each pipeline stage, and the schedule; None with one stage.
      context: layout of sequences over the axis `context`; None if no sequence is split.
      offload: slices of offloaded state and the memory of each; None without offload.
      abstract_state: `TrainState` of `ShapeDtypeStruct`s with shardings, in the form in which the
        run stores it.
      abstract_stored: the state with every parameter and moment uncut on the device; without
        offload the same object as abstract_state.
      stacks: {stacked parameter of rolled layers: the user's names of its rows, in order}; {} if no
        layers are rolled, which means run as one loop. Placement, state and step use stacked
        parameters; users see rows.
      abstract_portable: the state with unpadded shapes, the user's names and evenly dividing
        shardings, which is the form in checkpoints and for resharding.
      abstract_batch: the global batch, with shardings.
      traced: facts from the trace of the loss.
      program: choices for compiling the step.
      reasons: lines that explain each default or exception that a reader should know.
      remake: function that plans the same run on another mesh.
      tiles: layer weights that are gathered in tiles.
      features: {optional feature of the run: its decision} (`features.known.plan_features`).
      ladder: compiled sizes of steps (`features.several_sizes.Ladder`); None if all have one size,
        or before `rung_plans.with_rungs` has planned them.
    """

    mesh: Mesh | AbstractMesh
    model: Model
    loss: Loss
    settings: MeshConfig
    placement: Placement
    precision: Precision
    tx: optax.GradientTransformation
    learning_rate: Schedule | None
    num_microbatches: int
    pipeline: PipelineLayout | None
    context: ContextSplit | None
    offload: OffloadLayout | None
    abstract_state: TrainState
    abstract_stored: TrainState
    stacks: Stacks
    abstract_portable: TrainState
    abstract_batch: Tree
    traced: TracedLoss
    program: ProgramChoices
    reasons: tuple[str, ...]
    remake: Callable[[Mesh | AbstractMesh], Any] = dataclasses.field(repr=False, compare=False)
    tiles: LayerTiles = dataclasses.field(default_factory=LayerTiles)
    features: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    ladder: Any = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def zero(self) -> int:
        """The ZeRO stage, 0 to 3."""
        return self.settings.zero

    @property
    def state_shardings(self) -> Tree:
        """Sharding of every array in `plan.abstract_state`."""
        return jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state)

    @property
    def batch_sharding(self) -> NamedSharding:
        """Sharding of every array of a batch: dimension 0 is split over the data axes."""
        return NamedSharding(self.mesh, P(DATA_AXES))

    @property
    def users_model(self) -> Model:
        """The user's own model, whose parameters have the user's names."""
        return self.model.inner if isinstance(self.model, RolledModel) else self.model

    @property
    def users_placement(self) -> Placement:
        """Placement table with one row per parameter of the user's model; stacked parameters of
        rolled layers are split into rows."""
        return row_placement(self.placement, self.stacks) if self.stacks else self.placement

    @property
    def division(self) -> BatchDivision:
        """Division of a batch over data shards and microbatches."""
        return BatchDivision(num_data_shards(self.mesh), self.num_microbatches)

    @property
    def global_batch_size(self) -> int:
        """Number of rows of a batch over all devices."""
        return jax.tree.leaves(self.abstract_batch)[0].shape[0]

    @property
    def vocab_size(self) -> int | None:
        """`config.vocab_size` of the model; None if the model has none."""
        return getattr(bound_attribute(self.model, "config"), "vocab_size", None)

    @property
    def fingerprint(self) -> str:
        """Hash of the names, shapes and dtypes of the state, the same on every mesh.

        `OPTIONAL_PARTS` of the state are left out. `reshard` requires equal fingerprints.
        """
        state = {
            name: x for name, x in self.abstract_portable.items() if name not in OPTIONAL_PARTS
        }
        leaves = trees.flatten_names(state)
        rows = [[name, list(leaf.shape), leaf.dtype.name] for name, leaf in leaves.items()]
        return hashlib.sha256(json.dumps(sorted(rows)).encode()).hexdigest()[:16]
