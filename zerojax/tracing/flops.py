"""FLOPs of a traced function, counted in its jaxpr before anything compiles."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import partial_eval

from zerojax.config.checks import warn_user
from zerojax.config.tree_types import Tree
from zerojax.operators.cudnn_attention import BACKWARD, FORWARD, call_flops
from zerojax.operators.equations import Equation, Operand
from zerojax.operators.marks import FURTHER_ROUNDS, cost_of_branches, share_of_branch
from zerojax.tracing.dependence import Follow, Marks, union


def count_flops(fn: Callable[..., Any], *abstract_args: Tree) -> float:
    """Returns the FLOPs of matrix products, convolutions and fused attention in `fn`.

    A multiply-add is two operations. Loops count every iteration. A `cond` counts its most
    expensive branch, or the mean over layers if the kind of a layer decides. The body of a
    `shard_map` counts once per device: the result is a sum over all devices. Rounds of
    `zerojax.experts` after the first count 0, since equal loads do not need them. Element-wise
    operations are not counted, as is usual for MFU, and neither is dead code. Recomputation by
    remat is counted if `fn` contains its backward pass; for MFU (model FLOPs) use the forward pass
    times `TRAINING_FACTOR`.

    Args:
      fn: function that JAX can trace.
      *abstract_args: arguments of `fn`, as arrays or `ShapeDtypeStruct`s.

    Warns:
      UserWarning: a `while` loop whose trip count is not a constant; its body is counted once.
    """
    return count_program_flops(jax.make_jaxpr(fn)(*abstract_args))


def count_program_flops(program: core.ClosedJaxpr) -> float:
    """Counts the FLOPs of a traced program, like `count_flops`."""
    return float(_jaxpr_flops(without_waste(program)))


def further_round_flops(program: core.ClosedJaxpr) -> float:
    """Returns the FLOPs of one round after the first, over all calls of `zerojax.experts`."""
    return float(_further_flops(without_waste(program)))


def _further_flops(jaxpr: core.Jaxpr) -> int:
    total = 0
    for equation in jaxpr.eqns:
        inner = list(_inner_jaxprs(equation.params))
        if _is_further(equation):
            total += sum(map(_jaxpr_flops, inner))
        elif further := sum(map(_further_flops, inner)):
            total += further * times_run(equation)
    return total


def eight_bit_flops(program: core.ClosedJaxpr) -> float:
    """Returns the FLOPs of the products in a program whose two operands are 8-bit floats."""
    return float(
        sum(
            flops
            for equation, flops in products(without_waste(program))
            if all(_is_float8(variable) for variable in equation.invars[:2])
        )
    )


def _is_float8(variable: Operand) -> bool:
    return variable.aval.dtype.name.startswith("float8")


def without_waste(program: core.ClosedJaxpr) -> core.Jaxpr:
    """Returns the program without dead code (equations that no output depends on)."""
    outputs = [True] * len(program.jaxpr.outvars)
    needed, _ = partial_eval.dce_jaxpr(program.jaxpr, outputs, instantiate=True)
    return needed


TRAINING_FACTOR = 3
"""FLOPs of forward and backward pass, divided by FLOPs of the forward pass. A product y = x w has
two more products in the backward pass, for dx and dw.
"""


def _jaxpr_flops(jaxpr: core.Jaxpr) -> int:
    return sum(equation_flops(equation) for equation in jaxpr.eqns)


def equation_flops(equation: Equation) -> int:
    """Returns the FLOPs of one equation, including nested programs."""
    name = equation.primitive.name
    if name in ("dot_general", "ragged_dot", "ragged_dot_general"):
        return _dot_flops(equation)
    if name == "conv_general_dilated":
        return _convolution_flops(equation)
    if name == "ffi_call":
        return _library_flops(equation)
    if (cost := equation.params.get("cost_estimate")) is not None:  # number declared by the kernel
        return cost.flops
    inner = [_jaxpr_flops(jaxpr) for jaxpr in _inner_jaxprs(equation.params)]
    if name == "cond":
        return cost_of_branches(inner, [_share(x) for x in _inner_jaxprs(equation.params)])
    # A loop without products is not asked for its number of iterations, which might warn.
    return sum(inner) * times_run(equation) if any(inner) else 0


def _share(branch: core.Jaxpr) -> float | None:
    """Returns the fraction of layers that run a branch; None if its name scope does not
    record it.
    """
    return share_of_branch(str(equation.source_info.name_stack) for equation in branch.eqns)


PRODUCTS = ("dot_general", "ragged_dot", "ragged_dot_general", "conv_general_dilated")
"""Primitives that are matrix products or convolutions."""


def products(program: core.Jaxpr) -> Iterator[tuple[Equation, int]]:
    """Yields (equation, FLOPs of all its runs) of each matrix product or convolution, also nested
    ones.

    Warns:
      UserWarning: a `while` loop that contains a product has a trip count that is not a constant.
    """
    for equation in program.eqns:
        if equation.primitive.name in PRODUCTS:
            yield equation, equation_flops(equation)
            continue
        inner = [pair for part in _inner_jaxprs(equation.params) for pair in products(part)]
        runs = times_run(equation) if inner else 0
        for product, flops in inner:
            yield product, flops * runs


def flops_without_gradient(program: core.ClosedJaxpr, is_trained: Sequence[bool]) -> float:
    """Returns the FLOPs of gradients that a backward pass omits because an operand is not trained.

    A product y = x w needs two more products in a backward pass, one for the gradient of each
    operand. An operand that depends on no trained parameter has no gradient.

    Args:
      program: traced forward pass.
      is_trained: for each input, whether it is a trained parameter.
    """
    needed = without_waste(program)
    operands = _Operands()
    operands.outputs(needed, [int(trained) for trained in is_trained])
    without = lambda equation: operands.found.get(id(equation), [0, 0]).count(0)  # noqa: E731
    return float(sum(flops * without(equation) for equation, flops in products(needed)))


class _Operands(Follow):
    """Traversal that records whether each operand of a product depends on a trained parameter.

    Attributes:
      found: {id of the equation: marks of its operands, 1 for a trained parameter}.
    """

    def __init__(self) -> None:
        super().__init__(frozenset())
        self.found: dict[int, list[Marks]] = {}

    def _leaf(self, equation: Equation, operands: list[Marks]) -> Marks:
        if equation.primitive.name in PRODUCTS:
            earlier = self.found.get(id(equation), [0, 0])
            # The body of a loop is traversed until its carry gains no more marks.
            self.found[id(equation)] = [a | b for a, b in zip(earlier, operands[:2], strict=True)]
        return union(operands)


def ragged_groups(program: core.Jaxpr) -> dict[int, int]:
    """Returns {number of groups: FLOPs} of ragged products, which multiply rows by their group's
    matrix.

    Ragged products are `jax.lax.ragged_dot` and related primitives with more than one group, also
    nested ones.

    Warns:
      UserWarning: a `while` loop that contains a product has a trip count that is not a constant.
    """
    flops_by_groups: dict[int, int] = {}
    for equation, flops in products(program):
        if equation.primitive.name in ("ragged_dot", "ragged_dot_general"):
            groups = _shape(equation.invars[2])[-1]
            if groups > 1:
                flops_by_groups[groups] = flops_by_groups.get(groups, 0) + flops
    return flops_by_groups


def times_run(equation: Equation) -> int:
    """Returns how often an equation runs the program inside it, summed over all devices."""
    name, params = equation.primitive.name, equation.params
    if name == "scan":
        return params["length"]
    if name == "while":
        return 0 if _is_further(equation) else _trip_count(equation)
    if name == "shard_map":
        return math.prod(params["mesh"].shape[axis] for axis in params["newly_manual_axes"])
    if name == "pallas_call":
        return math.prod(params["grid_mapping"].grid)
    return 1


def _is_further(equation: Equation) -> bool:
    """Returns whether an equation is the loop of `zerojax.experts` over the rounds after
    the first.
    """
    is_loop = equation.primitive.name == "while"
    return is_loop and FURTHER_ROUNDS in str(equation.source_info.name_stack)


def _inner_jaxprs(params: dict[str, Any]) -> Iterator[core.Jaxpr]:
    for value in params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, core.ClosedJaxpr):
                yield item.jaxpr
            elif isinstance(item, core.Jaxpr):
                yield item


def _dot_flops(equation: Equation) -> int:
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


def _convolution_flops(equation: Equation) -> int:
    params = equation.params
    kernel, out = _shape(equation.invars[1]), _shape(equation.outvars[0])
    out_channels = kernel[params["dimension_numbers"].rhs_spec[0]]
    per_output = math.prod(kernel) // out_channels
    # Products with the zeros between the inputs of a transposed convolution are not counted.
    return 2 * math.prod(out) * per_output // math.prod(params["lhs_dilation"])


def _library_flops(equation: Equation) -> int:
    """Returns the FLOPs of a call of cuDNN's attention; 0 for other library calls."""
    target, config = equation.params["target_name"], equation.params["legacy_backend_config"]
    if target not in (FORWARD, BACKWARD):
        return 0
    return call_flops(target, _shape(equation.invars[0])[-1], json.loads(config))


