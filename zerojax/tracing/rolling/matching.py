"""Backward matching of layers: one value of each turn of a loop at a time.

From the values between layers back to what they are computed from, equations of all turns are
compared at once. Each tuple of values, one of each turn, turns out to be the same value in all
turns, the carried value, a row of something stacked, or the result of the same equation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from jax.extend.core import Literal

from zerojax.tracing.jaxpr import program_of, variables
from zerojax.tracing.rolling.equality import Equality, Hole, same_kind, same_literals
from zerojax.tracing.rolling.flat_program import LayerProgram, Mismatch

Values = tuple[Any, ...]
"""One variable or literal of each turn."""


@dataclasses.dataclass(frozen=True)
class Shared:
    """The same value in every turn: a literal, or a variable from outside of the loop."""

    atom: Any


@dataclasses.dataclass(frozen=True)
class Carried:
    """What the turn before gives, by its number."""

    index: int


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of a stack with one for each turn, by its number."""

    index: int


@dataclasses.dataclass(frozen=True)
class Result:
    """A result of an equation of the body."""

    node: tuple[int, ...]
    index: int


Operand = Shared | Carried | Row | Result


@dataclasses.dataclass(frozen=True)
class Node:
    """An equation of the body.

    Attributes:
      equations: the one of each turn.
      operands: what it takes, then what fills its holes.
      holes: literals in its program that differ by turn.
    """

    equations: tuple[Any, ...]
    operands: tuple[Operand, ...]
    holes: tuple[Hole, ...]


@dataclasses.dataclass(frozen=True)
class Turns:
    """Which layers run in which turn.

    Attributes:
      start: the first layer; period: layers in each turn.
      numbers: of the turns that are matched.
    """

    start: int
    period: int
    numbers: tuple[int, ...]

    def layer(self, turn: int) -> int:
        return self.start + turn * self.period


Carry = Mapping[int, Any]
"""{turn: the variable that it is given}, for all turns but perhaps the first."""

_Step = Generator[Values, Operand, Operand]


