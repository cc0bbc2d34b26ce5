"""Matches layers backwards: compares one value of every loop iteration at a time.

The search starts at the values between layers and goes back to their operands; equations of all
iterations are compared at once. A tuple with one value of each iteration must be one of these: the
same value in all iterations, a carried value, a row of a stack, or the result of equal equations.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any

from jax.extend.core import Literal, Var

from zerojax.config.late_dataclasses import dataclass
from zerojax.operators.equations import Equation
from zerojax.tracing.jaxpr import program_of, variables
from zerojax.tracing.rolling.equality import Equality, Hole, same_kind, same_literals
from zerojax.tracing.rolling.flat_program import LayerProgram, Mismatch

Values = tuple[Any, ...]
"""Variables or literals that correspond to each other, one of each loop iteration."""


@dataclass(frozen=True)
class Shared:
    """Operand that is the same in every iteration: a literal, or a variable from outside of the
    loop.
    """

    atom: Var | Literal


@dataclass(frozen=True)
class Carried:
    """Carried value of the previous iteration, identified by its index."""

    index: int


@dataclass(frozen=True)
class Row:
    """Row of a stack with one row per iteration, identified by the index of the stack."""

    index: int


@dataclass(frozen=True)
class Result:
    """Result of an equation in the loop's body."""

    node: tuple[int, ...]
    index: int


Operand = Shared | Carried | Row | Result


@dataclass(frozen=True)
class Node:
    """Equation in the loop's body.

    Attributes:
      equations: the equation of each iteration.
      operands: operands of the equation, then the values of `holes`.
      holes: positions of literals in the equation's program that differ between iterations.
    """

    equations: tuple[Any, ...]
    operands: tuple[Operand, ...]
    holes: tuple[Hole, ...]


@dataclass(frozen=True)
class Iterations:
    """Assignment of layers to iterations.

    Attributes:
      start: first layer of the loop.
      period: number of layers in each iteration.
      numbers: indices of the iterations that are matched.
    """

    start: int
    period: int
    numbers: tuple[int, ...]

    def layer(self, iteration: int) -> int:
        return self.start + iteration * self.period


Carry = Mapping[int, Any]
"""{iteration: variable of a carried value at its beginning}; the first iteration may be missing."""

_Step = Generator[Values, Operand, Operand]


