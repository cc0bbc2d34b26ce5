"""Dependence of values of a traced program on its inputs, through any control flow.

Marks are integers, of which bit i stands for input i (or for a group of inputs): a union is one
operation, also for a model with thousands of parameters. Labels are sets of names, for programs of
few inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

from zerojax.operators.marks import inner_programs
from zerojax.tracing.jaxpr import has_own_rules, is_own_rule, split_scan, variables

Marks = int

STOP_GRADIENT = frozenset(["stop_gradient"])
"""Where a derivative ends, whatever the value depends on."""


SAME_NUMBERS = frozenset(
    (
        "broadcast_in_dim",
        "convert_element_type",
        "copy",
        "copy_p",
        "dynamic_slice",
        "gather",
        "name",
        "optimization_barrier",
        "reshape",
        "slice",
        "squeeze",
        "transpose",
    )
)
"""Primitives whose result holds numbers of their input and no others, up to the dtype."""
LabelsOf = Callable[[Any], frozenset[Any]]
_CALLS = ("jit", "pjit")
_CLEAN: frozenset[Any] = frozenset()


def marks_of_own_rules(
    program: Jaxpr, inputs: Sequence[Marks], *, as_they_are: bool = False
) -> list[Marks]:
    """What each function with a derivative of its own (`jax.custom_vjp`) is given.

    Args:
      program: traced; rules that are marked as linear do not count.
      inputs: one for each input.
      as_they_are: an input counts only where it reaches the function by selection, reshaping or a
        change of dtype, and not where the function is given a value computed from it.
    """
    follow = _Given(as_they_are)
    follow.outputs(program, inputs)
    return list(follow.found.values())


def marks_of_outputs(
    program: Jaxpr, inputs: Sequence[Marks], *, ends_at: frozenset[str] = frozenset()
) -> list[Marks]:
    """The union of the marks of all inputs that each output is computed from.

    A value depends on what it is computed from and on what decided that it is: the predicate of a
    `cond`, the condition of a `while`. Its shape is not dependence.

    Args:
      program: traced.
      inputs: one for each input.
      ends_at: names of primitives whose results carry no marks.
    """
    return Follow(ends_at).outputs(program, inputs)


class Follow:
    """A walk over a program that gives each value the union of the marks it is computed from.

    Args:
      ends_at: names of primitives whose results carry no marks.
    """

    def __init__(self, ends_at: frozenset[str]) -> None:
        self._ends_at = ends_at

    def outputs(self, program: Jaxpr, inputs: Sequence[Marks]) -> list[Marks]:
        held: dict[Any, Marks] = dict(zip(program.invars, inputs, strict=True))

        def of(atom: Any) -> Marks:
            return 0 if isinstance(atom, Literal) else held.get(atom, 0)

        for equation in program.eqns:
            given = [of(atom) for atom in equation.invars]
            if self._ends(equation, given):
                continue
            held.update(zip(equation.outvars, self._equation(equation, given), strict=True))
        return [of(atom) for atom in program.outvars]

    def _ends(self, equation: Any, given: list[Marks]) -> bool:
        return not any(given) or equation.primitive.name in self._ends_at

    def _equation(self, equation: Any, given: list[Marks]) -> Sequence[Marks]:
        kind, params = equation.primitive.name, equation.params
        if kind == "scan":
            return self._scan(equation, given)
        if kind == "while":
            return self._while(params, given)
        if kind == "cond":
            branches = [self.outputs(b.jaxpr, given[1:]) for b in params["branches"]]
            return [given[0] | union(marks) for marks in zip(*branches, strict=True)]
        inner = list(inner_programs(params))
        calls = len(inner) == 1 and len(inner[0].invars) == len(given)
        if calls and len(inner[0].outvars) == len(equation.outvars):
            return self.outputs(inner[0], given)
        return [self._leaf(equation, given)] * len(equation.outvars)

    def _leaf(self, equation: Any, given: list[Marks]) -> Marks:
        """The marks of the results of an equation that is not a call."""
        return union(given)

    def _scan(self, equation: Any, given: list[Marks]) -> Sequence[Marks]:
        """A carry may come back with more marks, so it is followed until none is added."""
        num_consts, num_carry = split_scan(equation)
        body = equation.params["jaxpr"].jaxpr
        carry = slice(num_consts, num_consts + num_carry)
        while True:
            outputs = self.outputs(body, given)
            joined = [a | b for a, b in zip(given[carry], outputs[:num_carry], strict=True)]
            if joined == given[carry]:
                return [*joined, *outputs[num_carry:]]
            given = [*given[: carry.start], *joined, *given[carry.stop :]]

    def _while(self, params: Any, given: list[Marks]) -> Sequence[Marks]:
        first, second = params["cond_nconsts"], params["body_nconsts"]
        condition, consts, carry = (
            given[:first],
            given[first : first + second],
            given[first + second :],
        )
        while True:
            (decides,) = self.outputs(params["cond_jaxpr"].jaxpr, [*condition, *carry])
            outputs = self.outputs(params["body_jaxpr"].jaxpr, [*consts, *carry])
            joined = [a | b | decides for a, b in zip(carry, outputs, strict=True)]
            if joined == carry:
                return joined
            carry = joined


class _Given(Follow):
    """Notes what is given to functions with derivatives of their own, in every program."""

    def __init__(self, as_they_are: bool) -> None:
        super().__init__(frozenset())
        self._as_they_are = as_they_are
        self.found: dict[int, Marks] = {}

    def _ends(self, equation: Any, given: list[Marks]) -> bool:
        return False

    def _equation(self, equation: Any, given: list[Marks]) -> Sequence[Marks]:
        if not is_own_rule(equation):
            return super()._equation(equation, given)
        # A loop's body is followed more than once, with more marks each time.
        self.found[id(equation)] = self.found.get(id(equation), 0) | union(given)
        return [0 if self._as_they_are else union(given)] * len(equation.outvars)

    def _leaf(self, equation: Any, given: list[Marks]) -> Marks:
        if any(map(has_own_rules, inner_programs(equation.params))):
            self.found[id(equation)] = union(given)
        computed = self._as_they_are and equation.primitive.name not in SAME_NUMBERS
        return 0 if computed else union(given)


def union(marks: Sequence[Marks]) -> Marks:
    """All of them together."""
    result = 0
    for mark in marks:
        result |= mark
    return result


def follow_labels(program: Any, sources: Mapping[Any, frozenset[Any]]) -> LabelsOf:
    """The labels that each value of a program depends on.

    Args:
      program: a jaxpr.
      sources: variable -> its own labels; none is made by an equation of the program.
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
