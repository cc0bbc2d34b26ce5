"""Formats a plan as one line, as a page of text with its offload section, and as a dictionary for
JSON."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from zerojax.config.display import printable
from zerojax.config.mesh import DEVICE, HOST, NVME, TIERS
from zerojax.optim.weight_codes import FROZEN_CODES
from zerojax.pipeline.pipeline_page import pipeline_dict, pipeline_line, pipeline_lines
from zerojax.placement.decisions import Decisions
from zerojax.placement.device_mesh import MODEL, describe_mesh
from zerojax.placement.state_layout import OffloadLayout
from zerojax.placement.table import Placement, straight_pieces, unrolled
from zerojax.plan.counts import (
    Tiers,
    active_parameters,
    role_bytes,
    role_tiers,
    state_bytes,
    tokens_per_step,
)
from zerojax.plan.expert_costs import costs_dict, expert_lines
from zerojax.plan.offload_costs import Hiding, Moved, card_of, hiding, moved_bytes, redone_bytes
from zerojax.tracing import trees

_NAMES = 3
"""Largest number of parameters that a page lists for one reason."""

WIDTH = 98
"""Number of columns of the offload section; a forecast's page indents the section by two more."""
NAMES = {DEVICE: "device", HOST: "host", NVME: "disk"}
ROLE, CELL = 18, 11


def plan_line(plan: Decisions) -> str:
    """Formats a plan as one line: size, mesh, ZeRO stage, precision, batch, pipeline, and bytes of
    state per device."""
    counts = trees.format_count(plan.placement.num_parameters())
    active = active_parameters(plan)
    met = "" if active is None else f" ({trees.format_count(active)} for each token)"
    state = trees.format_bytes(state_bytes(plan))
    batch = f"batch {plan.global_batch_size}"
    if plan.num_microbatches > 1:
        batch += f" in {plan.num_microbatches} microbatches"
    if plan.pipeline is not None:
        batch += f", {pipeline_line(plan.pipeline)}"
    return (
        f"{counts} parameters{met}, mesh {describe_mesh(plan.mesh)}, zero={plan.zero}, "
        f"{jnp.dtype(plan.precision.compute_dtype).name}, {batch}, {state} of state per device"
        f"{offload_words(plan)}{_deterministic_words(plan)}"
    )


def _deterministic_words(plan: Decisions) -> str:
    pieces = plan.settings.fixed_pieces
    return "" if pieces is None else f", deterministic over meshes: {pieces} virtual shards"


def plan_table(plan: Decisions) -> str:
    """Formats a plan as one page: bytes by role, the pipeline, each parameter, and every exception
    and reason."""
    lines = [plan_line(plan), ""]
    if plan.offload is None:
        lines += _role_lines(plan)
    else:
        lines += [*tier_lines(role_tiers(plan)), "", *offload_lines(plan)]
    if plan.pipeline is not None:
        lines += ["", *pipeline_lines(plan.pipeline, plan.placement)]
    experts = costs_dict(plan)
    if experts is not None:
        lines += ["", *expert_lines(experts)]
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
    """Formats one line for each reason of exceptions, with names of its parameters."""
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
    waiting = unrolled(placement, pieces, gradients=True)
    rows = [("parameter", "shape", "stored as", "per device", "read")]
    for leaf in placement.leaves.values():
        spec = ", ".join(map(_axis_words, leaf.stored_spec)) or "whole"
        stored = plan.abstract_stored["frozen" if leaf.frozen else "params"][leaf.name]
        size = trees.format_bytes(placement.shard_elements(leaf) * stored.dtype.itemsize)
        coded = "" if leaf.codes is None else f"{leaf.codes.kind}, "
        access = "frozen, " * leaf.frozen + coded + leaf.access.value
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
    """Returns the plan as a JSON-compatible dictionary."""
    placement: Placement = plan.placement
    return {
        "summary": plan_line(plan),
        "fingerprint": plan.fingerprint,
        "mesh": dict(plan.mesh.shape),
        "zero": plan.zero,
        "precision": {
            name: jnp.dtype(getattr(plan.precision, name)).name
            for name in ("param_dtype", "compute_dtype", "reduce_dtype", "accumulate_dtype")
        }
        | {"freeze_dtype": plan.precision.freeze_codes or plan.precision.frozen_dtype.name},
        "num_microbatches": plan.num_microbatches,
        "kernels": {what: one.implementation for what, one in plan.program.kernels.items()},
        "deterministic": plan.settings.deterministic,
        "virtual_shards": plan.settings.fixed_pieces,
        "global_batch_size": plan.global_batch_size,
        "num_parameters": placement.num_parameters(),
        "num_frozen_parameters": placement.num_parameters(frozen=True),
        "num_active_parameters": active_parameters(plan) or placement.num_parameters(),
        "tensor_parallel": placement.axis_sizes[MODEL],
        "bytes_per_device": role_bytes(plan),
        "experts": costs_dict(plan),
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
    } | _codes_dict(plan)


