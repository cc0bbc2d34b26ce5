"""Dependences between the values of a traced program, and loops inside calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

from zerojax.models.jaxpr import inner_programs, variables

Stains = Callable[[Any], frozenset[Any]]
_CALLS = ("jit", "pjit")
_CLEAN: frozenset[Any] = frozenset()


def follow_stains(program: Any, sources: Mapping[Any, frozenset[Any]]) -> Stains:
    """Which of some marks each value of a program depends on.

    Args:
      program: a jaxpr.
      sources: variable -> its own marks; none is made by an equation of the program.
    """
    found = dict(sources)

    def of(atom: Any) -> frozenset[Any]:
        return _CLEAN if isinstance(atom, Literal) else found.get(atom, _CLEAN)

    for equation in program.eqns:
        marks = _CLEAN.union(*map(of, equation.invars))
        for variable in equation.outvars:
            if marks:
                found[variable] = marks
    return of


def inline_calls_with_loops(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same program, in which no loop is inside of a `jax.jit`; the loops are as they were."""
    if not any(map(_hides_loop, closed.jaxpr.eqns)):
        return closed
    # Tracing anew gives every call variables of its own, where one program is called twice.
    return jax.make_jaxpr(lambda *inputs: _evaluate_inlined(closed, inputs))(
        *(_abstract(variable.aval) for variable in closed.jaxpr.invars)
    )


def _hides_loop(equation: Any) -> bool:
    return equation.primitive.name in _CALLS and any(
        inner.primitive.name == "scan" or _hides_loop(inner)
        for program in inner_programs(equation.params)
        for inner in program.eqns
    )


def _evaluate_inlined(closed: ClosedJaxpr, inputs: Sequence[Any]) -> list[Any]:
    program = closed.jaxpr
    values = dict(zip(program.constvars, closed.consts, strict=True))
    values |= dict(zip(program.invars, inputs, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    used = set(variables(program.outvars))
    for equation in program.eqns:
        used.update(variables(equation.invars))
    for equation in program.eqns:
        if _hides_loop(equation):
            outputs = _evaluate_inlined(equation.params["jaxpr"], [*map(read, equation.invars)])
            values |= dict(zip(equation.outvars, outputs, strict=True))
            continue
        taken = list(dict.fromkeys(variables(equation.invars)))
        made = [variable for variable in equation.outvars if variable in used]
        alone = program.replace(
            constvars=[], invars=taken, outvars=made, eqns=[equation], effects=program.effects
        )
        outputs = jaxpr_as_fun(ClosedJaxpr(alone, []))(*map(read, taken))
        values |= dict(zip(made, outputs, strict=True))
    return [read(atom) for atom in program.outvars]


def _abstract(aval: Any) -> jax.ShapeDtypeStruct:
    weak = getattr(aval, "weak_type", False)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=weak)
