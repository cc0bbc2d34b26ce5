"""Dependence of each output of a traced program on its inputs, through any control flow.

Marks are integers, of which bit i stands for input i (or for a group of inputs): a union is one
operation, also for a model with thousands of parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import Jaxpr, Literal

from zerojax.programs import inner_programs, split_scan

Marks = int

STOP_GRADIENT = frozenset(["stop_gradient"])
"""Where a derivative ends, whatever the value depends on."""


def marks_of_outputs(
    program: Jaxpr, inputs: Sequence[Marks], *, ends_at: frozenset[str] = frozenset()
) -> list[Marks]:
    """The union of the marks of all inputs that each output is computed from.

    A value depends on what it is computed from and on what decided that it is: the predicate of a
    `cond`, the condition of a `while`. Its shape is no dependence.

    Args:
      program: traced.
      inputs: one for each input.
      ends_at: names of primitives whose results carry no marks.
    """
    return _Follow(ends_at).outputs(program, inputs)


class _Follow:
    def __init__(self, ends_at: frozenset[str]) -> None:
        self._ends_at = ends_at

    def outputs(self, program: Jaxpr, inputs: Sequence[Marks]) -> list[Marks]:
        held: dict[Any, Marks] = dict(zip(program.invars, inputs, strict=True))

        def of(atom: Any) -> Marks:
            return 0 if isinstance(atom, Literal) else held.get(atom, 0)

        for equation in program.eqns:
            given = [of(atom) for atom in equation.invars]
            if not any(given) or equation.primitive.name in self._ends_at:
                continue
            held.update(zip(equation.outvars, self._equation(equation, given), strict=True))
        return [of(atom) for atom in program.outvars]

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
        return [union(given)] * len(equation.outvars)

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


def union(marks: Sequence[Marks]) -> Marks:
    """All of them together."""
    result = 0
    for mark in marks:
        result |= mark
    return result
