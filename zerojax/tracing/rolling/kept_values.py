"""Decides which values of each loop iteration are saved for the backward pass.

XLA recomputes element-wise results that it fuses into their users. It cannot do so between two
loops: every result of the forward loop that the backward loop needs is stored for every iteration.
The policy of this module recomputes element-wise results in the backward loop, from the results of
matrix products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal, Primitive, jaxpr_as_fun

from zerojax.operators.chunked_attention import KEPT
from zerojax.operators.marks import read_name
from zerojax.tracing.flops import count_program_flops
from zerojax.tracing.jaxpr import evaluate_in_pieces, is_checkpoint, program_of
from zerojax.tracing.rolling.equality import abstract_value
from zerojax.tracing.rolling.flat_program import num_bytes
from zerojax.tracing.stacking import REMAT_POLICIES

ELEMENTWISE = "elementwise"
"""Name of the remat policy of this module, in addition to those of `REMAT_POLICIES`."""
_NAMES = (
    "abs add add_any broadcast_in_dim cbrt ceil clamp convert_element_type copy cos cosh div "
    "erf erf_inv exp exp2 expand_dims expm1 floor integer_pow iota log log1p logistic max "
    "min mul neg one_minus_square pow reduce_max reduce_min reduce_sum rem reshape round "
    "rsqrt select_n sign sin sinh sqrt square squeeze stop_gradient sub tan tanh transpose"
)
_COMPUTED_AGAIN = frozenset(_NAMES.split())
"""Primitives whose results the policy recomputes. Comparisons are not among them: their results
take one byte, and some depend on random numbers.
"""


def keep_products(primitive: Primitive, *_: jax.core.AbstractValue, **params: Any) -> bool:
    """Returns whether to save the results of a primitive: not for element-wise results, sums and
    reads.

    It is a policy for `jax.checkpoint`.
    """
    if primitive.name == "name":
        # Without its residuals attention would be computed twice.
        return params["name"] == KEPT
    return primitive.name not in _COMPUTED_AGAIN


def has_checkpoints(body: ClosedJaxpr) -> bool:
    """Returns whether the body of a loop contains a `jax.checkpoint` at its top level."""
    return any(map(is_checkpoint, body.jaxpr.eqns))


def with_remat(body: ClosedJaxpr, remat: str) -> Callable[..., list[Any]]:
    """Returns the body of the loop as a function with the remat policy `remat`: "model" keeps the
    checkpoints inside the body, "none" removes them, another policy replaces them by one
    checkpoint."""
    if remat == "model":
        return jaxpr_as_fun(_without_barriers(body))

    def run(*inputs: jax.Array) -> list[Any]:
        return _without_checkpoints(body, inputs)

    if remat == "none":
        return run
    policy = keep_products if remat == ELEMENTWISE else REMAT_POLICIES[remat]
    # prevent_cse=False for the reason in `_without_barriers`.
    return jax.checkpoint(run, policy=policy, prevent_cse=False)


def _without_barriers(body: ClosedJaxpr) -> ClosedJaxpr:
    """Returns a body whose checkpoints permit common-subexpression elimination.

    The backward pass is a separate loop, so there are no common subexpressions. Without the
    barriers, the compiler can move a collective into the previous iteration.
    """
    equations = [
        equation.replace(params=equation.params | {"prevent_cse": False})
        if is_checkpoint(equation)
        else equation
        for equation in body.jaxpr.eqns
    ]
    return ClosedJaxpr(body.jaxpr.replace(eqns=equations), body.consts)


def _without_checkpoints(closed: ClosedJaxpr, inputs: Sequence[Any]) -> list[Any]:
    """Evaluates a program as if its checkpoints were plain calls.

    Nested checkpoints would recompute values twice.
    """
    return evaluate_in_pieces(
        closed,
        inputs,
        is_apart=is_checkpoint,
        run_apart=lambda equation, operands: _without_checkpoints(program_of(equation), operands),
    )


def kept_bytes(body: ClosedJaxpr, remat: str) -> int:
    """Returns how many bytes one iteration saves for the backward pass, in addition to its inputs.

    Args:
      body: program of the iteration, with marks of parameter reads; parameters count as inputs.
      remat: remat policy, as in `with_remat`.
    """

    def residuals(*values: jax.Array) -> Any:
        return _derived(body, remat, values)[1]

    program = jax.make_jaxpr(residuals)(*_inputs(body)).jaxpr
    reads = {v for e in program.eqns if read_name(e) is not None for v in e.outvars}
    kept = {v for v in program.outvars if not isinstance(v, Literal)}
    made = kept - reads - set(program.invars) - set(program.constvars)
    return sum(map(num_bytes, made))


def trained_flops(body: ClosedJaxpr, remat: str) -> float:
    """Returns the FLOPs of the forward and backward pass of one iteration, with recomputation.

    Args:
      body, remat: as in `kept_bytes`.
    """

    def both(*values: jax.Array) -> Any:
        results, backward = _derived(body, remat, values)
        return results, backward([jnp.ones_like(result) for result in results])

    return count_program_flops(jax.make_jaxpr(both)(*_inputs(body)))


def _inputs(body: ClosedJaxpr) -> list[jax.ShapeDtypeStruct]:
    return [abstract_value(variable) for variable in body.jaxpr.invars]


def _derived(body: ClosedJaxpr, remat: str, values: Sequence[Any]) -> tuple[list[Any], Any]:
    """Runs an iteration; returns (its floating-point results, the function of the backward
    pass)."""
    run = with_remat(body, remat)
    floats = [n for n, x in enumerate(values) if jnp.issubdtype(x.dtype, jnp.inexact)]

    def outputs(*float_values: jax.Array) -> list[Any]:
        every = list(values)
        for place, value in zip(floats, float_values, strict=True):
            every[place] = value
        return [x for x in run(*every) if jnp.issubdtype(x.dtype, jnp.inexact)]

    return jax.vjp(outputs, *(values[place] for place in floats))
