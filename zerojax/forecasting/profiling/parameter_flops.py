"""Counts the FLOPs of a training step for each parameter: forward, backward and recomputed.

A matrix product that reads a parameter counts for this parameter. Products on which the loss
depends are the forward pass. Among the other products, a product with the shapes of a forward
product is a recomputation, and any other product that reads the parameter is the gradient of its
input. The gradient of the parameter itself reads no parameter: it multiplies the input by the same
cotangent that another product multiplies by the parameter. Products of activations, as in
attention, count for no parameter.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from zerojax.config.late_dataclasses import dataclass
from zerojax.forecasting.profiling.jaxpr_dataflow import (
    NOTHING,
    ParameterOrigin,
    RequiredEquations,
    is_call,
    join_origins,
    origin_of_output,
)
from zerojax.operators.equations import Equation, Operand
from zerojax.operators.marks import inner_programs
from zerojax.plan.make import Plan
from zerojax.tracing.flops import equation_flops, times_run, without_waste
from zerojax.tracing.jaxpr import split_scan

NO_PARAMETER = "between activations"
_PRODUCTS = ("dot_general", "ragged_dot", "ragged_dot_general", "conv_general_dilated")


@dataclass(frozen=True, kw_only=True)
class ParameterFlops:
    """FLOPs of the products of one parameter, in one step over all devices.

    Attributes:
      name: name of the parameter, or `NO_PARAMETER`.
      forward, backward: FLOPs of the forward pass and of the backward pass.
      recomputed: FLOPs of products of the forward pass that are computed again.
    """

    name: str
    forward: float
    backward: float
    recomputed: float

    @property
    def total(self) -> float:
        """FLOPs of the forward pass, the backward pass and recomputation together."""
        return self.forward + self.backward + self.recomputed


def flops_by_parameter(plan: Plan, step: Any) -> list[ParameterFlops]:
    """Counts the FLOPs of a step for each parameter that a product reads, and in one more row for
    all other products.

    The rows add up to `tracing.flops.count_program_flops` of the step.

    Args:
      plan: plan of the step.
      step: result of `build_step(plan)`.
    """
    traced = step.trace(plan.abstract_state, plan.abstract_batch)
    _, results, *_ = jax.eval_shape(step, plan.abstract_state, plan.abstract_batch)
    before = len(jax.tree.leaves(plan.abstract_state))
    # The loss is found by its name, since the metrics of a step depend on its features.
    metrics = [
        jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(results)
    ]
    loss = before + metrics.index("['loss']")
    return rows_of(traced.jaxpr, _inputs(plan), loss)


def _inputs(plan: Plan) -> list[str | None]:
    """Returns, for each input of the step, the name of the parameter that it contains, or None."""
    names: list[str | None] = []
    for path, _ in jax.tree_util.tree_leaves_with_path(plan.abstract_state):
        role = getattr(path[0], "key", None)
        is_parameter = role in ("params", "frozen")
        names.append(getattr(path[1], "key", None) if is_parameter else None)
    return names + [None] * len(jax.tree.leaves(plan.abstract_batch))


def rows_of(program: ClosedJaxpr, names: Sequence[str | None], loss: int) -> list[ParameterFlops]:
    """Computes the rows of `flops_by_parameter` from a traced step.

    Args:
      program: the traced step.
      names: for each input the name of the parameter that it contains, or None.
      loss: index of an output that only the forward pass computes.
    """
    # Dead equations would be counted as products that the compiled step does not compute.
    needed = without_waste(program)
    outputs = [index == loss for index in range(len(needed.outvars))]
    walk = _Walk()
    # Each input is a value of its own, even if two have the same origin.
    start = [(NOTHING if name is None else ParameterOrigin((name,)), object()) for name in names]
    walk.follow(needed, start, outputs, 1, True)
    return _rows(walk.products)


# --- following values through a program -----------------------------------------------------------

_Value = tuple[ParameterOrigin, object]
"""Origin of a value, and an identity that stays the same while the value is only moved."""


@dataclasses.dataclass(kw_only=True)
class _Product:
    """One product of the program, for all its executions."""

    flops: float
    names: tuple[str, ...]
    is_forward: bool
    signature: str | None
    factors: tuple[object, ...]
    """Identities of the operands that contain no parameter."""
    weight_size: int
    result_size: int


class _Walk:
    """Visits the equations of a jaxpr and collects its products."""

    def __init__(self) -> None:
        self.products: list[_Product] = []
        self._needs = RequiredEquations()

    def follow(
        self,
        program: Jaxpr,
        inputs: Sequence[_Value],
        outputs: Sequence[bool],
        times: float,
        collect: bool,
    ) -> list[_Value]:
        """Visits a jaxpr, records its products, and returns the origins of its outputs.

        Args:
          program: the jaxpr.
          inputs: origins of its inputs.
          outputs: for each output, whether the loss depends on it.
          times: how often the program runs.
          collect: whether products are recorded; False only computes the origins of the outputs.
        """
        values: dict[Any, _Value] = dict(zip(program.invars, inputs, strict=True))
        _, flags = self._needs.of(program, outputs)

        def read(atom: Operand) -> _Value:
            if isinstance(atom, Literal):
                is_number = np.issubdtype(np.asarray(atom.val).dtype, np.integer)
                return ParameterOrigin(number=int(atom.val) if is_number else None), object()
            # A value that is read before it was followed, such as a constant, has one identity
            # from now on.
            return values.setdefault(atom, (NOTHING, object()))

        for equation, wanted in zip(program.eqns, flags, strict=True):
            given = [read(atom) for atom in equation.invars]
            results = self._results(equation, given, wanted, times, collect)
            values.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in program.outvars]

    def _results(
        self,
        equation: Equation,
        given: list[_Value],
        wanted: Sequence[bool],
        times: float,
        collect: bool,
    ) -> list[_Value]:
        kind = equation.primitive.name
        fresh: list[_Value] = [(NOTHING, object()) for _ in equation.outvars]
        if kind in _PRODUCTS:
            if collect:
                self._note(equation, given, any(wanted), times)
            return fresh
        if kind == "scan":
            return self._scan(equation, given, wanted, times, collect)
        programs = list(inner_programs(equation.params))
        if kind == "cond":
            return self._cond(equation, programs, given, wanted, times, collect)
        for program in programs:
            if is_call(equation, program):
                often = times * times_run(equation)
                return self.follow(program, given, wanted, often, collect)
        if programs:  # a kernel, or a loop of unknown length
            flops = equation_flops(equation)
            if collect and flops:
                self._add(flops * times, equation, given, any(wanted), None)
            return fresh
        if kind == "optimization_barrier":
            return given
        origin = origin_of_output(equation, [origin for origin, _ in given])
        # A product with an array is no scale: it gives other numbers, and so another identity.
        scales = [o.is_scalar or a.aval.shape == () for (o, _), a in _rest(given, equation)]
        same = given and (origin.names or (kind in _KEEP_IDENTITY and all(scales)))
        return [(origin, given[0][1] if same else object()), *fresh[1:]]

    def _note(
        self, equation: Equation, given: list[_Value], is_forward: bool, times: float
    ) -> None:
        shapes = [atom.aval.shape for atom in equation.invars[:2]]
        numbers = equation.params.get("dimension_numbers") or str(equation.params)
        # Convolutions and ragged products state their dimensions under other parameters.
        signature = str((shapes, numbers))
        flops = equation_flops(equation) * times
        self._add(flops, equation, given[:2], is_forward, signature)

    def _add(
        self,
        flops: float,
        equation: Equation,
        given: Sequence[_Value],
        is_forward: bool,
        signature: str | None,
    ) -> None:
        weights = [index for index, (origin, _) in enumerate(given) if origin.names]
        names = tuple(dict.fromkeys(n for i in weights for n in given[i][0].names if n))
        self.products.append(
            _Product(
                flops=flops,
                names=names,
                # Factors are the activations or cotangents by which products of a backward pass
                # are matched.
                is_forward=is_forward,
                signature=signature,
                factors=tuple(identity for origin, identity in given if not origin.names),
                weight_size=equation.invars[weights[0]].aval.size if weights else 0,
                result_size=equation.outvars[0].aval.size,
            )
        )

    def _scan(
        self,
        equation: Equation,
        given: list[_Value],
        wanted: Sequence[bool],
        times: float,
        collect: bool,
    ) -> list[_Value]:
        constants, carried = split_scan(equation)
        body, length = equation.params["jaxpr"].jaxpr, equation.params["length"]
        wanted = self._needs.of_scan(equation, tuple(wanted))[1]
        carry = slice(constants, constants + carried)
        # Inside the body a stacked value has one dimension less and a new identity.
        inside = given[: carry.stop] + [(_unstacked(o), object()) for o, _ in given[carry.stop :]]
        while True:
            # Products are recorded only when the origins of the carry are final, or they would
            # count twice.
            results = self.follow(body, inside, wanted, times * length, False)
            joined = [
                (join_origins(old[0], new[0]), old[1])
                for old, new in zip(inside[carry], results[:carried], strict=True)
            ]
            settled = [j[0] for j in joined] == [old[0] for old in inside[carry]]
            inside[carry] = joined
            if settled:
                break
        results = self.follow(body, inside, wanted, times * length, collect)
        stacked = [(_stacked(origin), object()) for origin, _ in results[carried:]]
        return [*((origin, object()) for origin, _ in results[:carried]), *stacked]

    def _cond(
        self,
        equation: Equation,
        programs: Sequence[Jaxpr],
        given: list[_Value],
        wanted: Sequence[bool],
        times: float,
        collect: bool,
    ) -> list[_Value]:
        """Visits the branches of a conditional and returns the values of its outputs, with the
        origins of all branches joined. Only products of the most expensive branch are recorded, as
        in `tracing.flops`."""
        # The dearest branch counts, as it does in the FLOPs of the step; the rows must add up to
        # these.
        cost = [sum(map(equation_flops, program.eqns)) for program in programs]
        dearest = cost.index(max(cost))
        results = [
            self.follow(program, given[1:], wanted, times, collect and index == dearest)
            for index, program in enumerate(programs)
        ]
        joined = results[0]
        for other in results[1:]:
            joined = [(join_origins(a, b), i) for (a, i), (b, _) in zip(joined, other, strict=True)]
        return joined


_KEEP_IDENTITY = frozenset(
    [
        *("convert_element_type", "reduce_precision", "copy", "name", "pvary", "pcast"),
        *("reshape", "transpose", "squeeze", "expand_dims", "broadcast_in_dim"),
        *("sharding_constraint", "mul", "div", "neg"),
    ]
)
"""After these operations a cotangent still counts as the same: casts, layouts and scales."""


def _rest(given: Sequence[_Value], equation: Equation) -> Iterator[tuple[_Value, Any]]:
    """Returns pairs (value, variable) of all operands of an equation except the first."""
    return zip(given[1:], equation.invars[1:], strict=True)


def _unstacked(origin: ParameterOrigin) -> ParameterOrigin:
    return origin if origin.dim is None else dataclasses.replace(origin, dim=origin.dim - 1)


def _stacked(origin: ParameterOrigin) -> ParameterOrigin:
    return origin if origin.dim is None else dataclasses.replace(origin, dim=origin.dim + 1)


# --- from products to rows ------------------------------------------------------------------------


def _rows(products: Sequence[_Product]) -> list[ParameterFlops]:
    forward: dict[str, float] = collections.defaultdict(float)
    backward: dict[str, float] = collections.defaultdict(float)
    again: dict[str, float] = collections.defaultdict(float)
    # A backward product with the names and the shapes of a forward one repeats it.
    known = {(p.names, p.signature) for p in products if p.is_forward}
    partners = _partners(products, known)
    rest = 0.0
    for product in products:
        # A gradient of a parameter reads no parameter; its partner, which shares the cotangent,
        # does.
        names = product.names or _gradient_of(product, partners)
        name = _joined(names)
        if product.is_forward:
            forward[name] += product.flops
        elif not names:
            rest += product.flops
        elif product.names and (product.names, product.signature) in known:
            again[name] += product.flops
        else:
            backward[name] += product.flops
    # Each product of activations has two gradients; all others are recomputations.
    backward[NO_PARAMETER] = min(rest, 2 * forward[NO_PARAMETER])
    again[NO_PARAMETER] = rest - backward[NO_PARAMETER]
    rows = [
        ParameterFlops(name=n, forward=forward[n], backward=backward[n], recomputed=again[n])
        for n in {*forward, *backward, *again}
    ]
    rows = [row for row in rows if row.total]
    return sorted(rows, key=lambda row: (row.name == NO_PARAMETER, -row.total, row.name))


def _joined(names: Sequence[str]) -> str:
    """Joins the names of several parameters that one product reads, as in a merged matrix, into the
    name of one row."""
    return " + ".join(names) if names else NO_PARAMETER


def _partners(
    products: Sequence[_Product], known: Collection[tuple[tuple[str, ...], str | None]]
) -> dict[object, list[tuple[int, _Product]]]:
    """Groups products by their factors: returns {identity of a factor: products that multiply this
    factor by a parameter}; products that compute gradients of inputs come first."""
    found: dict[object, list[tuple[int, _Product]]] = collections.defaultdict(list)
    for product in products:
        if product.names and not product.is_forward:
            # A recomputed product has the forward's factors, not the cotangent, so it comes
            # second.
            order = int((product.names, product.signature) in known)
            for factor in product.factors:
                found[factor].append((order, product))
    return found


def _gradient_of(
    product: _Product, partners: Mapping[object, list[tuple[int, _Product]]]
) -> tuple[str, ...]:
    """Returns the name of the parameter whose gradient a product computes, as a tuple; () if it
    computes no parameter's gradient."""
    if product.is_forward:
        return ()
    met = [
        (order, partner.names)
        for factor in product.factors
        for order, partner in partners.get(factor, ())
        # The gradient of a parameter has as many elements as the parameter.
        if partner.weight_size == product.result_size
    ]
    if not met:
        return ()
    first = min(order for order, _ in met)
    candidates = {names for order, names in met if order == first}
    # Two parameters of one size that share a cotangent cannot be told apart.
    return next(iter(candidates)) if len(candidates) == 1 else ()
