"""Proves that a loop computes the same as the layers that it replaces.

The loop is unrolled again. Every equation of every iteration must equal an equation of the flat
program with the same operands. The proof does not use the search that found the loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend.core import Literal

from zerojax.operators.equations import Equation, Operand
from zerojax.tracing.jaxpr import program_of, variables
from zerojax.tracing.rolling.equality import Equality, Hole, same_literals
from zerojax.tracing.rolling.flat_program import Mismatch
from zerojax.tracing.rolling.rolled import Rolled

Key = tuple[Any, ...]


def check_unrolled(rolled: Rolled, equality: Equality) -> None:
    """Unrolls a loop and compares its equations with those of the layers that it is to replace.

    Raises:
      Mismatch: an equation, an operand or a result differs.
    """
    flat = _FlatValues(rolled, equality)
    body = rolled.body.jaxpr
    carried: Sequence[Any] = rolled.inits
    for iteration in range(rolled.num_iterations):
        rows = [row[iteration] for row in rolled.rows]
        names = dict(zip(body.invars, [*rolled.shared, *carried, *rows], strict=True))
        for equation, (source, holes) in zip(body.eqns, rolled.sources, strict=True):
            operands = [names.get(x, x) if not isinstance(x, Literal) else x
                        for x in equation.invars]  # fmt: skip
            names.update(zip(equation.outvars, flat.results(source, operands, holes), strict=True))
        results = [names.get(x, x) if not isinstance(x, Literal) else x for x in body.outvars]
        carried = results[: len(rolled.inits)]
        outputs = zip(rolled.outputs, results[len(rolled.inits) :], strict=True)
        for expected, result in outputs:
            if iteration in expected:
                flat.check_same(expected[iteration], result)
    for expected, result in zip(rolled.finals, carried, strict=True):
        if expected is not None:
            flat.check_same(expected, result)
    _check_order(rolled)


class _FlatValues:
    """Values of a flat program, identified by their computation.

    Two variables are one value if their equations are equal and have the same operands.
    """

    def __init__(self, rolled: Rolled, equality: Equality) -> None:
        self._equality = equality
        self._value: dict[Any, Any] = {}
        self._equations: dict[Key, list[Any]] = {}
        for equation in rolled.program.equations:
            key = self._key(equation, equation.invars)
            alike = self._equations.setdefault(key, [])
            same = next((x for x in alike if equality.holes(x, equation) == set()), None)
            if same is None:
                alike.append(equation)
            else:
                results = (self._value.get(x, x) for x in same.outvars)
                self._value.update(zip(equation.outvars, results, strict=True))

    def _key(self, equation: Equation, operands: Iterable[Any]) -> Key:
        return equation.primitive.name, *map(self._key_of, operands)

    def _key_of(self, atom: Operand) -> Any:
        if isinstance(atom, Literal):
            dtype = getattr(atom.aval, "dtype", None)
            return str(atom.aval), np.asarray(atom.val, dtype).tobytes()
        return self._value.get(atom, atom)

    def results(
        self, source: Equation, operands: Sequence[Any], holes: Sequence[Hole]
    ) -> Sequence[Any]:
        """Returns the results of the equation that equals `source` and has these operands.

        Args:
          source: equation of the first iteration.
          operands: operands of the equation in the loop: those of `source`, then the values of
            `holes`.
          holes: positions of literals in the program of `source` that operands replace.

        Raises:
          Mismatch: the flat program has no such equation.
        """
        number = len(source.invars)
        own, fillings = operands[:number], dict(zip(holes, operands[number:], strict=True))
        for equation in self._equations.get(self._key(source, own), ()):
            differing = self._equality.holes(source, equation)
            if differing is not None and _are_filled(source, equation, differing, fillings):
                return [self._value.get(x, x) for x in equation.outvars]
        raise Mismatch(f"the unrolled loop computes a different `{source.primitive.name}`")

    def check_same(self, expected: Operand, result: Operand) -> None:
        """Raises Mismatch if two variables do not have the same computation."""
        if self._key_of(expected) != self._key_of(result):
            raise Mismatch("the unrolled loop gives a different result")


def _are_filled(
    source: Equation, equation: Equation, differing: set[Hole], fillings: Mapping[Hole, Any]
) -> bool:
    """Returns whether an equation differs from `source` only in literals that have the given
    values.
    """

    def literal(place: Hole) -> Any:
        return program_of(equation).jaxpr.eqns[place[0]].invars[place[1]]

    # All holes are compared, also those in which this iteration equals the first one.
    return differing <= fillings.keys() and all(
        isinstance(value, Literal) and same_literals(value, literal(place))
        for place, value in fillings.items()
    )


def _check_order(rolled: Rolled) -> None:
    """Raises `Mismatch` if the program around the loop would read a value before it is computed.

    Raises:
      Mismatch: the message names the operation that reads the value.
    """
    jaxpr = rolled.program.closed.jaxpr
    stacked = {variable for row in rolled.stacks for variable in row}
    # The rows of stacks are no inputs of the new program.
    known = {v for v in (*jaxpr.constvars, *jaxpr.invars) if v not in stacked}

    def read(operation: str, atoms: Sequence[Any]) -> None:
        if not known.issuperset(variables(atoms)):
            raise Mismatch(f"`{operation}` would read values before they are computed")

    for equation in rolled.before:
        read(equation.primitive.name, equation.invars)
        known.update(equation.outvars)
    read("scan", [*rolled.inits, *rolled.shared, *(x for row in rolled.other_rows for x in row)])
    known.update(v for v in rolled.finals if v is not None)
    known.update(variable for output in rolled.outputs for variable in output.values())
    for equation in rolled.after:
        read(equation.primitive.name, equation.invars)
        known.update(equation.outvars)
    read("return", jaxpr.outvars)
