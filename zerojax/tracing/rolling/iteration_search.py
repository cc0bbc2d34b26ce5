"""Searches for the values that go from layer to layer, and builds the program of one iteration."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var

from zerojax.operators.equations import Equation
from zerojax.tracing.jaxpr import program_of, variables
from zerojax.tracing.rolling.equality import Equality, same_kind
from zerojax.tracing.rolling.flat_program import LayerProgram, Mismatch
from zerojax.tracing.rolling.matching import (
    Carried,
    Iterations,
    Matcher,
    Node,
    Operand,
    Result,
    Row,
    Shared,
)
from zerojax.tracing.rolling.proof import check_unrolled
from zerojax.tracing.rolling.rolled import Rolled

Key = tuple[tuple[int, ...], int]
"""Key of a result of an equation in the loop body: (key of the equation, index of the result)."""


def roll(program: LayerProgram, equality: Equality, start: int, period: int, count: int) -> Rolled:
    """Converts the layers from `start` on to a loop of `count` iterations with `period` layers
    each.

    Raises:
      Mismatch: iterations are not the same program; the message describes the first difference.
    """
    iterations = Iterations(start, period, tuple(range(count)))
    first: Mismatch | None = None
    for early in (False, True):
        for strict in (False, True):
            try:
                rolled = _Search(program, equality, iterations, strict=strict, early=early).rolled()
                # The proof does not rely on the search, so a mistake of the search cannot give a
                # wrong loop.
                check_unrolled(rolled, equality)
                return rolled
            except Mismatch as mismatch:
                # A traceback would keep all frames of the failed search, with their values.
                first = first or mismatch.with_traceback(None)
    assert first is not None
    raise first


class _Search:
    """Searches for the carried values and the body of a loop.

    Values that no later layer uses, such as a list with the loss of each layer, are outputs of the
    body.
    """

    def __init__(
        self,
        program: LayerProgram,
        equality: Equality,
        iterations: Iterations,
        *,
        strict: bool,
        early: bool,
    ) -> None:
        """Searches for the carried values.

        Args:
          program: flat program with the layers.
          equality: comparison of equations.
          iterations: assignment of layers to iterations.
          strict: whether to ignore values that only the rest of the program reads, such as running
            means.
          early: whether to cut between layers as early as possible (see `LayerProgram.cuts`).

        Raises:
          Mismatch: two layers are interleaved, or the number of values between layers is not
            constant.
        """
        self.program, self.equality, self.iterations = program, equality, iterations
        self.count = len(iterations.numbers)
        self.end = iterations.layer(self.count) - 1
        layers = [iterations.layer(i) - 1 for i in iterations.numbers[1:]]
        cuts = program.cuts(iterations.start, layers, early=early)
        if strict:
            cuts = [
                [v for v in cut if program.goes_on(v, layer)]
                for cut, layer in zip(cuts, layers, strict=True)
            ]
        other = next((n for n, cut in enumerate(cuts) if len(cut) != len(cuts[0])), None)
        if other is not None:
            raise Mismatch("layers pass on different numbers of values", other)
        self.carry: list[dict[int, Any]] = [
            {i: cut[k] for i, cut in enumerate(cuts, 1)} for k in range(len(cuts[0]))
        ]
        self.further_outputs: list[dict[int, Any]] = []

    def rolled(self) -> Rolled:
        matcher, results = self._match()
        while len(matcher.inits) < len(self.carry):
            # A value that no iteration takes from the one before it is an output, not a carried
            # value.
            taken = matcher.inits
            self.further_outputs += [x for k, x in enumerate(self.carry) if k not in taken]
            self.carry = [x for k, x in enumerate(self.carry) if k in taken]
            matcher, results = self._match()
        for values in self.further_outputs:  # so that equations of the body compute them
            matcher.match(self._results_of(values))
        return self._assemble(matcher, results)

    def _match(self) -> tuple[Matcher, list[Operand]]:
        if not self.carry:
            raise Mismatch("no value goes from layer to layer")
        for number, values in enumerate(self.carry):
            if self.count not in values:
                values[self.count] = self._last_value(number)
        inner = [{i: v for i, v in values.items() if i < self.count} for values in self.carry]
        matcher = Matcher(self.program, self.equality, self.iterations, inner)
        return matcher, [matcher.match(self._results_of(values)) for values in self.carry]

    def _results_of(self, values: Mapping[int, Any]) -> list[Any]:
        return [values[i + 1] for i in self.iterations.numbers]

    def _last_value(self, number: int) -> Any:
        """Returns the last iteration's value that corresponds to the given value of the previous
        iteration.
        """
        before, why = self.carry[number][self.count - 1], None
        # Two iterations tell the candidates apart; later all iterations are compared.
        last_two = dataclasses.replace(self.iterations, numbers=(self.count - 2, self.count - 1))
        inner = [
            {i: v for i, v in values.items() if self.count - 2 <= i < self.count}
            for values in self.carry
        ]
        for candidate in self._candidates(before):
            try:
                matcher = Matcher(self.program, self.equality, last_two, inner)
                matcher.match([before, candidate])
                return candidate
            except Mismatch as mismatch:
                why = why or mismatch
        text = str(why) if why else "the last layer has no result like the one before it"
        raise Mismatch(text, self.count - 1)

    def _candidates(self, variable: Var) -> list[Any]:
        """Returns values of the last iteration that are computed like the given value of the
        previous iteration.

        The value at the same position among similar values comes first, then the others in order.
        """
        before = self._like(variable, self.end - self.iterations.period)
        similar = [v for v in self._like(variable, self.end) if v is not variable]
        place = before.index(variable) if variable in before else len(similar)
        return [*similar[place : place + 1], *similar[:place], *similar[place + 1 :]]

    def _like(self, variable: Var, depth: int) -> list[Any]:
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
            variable: (key, k, iteration)
            for key, node in matcher.nodes.items()
            for iteration, equation in enumerate(node.equations)
            for k, variable in enumerate(equation.outvars)
        }
        finals = {values[self.count]: k for k, values in enumerate(self.carry)}

        def is_result(variable: Var) -> bool:
            # A value of no layer, or of parameters alone, is computed outside of the loop.
            own = program.depth.get(variable, -1) >= self.iterations.start
            return variable in finals or (
                variable in made and own and variable not in program.plain
            )

        after, needed = _slice(program, list(variables(jaxpr.outvars)), is_result)
        outputs: dict[Key, dict[int, Any]] = {}
        for variable in needed:
            if variable not in finals:
                key, k, iteration = made[variable]
                outputs.setdefault((key, k), {})[iteration] = variable
        order = [*results, *(Result(*key) for key in outputs)]
        made_body = _Body(matcher, [values[1] for values in self.carry], order)
        body, shared = made_body.build(jaxpr)
        taken = [value for row in matcher.rows for value in row]
        taken += [*matcher.inits.values(), *shared]
        before, _ = _slice(program, list(variables(taken)), lambda _: False)
        if any(variable in matcher.inside for e in before for variable in e.outvars):
            raise Mismatch("inputs of the loop are computed from its results")
        # An equation that is needed on both sides of the loop runs once, before it.
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
                values[self.count] if values[self.count] in needed else None
                for values in self.carry
            ),
            outputs=tuple(outputs.values()),
            before=tuple(before),
            after=rest,
        )
        _check(rolled)
        return rolled


def _check(rolled: Rolled) -> None:
    """Raises `Mismatch` if the parameters of the loop are also read outside of the loop.

    Raises:
      Mismatch: a parameter is also read elsewhere, or layers have no parameters of their own.
    """
    stacked = {variable for row in rolled.stacks for variable in row}
    if not stacked:
        raise Mismatch("layers read no parameters of their own")
    if len(stacked) != sum(map(len, rolled.stacks)):
        raise Mismatch("a parameter is in two places of its layer")
    read = [*rolled.inits, *rolled.shared, *rolled.program.closed.jaxpr.outvars]
    read += [v for row in rolled.other_rows for v in row]
    read += [atom for e in (*rolled.before, *rolled.after) for atom in e.invars]
    for variable in variables(read):
        if variable in stacked:
            place = rolled.program.places[variable]
            layer = rolled.program.numbers[place.layer]
            raise Mismatch(f"{place.within} of layer {layer} is also read outside of layers")


def _slice(
    program: LayerProgram, needed: Sequence[Any], is_known: Callable[[Any], bool]
) -> tuple[list[Any], list[Any]]:
    """Returns (equations that compute `needed` from known variables, known variables that they
    use).

    Args:
      program: flat program.
      needed: variables to be computed.
      is_known: function that returns whether a variable is already computed.
    """
    visited: dict[Any, None] = dict.fromkeys(needed)
    ends = {variable: None for variable in visited if is_known(variable)}
    kept = []
    for equation in reversed(program.equations):
        if any(v in visited and v not in ends for v in equation.outvars):
            kept.append(equation)
            for variable in variables(equation.invars):
                visited[variable] = None
                if is_known(variable):
                    ends[variable] = None
    return kept[::-1], list(ends)


class _Body:
    """Builds the program of one iteration from the equations of the first iteration."""

    def __init__(self, matcher: Matcher, carried: Sequence[Any], results: Sequence[Operand]):
        self.matcher, self.results = matcher, results
        self.carry = [Var(variable.aval) for variable in carried]
        self.rows = [Var(row[0].aval) for row in matcher.rows]
        self.shared: dict[Any, Any] = {}
        position = matcher.program.position
        # In the order of the first iteration, in which operands come before their uses.
        self.nodes = sorted(
            matcher.nodes.values(), key=lambda node: position[node.equations[0].outvars[0]]
        )

    def build(self, template: Jaxpr) -> tuple[ClosedJaxpr, list[Any]]:
        """Returns (program of an iteration, variables from outside of the loop that every iteration
        takes).
        """
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


def _filled(equation: Equation, holes: Sequence[tuple[int, int]]) -> Any:
    """Replaces some literals in the program of a checkpoint by inputs."""
    closed = program_of(equation)
    inner = closed.jaxpr
    made = {hole: Var(inner.eqns[hole[0]].invars[hole[1]].aval) for hole in holes}
    equations = [
        inner_equation.replace(
            invars=[made.get((n, k), atom) for k, atom in enumerate(inner_equation.invars)]
        )
        for n, inner_equation in enumerate(inner.eqns)
    ]
    inner = inner.replace(invars=[*inner.invars, *made.values()], eqns=equations)
    original = equation.params["jaxpr"]
    return ClosedJaxpr(inner, closed.consts) if hasattr(original, "consts") else inner
