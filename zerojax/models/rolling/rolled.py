"""One loop over layers in place of equations for each: `jax.lax.scan` in a traced program."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var, jaxpr_as_fun

from zerojax.models.jaxpr import evaluate_in_pieces, is_checkpoint, program_of, variables
from zerojax.models.rolling.equality import Equality, Hole, abstract_value, same_kind
from zerojax.models.rolling.flat_program import LayerProgram, Mismatch, num_bytes
from zerojax.models.rolling.kept_values import ELEMENTWISE, keep_products
from zerojax.models.rolling.matching import (
    Carried,
    Matcher,
    Node,
    Operand,
    Result,
    Row,
    Shared,
    Turns,
)
from zerojax.models.rolling.proof import check_unrolled
from zerojax.models.zoo.stacking import REMAT_POLICIES

Key = tuple[tuple[int, ...], int]
"""A result of an equation of the body."""


@dataclasses.dataclass(frozen=True, eq=False)
class Rolled:
    """A program whose layers are one loop.

    Attributes:
      program: the flat program.
      body: takes shared values, carried values and one row of each stack; gives what is carried on,
        then one row of each further output.
      sources: for each equation of the body the equation of the first turn that it is, and the
        literals in its program that it takes as further operands.
      shared: variables or literals that every turn takes.
      inits: what the first turn is carried.
      rows: for each stack its value in each turn.
      finals: the variables that the last turn gives to what follows, None where nothing needs one.
      outputs: for each further output {turn: variable}, of those that something needs.
      before, after: equations of the rest of the program.
    """

    program: LayerProgram
    body: ClosedJaxpr
    sources: tuple[tuple[Any, tuple[Hole, ...]], ...]
    shared: tuple[Any, ...]
    inits: tuple[Any, ...]
    rows: tuple[tuple[Any, ...], ...]
    finals: tuple[Any, ...]
    outputs: tuple[Mapping[int, Any], ...]
    before: tuple[Any, ...]
    after: tuple[Any, ...]

    @property
    def num_turns(self) -> int:
        return len(self.rows[0])

    @property
    def stacks(self) -> list[tuple[Any, ...]]:
        """The stacks of parameters: the inputs of the program that are their rows."""
        return [row for row in self.rows if self._is_stack(row)]

    @property
    def other_rows(self) -> list[tuple[Any, ...]]:
        """The stacks of something else: keys, masks, constants that differ."""
        return [row for row in self.rows if not self._is_stack(row)]

    @property
    def row_bytes(self) -> int:
        """Bytes of the stacks that are no parameters, of all turns."""
        return sum(num_bytes(value) for row in self.other_rows for value in row)

    @property
    def carry_bytes(self) -> int:
        """Bytes of what goes from one turn to the next."""
        num_carry = len(self.inits)
        return sum(map(num_bytes, self.body.jaxpr.outvars[:num_carry]))

    def _is_stack(self, row: Sequence[Any]) -> bool:
        return all(not isinstance(v, Literal) and v in self.program.places for v in row)

    def build(self, remat: str = "model") -> ClosedJaxpr:
        """The program with its loop.

        Its inputs are the stacks [turns, ...], then the other inputs of the program in their order.

        Args:
          remat: what the backward pass computes again of a turn instead of what the checkpoints in
            it say: a name of `REMAT_POLICIES`, "elementwise" or "none"; "model" leaves these.
        """
        stacks = self.stacks
        stacked = {variable for row in stacks for variable in row}
        jaxpr = self.program.closed.jaxpr
        others = [variable for variable in jaxpr.invars if variable not in stacked]
        consts = dict(zip(jaxpr.constvars, self.program.closed.consts, strict=True))

        def run(stacks_given: Sequence[Any], others_given: Sequence[Any]) -> list[Any]:
            values = consts | dict(zip(others, others_given, strict=True))
            numbers = [n for n, row in enumerate(self.rows) if self._is_stack(row)]
            given = dict(zip(numbers, stacks_given, strict=True))
            return self._evaluate(values, given, _layers_with(self.body, remat))

        shapes = [jax.ShapeDtypeStruct((len(r), *r[0].aval.shape), r[0].aval.dtype) for r in stacks]
        return jax.make_jaxpr(run)(shapes, [abstract_value(variable) for variable in others])

    def _evaluate(
        self, values: dict[Any, Any], stacks: Mapping[int, Any], run: Callable[..., list[Any]]
    ) -> list[Any]:
        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, Literal) else values[atom]

        jaxpr = self.program.closed.jaxpr
        self._run(self.before, values, self._needed_of(self.before))
        xs = [stacks[n] if n in stacks else _stacked(r, read) for n, r in enumerate(self.rows)]
        carried: Sequence[Any] = self.body.jaxpr.outvars
        given = [jnp.asarray(read(v), r.aval.dtype) if isinstance(v, Literal) else read(v)
                 for v, r in zip(self.inits, carried, strict=False)]  # fmt: skip
        shared = [read(atom) for atom in self.shared]
        number = len(self.inits)

        def turn(carry: list[Any], rows: list[Any]) -> tuple[list[Any], list[Any]]:
            results = run(*shared, *carry, *rows)
            return results[:number], results[number:]

        carry, outputs = lax.scan(turn, given, xs, length=self.num_turns)
        values |= {v: x for v, x in zip(self.finals, carry, strict=True) if v is not None}
        for variables_of_turns, stack in zip(self.outputs, outputs, strict=True):
            for number, variable in variables_of_turns.items():
                if variable not in values:
                    values[variable] = stack[number]
        self._run(self.after, values, list(variables(jaxpr.outvars)))
        return [read(atom) for atom in jaxpr.outvars]

    def _needed_of(self, equations: Sequence[Any]) -> list[Any]:
        """What of these results is read by anything else."""
        made = {variable for equation in equations for variable in equation.outvars}
        rows = [value for row in self.rows for value in row]
        read = [*rows, *self.inits, *self.shared, *self.program.closed.jaxpr.outvars]
        read += [atom for equation in self.after for atom in equation.invars]
        return [v for v in dict.fromkeys(variables(read)) if v in made]

    def _run(self, equations: Sequence[Any], values: dict[Any, Any], wanted: Sequence[Any]) -> None:
        """Runs equations and notes those of their results that are wanted."""
        made = {variable for equation in equations for variable in equation.outvars}
        outputs = [variable for variable in wanted if variable in made]
        free = dict.fromkeys(v for e in equations for v in variables(e.invars) if v not in made)
        piece = self.program.closed.jaxpr.replace(
            constvars=[], invars=list(free), outvars=outputs, eqns=list(equations)
        )
        results = jaxpr_as_fun(ClosedJaxpr(piece, []))(*(values[v] for v in free))
        values |= dict(zip(outputs, results, strict=True))


def _layers_with(body: ClosedJaxpr, remat: str) -> Callable[..., list[Any]]:
    """A body as a function, with this remat."""
    if remat == "model":
        return jaxpr_as_fun(_without_barriers(body))

    def run(*inputs: Any) -> list[Any]:
        return _without_checkpoints(body, inputs)

    if remat == "none":
        return run
    policy = keep_products if remat == ELEMENTWISE else REMAT_POLICIES[remat]
    return jax.checkpoint(run, policy=policy, prevent_cse=False)


def _without_barriers(body: ClosedJaxpr) -> ClosedJaxpr:
    """A body whose checkpoints do not guard against CSE.

    The backward pass is a loop of its own, so that nothing is common; and no collective moves over
    the guard, a barrier, into the turn before.
    """
    equations = [
        equation.replace(params=equation.params | {"prevent_cse": False})
        if is_checkpoint(equation)
        else equation
        for equation in body.jaxpr.eqns
    ]
    return ClosedJaxpr(body.jaxpr.replace(eqns=equations), body.consts)


def _without_checkpoints(closed: ClosedJaxpr, inputs: Sequence[Any]) -> list[Any]:
    """The outputs of a program whose checkpoints are plain calls; nested ones compute twice."""
    return evaluate_in_pieces(
        closed,
        inputs,
        is_apart=is_checkpoint,
        run_apart=lambda equation, given: _without_checkpoints(program_of(equation), given),
    )


def _stacked(row: Sequence[Any], read: Callable[[Any], Any]) -> jax.Array:
    """One array of a value of each turn."""

    def value(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else read(atom)

    return jnp.stack([jnp.asarray(value(atom), abstract_value(atom).dtype) for atom in row])


# --- finding --------------------------------------------------------------------------------------


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
