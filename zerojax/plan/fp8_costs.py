"""Computes the effects of 8-bit floats on a plan: the time of products, stored inputs, and bytes
sent.

Numbers are counted in the traced forward pass of one microbatch, or follow from the placement
table.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import Any

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr

from zerojax.config import MeshConfig
from zerojax.operators.marks import inner_programs
from zerojax.optim.precision import Precision
from zerojax.placement.decisions import Decisions
from zerojax.placement.table import Placement
from zerojax.plan.wire import leaf_transfers
from zerojax.tracing import trees
from zerojax.tracing.flops import count_program_flops, eight_bit_flops
from zerojax.tracing.jaxpr import is_checkpoint
from zerojax.zoo.fp8 import KEPT_INPUT


def eight_bit_share(program: ClosedJaxpr) -> float:
    """Returns the share of a jaxpr's FLOPs that are products of 8-bit floats, from 0 to 1."""
    small = eight_bit_flops(program)
    return small / count_program_flops(program) if small else 0.0


def kept_inputs(program: ClosedJaxpr) -> tuple[int, int]:
    """Counts the elements of 8-bit product inputs.

    Args:
      program: forward pass of a microbatch on one data shard, with all layers.

    Returns:
      (elements stored for the backward pass, elements that the backward pass recomputes).
    """
    kept = again = 0
    for size, inside in _inputs(program.jaxpr, 1, inside=False):
        kept, again = (kept, again + size) if inside else (kept + size, again)
    return kept, again


def _inputs(program: Jaxpr, times: int, *, inside: bool) -> Iterator[tuple[int, bool]]:
    """Yields, for each input of an 8-bit product, (elements over all iterations of loops, whether
    it is inside a checkpoint)."""
    for equation in program.eqns:
        if equation.primitive.name == "name" and equation.params["name"] == KEPT_INPUT:
            kept: Any = equation.outvars[0]
            yield times * math.prod(kept.aval.shape), inside
        turns = equation.params["length"] if equation.primitive.name == "scan" else 1
        for inner in inner_programs(equation.params):
            yield from _inputs(inner, times * turns, inside=inside or is_checkpoint(equation))


def describe_eight_bits(program: ClosedJaxpr, precision: Precision) -> list[str]:
    """Describes the 8-bit products and the memory of their inputs; returns [] if there are none.

    Args:
      program: the model's forward pass of a microbatch on one data shard.
      precision: dtypes of the run.
    """
    share, (kept, again) = eight_bit_share(program), kept_inputs(program)
    if not share:
        return []
    lines = [f"{share:.0%} of the FLOPs of products use 8-bit floats"]
    wide = jnp.dtype(precision.compute_dtype)
    if kept:
        lines.append(
            f"inputs of 8-bit products saved for the backward pass take {trees.format_bytes(kept)} "
            f"instead of {trees.format_bytes(kept * wide.itemsize)} in {wide.name}, for all layers "
            "and one microbatch of a data shard"
        )
    elif again:
        lines.append(
            "inputs of 8-bit products are not saved for the backward pass, because it "
            "recomputes layers "
            "(remat), so 8 bits save no memory there"
        )
    return lines


def describe_wire(
    settings: MeshConfig, placement: Placement, eight_bits: Collection[str]
) -> list[str]:
    """Describes which weights are gathered as 8-bit floats, or could be.

    Args:
      settings: mesh options.
      placement: placement table.
      eight_bits: names of the parameters that the model uses only as 8-bit floats.
    """
    on_use = [leaf for leaf in placement.leaves.values() if leaf.access.gathers_on_use]
    could = [leaf for leaf in on_use if leaf.name in eight_bits]
    elements = sum(trees.num_elements(leaf.shape) for leaf in could)
    if settings.wire.weights != "fp8":
        if not could:
            return []
        return [
            f"{len(could)} parameters (such as {could[0].name}, {elements:,} elements in all) are "
            "used only as 8-bit floats but gathered in a wider dtype; wire.weights=fp8 would send "
            "them in 8 bits, with bitwise equal results"
        ]
    if not could:
        return ["wire.weights=fp8 has no effect: no parameter used in 8 bits is gathered on use"]
    return [
        f"wire.weights=fp8: {len(could)} of {len(on_use)} parameters that are gathered on use "
        f"({elements:,} elements) are rounded to 8 bits before they are sent instead of after; "
        "gradients and all results are the same"
    ]


def wire_bytes_saved(plan: Decisions) -> int:
    """Returns the bytes per step that one device saves by gathering weights as 8-bit floats."""
    wide = jnp.dtype(plan.precision.compute_dtype).itemsize
    small = jnp.dtype(jnp.uint8)
    sent = [
        transfer.num_bytes
        for leaf in plan.placement.leaves.values()
        if leaf.eight_bits
        for transfer in leaf_transfers(plan, leaf)
        if transfer.dtype == small.name
    ]
    return round((wide / small.itemsize - 1) * math.fsum(sent))