def _shape(var: Operand) -> tuple[int, ...]:
    return var.aval.shape


def _trip_count(equation: Equation) -> int:
    """Returns the number of iterations of a loop `while i < n: i += c` with constants.

    For other loops it returns 1 and warns.
    """
    params = equation.params
    cond, body = params["cond_jaxpr"].jaxpr, params["body_jaxpr"].jaxpr
    cond_consts, body_consts = params["cond_nconsts"], params["body_nconsts"]
    start_of = equation.invars[cond_consts + body_consts :]
    if [e.primitive.name for e in cond.eqns] == ["lt"]:
        counter, bound = cond.eqns[0].invars
        if counter in cond.invars[cond_consts:]:
            index = cond.invars.index(counter) - cond_consts
            # `lax.fori_loop` carries its upper bound.
            if bound in cond.invars[cond_consts:]:
                bound = start_of[cond.invars.index(bound) - cond_consts]
            increment = _increment(body, body.invars[body_consts + index], body.outvars[index])
            limits = [_constant(start_of[index]), _constant(bound), increment]
            if None not in limits:
                start, stop, by = limits
                return max(0, -(-(stop - start) // by))  # type: ignore[operator]
    warn_user(
        "the reported and forecast FLOPs are too low: the loss has a while loop whose trip count "
        "is not known before it runs, so its matrix products are counted once. Training is not "
        "affected. Use jax.lax.scan, or a fori_loop with constant bounds, to count every iteration"
    )
    return 1


def _increment(body: core.Jaxpr, before: Operand, after: Operand) -> int | None:
    for equation in body.eqns:
        if after in equation.outvars and equation.primitive.name == "add":
            others = [var for var in equation.invars if var is not before]
            return _constant(others[0]) if len(others) == 1 else None
    return None


def _constant(var: Operand) -> int | None:
    return int(var.val) if isinstance(var, core.Literal) else None
