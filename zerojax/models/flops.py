"""FLOPs of a traced function, counted in its jaxpr before anything compiles."""

import json
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import partial_eval

from zerojax.models.cudnn_attention import BACKWARD, FORWARD, call_flops


def count_flops(fn: Callable[..., Any], *abstract_args: Any) -> float:
    """Floating-point operations of products, convolutions and fused attention in one call of `fn`.

    A multiply-add is two. Loops count as often as they run, a `cond` as its dearest branch, the
    body of a `shard_map` once per device: the result is a sum over all devices. Elementwise work
    is left out, as in every published MFU, and so is what no result depends on. What remat computes
    again is counted when `fn` contains its backward pass; for MFU (model FLOPs) count the forward
    pass times `TRAINING_FACTOR`.

    Args:
      fn: any function that JAX can trace.
      *abstract_args: arrays or ShapeDtypeStructs, as `fn` takes them.

    Warns:
      UserWarning: a `while` loop whose trip count is not a constant; its body is counted once.
    """
    return count_program_flops(jax.make_jaxpr(fn)(*abstract_args))


def count_program_flops(program: core.ClosedJaxpr) -> float:
    """The same of a program that is traced already; what nothing needs is left out."""
    return float(_jaxpr_flops(without_waste(program)))


def without_waste(program: core.ClosedJaxpr) -> core.Jaxpr:
    """The program without what no result depends on."""
    outputs = [True] * len(program.jaxpr.outvars)
    needed, _ = partial_eval.dce_jaxpr(program.jaxpr, outputs, instantiate=True)
    return needed


TRAINING_FACTOR = 3
"""Forward and backward over forward: each product y = x w has two more of its size, dx and dw."""


def _jaxpr_flops(jaxpr: core.Jaxpr) -> int:
    return sum(equation_flops(equation) for equation in jaxpr.eqns)


def equation_flops(equation: core.JaxprEqn) -> int:
    """FLOPs of one equation, all that is inside of it counted."""
    name = equation.primitive.name
    if name in ("dot_general", "ragged_dot", "ragged_dot_general"):
        return _dot_flops(equation)
    if name == "conv_general_dilated":
        return _convolution_flops(equation)
    if name == "ffi_call":
        return _library_flops(equation)
    if (cost := equation.params.get("cost_estimate")) is not None:  # a kernel that says so itself
        return cost.flops
    inner = [_jaxpr_flops(jaxpr) for jaxpr in _inner_jaxprs(equation.params)]
    if name == "cond":
        return max(inner)
    return sum(inner) * times_run(equation) if any(inner) else 0


def times_run(equation: core.JaxprEqn) -> int:
    """How often the program inside of an equation runs, over all devices."""
    name, params = equation.primitive.name, equation.params
    if name == "scan":
        return params["length"]
    if name == "while":
        return _trip_count(equation)
    if name == "shard_map":
        return math.prod(params["mesh"].shape[axis] for axis in params["newly_manual_axes"])
    if name == "pallas_call":
        return math.prod(params["grid_mapping"].grid)
    return 1


def _inner_jaxprs(params: dict[str, Any]) -> Iterator[core.Jaxpr]:
    for value in params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, core.ClosedJaxpr):
                yield item.jaxpr
            elif isinstance(item, core.Jaxpr):
                yield item


def _dot_flops(equation: core.JaxprEqn) -> int:
    lhs, rhs = (_shape(var) for var in equation.invars[:2])
    numbers = equation.params.get("dimension_numbers")
    group_dims: tuple[int, ...] = ()
    if numbers is None:  # ragged: the contraction of each group's rows with that group's matrix
        ragged = equation.params["ragged_dot_dimension_numbers"]
        numbers, group_dims = ragged.dot_dimension_numbers, tuple(ragged.rhs_group_dimensions)
    (_, rhs_contracting), (_, rhs_batch) = numbers
    shared = {*rhs_contracting, *rhs_batch, *group_dims}
    free = math.prod(size for dim, size in enumerate(rhs) if dim not in shared)
    return 2 * math.prod(lhs) * free


def _convolution_flops(equation: core.JaxprEqn) -> int:
    params = equation.params
    kernel, out = _shape(equation.invars[1]), _shape(equation.outvars[0])
    out_channels = kernel[params["dimension_numbers"].rhs_spec[0]]
    per_output = math.prod(kernel) // out_channels
    # The zeros that a transposed convolution puts between its inputs are not work.
    return 2 * math.prod(out) * per_output // math.prod(params["lhs_dilation"])


def _library_flops(equation: core.JaxprEqn) -> int:
    """Of cuDNN's attention; 0 for any other call of a library."""
    target, config = equation.params["target_name"], equation.params["legacy_backend_config"]
    if target not in (FORWARD, BACKWARD):
        return 0
    return call_flops(target, _shape(equation.invars[0])[-1], json.loads(config))


def _shape(var: Any) -> tuple[int, ...]:
    return var.aval.shape


def _trip_count(equation: core.JaxprEqn) -> int:
    """Iterations of `while i < n: i += c` with constants; 1 and a warning for anything else."""
    params = equation.params
    cond, body = params["cond_jaxpr"].jaxpr, params["body_jaxpr"].jaxpr
    cond_consts, body_consts = params["cond_nconsts"], params["body_nconsts"]
    start_of = equation.invars[cond_consts + body_consts :]
    if [e.primitive.name for e in cond.eqns] == ["lt"]:
        counter, bound = cond.eqns[0].invars
        if counter in cond.invars[cond_consts:]:
            index = cond.invars.index(counter) - cond_consts
            if bound in cond.invars[cond_consts:]:
                bound = start_of[cond.invars.index(bound) - cond_consts]
            increment = _increment(body, body.invars[body_consts + index], body.outvars[index])
            limits = [_constant(start_of[index]), _constant(bound), increment]
            if None not in limits:
                start, stop, by = limits
                return max(0, -(-(stop - start) // by))  # type: ignore[operator]
    warnings.warn(
        "count_flops: a while loop has no constant trip count, so its body is counted once; "
        "use jax.lax.scan or fori_loop with constant bounds to have it counted",
        stacklevel=2,
    )
    return 1


def _increment(body: core.Jaxpr, before: Any, after: Any) -> int | None:
    for equation in body.eqns:
        if after in equation.outvars and equation.primitive.name == "add":
            others = [var for var in equation.invars if var is not before]
            return _constant(others[0]) if len(others) == 1 else None
    return None


def _constant(var: Any) -> int | None:
    return int(var.val) if isinstance(var, core.Literal) else None
