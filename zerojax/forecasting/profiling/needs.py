"""Equations of a traced program that some of its results depend on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import Jaxpr, Literal

from zerojax.models.jaxpr import inner_programs, split_scan

Flags = tuple[bool, ...]


class Needs:
    """Answers for one program and all inside of it, each question once."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, Flags], tuple[Flags, list[Flags]]] = {}

    def of(self, program: Jaxpr, outputs: Sequence[bool]) -> tuple[Flags, list[Flags]]:
        """(which inputs, and of each equation which outputs, the given outputs depend on)."""
        key = id(program), tuple(outputs)
        if key not in self._known:
            self._known[key] = self._find(program, outputs)
        return self._known[key]

    def _find(self, program: Jaxpr, outputs: Sequence[bool]) -> tuple[Flags, list[Flags]]:
        needed = {
            atom
            for atom, flag in zip(program.outvars, outputs, strict=True)
            if flag and not isinstance(atom, Literal)
        }
        found: list[Flags] = []
        for equation in reversed(program.eqns):
            flags = tuple(variable in needed for variable in equation.outvars)
            found.append(flags)
            if any(flags):
                for atom, flag in zip(equation.invars, self._inputs(equation, flags), strict=True):
                    if flag and not isinstance(atom, Literal):
                        needed.add(atom)
        return tuple(variable in needed for variable in program.invars), found[::-1]

    def _inputs(self, equation: Any, outputs: Flags) -> Sequence[bool]:
        kind, everything = equation.primitive.name, [True] * len(equation.invars)
        if kind == "scan":
            return self.of_scan(equation, outputs)[0]
        if kind == "optimization_barrier":  # it orders, and each output is its own input
            return outputs
        programs = list(inner_programs(equation.params))
        if kind == "cond":
            each = [self.of(program, outputs)[0] for program in programs]
            return [True, *(any(flags) for flags in zip(*each, strict=True))]
        for program in programs:
            if is_call(equation, program):
                return self.of(program, outputs)[0]
        return everything

    def of_scan(self, equation: Any, outputs: Flags) -> tuple[Flags, Flags]:
        """(which inputs, which outputs of the body): what is carried round counts on the way."""
        constants, carried = split_scan(equation)
        body = equation.params["jaxpr"].jaxpr
        wanted = list(outputs)
        while True:
            inputs = self.of(body, wanted)[0]
            carry = inputs[constants : constants + carried]
            joined = [old or new for old, new in zip(wanted[:carried], carry, strict=True)]
            if joined == wanted[:carried]:
                return inputs, tuple(wanted)
            wanted[:carried] = joined


def is_call(equation: Any, program: Jaxpr) -> bool:
    """Whether an equation runs a program once, with its own inputs and outputs."""
    return (
        equation.primitive.name not in ("scan", "while", "cond", "pallas_call")
        and len(program.invars) == len(equation.invars)
        and len(program.outvars) == len(equation.outvars)
    )