class Matcher:
    """Matches values of several iterations, and builds the equations of the loop's body.

    Attributes:
      nodes: equations of the body.
      inits: {index of a carried value: its value in the first iteration}.
      rows: stacks, each as a tuple with one value of each iteration.
      inside: variables that depend on a carried value.
    """

    def __init__(
        self,
        program: LayerProgram,
        equality: Equality,
        iterations: Iterations,
        carry: Sequence[Carry],
    ) -> None:
        self.program, self.equality = program, equality
        self.iterations, self.carry = iterations, carry
        self.nodes: dict[tuple[int, ...], Node] = {}
        self.inits: dict[int, Any] = {}
        self.rows: list[Values] = []
        self.inside = program.depends_on([v for inputs in carry for v in inputs.values()])
        self._known: dict[Values, Operand | Mismatch] = {}

    def match(self, values: Sequence[Any]) -> Operand:
        """Returns the operand of the loop body that represents these values, one of each iteration.

        Raises:
          Mismatch: the values are not computed in the same way.
        """
        # A stack of generators instead of recursion: layers are deeper than Python's limit.
        first = tuple(values)
        answer: Any = self._known.get(_key(first))
        steps: list[tuple[Values, _Step]] = [] if answer else [(first, self._step(first))]
        while steps:
            key, step = steps[-1]
            try:
                if isinstance(answer, Mismatch):
                    needed = step.throw(answer)
                else:
                    needed = step.send(answer)
            except StopIteration as end:
                answer = self._known[_key(key)] = end.value
                steps.pop()
            except Mismatch as mismatch:
                # A traceback would keep the frames of all steps.
                answer = self._known[_key(key)] = mismatch.with_traceback(None)
                steps.pop()
            else:
                answer = self._known.get(_key(needed))
                if answer is None:
                    steps.append((needed, self._step(needed)))
        if isinstance(answer, Mismatch):
            raise answer
        return answer

    def _step(self, values: Values) -> _Step:
        """Matches one value of each loop iteration, after the operands of the equations that define
        them.

        It is a generator: it yields tuples of operands that must be matched first.
        """
        operand = self._simple(values)
        if operand is not None:
            return operand
        try:
            return (yield from self._equation(values))
        except Mismatch:
            if any(variable in self.inside for variable in variables(values)):
                raise
            return self._stack(values)  # computed before the loop, one row per iteration

    def _simple(self, values: Values) -> Operand | None:
        """Matches one value of each iteration without comparing equations; None if that is not
        possible.

        Raises:
          Mismatch: the values cannot be matched.
        """
        literals = [isinstance(value, Literal) for value in values]
        if all(literals):
            return self._literals(values)
        for number, carry in enumerate(self.carry):
            if self._is_carried(number, carry, values):
                return Carried(number)
        if not any(literals) and all(value is values[0] for value in values):
            if values[0] in self.inside:
                raise Mismatch("several layers use the same value of one layer")
            return Shared(values[0])
        other = next((n for n, v in enumerate(values) if not same_kind(v, values[0])), None)
        if other is not None:
            kinds = sorted({str(value.aval) for value in values})
            raise Mismatch(f"values of layers differ in shape or dtype: {', '.join(kinds)}", other)
        return self._parameters(values)

    def _literals(self, values: Values) -> Operand:
        if all(same_literals(values[0], value) for value in values):
            return Shared(values[0])
        if all(same_kind(values[0], value) for value in values):
            return self._stack(values)
        raise Mismatch("constants of the layers have different types")

    def _is_carried(self, number: int, carry: Carry, values: Values) -> bool:
        pairs = zip(self.iterations.numbers, values, strict=True)
        compared = [(value, carry[i]) for i, value in pairs if i in carry]
        if not compared or len(compared) < len(values) - 1:
            return False
        if not all(value is variable for value, variable in compared):
            return False
        if self.iterations.numbers[0] not in carry:
            self._note_first(number, values)
        return True

    def _note_first(self, number: int, values: Values) -> None:
        first = self.inits.setdefault(number, values[0])
        if first is not values[0] and not _equal_literals(first, values[0]):
            raise Mismatch("the first layer has two inputs where other layers have one", 1)
        if not same_kind(values[0], values[1]):
            raise Mismatch(
                f"the value passed from layer to layer is {values[0].aval} for the first layer, "
                f"but {values[1].aval} for the next one",
                1,
            )

    def _parameters(self, values: Values) -> Operand | None:
        """Matches values that are parameters of different layers to one stack; None for other
        values.
        """
        places = [self.program.places.get(v) for v in values if not isinstance(v, Literal)]
        owners = [place for place in places if place is not None]
        if len(owners) != len(values):
            return None
        offsets = {
            (place.layer - self.iterations.layer(iteration), place.within)
            for iteration, place in zip(self.iterations.numbers, owners, strict=True)
        }
        if len(offsets) != 1 or not 0 <= next(iter(offsets))[0] < self.iterations.period:
            number = self.program.numbers
            texts = ", ".join(f"{x.within} of layer {number[x.layer]}" for x in owners[:2])
            raise Mismatch(f"layers read different parameters: {texts}")
        return self._stack(values)

    def _stack(self, values: Values) -> Row:
        self.rows.append(values)
        return Row(len(self.rows) - 1)

    def _equation(self, values: Values) -> _Step:
        """Matches the equations that define one value of each iteration, and their operands."""
        made = self._makers(values)
        equations, index = tuple(equation for equation, _ in made), made[0][1]
        if any(k != index for _, k in made):
            raise Mismatch(f"layers use different results of `{equations[0].primitive.name}`")
        # `nodes` holds the equations, so that their ids are not used again.
        key = tuple(map(id, equations))
        if key not in self.nodes:
            holes = self._compare(equations)
            operands = []
            needed = [*zip(*(equation.invars for equation in equations), strict=True)]
            needed += [tuple(_literal(equation, hole) for equation in equations) for hole in holes]
            for operand_values in needed:
                operands.append((yield operand_values))
            self.nodes[key] = Node(equations, tuple(operands), tuple(holes))
        return Result(key, index)

    def _makers(self, values: Values) -> list[tuple[Any, int]]:
        made_by = self.program.made_by
        made = [None if isinstance(v, Literal) else made_by.get(v) for v in values]
        if None in made:
            other = next((n for n, x in enumerate(made) if (x is None) != (made[0] is None)), None)
            raise Mismatch("a value that one layer computes is an input of another layer", other)
        return [x for x in made if x is not None]

    def _compare(self, equations: Sequence[Any]) -> list[Hole]:
        first, holes = equations[0], set[Hole]()
        for number, other in enumerate(equations[1:], 1):
            differing = self.equality.holes(first, other)
            if differing is None:
                pair = self.iterations.numbers[0], self.iterations.numbers[number]
                layers = [self.program.numbers[self.iterations.layer(i)] for i in pair]
                raise Mismatch(_difference(first, other, layers), number)
            holes |= differing
        if any(equation.effects for equation in equations):
            raise Mismatch(
                f"`{first.primitive.name}` has side effects, whose order a loop may change"
            )
        return sorted(holes)


def _key(values: Values) -> Values:
    """Returns a tuple of values as a dictionary key: literals by value, variables by identity."""
    return tuple(
        (str(value.aval), str(value.val)) if isinstance(value, Literal) else value
        for value in values
    )


def _equal_literals(first: Literal, second: Literal) -> bool:
    both = isinstance(first, Literal) and isinstance(second, Literal)
    return both and same_literals(first, second)


def _literal(equation: Equation, hole: Hole) -> Any:
    number, place = hole
    return program_of(equation).jaxpr.eqns[number].invars[place]


def _difference(first: Equation, other: Equation, layers: Sequence[int]) -> str:
    names = first.primitive.name, other.primitive.name
    where = [f"layer {number}" for number in layers]
    if names[0] != names[1]:
        return f"{where[0]} computes `{names[0]}` where {where[1]} computes `{names[1]}`"
    keys = first.params.keys() & other.params.keys()
    differ = [key for key in sorted(keys) if _plainly_differs(first.params[key], other.params[key])]
    detail = ""
    if differ:
        detail = f" ({differ[0]} {first.params[differ[0]]} and {other.params[differ[0]]})"
    elif names[0].startswith("custom_"):
        detail = " (its program or the program of its derivative)"
    return f"`{names[0]}` has different settings in {where[0]} and in {where[1]}{detail}"


def _plainly_differs(first: object, second: object) -> bool:
    kinds = (int, float, str, bool, tuple, type(None))
    return isinstance(first, kinds) and isinstance(second, kinds) and first != second
