"""Finds the parameters that Muon treats as matrices, and counts the bytes sent to bring each matrix
onto one device for its update.

The traced loss shows which parameters are matrices (`zerojax.tracing.matrix_uses`);
`zerojax.optim.matrices` runs the exchanges.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Collection, Mapping
from typing import Any

import jax
import optax
from jax.sharding import AbstractMesh, Mesh

from zerojax import optim
from zerojax.config.late_dataclasses import dataclass
from zerojax.optim.matrices import MatrixExchange, as_stack, classes_of, exchanges_of, fans
from zerojax.optim.optimizer import Optimizer
from zerojax.placement.decisions import Decisions
from zerojax.placement.device_mesh import REPLICA
from zerojax.placement.state import TrainState
from zerojax.placement.table import Placement, axes_of_dims
from zerojax.tracing.matrix_uses import ParameterUse, find_matrix_uses
from zerojax.tracing.trace import ModelTrace
from zerojax.tracing.trees import format_bytes

DIRECTION_BYTES = 4
"""Number of bytes of one sent element, which is float32."""


@dataclass(frozen=True, kw_only=True)
class MatrixClass:
    """Matrices of an optimizer (Muon) that are distributed over devices together, so that each
    device updates whole matrices.

    Attributes:
      counts: {parameter: number of its matrices in one group of devices}.
      shape: (rows, columns) of one matrix of the first parameter.
      exchanges: one exchange for each dimension that is sharded; () if every device has whole
        matrices.
      per_device: number of matrices that each device multiplies, including padding.
    """

    counts: Mapping[str, int]
    shape: tuple[int, int]
    exchanges: tuple[MatrixExchange, ...]
    per_device: int

    @property
    def devices(self) -> int:
        """Number of devices among which the matrices are distributed."""
        return math.prod(exchange.size for exchange in self.exchanges)

    @property
    def useful(self) -> float:
        """Fraction of the multiplied matrices that are not padding, from 0 to 1."""
        return sum(self.counts.values()) / (self.devices * self.per_device)

    def bytes_over(self, exchange: MatrixExchange) -> float:
        """Returns the bytes that one device sends per step for one exchange, in both directions."""
        return 2 * DIRECTION_BYTES * exchange.elements * (exchange.size - 1) / exchange.size


def with_matrices(tx: optax.GradientTransformation, trace: ModelTrace, placement: Placement) -> Any:
    """Passes the matrices that the traced loss shows to Muon; returns any other optimizer
    unchanged.

    Raises:
      ValueError: there are no matrices, or the loss does not show the matrices of an expert.
    """
    if not isinstance(tx, Optimizer) or tx.with_uses is None:
        return tx
    return tx.with_uses(_uses_of_trained(trace, placement))


def _uses_of_trained(trace: ModelTrace, placement: Placement) -> dict[str, ParameterUse]:
    shapes = {name: leaf.shape for name, leaf in placement.leaves.items()}
    uses = find_matrix_uses(trace.program.jaxpr, shapes)
    return {name: use for name, use in uses.items() if not placement.leaves[name].frozen}


def describe_taken(
    tx: optax.GradientTransformation,
    trace: ModelTrace,
    stored: TrainState,
    placement: Placement,
    stacks: Collection[str],
) -> list[str]:
    """Describes which parameters Muon treats as matrices; returns [] for other optimizers.

    Args:
      tx: the optimizer, of zerojax or optax.
      trace, stored, placement: trace, abstract state and placement table of the plan.
      stacks: names of stacked parameters that the user's own loop slices.
    """
    if not optim.muon_names(stored["opt_state"]):
        return []
    uses, stated = _uses_of_trained(trace, placement), None
    if isinstance(tx, Optimizer) and tx.matrices is not None:
        structs = {n: jax.ShapeDtypeStruct(use.shape, jax.numpy.float32) for n, use in uses.items()}
        stated = tx.matrices(structs)
    return optim.describe_muon(stored["opt_state"], stacks, uses, stated)


def find_classes(
    tx: optax.GradientTransformation,
    stored: TrainState,
    placement: Placement,
    mesh: Mesh | AbstractMesh,
) -> list[MatrixClass]:
    """Returns the groups of matrices that Muon distributes together; [] for other optimizers.

    Args:
      tx: the optimizer.
      stored: abstract state as stored, with shardings.
      placement, mesh: placement table and mesh of the plan.
    """
    if not isinstance(tx, Optimizer) or tx.matrices is None:
        return []
    params = stored["params"]
    users = {
        name: jax.ShapeDtypeStruct(placement.leaves[name].shape, x.dtype)
        for name, x in params.items()
    }
    kinds, dims = tx.matrices(users), axes_of_dims(mesh, params)
    stacks = {
        name: as_stack(params[name].sharding.shard_shape(params[name].shape), dims[name], matrix)
        for name, matrix in sorted(kinds.items())
    }
    sizes = {str(name): size for name, size in mesh.shape.items()}
    found = []
    for names in classes_of(stacks):
        exchanges, per_device = exchanges_of([stacks[name] for name in names], sizes)
        found.append(
            MatrixClass(
                counts={name: stacks[name].count for name in names},
                shape=fans(users[names[0]].shape, kinds[names[0]]),
                exchanges=tuple(exchanges),
                per_device=per_device,
            )
        )
    return found


def classes_of_plan(plan: Decisions) -> list[MatrixClass]:
    """Returns the groups of matrices that a plan's optimizer distributes over devices together."""
    return find_classes(plan.tx, plan.abstract_stored, plan.placement, plan.mesh)


