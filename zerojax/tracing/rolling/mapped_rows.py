"""Runs a program over unstacked layers on stacked arrays, and maps operations that all rows share.

An example is an optimizer, which updates the parameters of equal layers by the same equations for
each layer. These become one equation under `jax.vmap`. Operations that mix rows, such as the norm
of all gradients, take single rows of the results.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal

from zerojax.config.late_dataclasses import dataclass
from zerojax.operators.equations import Equation, Operand
from zerojax.tracing.jaxpr import variables
from zerojax.tracing.rolling.equality import Equality, equation_function
from zerojax.tracing.rolling.flat_program import open_calls

Shape = tuple[Any, ...]


@dataclasses.dataclass(eq=False)
class _Kind:
    """One result of a `_Group`: the same value computed for every row of the stacks.

    Attributes:
      size: number of rows of the stacks.
      members: {row: variable of this row}; complete if every row has a variable.
    """

    size: int
    members: dict[int, Any] = dataclasses.field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        return len(self.members) == self.size

    def places(self) -> dict[Any, tuple[_Kind, int]]:
        """Returns {variable of a row: (this kind, row)}."""
        return {variable: (self, row) for row, variable in self.members.items()}


@dataclasses.dataclass(eq=False)
class _Group:
    """Equations, one per row, that differ only in the row of the stacks.

    Attributes:
      first: the first of these equations, in order of the program.
      results: a `_Kind` for each result of the equations.
    """

    first: Any
    results: list[_Kind]


@dataclass(frozen=True, eq=False)
class MappedRows:
    """Runs a program over rows on stacks: equal equations of all rows run as one mapped equation.

    Attributes:
      closed: flat program over rows.
      groups, outputs: for each stack, the positions of its rows among the inputs (groups) and among
        the outputs (outputs).
      mapped: {index of an equation: group that runs instead of it}.
      skipped: indices of the other equations that such groups replace.
      kind_of: {variable: (its `_Kind`, its row)}.
    """

    closed: ClosedJaxpr
    groups: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    mapped: Mapping[int, _Group]
    skipped: frozenset[int]
    kind_of: Mapping[Any, tuple[_Kind, int]]

    def __call__(
        self, stacked: Sequence[jax.Array], others: Mapping[int, Any]
    ) -> tuple[list[jax.Array], dict[int, Any]]:
        """Runs the program on stacks.

        Args:
          stacked: one array [rows, ...] for each entry of `groups`.
          others: {position: value} of every other input.

        Returns:
          (one array [rows, ...] for each entry of `outputs`, {position: value} of every other
          output).
        """
        run = _Run(self, stacked, others)
        in_stacks = {position for rows in self.outputs for position in rows}
        results = self.closed.jaxpr.outvars
        stacks = [run.stack([results[position] for position in rows]) for rows in self.outputs]
        rest = {p: run.read(atom) for p, atom in enumerate(results) if p not in in_stacks}
        return stacks, rest


class _Run:
    """Values of one call of a `MappedRows`."""

    def __init__(
        self, mapped: MappedRows, stacked: Sequence[jax.Array], others: Mapping[int, Any]
    ) -> None:
        self.mapped = mapped
        jaxpr = mapped.closed.jaxpr
        self.values = dict(zip(jaxpr.constvars, mapped.closed.consts, strict=True))
        self.values |= {jaxpr.invars[position]: x for position, x in others.items()}
        self.stacks: dict[_Kind, jax.Array] = {}
        for rows, array in zip(mapped.groups, stacked, strict=True):
            self.stacks[mapped.kind_of[jaxpr.invars[rows[0]]][0]] = array
        for number, equation in enumerate(jaxpr.eqns):
            if number in mapped.mapped:
                self._run_group(mapped.mapped[number])
            elif number not in mapped.skipped:
                taken = list(dict.fromkeys(variables(equation.invars)))
                results = equation_function(equation, taken)(*map(self.read, taken))
                self.values |= dict(zip(equation.outvars, results, strict=True))

    def read(self, atom: Operand) -> Any:
        if isinstance(atom, Literal):
            return atom.val
        if atom not in self.values:
            kind, row = self.mapped.kind_of[atom]
            return self.stacks[kind][row]
        return self.values[atom]

    def stack(self, atoms: Sequence[Any]) -> jax.Array:
        """Returns the values of `atoms` as one array, without a copy if they are all rows of one
        stack.
        """
        places = [None if isinstance(a, Literal) else self.mapped.kind_of.get(a) for a in atoms]
        first = places[0]
        if first is not None and first[0] in self.stacks:
            expected = [(first[0], row) for row in range(len(atoms))]
            if places == expected and first[0].size == len(atoms):
                return self.stacks[first[0]]
        return jnp.stack([jnp.asarray(self.read(a), a.aval.dtype) for a in atoms])

    def _run_group(self, group: _Group) -> None:
        taken = list(dict.fromkeys(variables(group.first.invars)))
        arrays, axes = [], []
        for variable in taken:
            kind = self.mapped.kind_of.get(variable)
            is_row = kind is not None and kind[0] in self.stacks
            arrays.append(self.stacks[kind[0]] if is_row and kind else self.read(variable))
            axes.append(0 if is_row else None)
        run = jax.vmap(equation_function(group.first, taken), in_axes=tuple(axes))
        for kind, array in zip(group.results, run(*arrays), strict=True):
            self.stacks[kind] = array


def map_rows(
    closed: ClosedJaxpr, groups: Sequence[tuple[int, ...]], outputs: Sequence[tuple[int, ...]]
) -> MappedRows:
    """Groups the equations of a program that are equal for every row of a stack.

    Args:
      closed: program over unstacked arrays.
      groups: for each stack, the positions of its rows among the inputs.
      outputs: for each stack of results, the positions of its rows among the outputs.
    """
    flat = _without_repeats(open_calls(closed))
    kind_of: dict[Any, tuple[_Kind, int]] = {}
    for rows in groups:
        kind = _Kind(len(rows), {row: flat.jaxpr.invars[at] for row, at in enumerate(rows)})
        kind_of |= kind.places()
    numbered = _grouped(flat, kind_of)
    mapped = {numbers[0]: group for group, numbers in numbered}
    skipped = frozenset(number for _, numbers in numbered for number in numbers)
    made = (tuple(map(tuple, groups)), tuple(map(tuple, outputs)))
    return MappedRows(flat, *made, mapped, skipped, kind_of)


def _without_repeats(flat: ClosedJaxpr) -> ClosedJaxpr:
    """Removes repeated computations from a program (common-subexpression elimination).

    A value that all rows use, such as optax's zeros for imaginary parts, is then one variable, so
    that the equations of different rows have equal operands.
    """
    equality, kept = Equality({}), []
    by_signature: dict[Any, list[Any]] = {}
    first_of: dict[Any, Any] = {}

    def read(atom: Operand) -> Any:
        return atom if isinstance(atom, Literal) else first_of.get(atom, atom)

    for equation in flat.jaxpr.eqns:
        equation = equation.replace(invars=[read(atom) for atom in equation.invars])
        alike = [] if equation.effects else by_signature.setdefault(_signature(equation, {}), [])
        same = next((other for other in alike if equality.holes(other, equation) == set()), None)
        if same is None:
            alike.append(equation)
            kept.append(equation)
        else:
            first_of.update(zip(equation.outvars, same.outvars, strict=True))
    outputs = [read(atom) for atom in flat.jaxpr.outvars]
    return ClosedJaxpr(flat.jaxpr.replace(eqns=kept, outvars=outputs), flat.consts)


def _grouped(
    flat: ClosedJaxpr, kind_of: dict[Any, tuple[_Kind, int]]
) -> list[tuple[_Group, list[int]]]:
    """Groups corresponding equations of all rows; returns (group, their indices) and extends
    `kind_of`.

    Equal equations have operands of the same depth, so the groups of each depth are complete before
    the next depth. An equation that only some rows have is not grouped; a sum over all rows, for
    example, adds one row after the other.
    """
    equality, groups = Equality({}), []
    for level in _levels(flat.jaxpr.eqns):
        by_signature: dict[Any, list[tuple[_Group, list[int]]]] = {}
        for number, equation in level:
            places = [kind_of[v] for v in variables(equation.invars) if v in kind_of]
            # Operands of two rows do not belong to the computation of one row.
            if equation.effects or len({(kind.size, row) for kind, row in places}) != 1:
                continue
            size, row = places[0][0].size, places[0][1]
            alike = by_signature.setdefault(_signature(equation, kind_of), [])
            for group, numbers in alike:
                if equality.holes(group.first, equation) == set():
                    numbers.append(number)
                    break
            else:
                group = _Group(equation, [_Kind(size) for _ in equation.outvars])
                alike.append((group, [number]))
            for kind, variable in zip(group.results, equation.outvars, strict=True):
                kind.members[row] = variable
        for group, numbers in (pair for alike in by_signature.values() for pair in alike):
            if all(kind.is_complete for kind in group.results):
                groups.append((group, numbers))
                for kind in group.results:
                    kind_of |= kind.places()
    return groups


def _levels(equations: Sequence[Any]) -> Iterable[list[tuple[int, Any]]]:
    """Groups equations by their depth from the inputs: lists of (index, equation).

    The depth is the length of the longest chain of equations up to the equation.
    """
    depth: dict[Any, int] = {}
    levels: dict[int, list[tuple[int, Any]]] = {}
    for number, equation in enumerate(equations):
        own = 1 + max((depth.get(v, 0) for v in variables(equation.invars)), default=0)
        depth |= dict.fromkeys(equation.outvars, own)
        levels.setdefault(own, []).append((number, equation))
    return (levels[own] for own in sorted(levels))


def _signature(equation: Equation, kind_of: Mapping[Any, tuple[_Kind, int]]) -> Any:
    """Returns a key that is the same for corresponding equations of different rows."""

    def of(atom: Operand) -> Any:
        if isinstance(atom, Literal):
            return str(atom.aval), str(atom.val)
        return id(kind_of[atom][0]) if atom in kind_of else id(atom)

    return equation.primitive.name, *map(of, equation.invars)
