"""Parts of a traced program: what some of its values need, and which values depend on which.

Knows programs only; never what their inputs are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

from zerojax.programs import inner_programs

Stains = Callable[[Any], frozenset[Any]]
_CALLS = ("jit", "pjit")
_CLEAN: frozenset[Any] = frozenset()


@dataclasses.dataclass(frozen=True, eq=False)
class Piece:
    """A part of a program without dead code.

    Attributes:
      closed: takes the values it was cut at, then the inputs of the program that it needs.
      inputs: positions of the latter among all inputs of the program.
    """

    closed: ClosedJaxpr
    inputs: tuple[int, ...]

    def __call__(self, given: Sequence[Any], inputs: Mapping[int, Any]) -> list[Any]:
        """The values of the piece, from those it was cut at and {position: input}."""
        return jaxpr_as_fun(self.closed)(*given, *(inputs[place] for place in self.inputs))


def cut_piece(closed: ClosedJaxpr, outputs: Sequence[Any], given: Sequence[Any] = ()) -> Piece:
    """What a program computes of `outputs` when the variables `given` are known.

    Args:
      closed: the whole program.
      outputs: variables or literals of it.
      given: variables of it at which the search for what is needed ends.
    """
    program, known = closed.jaxpr, set(given)
    wanted = set(_variables(outputs))
    kept = []
    for equation in reversed(program.eqns):
        made = set(equation.outvars)
        if made & wanted and not made & known:
            kept.append(equation)
            wanted.update(_variables(equation.invars))
    consts = {
        variable: value
        for variable, value in zip(program.constvars, closed.consts, strict=True)
        if variable in wanted
    }
    # An input that is also `given` arrives as such.
    inputs = [i for i, v in enumerate(program.invars) if v in wanted and v not in known]
    part = program.replace(
        constvars=list(consts),
        invars=[*given, *(program.invars[i] for i in inputs)],
        outvars=list(outputs),
        eqns=kept[::-1],
        effects=program.effects,
    )
    return Piece(ClosedJaxpr(part, list(consts.values())), tuple(inputs))


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

    used = set(_variables(program.outvars))
    for equation in program.eqns:
        used.update(_variables(equation.invars))
    for equation in program.eqns:
        if _hides_loop(equation):
            outputs = _evaluate_inlined(equation.params["jaxpr"], [*map(read, equation.invars)])
            values |= dict(zip(equation.outvars, outputs, strict=True))
            continue
        taken = list(dict.fromkeys(_variables(equation.invars)))
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


def _variables(atoms: Sequence[Any]) -> Iterator[Any]:
    return (atom for atom in atoms if not isinstance(atom, Literal))