def _codes_dict(plan: Decisions) -> dict[str, Any]:
    """Returns {"frozen_codes": {user's name: its codes}}, which exports read; {} without quantized
    parameters."""
    found = {
        name: dataclasses.asdict(leaf.codes)
        for name, leaf in plan.users_placement.leaves.items()
        if leaf.codes is not None
    }
    return {FROZEN_CODES: found} if found else {}


def offload_words(plan: Decisions) -> str:
    """Describes the state outside device memory, as the end of a plan's line; "" if there is
    none."""
    if plan.offload is None:
        return ""
    places = {HOST: "in host memory", NVME: "on disk"}
    sizes = {tier: state_bytes(plan, tier) for tier in places}
    return "".join(
        f", {trees.format_bytes(size)} {places[tier]}" for tier, size in sizes.items() if size
    )


def tier_lines(roles: Mapping[str, Tiers]) -> list[str]:
    """Formats a table of bytes per device by role and memory, with their sums."""
    used = [tier for tier in TIERS if tier == DEVICE or any(t.get(tier) for t in roles.values())]
    head = "".join(f" {NAMES[tier]:>{CELL}}" for tier in used)
    lines = [f"{'bytes per device':<{ROLE + 2}}{head}"]
    for role, tiers in roles.items():
        if any(tiers.values()):
            lines.append(f"  {role:<{ROLE}}{_cells(tiers, used)}".rstrip())
    total = {tier: sum(tiers.get(tier, 0) for tiers in roles.values()) for tier in used}
    return [*lines, f"  {'sum':<{ROLE}}{_cells(total, used)}  + activations on the device"]


def _cells(tiers: Tiers, used: Sequence[str]) -> str:
    sizes = [trees.format_bytes(tiers[tier]) if tiers.get(tier) else "-" for tier in used]
    return "".join(f" {size:>{CELL}}" for size in sizes)


def offload_lines(plan: Decisions) -> list[str]:
    """Formats the offload section of a plan's page: transfers, slices, and the time that transfers
    take."""
    layout, moved = plan.offload, moved_bytes(plan)
    assert layout is not None
    lines = moved_lines(moved)
    if layout.leaves:
        lines += _wrap(_slices_sentence(layout))
    if layout.update_in_backward and layout.paged:
        again = redone_bytes(plan)
        lines += _wrap(
            f"layers are updated in the backward pass, {layout.slices_at_once} slices at a time, "
            "as if gradients were not clipped; a clipped step is updated once more from the "
            f"previous generation of the files: {trees.format_bytes(again.read)} more read, "
            f"{trees.format_bytes(again.written)} more written, after the backward pass"
        )
    card = card_of(plan)
    found = None if card is None else hiding(plan, card)
    if found is not None:
        lines += hiding_lines(found, tokens_per_step(plan))
    elif moved:
        lines += _wrap(
            "which transfers overlap with products depends on the GPU: "
            "see `zerojax plan --gpu NAME`"
        )
    return lines


def moved_lines(moved: Sequence[Moved]) -> list[str]:
    """Formats a table of the bytes that offload transfers per step on one device, by purpose."""
    head = "".join(f" {name:>{CELL}}" for name in ("to device", "to host"))
    lines = [f"{'offload, per step':<{ROLE + 2}}{head}"]
    rows = [(part.what, (part.to_device, part.to_host)) for part in moved]
    sums = sum(part.to_device for part in moved), sum(part.to_host for part in moved)
    for what, sizes in [*rows, ("sum", sums)]:
        cells = [trees.format_bytes(size) if size else "-" for size in sizes]
        lines.append(f"  {what:<{ROLE}}" + "".join(f" {cell:>{CELL}}" for cell in cells))
    read, written = sum(part.read for part in moved), sum(part.written for part in moved)
    if read or written:
        lines.append(
            f"  files: {trees.format_bytes(read)} read, {trees.format_bytes(written)} written"
        )
    return lines


