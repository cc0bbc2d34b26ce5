"""Loops over layers as straight code: what a `jax.lax.scan` over stacked parameters stacks is gone.

The backward pass of a loop reads what the forward pass kept from one array [layers, ...] for each
kept value. Each layer writes its part there, and reads a copy of it back. Straight code keeps the
values themselves. It compiles longer: each layer is compiled by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr

from zerojax.config import MeshConfig
from zerojax.config.mesh import HOST
from zerojax.models.activation_offload import (
    LayerScan,
    contains,
    evaluate_loops,
    find_loops_over_layers,
    trace_with_loops,
)
from zerojax.models.jaxpr import is_checkpoint


def unroll_layers(
    function: Callable[..., Any], constants: Sequence[Any] = ()
) -> Callable[..., Any]:
    """Returns `function(parameters, *others)` whose loops over layers are straight code.

    Loops whose layers have checkpoints stay: in straight code the compiler merges what a checkpoint
    computes again with what it computed first.

    Args:
      function: has the same values and derivatives.
      constants: arrays that it closes over and that are parameters, too.
    """

    def unrolled(parameters: Any, *others: Any) -> Any:
        closed, shape, scans = trace_with_loops(function, (parameters, *others), constants)
        chosen = {id(scan.equation) for scan in scans if _why_not(scan) is None}
        inputs = jax.tree.leaves((parameters, *others))
        outputs = evaluate_loops(closed, inputs, chosen, _run_unrolled)
        return jax.tree.unflatten(jax.tree.structure(shape), outputs)

    return unrolled


def describe_unrolled(
    settings: MeshConfig, forward: ClosedJaxpr, num_parameters: int
) -> tuple[str, ...]:
    """What a plan says of unrolled loops: one line per loop; () without `unroll`.

    Args:
      settings: the mesh options.
      forward: the loss of one microbatch on one data shard; its first inputs are parameters.
      num_parameters: how many.

    Raises:
      ValueError: it cannot be done with these settings or this model; with the remedy.
    """
    if not settings.unroll:
        return ()
    if why := why_never_unrolled(settings):
        raise ValueError(f"unroll=True cannot be combined with {why}; leave unroll=False")
    places = range(len(forward.jaxpr.invars))
    scans = find_loops_over_layers(forward, [place < num_parameters for place in places])
    reasons = [
        f"layers: the loop over {scan.num_layers} layers "
        + ("runs as straight code" if (why := _why_not(scan)) is None else f"stays: {why}")
        for scan in scans
    ]
    if all(_why_not(scan) for scan in scans):
        found = "; ".join(reasons) or "the loss has no jax.lax.scan over stacked parameters"
        raise ValueError(f"unroll=True, and there is no loop to unroll ({found}); use unroll=False")
    return tuple(reasons)


def why_never_unrolled(settings: MeshConfig) -> str | None:
    """Returns why no loop of any model may be unrolled with these settings; None if one may."""
    if settings.stage > 1:
        return f"stage={settings.stage}: a pipeline gives each stage turns of the loop"
    if settings.zero == 3:
        return "zero=3, which gathers the weights of one layer at a time in the loop"
    if HOST in (settings.offload.params, settings.offload.activations):
        return "offload.params or offload.activations, which move one layer at a time in the loop"
    if settings.deterministic:
        return (
            f"deterministic={settings.deterministic}: fused across layers, sums may round otherwise"
        )
    return None


def _why_not(scan: LayerScan) -> str | None:
    """Why a loop stays one, if it does."""
    if scan.inside:
        return f"it is inside of a `{scan.inside}`"
    layer = scan.equation.params["jaxpr"].jaxpr
    if any(is_checkpoint(one) or contains(one, _may_be_merged) for one in layer.eqns):
        return "its layers have checkpoints (model.remat or jax.checkpoint)"
    return None


def _may_be_merged(equation: Any) -> bool:
    """A checkpoint that does not keep the compiler from merging what it computes again.

    Those that do, as in the layers of experts, work in straight code as well.
    """
    return is_checkpoint(equation) and not np.all(equation.params["prevent_cse"])


def _run_unrolled(equation: Any, given: Sequence[Any]) -> Sequence[Any]:
    params = {**equation.params, "unroll": equation.params["length"]}
    return equation.primitive.bind(*given, **params)
