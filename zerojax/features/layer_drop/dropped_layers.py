"""Layer drop: rewrites a loop over layers so that each step can skip some of the layers.

A layer that maps its input x to y becomes `x + (y - x) * scale`, with scale = 1 / p for a layer
that is kept with probability p; its expected result is y. A dropped layer returns x. The layer is
in a `lax.cond` whose branch is the same on all devices, so neither its matrix products nor its
collectives run, in forward and backward pass. The gradients of a dropped layer are zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.interpreters import partial_eval

from zerojax.config.late_dataclasses import dataclass
from zerojax.config.tree_types import Tree
from zerojax.operators.equations import Equation
from zerojax.operators.marks import branch_scope
from zerojax.tracing.activation_offload import (
    LayerScan,
    evaluate_loops,
    loops_of_trace,
)
from zerojax.tracing.dependence import Follow, Marks, marks_of_outputs
from zerojax.tracing.flops import without_waste
from zerojax.tracing.jaxpr import split_scan

_SHARES = 10_000
"""Resolution with which the expected fraction of kept layers is recorded in the scope of the
branch.
"""
_REMEDY = "or leave layer_drop out"


def draw_scales(key: jax.Array, theta: jax.Array, microbatches: int, layers: int) -> jax.Array:
    """Draws which layers run: float32 [microbatches, layers], 0 for a dropped layer, otherwise 1 /
    p.

    Layer i of L (from 1) is kept with probability p = 1 - (i / L)(1 - theta). The draw depends on
    the key, the microbatch and the layer, not on the number of microbatches.

    Args:
      key: typed random key, the same on every device.
      theta: float32 [], probability of keeping the last layer.
      microbatches, layers: number of microbatches and number of layers.
    """
    kept = 1 - jnp.arange(1, layers + 1, dtype=jnp.float32) / layers * (1 - theta)

    def draw(microbatch: jax.Array) -> jax.Array:
        numbers = jax.random.uniform(jax.random.fold_in(key, microbatch), (layers,))
        return jnp.where(numbers < kept, 1 / kept, 0)

    return jax.vmap(draw)(jnp.arange(microbatches))


def drop_layers(
    function: Callable[..., Any], constants: Sequence[Any], share: float
) -> Callable[..., Any]:
    """Returns `function(parameters, *others)` with a further last argument: the scale of each
    layer.

    Args:
      function: function whose first argument holds the parameters, with a loop over layers that
        `find_layers` accepts.
      constants: arrays in the closure of `function` that are parameters as well.
      share: expected fraction of layers that run; FLOPs of a layer are counted with this factor.
    """

    def dropping(parameters: dict[str, jax.Array], *others: Tree) -> Any:
        *given, scales = others
        closed, shape = jax.make_jaxpr(function, return_shape=True)(parameters, *given)
        closed = _needed(closed)
        number = len(jax.tree.leaves(parameters))
        scan = _the_only(loops_of_trace(closed, number, constants))
        run = lambda equation, operands: _run(scan, operands, scales, share)  # noqa: E731
        inputs = jax.tree.leaves((parameters, *given))
        outputs = evaluate_loops(closed, inputs, {id(scan.equation)}, run)
        return jax.tree.unflatten(jax.tree.structure(shape), outputs)

    return dropping


def find_layers(closed: ClosedJaxpr, num_parameters: int) -> LayerScan:
    """Returns the loop over layers of a loss, after checking that its layers can be dropped.

    Args:
      closed: traced loss of one microbatch; its first inputs are parameters.
      num_parameters: number of inputs that are parameters.

    Raises:
      ValueError: there is not exactly one loop over layers, the loop is inside another operation or
        starts from constants, or a layer uses references or has other results than the
        floating-point values that go from layer to layer.
    """
    closed = _needed(closed)
    scan = _the_only(loops_of_trace(closed, num_parameters, ()))
    starts = _Starts(scan)
    starts.outputs(closed.jaxpr, [1] * len(closed.jaxpr.invars))
    if not any(starts.marks[place] for place in _sort(scan).skipped):
        raise ValueError(
            f"layer drop: the loop over {scan.num_layers} rows of a stacked parameter starts from "
            "constants, so it is no loop over layers (it may be a loop over chunks of the output "
            "weights); use a model whose layers run in a loop that starts from activations, "
            f"{_REMEDY}"
        )
    return scan


class _Starts(Follow):
    """Traversal that records which initial carried values of a loop depend on inputs of the
    program.

    Attributes:
      marks: marks of each carried value; 0 if its initial value is a constant.
    """

    def __init__(self, scan: LayerScan) -> None:
        super().__init__(frozenset())
        self._loop = scan.equation
        num_consts, num_carry = split_scan(scan.equation)
        self._carried = slice(num_consts, num_consts + num_carry)
        self.marks: list[Marks] = [0] * num_carry

    def _scan(self, equation: Equation, operands: list[Marks]) -> Sequence[Marks]:
        if equation is self._loop:
            found = zip(self.marks, operands[self._carried], strict=True)
            self.marks = [old | new for old, new in found]
        return super()._scan(equation, operands)


def _needed(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Returns the program without dead code, such as state that layers return but the loss does not
    use.
    """
    return ClosedJaxpr(without_waste(closed), closed.consts)


