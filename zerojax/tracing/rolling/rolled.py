"""One loop over layers in place of equations for each: `jax.lax.scan` in a traced program."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

from zerojax.tracing.jaxpr import evaluate_in_pieces, is_checkpoint, program_of, variables
from zerojax.tracing.rolling.equality import Hole, abstract_value
from zerojax.tracing.rolling.flat_program import LayerProgram, num_bytes
from zerojax.tracing.rolling.kept_values import ELEMENTWISE, keep_products
from zerojax.tracing.stacking import REMAT_POLICIES


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