def matrix_bytes(plan: Decisions) -> dict[str, int]:
    """Returns {mesh axes, as in "data+context": bytes that one device sends over them per step}."""
    sent: collections.Counter[str] = collections.Counter()
    for one in classes_of_plan(plan):
        for exchange in one.exchanges:
            sent["+".join(exchange.axes)] += round(one.bytes_over(exchange))
    return dict(sent)


def exchanges_of_parameter(plan: Decisions, name: str) -> list[tuple[tuple[str, ...], float]]:
    """Returns [(mesh axes, bytes that one device sends for a parameter's matrices per step)]."""
    return [
        (exchange.axes, one.bytes_over(exchange) * one.counts[name] / sum(one.counts.values()))
        for one in classes_of_plan(plan)
        if name in one.counts
        for exchange in one.exchanges
    ]


def describe_matrices(
    tx: Any,
    stored: TrainState,
    placement: Placement,
    mesh: Mesh | AbstractMesh,
) -> list[str]:
    """Describes how matrices are distributed over devices, and which work is repeated; returns []
    on one device."""
    classes = find_classes(tx, stored, placement, mesh)
    if mesh.size == 1 or not classes:
        return []
    lines = []
    dealt = [one for one in classes if one.exchanges]
    if dealt:
        count = sum(sum(one.counts.values()) for one in dealt)
        sent = sum(one.bytes_over(exchange) for one in dealt for exchange in one.exchanges)
        work = [one.devices * one.per_device * _work(one.shape) for one in dealt]
        useful = math.fsum(w * one.useful for w, one in zip(work, dealt, strict=True)) / sum(work)
        axes = sorted(
            {axis for one in dealt for exchange in one.exchanges for axis in exchange.axes}
        )
        lines.append(
            f"{tx.kernel}: {count} matrices ({len(dealt)} class{'es' if len(dealt) > 1 else ''} of "
            f"equal shape) are distributed over {', '.join(axes)} and multiplied by one device "
            f"each: {format_bytes(sent)} sent in float32; {useful:.0%} of the products are not "
            "padding"
        )
    whole = {
        name: number for one in classes if not one.exchanges for name, number in one.counts.items()
    }
    if whole:
        lines.append(
            f"{tx.kernel}: {sum(whole.values())} matrices, such as those of {min(whole)}, are "
            "unsharded on "
            "every device, and each device multiplies them"
        )
    if dealt and mesh.shape.get(REPLICA, 1) > 1:
        lines.append(f"{tx.kernel}: each of {mesh.shape[REPLICA]} replicas multiplies all matrices")
    return lines


def _work(shape: tuple[int, int]) -> int:
    """Returns the relative cost of updating one matrix."""
    short, long = sorted(shape)
    return 2 * short * short * long + short**3
