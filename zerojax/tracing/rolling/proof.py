"""Proof that a loop computes what the layers compute that it stands for.

The loop is unrolled again, turn by turn. Every equation of a turn must be one of the flat program,
with the same operands. Knows nothing of how the loop was found.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend.core import Literal

from zerojax.tracing.jaxpr import program_of, variables
from zerojax.tracing.rolling.equality import Equality, Hole, same_literals
from zerojax.tracing.rolling.flat_program import Mismatch
from zerojax.tracing.rolling.rolled import Rolled

Key = tuple[Any, ...]


def check_unrolled(rolled: Rolled, equality: Equality) -> None:
    """Unrolls a loop and compares it with the program in place of which it runs.

    Raises:
      Mismatch: an equation, an operand or a result differs.
    """
    flat = _FlatValues(rolled, equality)
    body = rolled.body.jaxpr
    carried: Sequence[Any] = rolled.inits
    for turn in range(rolled.num_turns):
        rows = [row[turn] for row in rolled.rows]
        names = dict(zip(body.invars, [*rolled.shared, *carried, *rows], strict=True))
        for equation, (source, holes) in zip(body.eqns, rolled.sources, strict=True):
            operands = [names.get(x, x) if not isinstance(x, Literal) else x
                        for x in equation.invars]  # fmt: skip
            names.update(zip(equation.outvars, flat.results(source, operands, holes), strict=True))
        results = [names.get(x, x) if not isinstance(x, Literal) else x for x in body.outvars]
        carried = results[: len(rolled.inits)]
        outputs = zip(rolled.outputs, results[len(rolled.inits) :], strict=True)
        for expected, result in outputs:
            if turn in expected:
                flat.check_same(expected[turn], result)
    for expected, result in zip(rolled.finals, carried, strict=True):
        if expected is not None:
            flat.check_same(expected, result)
    _check_order(rolled)


class _FlatValues:
    """The values of a flat program, by what they are computed from.

    Two variables are one value where their equations are equal and take the same values.
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

    def _key(self, equation: Any, operands: Iterable[Any]) -> Key:
        return equation.primitive.name, *map(self._key_of, operands)

    def _key_of(self, atom: Any) -> Any:
        if isinstance(atom, Literal):
            dtype = getattr(atom.aval, "dtype", None)
            return str(atom.aval), np.asarray(atom.val, dtype).tobytes()
        return self._value.get(atom, atom)

    def results(self, source: Any, operands: Sequence[Any], holes: Sequence[Hole]) -> Sequence[Any]:
        """Returns the results of the equation that is like `source` and takes these operands.

        Args:
          operands: of the equation in the loop: those of `source`, then what fills its holes.
          holes: literals in the program of `source` that operands replace.

        Raises:
          Mismatch: the flat program has no such equation.
        """
        number = len(source.invars)
        given, fillings = operands[:number], dict(zip(holes, operands[number:], strict=True))
        for equation in self._equations.get(self._key(source, given), ()):
            found = self._equality.holes(source, equation)
            if found is not None and _are_filled(source, equation, found, fillings):
                return [self._value.get(x, x) for x in equation.outvars]
        raise Mismatch(f"unrolled again, the loop computes another `{source.primitive.name}`")

    def check_same(self, expected: Any, result: Any) -> None:
        """Raises Mismatch where two variables are not one value."""
        if self._key_of(expected) != self._key_of(result):
            raise Mismatch("unrolled again, the loop gives another result")


def _are_filled(
    source: Any, equation: Any, differing: set[Hole], fillings: Mapping[Hole, Any]
) -> bool:
    """Whether an equation differs from `source` in holes alone, and has in them what fills them."""

    def literal(place: Hole) -> Any:
        return program_of(equation).jaxpr.eqns[place[0]].invars[place[1]]

    return differing <= fillings.keys() and all(
        isinstance(value, Literal) and same_literals(value, literal(place))
        for place, value in fillings.items()
    )


def _check_order(rolled: Rolled) -> None:
    """Refuses a program around the loop that reads what is not computed yet.

    Raises:
      Mismatch: with the operation.
    """
    jaxpr = rolled.program.closed.jaxpr
    stacked = {variable for row in rolled.stacks for variable in row}
    known = {v for v in (*jaxpr.constvars, *jaxpr.invars) if v not in stacked}

    def read(operation: str, atoms: Sequence[Any]) -> None:
        if not known.issuperset(variables(atoms)):
            raise Mismatch(f"`{operation}` would read what the loop has not computed")

    for equation in rolled.before:
        read(equation.primitive.name, equation.invars)
        known.update(equation.outvars)
    read("scan", [*rolled.inits, *rolled.shared, *(x for row in rolled.other_rows for x in row)])
    known.update(v for v in rolled.finals if v is not None)
    known.update(variable for one in rolled.outputs for variable in one.values())
    for equation in rolled.after:
        read(equation.primitive.name, equation.invars)
        known.update(equation.outvars)
    read("return", jaxpr.outvars)
