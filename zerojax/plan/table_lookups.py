"""Chooses the tables whose rows are fetched from the devices that store them, instead of gathering
the table (`mesh.lookup: owners`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh

from zerojax.config import MeshConfig
from zerojax.config.late_dataclasses import dataclass
from zerojax.optim import Optimizer
from zerojax.optim.precision import Precision
from zerojax.placement.device_mesh import AXES, DATA, DATA_AXES, EXPERT
from zerojax.placement.table import Placement
from zerojax.tracing.row_lookups import RowReads, find_row_lookups
from zerojax.tracing.trace import ModelTrace
from zerojax.tracing.trees import format_bytes, num_elements

_ASKED = "lookup=owners"
_ONE_DEVICE = tuple(axis for axis in AXES if axis not in DATA_AXES or axis == EXPERT)
"""Mesh axes that must have size 1 for lookup=owners."""


def check_lookup(settings: MeshConfig, mesh: Mesh | AbstractMesh, precision: Precision) -> None:
    """Raises if `lookup=owners` is combined with settings that are unsupported or could change the
    results.

    Args:
      settings: mesh options.
      mesh: the device mesh.
      precision: the user's setting of precision.

    Raises:
      ValueError: the message states the conflicting setting and the remedy.
    """
    if settings.lookup != "owners":
        return
    codes = getattr(precision, "freeze_codes", None)
    others = {
        **{f"{axis}={mesh.shape[axis]}": mesh.shape[axis] > 1 for axis in _ONE_DEVICE},
        f"deterministic={settings.deterministic!r}": settings.deterministic is not None,
        "offload": not settings.offload.is_off,
        f"freeze_codes={codes!r}": codes is not None,
        f"wire.weights={settings.wire.weights}": settings.wire.weights != "compute",
    }
    for what, is_there in others.items():
        if is_there:
            raise ValueError(
                f"{_ASKED} with {what} is not supported; leave {what} out, or use lookup=gather"
            )


def check_update_of_tables(placement: Placement, tx: optax.GradientTransformation) -> None:
    """Raises if the optimizer's update could differ with `lookup=owners`.

    Raises:
      ValueError: the update of an element depends on other elements of the shard.
    """
    looked_up = any(leaf.row_reads is not None for leaf in placement.leaves.values())
    if looked_up and isinstance(tx, Optimizer) and getattr(tx, "begin", None) is None:
        raise ValueError(
            f"{_ASKED} is not supported with the optimizer {tx.kernel}, whose update of one "
            "element depends on other elements; use zerojax.adamw, lion or sgd, or lookup=gather"
        )


@dataclass(frozen=True)
class Lookups:
    """Tables whose rows are looked up on the devices that store them.

    Attributes:
      row_reads: {table: rows looked up on a device per microbatch}.
      reasons: sentences about these tables, and about every other table.
    """

    row_reads: Mapping[str, RowReads] = dataclasses.field(default_factory=dict)
    reasons: tuple[str, ...] = ()


def plan_lookups(
    params: Mapping[str, Any],
    trace: ModelTrace,
    settings: MeshConfig,
    mesh: Mesh | AbstractMesh,
    *,
    precision: Precision,
    num_microbatches: int,
    frozen: Collection[str] = (),
) -> Lookups:
    """Chooses the tables whose rows are looked up on the devices that store them.

    A table is chosen if the traced loss uses it only to take whole rows by integers, and if that
    sends fewer bytes than gathering the table.

    Args:
      params: {name: abstract parameter}.
      trace: trace of the loss on one microbatch.
      settings, mesh, precision, num_microbatches: mesh options, mesh, dtypes and number of
        microbatches of the run.
      frozen: names of the parameters without gradient.
    """
    if settings.lookup != "owners":
        return Lookups()
    if settings.zero == 0 or mesh.shape[DATA] == 1:
        why = "the data axis has one device" if settings.zero else "zero=0 does not shard tables"
        return Lookups(reasons=(f"{_ASKED} has no effect: {why}",))
    found = find_row_lookups(trace.program.jaxpr, sorted(params))
    if not found.row_reads:
        return Lookups(reasons=(f"{_ASKED} has no effect: the loss looks up rows of no parameter",))
    asked: dict[str, RowReads] = {}
    lines = []
    for name, rows in sorted(found.row_reads.items()):
        sent = _Sent.of(precision, is_frozen=name in frozen)
        costs = sent.costs(params[name].shape, rows, settings.zero, num_microbatches)
        elsewhere = found.elsewhere.get(name) or trace.barriers.get(name)
        if elsewhere is not None:
            why = f"it {elsewhere}"
        else:
            why = _why_not(params[name], settings, mesh, costs)
        if why is None:
            asked[name] = rows
            lines.append(
                f"{_ASKED}: {name} is never gathered, and only rows of it and of its gradient "
                "are sent, "
                f"{costs.words(mesh.shape[DATA])}"
            )
        else:
            lines.append(f"{_ASKED}: {name} is still gathered: {why}")
    return Lookups(asked, tuple(lines))


@dataclass(frozen=True)
class _Costs:
    """Bytes that one device sends for a table in a step: with lookups of rows, and with gathering.

    On N devices the bytes actually sent are (N-1)/N of these numbers.
    """

    looked_up: int
    gathered: int

    def words(self, devices: int) -> str:
        sent = [format_bytes(x * (devices - 1) / devices) for x in (self.looked_up, self.gathered)]
        return f"{sent[0]} sent by each device in a step instead of {sent[1]}"


@dataclass(frozen=True)
class _Sent:
    """Bytes per element of a table's rows when they are sent to the reader, and of their gradients
    when sent back."""

    there: int
    back: int

    @staticmethod
    def of(precision: Precision, *, is_frozen: bool) -> _Sent:
        compute, reduce = (jnp.dtype(x) for x in (precision.compute_dtype, precision.reduce_dtype))
        return _Sent(compute.itemsize, 0 if is_frozen else reduce.itemsize)

    def costs(
        self, shape: tuple[int, ...], asked: RowReads, zero: int, num_microbatches: int
    ) -> _Costs:
        # The backward pass does not read the table, so at stage 3 it is gathered only once, too.
        gathers, scatters = (num_microbatches if zero >= stage else 1 for stage in (3, 2))
        rows = (asked.rows + asked.again) * self.there + asked.rows * self.back
        return _Costs(
            looked_up=num_microbatches * rows * shape[-1],
            gathered=num_elements(shape) * (gathers * self.there + scatters * self.back),
        )


def _why_not(
    param: jax.ShapeDtypeStruct, settings: MeshConfig, mesh: Mesh | AbstractMesh, costs: _Costs
) -> str | None:
    if not jnp.issubdtype(param.dtype, jnp.floating):
        return f"its dtype is {param.dtype.name}"
    size = num_elements(param.shape)
    if settings.zero == 3 and size < settings.persistence_threshold:
        return f"it has fewer elements than persistence_threshold {settings.persistence_threshold}"
    if param.shape[-1] % mesh.shape[DATA]:
        return f"data={mesh.shape[DATA]} does not divide its {param.shape[-1]} columns"
    if costs.looked_up >= costs.gathered:
        return (
            f"the rows of a step are {format_bytes(costs.looked_up)}, the table and its gradient "
            f"{format_bytes(costs.gathered)}"
        )
    return None
