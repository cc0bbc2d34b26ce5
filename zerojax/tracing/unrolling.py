"""Unrolls loops over layers, so that the step stacks no values for the backward pass.

In a `jax.lax.scan` over stacked parameters, each layer writes the values for its backward pass into
arrays [layers, ...], and the backward pass reads copies from them. In unrolled layers the backward
pass uses the values directly. But each layer is compiled separately, which takes longer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr

from zerojax.config import MeshConfig
from zerojax.config.mesh import DEVICE
from zerojax.config.tree_types import Tree
from zerojax.operators.equations import Equation
from zerojax.tracing.activation_offload import (
    LayerScan,
    contains,
    evaluate_loops,
    find_loops_over_layers,
    trace_with_loops,
)
from zerojax.tracing.jaxpr import is_checkpoint


def unroll_layers(
    function: Callable[..., Any], constants: Sequence[Any] = ()
) -> Callable[..., Any]:
    """Returns `function(parameters, *others)` with unrolled loops over layers.

    Values and derivatives stay the same. Loops whose layers have checkpoints are not unrolled,
    because in unrolled layers the compiler would merge the recomputation with the first
    computation.

    Args:
      function: function whose first argument holds the parameters.
      constants: arrays in the closure of `function` that are parameters as well.
    """

    def unrolled(parameters: dict[str, jax.Array], *others: Tree) -> Any:
        closed, shape, scans = trace_with_loops(function, (parameters, *others), constants)
        chosen = {id(scan.equation) for scan in scans if _why_not(scan) is None}
        inputs = jax.tree.leaves((parameters, *others))
        outputs = evaluate_loops(closed, inputs, chosen, _run_unrolled)
        return jax.tree.unflatten(jax.tree.structure(shape), outputs)

    return unrolled


MOST_UNROLLED, MOST_BY_DEFAULT = 64, 32
"""Largest number of layers that a search unrolls, and that a plan unrolls by default: compiling 12
layers of GPT-2 takes 2 s each."""


def choose_unrolling(
    settings: MeshConfig, forward: ClosedJaxpr, num_parameters: int, *, pays: bool
) -> tuple[bool, tuple[str, ...]]:
    """Decides whether loops over layers are unrolled.

    Args:
      settings: mesh options of the plan.
      forward: traced loss of one microbatch on one data shard; its first inputs are parameters.
      num_parameters: number of inputs that are parameters.
      pays: whether loops that can be unrolled are, if `settings.unroll` is None.

    Returns:
      (whether loops are unrolled, lines of a plan about it, one for each loop).

    Raises:
      ValueError: unrolling is requested, but the settings or the model need the loop; the message
        says what to change.
    """
    why = why_never_unrolled(settings)
    if settings.unroll is False or (settings.unroll is None and (why or not pays)):
        return False, ()
    check_unroll(settings)
    places = range(len(forward.jaxpr.invars))
    scans = find_loops_over_layers(forward, [place < num_parameters for place in places])
    if settings.unroll is None:
        layers = sum(scan.num_layers for scan in scans)
        if not 0 < layers <= MOST_BY_DEFAULT or any(map(_why_not, scans)):
            return False, ()
        return True, tuple(
            f"layers: the loop over {scan.num_layers} layers is unrolled, because on a GPU the "
            "copies of a loop cost more than the longer compilation (unroll: false keeps it)"
            for scan in scans
        )
    reasons = [
        f"layers: the loop over {scan.num_layers} layers "
        + ("is unrolled" if (why := _why_not(scan)) is None else f"is not unrolled: {why}")
        for scan in scans
    ]
    if all(_why_not(scan) for scan in scans):
        loops = "; ".join(reasons) or "the loss has no jax.lax.scan over stacked parameters"
        raise ValueError(f"unroll=True, but there is no loop to unroll ({loops}); use unroll=False")
    return True, tuple(reasons)


def check_unroll(settings: MeshConfig) -> None:
    """Raises if unrolling is requested, but other settings need the loops.

    Raises:
      ValueError: the message states the setting and the remedy.
    """
    why = why_never_unrolled(settings)
    if settings.unroll and why:
        raise ValueError(f"unroll=True cannot be combined with {why}; leave unroll=False")


def why_never_unrolled(settings: MeshConfig) -> str | None:
    """Returns the reason why no loop may be unrolled with these settings; None if loops may be
    unrolled.
    """
    if settings.stage > 1:
        return f"stage={settings.stage}: a pipeline gives each stage iterations of the loop"
    if settings.zero == 3:
        return "zero=3, which gathers the weights of one layer at a time in the loop"
    if settings.offload.by_layer:
        return f"{settings.offload.by_layer_key}, which moves one layer at a time in the loop"
    if settings.offload.activations != DEVICE:
        return "offload.activations, which move one layer at a time in the loop"
    if settings.deterministic:
        return (
            f"deterministic={settings.deterministic}: fusion across layers may change the rounding "
            "of sums"
        )
    return None


def _why_not(scan: LayerScan) -> str | None:
    """Returns the reason why a loop is not unrolled; None if it is unrolled."""
    if scan.inside:
        return f"it is inside of a `{scan.inside}`"
    layer = scan.equation.params["jaxpr"].jaxpr
    if any(is_checkpoint(inner) or contains(inner, _may_be_merged) for inner in layer.eqns):
        return "its layers have checkpoints (model.remat or jax.checkpoint)"
    return None


def _may_be_merged(equation: Equation) -> bool:
    """Returns whether an equation is a checkpoint whose recomputation the compiler may merge.

    Checkpoints with `prevent_cse`, as in layers of experts, also work in unrolled layers.
    """
    return is_checkpoint(equation) and not np.all(equation.params["prevent_cse"])


def _run_unrolled(equation: Equation, operands: Sequence[Any]) -> Sequence[Any]:
    params = {**equation.params, "unroll": equation.params["length"]}
    return equation.primitive.bind(*operands, **params)
