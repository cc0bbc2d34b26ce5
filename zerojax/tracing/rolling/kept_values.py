"""Decides which values of each loop iteration are saved for the backward pass.

XLA recomputes element-wise results that it fuses into their users. It cannot do so between two
loops: every result of the forward loop that the backward loop needs is stored for every iteration.
The policy of this module recomputes element-wise results in the backward loop, from the results of
matrix products.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

from zerojax.operators.chunked_attention import KEPT
from zerojax.operators.marks import read_name
from zerojax.tracing.jaxpr import is_checkpoint
from zerojax.tracing.rolling.equality import abstract_value
from zerojax.tracing.rolling.flat_program import num_bytes

ELEMENTWISE = "elementwise"
"""Name of the remat policy of this module, in addition to those of `REMAT_POLICIES`."""
_NAMES = (
    "abs add add_any broadcast_in_dim cbrt ceil clamp convert_element_type copy cos cosh div erf "
    "erf_inv exp exp2 expand_dims expm1 floor integer_pow iota log log1p logistic max min mul neg "
    "pow reduce_max reduce_min reduce_sum rem reshape round rsqrt select_n sign sin sinh sqrt "
    "square squeeze stop_gradient sub tan tanh transpose"
)
_COMPUTED_AGAIN = frozenset(_NAMES.split())
"""Primitives whose results the policy recomputes. Comparisons are not among them: their results
take one byte, and some depend on random numbers.
"""


def keep_products(primitive: Any, *_: Any, **params: Any) -> bool:
    """Returns whether to save the results of a primitive: not for element-wise results, sums and
    reads.

    It is a policy for `jax.checkpoint`.
    """
    if primitive.name == "name":
        return params["name"] == KEPT
    return primitive.name not in _COMPUTED_AGAIN


def has_checkpoints(body: ClosedJaxpr) -> bool:
    """Returns whether the body of a loop contains a `jax.checkpoint` at its top level."""
    return any(map(is_checkpoint, body.jaxpr.eqns))


def kept_bytes(body: ClosedJaxpr, *, elementwise: bool) -> int:
    """Returns how many bytes one iteration saves for the backward pass, in addition to its inputs.

    Args:
      body: program of the iteration, with marks of parameter reads; parameters count as inputs.
      elementwise: whether the policy `keep_products` applies; if not, no checkpoint applies.
    """
    run = jaxpr_as_fun(body)
    if elementwise:
        run = jax.checkpoint(run, policy=keep_products, prevent_cse=False)
    taken = [abstract_value(variable) for variable in body.jaxpr.invars]
    floats = [n for n, x in enumerate(taken) if jnp.issubdtype(x.dtype, jnp.inexact)]

    def residuals(*values: Any) -> Any:
        def outputs(*float_values: Any) -> list[Any]:
            every = list(values)
            for place, value in zip(floats, float_values, strict=True):
                every[place] = value
            return [x for x in run(*every) if jnp.issubdtype(x.dtype, jnp.inexact)]

        return jax.vjp(outputs, *(values[place] for place in floats))[1]

    program = jax.make_jaxpr(residuals)(*taken).jaxpr
    reads = {v for e in program.eqns if read_name(e) is not None for v in e.outvars}
    kept = {v for v in program.outvars if not isinstance(v, Literal)}
    made = kept - reads - set(program.invars) - set(program.constvars)
    return sum(map(num_bytes, made))