def _the_only(scans: Sequence[LayerScan]) -> LayerScan:
    if len(scans) != 1:
        loops = ", ".join(f"one of {scan.num_layers} layers" for scan in scans) or "none"
        raise ValueError(
            "layer drop needs a model whose layers run in one jax.lax.scan over stacked "
            f"parameters, but the loss has {len(scans)} such loops ({loops}); use "
            "zerojax.Stages(embed, block, head), flax.linen.scan, or stack the layers with "
            f"nnx.vmap and scan them; {_REMEDY}"
        )
    (scan,) = scans
    if scan.inside:
        raise ValueError(
            f"layer drop: the loop of {scan.num_layers} layers is inside of a `{scan.inside}`, "
            "where layers cannot be skipped; run the loop at the top level of the loss (put "
            f"jax.checkpoint around the layer, not around the loop), {_REMEDY}"
        )
    return scan


@dataclass(frozen=True)
class _Layer:
    """Outputs of a layer, grouped by their value if the layer is dropped.

    Attributes:
      skipped: positions of carried values that the layer changes; a dropped layer returns its
        input.
      always: positions of outputs that depend on no parameter of the layer and no skipped value,
        such as a split key; they are computed in every layer.
    """

    skipped: tuple[int, ...]
    always: tuple[int, ...]


def _sort(scan: LayerScan) -> _Layer:
    """Groups the outputs of a layer, and checks that a dropped layer can return each of them.

    Raises:
      ValueError: a dropped layer would leave an output undefined.
    """
    equation = scan.equation
    body, (num_consts, num_carry) = equation.params["jaxpr"].jaxpr, split_scan(equation)
    if any(hasattr(variable.aval, "inner_aval") for variable in body.invars):
        raise ValueError(
            f"layer drop: the {scan.num_layers} layers read or write a reference (jax.new_ref) "
            "made before their loop, which a layer inside a `cond` cannot do; carry its value "
            f"from layer to layer, {_REMEDY}"
        )
    carry, rows = [0] * num_carry, [int(is_row) for is_row in scan.parameters]
    while True:
        marks = marks_of_outputs(body, [*[0] * num_consts, *carry, *rows])
        joined = [old | new for old, new in zip(carry, marks[:num_carry], strict=True)]
        if joined == carry:
            break
        carry = joined
    skipped = tuple(place for place, mark in enumerate(marks) if mark)
    for place in skipped:
        value: Any = body.outvars[place].aval
        text = f"{value.dtype.name}{list(value.shape)}"
        if place >= num_carry:
            raise ValueError(
                f"layer drop: each of the {scan.num_layers} layers returns {text} in addition to "
                "the carried values (for example running averages, or counts of tokens per "
                "expert), which a dropped layer would not compute; use a model without such "
                f"state, {_REMEDY}"
            )
        if not jnp.issubdtype(value.dtype, jnp.floating):
            raise ValueError(
                f"layer drop: the {scan.num_layers} layers change {text}, a carried value that is "
                "not floating-point and so cannot be scaled; carry only floating-point "
                f"activations, {_REMEDY}"
            )
    return _Layer(skipped, tuple(p for p in range(len(marks)) if p not in skipped))


def _run(scan: LayerScan, operands: Sequence[Any], scales: jax.Array, share: float) -> list[Any]:
    """Runs the loop and skips each layer whose entry in `scales` (float32 [layers]) is 0."""
    params, (num_consts, num_carry) = scan.equation.params, split_scan(scan.equation)
    layer = _sort(scan)
    run_always, run_kept = (
        _part(params["jaxpr"], places) for places in (layer.always, layer.skipped)
    )
    consts, carry = operands[:num_consts], operands[num_consts : num_consts + num_carry]
    taken = round(share * _SHARES)

    def body(carry: Sequence[Any], row: Any) -> tuple[list[Any], list[Any]]:
        scale, items = row
        given = [*consts, *carry, *items]
        before = [carry[place] for place in layer.skipped]

        def kept(scale: jax.Array, before: Sequence[Any], given: Sequence[Any]) -> list[Any]:
            with jax.named_scope(branch_scope(taken, _SHARES)):
                after = run_kept(given)
                return [_scaled(x, y, scale) for x, y in zip(before, after, strict=True)]

        after = lax.cond(scale > 0, kept, lambda _, before, __: before, scale, before, given)
        outputs = dict(zip(layer.skipped, after, strict=True))
        outputs |= zip(layer.always, run_always(given), strict=True)
        values = [outputs[place] for place in range(len(outputs))]
        return values[:num_carry], values[num_carry:]

    carry, items = lax.scan(
        body,
        list(carry),
        (
            scales[::-1] if params["reverse"] else scales,
            list(operands[num_consts + num_carry :]),
        ),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *items]


def _part(closed: ClosedJaxpr, places: Sequence[int]) -> Callable[[Sequence[Any]], list[Any]]:
    """Returns the part of a program that computes the outputs at `places`."""
    used = [place in places for place in range(len(closed.jaxpr.outvars))]
    part, inputs = partial_eval.dce_jaxpr(closed.jaxpr, used)
    run = jaxpr_as_fun(ClosedJaxpr(part, closed.consts))
    return lambda given: run(*(x for x, is_used in zip(given, inputs, strict=True) if is_used))


def _scaled(before: jax.Array, after: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns `before + (after - before) * scale`, computed in float32 at least."""
    dtype = jnp.promote_types(before.dtype, jnp.float32)
    start = before.astype(dtype)
    return (start + (after.astype(dtype) - start) * scale.astype(dtype)).astype(after.dtype)
