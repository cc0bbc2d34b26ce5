"""Text, table and JSON of a plan."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from zerojax.config.display import printable
from zerojax.models import trees
from zerojax.plan.counts import role_bytes, role_tiers, state_bytes
from zerojax.plan.decisions import Decisions
from zerojax.plan.leaf import Access
from zerojax.plan.liveness import straight_pieces, unrolled
from zerojax.plan.mesh import MODEL, describe_mesh
from zerojax.plan.placement_table import Placement
from zerojax.plan.show_offload import offload_dict, offload_lines, offload_words, tier_lines
from zerojax.plan.show_pipeline import pipeline_dict, pipeline_line, pipeline_lines

_NAMES = 3
"""Of a reason that several parameters share, so many are named."""


def plan_line(plan: Decisions) -> str:
    """One line: model size, mesh, ZeRO, precision, batch, pipeline, bytes of state per device."""
    counts = trees.format_count(plan.placement.num_parameters())
    state = trees.format_bytes(state_bytes(plan))
    batch = f"batch {plan.global_batch_size}"
    if plan.num_microbatches > 1:
        batch += f" in {plan.num_microbatches} microbatches"
    if plan.pipeline is not None:
        batch += f", {pipeline_line(plan.pipeline)}"
    return (
        f"{counts} parameters, mesh {describe_mesh(plan.mesh)}, zero={plan.zero}, "
        f"{jnp.dtype(plan.precision.compute_dtype).name}, {batch}, {state} of state per device"
        f"{offload_words(plan)}{_deterministic_words(plan)}"
    )


def _deterministic_words(plan: Decisions) -> str:
    if plan.settings.deterministic is None:
        return ""
    return f", deterministic over meshes: {plan.settings.virtual_shards} virtual shards"


def plan_table(plan: Decisions) -> str:
    """One page: bytes by role, the pipeline, one line per parameter, every exception and reason."""
    lines = [plan_line(plan), ""]
    if plan.offload is None:
        lines += _role_lines(plan)
    else:
        lines += [*tier_lines(role_tiers(plan)), "", *offload_lines(plan)]
    if plan.pipeline is not None:
        lines += ["", *pipeline_lines(plan.pipeline, plan.placement)]
    lines += ["", *_leaf_lines(plan)]
    exceptions = _exception_lines(plan.placement)
    if exceptions:
        lines += ["", "exceptions", *exceptions]
    lines += ["", "why", *(f"  {printable(reason)}" for reason in plan.reasons)]
    return "\n".join(lines)


def _role_lines(plan: Decisions) -> list[str]:
    roles = role_bytes(plan)
    lines = ["bytes per device"]
    for role, count in roles.items():
        if count or role in ("master weights", "optimizer state"):
            lines.append(f"  {role:<18} {trees.format_bytes(count):>11}")
    total = trees.format_bytes(sum(roles.values()))
    return [*lines, f"  {'sum':<18} {total:>11}  + activations"]


def _exception_lines(placement: Placement) -> list[str]:
    """One line per reason, with how many parameters it is of and the names of some."""
    names: dict[str, list[str]] = {}
    for name, reason in placement.exceptions():
        names.setdefault(reason, []).append(name)
    lines = []
    for reason, found in names.items():
        some = ", ".join(found[:_NAMES])
        if len(found) > _NAMES:
            some = f"{len(found)} parameters ({some}, ...)"
        lines.append(f"  {printable(some)}: {printable(reason)}")
    return lines


def _leaf_lines(plan: Decisions) -> list[str]:
    placement: Placement = plan.placement
    pieces = straight_pieces(plan.traced.forward.jaxpr)
    together = unrolled(placement, pieces)
    waiting = unrolled(placement, pieces, Access.GATHER_ONCE_SCATTER_EARLY)
    rows = [("parameter", "shape", "stored as", "per device", "read")]
    for leaf in placement.leaves.values():
        spec = ", ".join(map(_axis_words, leaf.stored_spec)) or "whole"
        size = trees.format_bytes(placement.shard_elements(leaf) * 4)
        access = "frozen, " * leaf.frozen + leaf.access.value
        access += ", all at once" * (leaf.name in together)
        access += ", gradients at once" * (leaf.name in waiting and not leaf.frozen)
        rows.append(
            (printable(leaf.name), "x".join(map(str, leaf.shape)) or "scalar", spec, size, access)
        )
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _axis_words(axes: Any) -> str:
    return "+".join(axes) if isinstance(axes, tuple) else axes or "-"


def plan_dict(plan: Decisions) -> dict[str, Any]:
    """The same as JSON takes it."""
    placement: Placement = plan.placement
    return {
        "summary": plan_line(plan),
        "fingerprint": plan.fingerprint,
        "mesh": dict(plan.mesh.shape),
        "zero": plan.zero,
        "precision": {
            name: jnp.dtype(getattr(plan.precision, name)).name
            for name in ("param_dtype", "compute_dtype", "reduce_dtype", "accumulate_dtype")
        },
        "num_microbatches": plan.num_microbatches,
        "deterministic": plan.settings.deterministic,
        "virtual_shards": plan.settings.virtual_shards if plan.settings.deterministic else None,
        "global_batch_size": plan.global_batch_size,
        "num_parameters": placement.num_parameters(),
        "num_frozen_parameters": placement.num_parameters(frozen=True),
        "tensor_parallel": placement.axis_sizes[MODEL],
        "bytes_per_device": role_bytes(plan),
        "offload": offload_dict(plan),
        "pipeline": None if plan.pipeline is None else pipeline_dict(plan.pipeline, placement),
        "parameters": [
            {
                "name": leaf.name,
                "shape": list(leaf.shape),
                "stored_shape": list(leaf.stored_shape),
                "spec": list(leaf.stored_spec),
                "access": leaf.access.value,
                "frozen": leaf.frozen,
                "reasons": list(leaf.reasons),
            }
            for leaf in placement.leaves.values()
        ],
        "reasons": list(plan.reasons),
    }
