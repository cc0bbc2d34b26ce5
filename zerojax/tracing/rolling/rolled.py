"""Program whose layers run as one loop (`jax.lax.scan`) over stacked parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

from zerojax.config.late_dataclasses import dataclass
from zerojax.operators.equations import Operand
from zerojax.tracing.jaxpr import variables
from zerojax.tracing.rolling.equality import Hole, abstract_value
from zerojax.tracing.rolling.flat_program import LayerProgram, num_bytes
from zerojax.tracing.rolling.kept_values import with_remat


@dataclass(frozen=True, eq=False)
class Rolled:
    """Program whose layers run as one loop over stacked parameters.

    Attributes:
      program: flat program before rolling.
      body: program of an iteration. It takes shared values, carried values and one row of each
        stack; it returns the next carried values, then one row of each further output.
      sources: for each equation of the body, (equation in the first iteration, positions of the
        literals in its program that the body passes as operands).
      shared: variables or literals that every iteration takes.
      inits: carried values of the first iteration.
      rows: for each stack, the variable of each iteration.
      finals: variables of the carried values after the last iteration; None for a value that is
        unused after the loop.
      outputs: for each further output, {iteration: variable} of the iterations whose output is
        used.
      before, after: equations of the program before and after the loop.
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
    def num_iterations(self) -> int:
        return len(self.rows[0])

    @property
    def stacks(self) -> list[tuple[Any, ...]]:
        """Stacks of parameters: the inputs of the program that are their rows."""
        return [row for row in self.rows if self._is_stack(row)]

    @property
    def other_rows(self) -> list[tuple[Any, ...]]:
        """Stacks other than parameters, such as keys, masks or constants that differ between
        layers.
        """
        return [row for row in self.rows if not self._is_stack(row)]

    @property
    def row_bytes(self) -> int:
        """Bytes of the stacks that are not parameters, over all iterations."""
        return sum(num_bytes(value) for row in self.other_rows for value in row)

    @property
    def carry_bytes(self) -> int:
        """Bytes of the carried values of one iteration."""
        num_carry = len(self.inits)
        return sum(map(num_bytes, self.body.jaxpr.outvars[:num_carry]))

    def _is_stack(self, row: Sequence[Any]) -> bool:
        return all(not isinstance(v, Literal) and v in self.program.places for v in row)

    def build(self, remat: str = "model") -> ClosedJaxpr:
        """Returns the program with its loop.

        The inputs of the result are the stacks [iterations, ...], then the other inputs of the
        program in order.

        Args:
          remat: remat policy of an iteration. A name of `REMAT_POLICIES`, "elementwise" or "none"
            replaces the checkpoints inside the iteration; "model" keeps them.
        """
        stacks = self.stacks
        stacked = {variable for row in stacks for variable in row}
        jaxpr = self.program.closed.jaxpr
        others = [variable for variable in jaxpr.invars if variable not in stacked]
        consts = dict(zip(jaxpr.constvars, self.program.closed.consts, strict=True))

        def run(stack_values: Sequence[Any], other_values: Sequence[Any]) -> list[Any]:
            values = consts | dict(zip(others, other_values, strict=True))
            numbers = [n for n, row in enumerate(self.rows) if self._is_stack(row)]
            by_number = dict(zip(numbers, stack_values, strict=True))
            return self._evaluate(values, by_number, with_remat(self.body, remat))

        shapes = [jax.ShapeDtypeStruct((len(r), *r[0].aval.shape), r[0].aval.dtype) for r in stacks]
        return jax.make_jaxpr(run)(shapes, [abstract_value(variable) for variable in others])

    def _evaluate(
        self, values: dict[Any, Any], stacks: Mapping[int, Any], run: Callable[..., list[Any]]
    ) -> list[Any]:
        def read(atom: Operand) -> Any:
            return atom.val if isinstance(atom, Literal) else values[atom]

        jaxpr = self.program.closed.jaxpr
        self._run(self.before, values, self._needed_of(self.before))
        xs = [stacks[n] if n in stacks else _stacked(r, read) for n, r in enumerate(self.rows)]
        carried: Sequence[Any] = self.body.jaxpr.outvars
        # A literal gets the dtype that the body returns, since the type of a carry must not
        # change.
        inits = [jnp.asarray(read(v), r.aval.dtype) if isinstance(v, Literal) else read(v)
                 for v, r in zip(self.inits, carried, strict=False)]  # fmt: skip
        shared = [read(atom) for atom in self.shared]
        number = len(self.inits)

        def iteration(carry: list[Any], rows: list[Any]) -> tuple[list[Any], list[Any]]:
            results = run(*shared, *carry, *rows)
            return results[:number], results[number:]

        carry, outputs = lax.scan(iteration, inits, xs, length=self.num_iterations)
        values |= {v: x for v, x in zip(self.finals, carry, strict=True) if v is not None}
        for by_iteration, stack in zip(self.outputs, outputs, strict=True):
            for number, variable in by_iteration.items():
                # An output may also be the final value of a carry.
                if variable not in values:
                    values[variable] = stack[number]
        self._run(self.after, values, list(variables(jaxpr.outvars)))
        return [read(atom) for atom in jaxpr.outvars]

    def _needed_of(self, equations: Sequence[Any]) -> list[Any]:
        """Returns the results of `equations` that are read outside of them."""
        made = {variable for equation in equations for variable in equation.outvars}
        rows = [value for row in self.rows for value in row]
        read = [*rows, *self.inits, *self.shared, *self.program.closed.jaxpr.outvars]
        read += [atom for equation in self.after for atom in equation.invars]
        return [v for v in dict.fromkeys(variables(read)) if v in made]

    def _run(self, equations: Sequence[Any], values: dict[Any, Any], needed: Sequence[Any]) -> None:
        """Runs equations, and adds the results in `needed` to `values`."""
        made = {variable for equation in equations for variable in equation.outvars}
        outputs = [variable for variable in needed if variable in made]
        free = dict.fromkeys(v for e in equations for v in variables(e.invars) if v not in made)
        piece = self.program.closed.jaxpr.replace(
            constvars=[], invars=list(free), outvars=outputs, eqns=list(equations)
        )
        results = jaxpr_as_fun(ClosedJaxpr(piece, []))(*(values[v] for v in free))
        values |= dict(zip(outputs, results, strict=True))


def _stacked(row: Sequence[Any], read: Callable[[Any], Any]) -> jax.Array:
    """Stacks the values of all iterations to one array."""

    def value(atom: Operand) -> Any:
        return atom.val if isinstance(atom, Literal) else read(atom)

    return jnp.stack([jnp.asarray(value(atom), abstract_value(atom).dtype) for atom in row])
