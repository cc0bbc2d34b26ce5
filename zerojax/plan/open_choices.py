"""Lists the choices that a plan leaves to a measurement on the run's GPUs, and the alternatives of
each.

This module measures nothing; `zerojax.training.tuning` does so before the run has a state.
"""

from __future__ import annotations

import numpy as np

from pallas_kernels.choice import KERNELS_THAT_WIN
from pallas_kernels.gradients import GRADIENT_STATS
from zerojax.config.mesh import HOST, SLICE_ELEMENTS
from zerojax.operators.attending import Call
from zerojax.optim import Optimizer
from zerojax.placement.decisions import Decisions

CALLS = 2
"""Largest number of kinds of attention calls that are measured; the kinds with the most products
are chosen."""
NO_MORE_MEMORY = {
    "xla": ("chunked", "mosaic_gpu"),
    "chunked": ("mosaic_gpu",),
    "cudnn": ("mosaic_gpu",),
}
"""{implementation that `auto` chooses for attention: alternatives that need no more memory}."""
MOSTLY_PRODUCTS = ("muon",)
"""Kernels that are not timed, because most of the time is that of XLA's products in both ways."""
SIZES = (SLICE_ELEMENTS // 4, SLICE_ELEMENTS * 2)
"""Other slice sizes of offloaded state to try, in elements at most, besides `SLICE_ELEMENTS`."""


def why_closed(plan: Decisions) -> str | None:
    """Returns the reason, with a remedy, why no choice of a plan is left to measurement; None if a
    choice is."""
    settings = plan.settings
    if settings.tune == "off":
        return "tune=off; use tune=auto"
    if settings.deterministic is not None:
        return "deterministic runs must compute the same bits everywhere; leave deterministic out"
    if open_kernels(plan) or open_calls(plan) or why_slices_are_fixed(plan) is None:
        return None
    return (
        f"kernels={settings.kernels} sets the kernels, and neither attention nor slice sizes "
        "are left "
        "to choose; use kernels=auto"
    )


def open_kernels(plan: Decisions) -> dict[str, str]:
    """Returns the operations whose implementation is measured: {"statistics" or "update": kernel
    name}.

    An update is measured if its optimizer requests no implementation, bytes do not decide, and it
    is not mostly matrix products.
    """
    if plan.settings.kernels != "auto":
        return {}
    tx, found = plan.tx, {"statistics": GRADIENT_STATS.name}
    if not isinstance(tx, Optimizer) or tx.impl != "auto":
        return found
    is_closed = tx.kernel in (*KERNELS_THAT_WIN, *MOSTLY_PRODUCTS)
    return found if is_closed else {**found, "update": tx.kernel}


def planned_kernels(plan: Decisions) -> dict[str, str]:
    """Returns {"update": kernel name} if the setting `auto` chose the optimizer's Pallas kernel
    because it moves fewer bytes than XLA's fusions; {} otherwise.

    The kernel is not timed, but its result must match the reference on the run's GPU.
    """
    if plan.settings.kernels != "auto" or not isinstance(plan.tx, Optimizer):
        return {}
    is_planned = plan.tx.impl == "auto" and plan.program.kernels["update"].implementation != "xla"
    return {"update": plan.tx.kernel} if is_planned else {}


def open_calls(plan: Decisions) -> dict[str, Call]:
    """Returns {kind: call} of the attention calls whose implementation `auto` chooses and a
    measurement may improve.

    Calls whose time depends on data (packed texts, positions) and calls with layouts are not
    measured.
    """
    calls = {
        call.kind: call
        for call in plan.traced.attention_calls
        if call.kind is not None and call.layout is None and call.implementation in NO_MORE_MEMORY
    }
    most = sorted(calls, key=lambda kind: -_products(calls[kind]))
    return {kind: calls[kind] for kind in most[:CALLS]}


def _products(call: Call) -> int:
    return call.rows * call.queries * call.keys * call.heads * call.head_dim


def sizes_of_slices(plan: Decisions) -> dict[str, int]:
    """Returns {parameter: elements per slice} for the parameters with slices in host memory."""
    leaves = {} if plan.offload is None else plan.offload.leaves
    return {name: leaf.slice_elements for name, leaf in leaves.items() if leaf.counts[HOST]}


def why_slices_are_fixed(plan: Decisions) -> str | None:
    """Returns the reason why the size of offloaded slices is not measured; None if it is."""
    config = plan.settings.offload
    if not sizes_of_slices(plan):
        return "no optimizer state is on the host"
    if config.slice_elements is not None:
        return f"offload.slice_elements={config.slice_elements} sets the size"
    if config.on_disk:
        return "files keep the slice size with which they were written"
    if config.updates_in_pass:
        return "with an update in the backward pass a slice is a layer"
    stored = (plan.precision.param_dtype, plan.precision.moments_dtype)
    if any(np.dtype(dtype) != np.float32 for dtype in stored):
        return "16-bit state is rounded stochastically, slice by slice"
    return None


def describe_open_choices(plan: Decisions) -> list[str]:
    """Describes the choices of a plan for absent GPUs that a run will measure, and their
    alternatives."""
    if why_closed(plan) is not None:
        return []
    kernels = open_kernels(plan)
    titles = {"statistics": "gradient statistics", "update": f"update by {kernels.get('update')}"}
    arrays = len(plan.abstract_stored["params"])
    parts = []
    if kernels:
        parts.append(
            f"{' and '.join(titles[what] for what in kernels)} (xla, or mosaic_gpu; both "
            f"launch a kernel for each of {arrays} arrays and move about the same bytes)"
        )
    for kind, call in open_calls(plan).items():
        others = " or ".join(NO_MORE_MEMORY[str(call.implementation)])
        parts.append(f"{kind} ({call.implementation}, or {others})")
    if why_slices_are_fixed(plan) is None:
        sizes = " or ".join(f"{size:,}" for size in SIZES)
        parts.append(
            f"slices of state on the host (at most {SLICE_ELEMENTS:,} elements, or {sizes})"
        )
    told = (
        "measured on the run's GPUs before step 1 (tune: auto); planned is the first choice of "
        "each: "
    )
    return [told + "; ".join(parts)]
