"""Search for the values that go from layer to layer, and for the program of one turn."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var

from zerojax.tracing.jaxpr import program_of, variables
from zerojax.tracing.rolling.equality import Equality, same_kind
from zerojax.tracing.rolling.flat_program import LayerProgram, Mismatch
from zerojax.tracing.rolling.matching import (
    Carried,
    Matcher,
    Node,
    Operand,
    Result,
    Row,
    Shared,
    Turns,
)
from zerojax.tracing.rolling.proof import check_unrolled
from zerojax.tracing.rolling.rolled import Rolled

Key = tuple[tuple[int, ...], int]
"""A result of an equation of the body."""


def roll(program: LayerProgram, equality: Equality, start: int, period: int, count: int) -> Rolled:
    """The layers from `start` on as a loop of `count` turns of `period` layers.

    Raises:
      Mismatch: they are not the same program, with the first difference.
    """
    turns = Turns(start, period, tuple(range(count)))
    first: Mismatch | None = None
    for early in (False, True):
        for strict in (False, True):
            try:
                rolled = _Search(program, equality, turns, strict=strict, early=early).rolled()
                check_unrolled(rolled, equality)
                return rolled
            except Mismatch as mismatch:
                first = first or mismatch.with_traceback(None)
    assert first is not None
    raise first


class _Search:
    """Finds what goes from turn to turn, and the body.

    Values that no layer takes, such as losses of each layer in a list, are outputs of the body.
    """

    def __init__(
        self, program: LayerProgram, equality: Equality, turns: Turns, *, strict: bool, early: bool
    ) -> None:
        """Looks for the values that go from turn to turn.

        Args:
          strict: leave out what only the rest of the program reads, such as running means.
          early: as `LayerProgram.cuts` takes it.

        Raises:
          Mismatch: two layers are interleaved, or have other numbers of such values.
        """
        self.program, self.equality, self.turns = program, equality, turns
        self.count = len(turns.numbers)
        self.end = turns.layer(self.count) - 1
        layers = [turns.layer(turn) - 1 for turn in turns.numbers[1:]]
        cuts = program.cuts(turns.start, layers, early=early)
        if strict:
            cuts = [
                [v for v in cut if program.goes_on(v, layer)]
                for cut, layer in zip(cuts, layers, strict=True)
            ]
        other = next((n for n, cut in enumerate(cuts) if len(cut) != len(cuts[0])), None)
        if other is not None:
            raise Mismatch("between layers there are other numbers of values", other)
        self.carry: list[dict[int, Any]] = [
            {turn: cut[k] for turn, cut in enumerate(cuts, 1)} for k in range(len(cuts[0]))
        ]
        self.given_out: list[dict[int, Any]] = []

    def rolled(self) -> Rolled:
        matcher, results = self._match()
        while len(matcher.inits) < len(self.carry):
            taken = matcher.inits
            self.given_out += [one for k, one in enumerate(self.carry) if k not in taken]
            self.carry = [one for k, one in enumerate(self.carry) if k in taken]
            matcher, results = self._match()
        for one in self.given_out:  # so that equations of the body make them
            matcher.match(self._results_of(one))
        return self._assemble(matcher, results)

    def _match(self) -> tuple[Matcher, list[Operand]]:
        if not self.carry:
            raise Mismatch("nothing goes from layer to layer")
        for number, one in enumerate(self.carry):
            if self.count not in one:
                one[self.count] = self._last_value(number)
        inner = [{i: v for i, v in one.items() if i < self.count} for one in self.carry]
        matcher = Matcher(self.program, self.equality, self.turns, inner)
        return matcher, [matcher.match(self._results_of(one)) for one in self.carry]

    def _results_of(self, one: Mapping[int, Any]) -> list[Any]:
        return [one[turn + 1] for turn in self.turns.numbers]

    def _last_value(self, number: int) -> Any:
        """What the last turn gives: the value that matches what the turn before it gave."""
        before, why = self.carry[number][self.count - 1], None
        turns = dataclasses.replace(self.turns, numbers=(self.count - 2, self.count - 1))
        inner = [
            {i: v for i, v in one.items() if self.count - 2 <= i < self.count} for one in self.carry
        ]
        for candidate in self._candidates(before):
            try:
                matcher = Matcher(self.program, self.equality, turns, inner)
                matcher.match([before, candidate])
                return candidate
            except Mismatch as mismatch:
                why = why or mismatch
        text = str(why) if why else "the last layer gives nothing like the one before it"
        raise Mismatch(text, self.count - 1)

    def _candidates(self, variable: Any) -> list[Any]:
        """Values of the last turn that are made as this one of the turn before is.

        First the one that comes at the same place among its like, then the others in order.
        """
        before = self._like(variable, self.end - self.turns.period)
        found = [v for v in self._like(variable, self.end) if v is not variable]
        place = before.index(variable) if variable in before else len(found)
        return [*found[place : place + 1], *found[:place], *found[place + 1 :]]

    def _like(self, variable: Any, depth: int) -> list[Any]:
        equation, index = self.program.made_by[variable]
        alike = (
            other.outvars[index]
            for other in self.program.equations
            if other.primitive is equation.primitive and len(other.outvars) > index
        )
        at_depth = (v for v in alike if self.program.depth.get(v) == depth)
        return [v for v in at_depth if same_kind(v, variable)]

    def _assemble(self, matcher: Matcher, results: Sequence[Operand]) -> Rolled:
        program, jaxpr = self.program, self.program.closed.jaxpr
        made = {
            variable: (key, k, turn)
            for key, node in matcher.nodes.items()
            for turn, equation in enumerate(node.equations)
            for k, variable in enumerate(equation.outvars)
        }
        finals = {one[self.count]: k for k, one in enumerate(self.carry)}

        def given(variable: Any) -> bool:
            own = program.depth.get(variable, -1) >= self.turns.start
            return variable in finals or (
                variable in made and own and variable not in program.plain
            )

        after, needed = _slice(program, list(variables(jaxpr.outvars)), given)
        outputs: dict[Key, dict[int, Any]] = {}
        for variable in needed:
            if variable not in finals:
                key, k, turn = made[variable]
                outputs.setdefault((key, k), {})[turn] = variable
        order = [*results, *(Result(*key) for key in outputs)]
        made_body = _Body(matcher, [one[1] for one in self.carry], order)
        body, shared = made_body.build(jaxpr)
        taken = [value for row in matcher.rows for value in row]
        taken += [*matcher.inits.values(), *shared]
        before, _ = _slice(program, list(variables(taken)), lambda _: False)
        if any(variable in matcher.inside for e in before for variable in e.outvars):
            raise Mismatch("what layers take is computed from what they give")
        done = set(map(id, before))
        rest = tuple(equation for equation in after if id(equation) not in done)
        rolled = Rolled(
            program=program,
            body=body,
            sources=tuple((node.equations[0], node.holes) for node in made_body.nodes),
            shared=tuple(shared),
            inits=tuple(matcher.inits[k] for k in range(len(self.carry))),
            rows=tuple(matcher.rows),
            finals=tuple(
                one[self.count] if one[self.count] in needed else None for one in self.carry
            ),
            outputs=tuple(outputs.values()),
            before=tuple(before),
            after=rest,
        )
        _check(rolled)
        return rolled


def _check(rolled: Rolled) -> None:
    """Refuses parameters of the loop that something else reads.

    Raises:
      Mismatch: with the reason.
    """
    stacked = {variable for row in rolled.stacks for variable in row}
    if not stacked:
        raise Mismatch("layers read no parameters of their own")
    if len(stacked) != sum(map(len, rolled.stacks)):
        raise Mismatch("a parameter stands in two places of its layer")
    read = [*rolled.inits, *rolled.shared, *rolled.program.closed.jaxpr.outvars]
    read += [v for row in rolled.other_rows for v in row]
    read += [atom for e in (*rolled.before, *rolled.after) for atom in e.invars]
    for variable in variables(read):
        if variable in stacked:
            place = rolled.program.places[variable]
            layer = rolled.program.numbers[place.layer]
            raise Mismatch(f"{place.within} of layer {layer} is also read outside of layers")


def _slice(
    program: LayerProgram, wanted: Sequence[Any], given: Callable[[Any], bool]
) -> tuple[list[Any], list[Any]]:
    """(the equations that compute these variables, the given ones at which that ends)."""
    need: dict[Any, None] = dict.fromkeys(wanted)
    ends = {variable: None for variable in need if given(variable)}
    kept = []
    for equation in reversed(program.equations):
        if any(v in need and v not in ends for v in equation.outvars):
            kept.append(equation)
            for variable in variables(equation.invars):
                need[variable] = None
                if given(variable):
                    ends[variable] = None
    return kept[::-1], list(ends)


class _Body:
    """Builds the program of one turn from the equations of the first."""

    def __init__(self, matcher: Matcher, carried: Sequence[Any], results: Sequence[Operand]):
        self.matcher, self.results = matcher, results
        self.carry = [Var(variable.aval) for variable in carried]
        self.rows = [Var(row[0].aval) for row in matcher.rows]
        self.shared: dict[Any, Any] = {}
        position = matcher.program.position
        self.nodes = sorted(
            matcher.nodes.values(), key=lambda node: position[node.equations[0].outvars[0]]
        )

    def build(self, template: Jaxpr) -> tuple[ClosedJaxpr, list[Any]]:
        """(the program, the variables that it takes for its shared values)."""
        equations = [self._equation(node) for node in self.nodes]
        outputs = [self._atom(result) for result in self.results]
        body = template.replace(
            constvars=[],
            invars=[*self.shared.values(), *self.carry, *self.rows],
            outvars=outputs,
            eqns=equations,
        )
        return ClosedJaxpr(body, []), list(self.shared)

    def _equation(self, node: Node) -> Any:
        first = node.equations[0]
        operands = [self._atom(operand) for operand in node.operands]
        if not node.holes:
            return first.replace(invars=operands)
        params = first.params | {"jaxpr": _filled(first, node.holes)}
        return first.replace(invars=operands, params=params)

    def _atom(self, operand: Operand) -> Any:
        match operand:
            case Shared(atom) if isinstance(atom, Literal):
                return atom
            case Shared(atom):
                return self.shared.setdefault(atom, Var(atom.aval))
            case Carried(index):
                return self.carry[index]
            case Row(index):
                return self.rows[index]
            case Result(key, index):
                return self.matcher.nodes[key].equations[0].outvars[index]


def _filled(equation: Any, holes: Sequence[tuple[int, int]]) -> Any:
    """The program of a checkpoint that takes some of its literals as further inputs."""
    closed = program_of(equation)
    inner = closed.jaxpr
    made = {hole: Var(inner.eqns[hole[0]].invars[hole[1]].aval) for hole in holes}
    equations = [
        one.replace(invars=[made.get((n, k), atom) for k, atom in enumerate(one.invars)])
        for n, one in enumerate(inner.eqns)
    ]
    inner = inner.replace(invars=[*inner.invars, *made.values()], eqns=equations)
    given = equation.params["jaxpr"]
    return ClosedJaxpr(inner, closed.consts) if hasattr(given, "consts") else inner
