"""Fields of a plan: every decision about a run before its first array exists."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.choice import Choice
from zerojax.config import MeshConfig
from zerojax.models import trees
from zerojax.models.adapt import bound_attribute
from zerojax.models.attending import Call
from zerojax.models.batch_weight import BatchWeight
from zerojax.models.context import ContextSplit
from zerojax.models.index_limits import IndexLimit
from zerojax.models.protocol import Loss, Model
from zerojax.models.rolling import RolledModel
from zerojax.optim import Schedule
from zerojax.optim.precision import Precision
from zerojax.plan.device_mesh import DATA_AXES
from zerojax.plan.layer_stacks import Stacks, row_placement
from zerojax.plan.placement import Placement
from zerojax.plan.state import COPIES, ONE_BIT, TrainState
from zerojax.plan.state_layout import OffloadLayout, PipelineLayout

Tree = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class TracedLoss:
    """Facts that tracing the loss of one microbatch on one data shard has shown.

    Attributes:
      forward: the forward pass (a jaxpr), for counting.
      index_limits: bounds of the integers of a batch that look up rows of a parameter.
      has_weight: whether the loss returns a weight beside its sum.
      metric_names: names of the own metrics that the loss returns, sorted.
      counted_state: names of the model's state to which a step adds sums over the batch.
      attention_calls: calls of `zerojax.attention`, each kind once.
      batch_weight: the weight of a batch, by which its loss is divided before the backward pass,
        for a model with derivatives of its own; None: gradients are divided after it, which is the
        same where the backward pass is linear.
    """

    forward: Any
    index_limits: Mapping[str, tuple[IndexLimit, ...]]
    has_weight: bool
    metric_names: tuple[str, ...]
    counted_state: frozenset[str]
    attention_calls: tuple[Call, ...]
    batch_weight: BatchWeight | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramChoices:
    """Choices with which the step is compiled, on the devices of the plan.

    Attributes:
      options: of the compiler, where it is known what helps.
      dropped: compiler option -> why this compiler goes without it.
      kernels: "update" and "statistics" (of the gradients) -> kernel or XLA, and why. Where it was
        measured, also the kind of a call of attention -> its implementation.
      regather: whether the backward pass gathers parameters again (zero=3, see `zero`).
    """

    options: Mapping[str, Any]
    dropped: Mapping[str, str]
    kernels: Mapping[str, Choice]
    regather: bool


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Decisions:
    """Everything that is decided before the first array exists.

    Attributes:
      mesh: `Mesh`, or `AbstractMesh` for absent devices.
      model: the internal form of the model; loss: `loss(model, batch)`.
      settings: the mesh options with every size resolved.
      placement: the table, one row per parameter.
      precision: the dtypes.
      tx: the optimizer; learning_rate: its schedule over updates applied, where it is known.
      num_microbatches: pieces a device's rows are cut into.
      pipeline: how the layers lie on stages and which schedule runs them; None with one stage.
      context: how sequences lie over the axis `context`; None where each is whole on its device.
      offload: what lies outside device memory, in which slices; None where nothing does.
      abstract_state: `TrainState` of `ShapeDtypeStruct`s with shardings, as it lies in memory.
      abstract_stored: the same with every parameter and moment in one piece on the device; without
        offload the same object.
      stacks: {name of stored layers of a rolled list: the user's names of its rows, in order}; {}
        where nothing is rolled. Placement, state and step have stacks, everything that a user sees
        has rows.
      abstract_canonical: the same with true shapes, the user's names and evenly dividing shardings:
        the form on disk and between two plans.
      abstract_batch: the global batch, with shardings.
      traced: what the trace of the loss showed.
      program: the choices with which the step is compiled.
      reasons: one line per default or exception that a reader should know.
      remake: makes the same plan for another mesh.
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
    abstract_canonical: TrainState
    abstract_batch: Tree
    traced: TracedLoss
    program: ProgramChoices
    reasons: tuple[str, ...]
    remake: Callable[[Mesh | AbstractMesh], Any] = dataclasses.field(repr=False, compare=False)

    @property
    def zero(self) -> int:
        """The ZeRO stage, 0 to 3."""
        return self.settings.zero

    @property
    def state_shardings(self) -> Tree:
        """The sharding of every leaf of `plan.abstract_state`."""
        return jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state)

    @property
    def batch_sharding(self) -> NamedSharding:
        """Dimension 0 over the data axes; fits every leaf of a batch."""
        return NamedSharding(self.mesh, P(DATA_AXES))

    @property
    def users_model(self) -> Model:
        """The model as the user wrote it, whose arrays have the user's names."""
        return self.model.inner if isinstance(self.model, RolledModel) else self.model

    @property
    def users_placement(self) -> Placement:
        """The table with one row per parameter of the model, where some are stored stacked."""
        return row_placement(self.placement, self.stacks) if self.stacks else self.placement

    @property
    def global_batch_size(self) -> int:
        """Rows of a batch over all devices."""
        return jax.tree.leaves(self.abstract_batch)[0].shape[0]

    @property
    def vocab_size(self) -> int | None:
        """Token ids that the model knows, where it says so: its `config.vocab_size`."""
        return getattr(bound_attribute(self.model, "config"), "vocab_size", None)

    @property
    def fingerprint(self) -> str:
        """Changes with the names, shapes or dtypes of the canonical state; not with the mesh."""
        others = (ONE_BIT, COPIES)
        state = {name: x for name, x in self.abstract_canonical.items() if name not in others}
        leaves = trees.flatten_names(state)
        rows = [[name, list(leaf.shape), leaf.dtype.name] for name, leaf in leaves.items()]
        return hashlib.sha256(json.dumps(sorted(rows)).encode()).hexdigest()[:16]