def hiding_lines(found: Hiding, tokens: int | None) -> list[str]:
    """Describes the shortest time of transfers, and the number of tokens with which products take
    as long."""
    rates = found.rates
    sentence = f"link at {_rate(rates.to_device)} and {_rate(rates.to_host)} ({rates.link})"
    if found.disk_seconds is None:
        sentence += f"; {rates.disk_source}"
    elif found.disk_seconds:
        assert rates.disk is not None
        sentence += f"; disk at {_rate(rates.disk)}, {rates.disk_source}"
    lines = _wrap(sentence)
    seconds = []
    if found.update_seconds:
        where = "longer than the forward pass" if found.in_forward else "after the backward pass"
        seconds.append(f"{_seconds(found.update_seconds)} for the update, {where}")
    if found.stream_seconds:
        seconds.append(f"{_seconds(found.stream_seconds)} beside forward and backward")
    lines += _wrap(f"at best {', '.join(seconds)}")
    rate = f"{found.flops / 1e12:.0f} TFLOP/s, half of the GPU's peak"
    if found.disk_seconds is None:
        return lines
    if found.tokens is None:
        return [
            *lines,
            *_wrap(f"with products at {rate}, no number of tokens per step hides the transfers"),
        ]
    if not found.tokens:
        return [
            *lines,
            *_wrap(f"products at {rate}, take longer than the transfers with any number of tokens"),
        ]
    now = "" if tokens is None else f" (now {trees.format_count(tokens)})"
    lines += _wrap(
        f"products at {rate}, take as long as the transfers with "
        f"{trees.format_count(found.tokens)} tokens "
        f"per step{now}"
    )
    if found.tokens_for_update:
        lines += _wrap(
            "the update makes a step at most 10 % longer from "
            f"{trees.format_count(found.tokens_for_update)} tokens per step on"
            + "; offload.update_in_forward: true hides a part of it"
            * found.may_be_in_forward
        )
    return lines


def _slices_sentence(layout: OffloadLayout) -> str:
    leaves = layout.leaves.values()
    number = sum(leaf.num_slices for leaf in leaves)
    largest = max(leaf.slice_elements for leaf in leaves)
    plural = "" if len(leaves) == 1 else "s"
    sentence = (
        f"state of {len(leaves)} parameter{plural} in {number} slices of {', '.join(layout.arrays)}"
        f", at most {largest:,} elements"
    )
    if layout.slices_at_once == 1:
        sentence += "; three slices of each array are on the device during the update"
    if layout.kept:
        number, (name, why) = len(layout.kept), layout.kept[0]
        plural = "" if number == 1 else "s"
        sentence += f"; {number} parameter{plural} not offloaded ({name}: {why})"
    return sentence


def offload_dict(plan: Decisions) -> dict[str, Any] | None:
    """Returns the facts of the offload section as a JSON-compatible dictionary; bytes are per
    device."""
    layout = plan.offload
    if layout is None:
        return None
    card = card_of(plan)
    found = None if card is None else hiding(plan, card)
    return {
        "bytes_by_tier": role_tiers(plan),
        "moved": [dataclasses.asdict(part) for part in moved_bytes(plan)],
        "arrays": list(layout.arrays),
        "slices": {
            leaf.name: {"elements": leaf.slice_elements, **leaf.counts}
            for leaf in layout.leaves.values()
        },
        "streamed": sorted(layout.streamed),
        "paged": sorted(layout.paged),
        "kept": [list(pair) for pair in layout.kept],
        "tiles": dataclasses.asdict(plan.tiles),
        "hiding": None if found is None else dataclasses.asdict(found),
    }


def _rate(rate: float) -> str:
    return f"{rate / 1e9:.3g} GB/s"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _wrap(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="    ")