class Matcher:
    """Matches values of several turns.

    Attributes:
      nodes: the equations of the body.
      inits: {number of a carried value: what the first turn takes for it}.
      rows: the stacks: one value of each turn.
      inside: the variables that depend on a carried value.
    """

    def __init__(
        self, program: LayerProgram, equality: Equality, turns: Turns, carry: Sequence[Carry]
    ) -> None:
        self.program, self.equality, self.turns, self.carry = program, equality, turns, carry
        self.nodes: dict[tuple[int, ...], Node] = {}
        self.inits: dict[int, Any] = {}
        self.rows: list[Values] = []
        self.inside = program.depends_on([v for one in carry for v in one.values()])
        self._known: dict[Values, Operand | Mismatch] = {}

    def match(self, values: Sequence[Any]) -> Operand:
        """What the body has in place of one value of each turn.

        Raises:
          Mismatch: turns differ.
        """
        # A stack of generators, since layers are deeper than Python's recursion.
        first = tuple(values)
        answer: Any = self._known.get(_key(first))
        steps: list[tuple[Values, _Step]] = [] if answer else [(first, self._step(first))]
        while steps:
            key, step = steps[-1]
            try:
                if isinstance(answer, Mismatch):
                    wanted = step.throw(answer)
                else:
                    wanted = step.send(answer)
            except StopIteration as end:
                answer = self._known[_key(key)] = end.value
                steps.pop()
            except Mismatch as mismatch:
                answer = self._known[_key(key)] = mismatch.with_traceback(None)
                steps.pop()
            else:
                answer = self._known.get(_key(wanted))
                if answer is None:
                    steps.append((wanted, self._step(wanted)))
        if isinstance(answer, Mismatch):
            raise answer
        return answer

    def _step(self, values: Values) -> _Step:
        """Matches one value of each turn; yields tuples whose operands it needs."""
        found = self._simple(values)
        if found is not None:
            return found
        try:
            return (yield from self._equation(values))
        except Mismatch:
            if any(variable in self.inside for variable in variables(values)):
                raise
            return self._stack(values)  # computed before the loop, a row for each turn

    def _simple(self, values: Values) -> Operand | None:
        """What needs no look at equations.

        Raises:
          Mismatch: there is no way.
        """
        literals = [isinstance(value, Literal) for value in values]
        if all(literals):
            return self._literals(values)
        for number, carry in enumerate(self.carry):
            if self._is_carried(number, carry, values):
                return Carried(number)
        if not any(literals) and all(value is values[0] for value in values):
            if values[0] in self.inside:
                raise Mismatch("a value of one layer goes into several others")
            return Shared(values[0])
        other = next((n for n, v in enumerate(values) if not same_kind(v, values[0])), None)
        if other is not None:
            kinds = sorted({str(value.aval) for value in values})
            raise Mismatch(f"shapes or dtypes differ: {', '.join(kinds)}", other)
        return self._parameters(values)

    def _literals(self, values: Values) -> Operand:
        if all(same_literals(values[0], value) for value in values):
            return Shared(values[0])
        if all(same_kind(values[0], value) for value in values):
            return self._stack(values)
        raise Mismatch("constants have other types")

    def _is_carried(self, number: int, carry: Carry, values: Values) -> bool:
        pairs = zip(self.turns.numbers, values, strict=True)
        given = [(value, carry[turn]) for turn, value in pairs if turn in carry]
        if not given or len(given) < len(values) - 1:
            return False
        if not all(value is variable for value, variable in given):
            return False
        if self.turns.numbers[0] not in carry:
            self._note_first(number, values)
        return True

    def _note_first(self, number: int, values: Values) -> None:
        first = self.inits.setdefault(number, values[0])
        if first is not values[0] and not _equal_literals(first, values[0]):
            raise Mismatch("the first layer takes two values where others take one", 1)
        if not same_kind(values[0], values[1]):
            raise Mismatch(
                f"the first layer takes {values[0].aval}, and the next one {values[1].aval}", 1
            )

    def _parameters(self, values: Values) -> Operand | None:
        """A stack of parameters; None where the values are something else."""
        places = [self.program.places.get(v) for v in values if not isinstance(v, Literal)]
        owners = [place for place in places if place is not None]
        if len(owners) != len(values):
            return None
        offsets = {
            (place.layer - self.turns.layer(turn), place.within)
            for turn, place in zip(self.turns.numbers, owners, strict=True)
        }
        if len(offsets) != 1 or not 0 <= next(iter(offsets))[0] < self.turns.period:
            number = self.program.numbers
            texts = ", ".join(f"{x.within} of layer {number[x.layer]}" for x in owners[:2])
            raise Mismatch(f"layers read parameters of other places: {texts}")
        return self._stack(values)

    def _stack(self, values: Values) -> Row:
        self.rows.append(values)
        return Row(len(self.rows) - 1)

    def _equation(self, values: Values) -> _Step:
        """Matches the equations that make the values, and what they take."""
        made = self._makers(values)
        equations, index = tuple(equation for equation, _ in made), made[0][1]
        if any(k != index for _, k in made):
            raise Mismatch(f"other results of `{equations[0].primitive.name}`")
        key = tuple(map(id, equations))
        if key not in self.nodes:
            holes = self._compare(equations)
            operands = []
            wanted = [*zip(*(equation.invars for equation in equations), strict=True)]
            wanted += [tuple(_literal(equation, hole) for equation in equations) for hole in holes]
            for one in wanted:
                operands.append((yield one))
            self.nodes[key] = Node(equations, tuple(operands), tuple(holes))
        return Result(key, index)

    def _makers(self, values: Values) -> list[tuple[Any, int]]:
        made_by = self.program.made_by
        made = [None if isinstance(v, Literal) else made_by.get(v) for v in values]
        if None in made:
            other = next((n for n, x in enumerate(made) if (x is None) != (made[0] is None)), None)
            raise Mismatch("one layer computes what another one is given", other)
        return [x for x in made if x is not None]

    def _compare(self, equations: Sequence[Any]) -> list[Hole]:
        first, holes = equations[0], set[Hole]()
        for number, other in enumerate(equations[1:], 1):
            found = self.equality.holes(first, other)
            if found is None:
                turns = self.turns.numbers[0], self.turns.numbers[number]
                layers = [self.program.numbers[self.turns.layer(turn)] for turn in turns]
                raise Mismatch(_difference(first, other, layers), number)
            holes |= found
        if any(equation.effects for equation in equations):
            raise Mismatch(f"`{first.primitive.name}` has effects, whose order a loop may change")
        return sorted(holes)


def _key(values: Values) -> Values:
    """A tuple of values as a key: literals by value, variables by identity."""
    return tuple(
        (str(value.aval), str(value.val)) if isinstance(value, Literal) else value
        for value in values
    )


def _equal_literals(first: Any, second: Any) -> bool:
    both = isinstance(first, Literal) and isinstance(second, Literal)
    return both and same_literals(first, second)


def _literal(equation: Any, hole: Hole) -> Any:
    number, place = hole
    return program_of(equation).jaxpr.eqns[number].invars[place]


def _difference(first: Any, other: Any, layers: Sequence[int]) -> str:
    names = first.primitive.name, other.primitive.name
    where = [f"layer {number}" for number in layers]
    if names[0] != names[1]:
        return f"{where[0]} computes `{names[0]}` where {where[1]} computes `{names[1]}`"
    keys = first.params.keys() & other.params.keys()
    differ = [key for key in sorted(keys) if _plainly_differs(first.params[key], other.params[key])]
    what = ""
    if differ:
        what = f" ({differ[0]} {first.params[differ[0]]} and {other.params[differ[0]]})"
    elif names[0].startswith("custom_"):
        what = " (its program or the program of its derivative)"
    return f"`{names[0]}` has other settings in {where[0]} than in {where[1]}{what}"


def _plainly_differs(first: Any, second: Any) -> bool:
    kinds = (int, float, str, bool, tuple, type(None))
    return isinstance(first, kinds) and isinstance(second, kinds) and first != second
