"""Computes which inputs each value of a traced program depends on, through any control flow.

The dependence is recorded as marks or labels. Marks are integers in which bit i stands for input i
(or for a group of inputs), so that a union is one operation even with thousands of parameters.
Labels are sets of names, for programs with few inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var, jaxpr_as_fun

from zerojax.operators.equations import Equation
from zerojax.operators.marks import inner_programs
from zerojax.tracing.jaxpr import has_own_rules, is_own_rule, split_scan, variables

Marks = int

STOP_GRADIENT = frozenset(["stop_gradient"])
"""Primitives that stop a derivative, although their result depends on the operand."""


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
"""Primitives whose result contains only elements of the operand, perhaps cast to another dtype."""
LabelsOf = Callable[[Any], frozenset[Any]]
_CALLS = ("jit", "pjit")
_CLEAN: frozenset[Any] = frozenset()


def marks_of_own_rules(
    program: Jaxpr, inputs: Sequence[Marks], *, as_they_are: bool = False
) -> list[Marks]:
    """Returns the marks of the operands of each custom derivative (`jax.custom_vjp`) in a program.

    Marks show on which inputs of the program an operand depends.

    Args:
      program: traced program; custom derivatives that are marked as linear are ignored.
      inputs: marks of each input.
      as_they_are: if True, an input counts only if it reaches the function unchanged, that is, by
        selection, reshaping or a change of dtype.
    """
    follow = _RuleMarks(as_they_are)
    follow.outputs(program, inputs)
    return list(follow.marks.values())


def marks_of_outputs(
    program: Jaxpr, inputs: Sequence[Marks], *, ends_at: frozenset[str] = frozenset()
) -> list[Marks]:
    """Returns, for each output, the marks of all inputs that it depends on.

    A value depends on its operands and on the control flow around it: the predicate of a `cond`,
    the condition of a `while`. It does not depend on arrays of which only the shape is used.

    Args:
      program: traced program.
      inputs: marks of each input.
      ends_at: names of primitives whose results carry no marks.
    """
    return Follow(ends_at).outputs(program, inputs)


class Follow:
    """Traverses a program and computes the marks of each value: the inputs that it depends on.

    Args:
      ends_at: names of primitives whose results carry no marks.
    """

    def __init__(self, ends_at: frozenset[str]) -> None:
        self._ends_at = ends_at

    def outputs(self, program: Jaxpr, inputs: Sequence[Marks]) -> list[Marks]:
        held: dict[Any, Marks] = dict(zip(program.invars, inputs, strict=True))

        def of(atom: Var | Literal) -> Marks:
            return 0 if isinstance(atom, Literal) else held.get(atom, 0)

        for equation in program.eqns:
            operands = [of(atom) for atom in equation.invars]
            # Results without marks are not stored, and `of` returns 0 for them.
            if self._ends(equation, operands):
                continue
            held.update(zip(equation.outvars, self._equation(equation, operands), strict=True))
        return [of(atom) for atom in program.outvars]

    def _ends(self, equation: Equation, operands: list[Marks]) -> bool:
        return not any(operands) or equation.primitive.name in self._ends_at

    def _equation(self, equation: Equation, operands: list[Marks]) -> Sequence[Marks]:
        kind, params = equation.primitive.name, equation.params
        if kind == "scan":
            return self._scan(equation, operands)
        if kind == "while":
            return self._while(params, operands)
        if kind == "cond":
            branches = [self.outputs(b.jaxpr, operands[1:]) for b in params["branches"]]
            return [operands[0] | union(marks) for marks in zip(*branches, strict=True)]
        inner = list(inner_programs(params))
        calls = len(inner) == 1 and len(inner[0].invars) == len(operands)
        if calls and len(inner[0].outvars) == len(equation.outvars):
            return self.outputs(inner[0], operands)
        return [self._leaf(equation, operands)] * len(equation.outvars)

    def _leaf(self, equation: Equation, operands: list[Marks]) -> Marks:
        """Returns the marks of the results of an equation without a nested program."""
        return union(operands)

    def _scan(self, equation: Equation, operands: list[Marks]) -> Sequence[Marks]:
        """Processes the body of a loop repeatedly, until the marks of its carry no longer
        change.
        """
        num_consts, num_carry = split_scan(equation)
        body = equation.params["jaxpr"].jaxpr
        carry = slice(num_consts, num_consts + num_carry)
        while True:
            outputs = self.outputs(body, operands)
            joined = [a | b for a, b in zip(operands[carry], outputs[:num_carry], strict=True)]
            if joined == operands[carry]:
                return [*joined, *outputs[num_carry:]]
            operands = [*operands[: carry.start], *joined, *operands[carry.stop :]]

    def _while(self, params: Mapping[str, Any], operands: list[Marks]) -> Sequence[Marks]:
        first, second = params["cond_nconsts"], params["body_nconsts"]
        condition, consts, carry = (
            operands[:first],
            operands[first : first + second],
            operands[first + second :],
        )
        while True:
            (decides,) = self.outputs(params["cond_jaxpr"].jaxpr, [*condition, *carry])
            outputs = self.outputs(params["body_jaxpr"].jaxpr, [*consts, *carry])
            joined = [a | b | decides for a, b in zip(carry, outputs, strict=True)]
            if joined == carry:
                return joined
            carry = joined


class _RuleMarks(Follow):
    """Traversal that records the marks of the operands of custom derivatives, at any depth."""

    def __init__(self, as_they_are: bool) -> None:
        super().__init__(frozenset())
        self._as_they_are = as_they_are
        self.marks: dict[int, Marks] = {}

    def _ends(self, equation: Equation, operands: list[Marks]) -> bool:
        return False

    def _equation(self, equation: Equation, operands: list[Marks]) -> Sequence[Marks]:
        if not is_own_rule(equation):
            return super()._equation(equation, operands)
        # The body of a loop is traversed more than once, with more marks each time.
        self.marks[id(equation)] = self.marks.get(id(equation), 0) | union(operands)
        # What the function returns is computed, and not the input as it was.
        return [0 if self._as_they_are else union(operands)] * len(equation.outvars)

    def _leaf(self, equation: Equation, operands: list[Marks]) -> Marks:
        # The programs inside did not get these operands one to one, so all of them count.
        if any(map(has_own_rules, inner_programs(equation.params))):
            self.marks[id(equation)] = union(operands)
        computed = self._as_they_are and equation.primitive.name not in SAME_NUMBERS
        return 0 if computed else union(operands)


def union(marks: Sequence[Marks]) -> Marks:
    """Returns the union of several sets of marks."""
    result = 0
    for mark in marks:
        result |= mark
    return result


def follow_labels(program: Jaxpr, sources: Mapping[Any, frozenset[Any]]) -> LabelsOf:
    """Returns a function that maps a value of a program to the labels that it depends on.

    Args:
      program: jaxpr to follow.
      sources: {variable: labels}; the variables must not be results of equations of the program.
    """
    labels = dict(sources)

    def of(atom: Var | Literal) -> frozenset[Any]:
        return _CLEAN if isinstance(atom, Literal) else labels.get(atom, _CLEAN)

    for equation in program.eqns:
        marks = _CLEAN.union(*map(of, equation.invars))
        for variable in equation.outvars:
            if marks:
                labels[variable] = marks
    return of


def inline_calls_with_loops(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Inlines calls of `jax.jit` that contain loops, so that no loop is inside a call."""
    if not any(map(_hides_loop, closed.jaxpr.eqns)):
        return closed
    # Tracing again gives each call separate variables, even if one program is called twice.
    return jax.make_jaxpr(lambda *inputs: _evaluate_inlined(closed, inputs))(
        *(_abstract(variable.aval) for variable in closed.jaxpr.invars)
    )


def _hides_loop(equation: Equation) -> bool:
    return equation.primitive.name in _CALLS and any(
        inner.primitive.name == "scan" or _hides_loop(inner)
        for program in inner_programs(equation.params)
        for inner in program.eqns
    )


def _evaluate_inlined(closed: ClosedJaxpr, inputs: Sequence[Any]) -> list[Any]:
    program = closed.jaxpr
    values = dict(zip(program.constvars, closed.consts, strict=True))
    values |= dict(zip(program.invars, inputs, strict=True))

    def read(atom: Var | Literal) -> Any:
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
        # A result that nothing uses may be a placeholder, which cannot be an output.
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
