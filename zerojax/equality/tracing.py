"""Compares two executions of one traced program, equation by equation.

`compare_pieces` runs a program on a whole batch and on its pieces, which are equal parts of its
rows. A value of the whole batch should be equal to the values of the pieces, to their concatenation
along the rows, or to their mean or sum. The first equation whose inputs satisfy this and whose
output does not is the equation that mixes rows.

`compare_scaled` runs a backward pass on a cotangent and on an eighth of it. The first equation with
proportional inputs and a non-proportional output is not linear. Equations and errors are reported
with lines of the user's code.
"""

from __future__ import annotations

import enum
import os
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

from zerojax.config.late_dataclasses import dataclass
from zerojax.config.tree_types import Batch
from zerojax.equality.short_runs import quick_options
from zerojax.operators.equations import Equation, Operand
from zerojax.operators.marks import inner_programs
from zerojax.operators.whole_batch import batch_split_over
from zerojax.tracing.jaxpr import holds_collectives
from zerojax.tracing.source_lines import innermost_line, is_of_users, line_of_equation, source_line

_RELATIVE = 1e-4
"""Tolerance for a relation of values, relative to the largest element; rounding is about 1e-6."""
_SCALE = 0.125
_PIECES = "pieces of the batch"

_CHECK = str(Path(__file__).resolve().parent) + os.sep


class Relation(enum.Enum):
    """Relation between a value of the whole batch and the values of its pieces: equal to each of
    them, to their concatenation (in any order), to their mean or to their sum. SCALED is for
    `compare_scaled`: the value for an eighth of the cotangent is an eighth."""

    SAME = "same"
    ROWS = "rows"
    MEAN = "mean"
    SUM = "sum"
    SCALED = "scaled"
    OTHER = "other"
    UNKNOWN = "unknown"
    """No relation: integers that may be row numbers, random keys, values that only one run has."""


@dataclass(frozen=True)
class Break:
    """First equation at which the relation between two executions breaks.

    Attributes:
      primitive: name of the equation's JAX primitive, or of the jitted function that it calls.
      inputs: relations of the equation's inputs.
      has_rows: whether a dimension of the equation's output indexes rows.
      has_pairs: whether two dimensions of the output index rows.
      of_place: whether the output depends on the places or the number of rows, but not on what is
        in other rows.
      where: "file:line: source" of the user's code.
    """

    primitive: str
    inputs: tuple[Relation, ...]
    has_rows: bool
    has_pairs: bool
    of_place: bool
    where: str | None


@dataclass(frozen=True)
class Comparison:
    """Result of comparing two executions of a program.

    Attributes:
      outputs: relation of each output.
      breaks: for each output, the first break among its ancestors, if it could be located.
      origins: for each output, the line of the equation that introduced its relation.
      values: for each output, its value for the whole batch and for each piece.
    """

    outputs: tuple[Relation, ...]
    breaks: tuple[Break | None, ...]
    origins: tuple[str | None, ...]
    values: tuple[tuple[Any, ...], ...]


def compare_pieces(
    function: Callable[..., Sequence[Any]], whole: object, pieces: Sequence[Any]
) -> Comparison:
    """Compares `function(whole)` with `function(piece)` for each piece of a batch.

    Args:
      function: traceable function that returns a flat list of arrays.
      whole: batch, a tree of arrays with rows in dimension 0.
      pieces: parts of `whole`, of equal size, in order. All pieces run together, so that
        `zerojax.batch_sum` and `batch_mean` cover all of them.
    """

    def trace(batch: Batch, number: int) -> ClosedJaxpr:
        with batch_split_over((_PIECES,)):
            return jax.make_jaxpr(function, axis_env=[(_PIECES, number)])(batch)

    programs = [trace(whole, 1), trace(pieces[0], len(pieces))]
    inputs = [jax.tree.leaves(batch) for batch in (whole, *pieces)]
    return _compare(programs[0], programs[1], inputs, _relation_of_pieces)


def compare_scaled(function: Callable[[Any], Sequence[Any]]) -> Comparison:
    """Compares `function(1.0)` with `function(0.125)`; `function` should be linear."""
    program = jax.make_jaxpr(function)(jnp.float32(1))
    inputs = [[jnp.float32(1)], [jnp.float32(_SCALE)]]
    return _compare(program, program, inputs, _relation_of_scaled)


Relate = Callable[[Any, Sequence[Any]], Relation]


def _compare(
    first: ClosedJaxpr, other: ClosedJaxpr, inputs: Sequence[Sequence[Any]], relate: Relate
) -> Comparison:
    """Runs `first` on inputs[0] and `other` on each further input, and relates their values."""
    same_form = _form(first.jaxpr) == _form(other.jaxpr)
    if not same_form:
        results = [*_run_together(first, inputs[:1]), *_run_together(other, inputs[1:])]
        values = tuple(zip(*results, strict=True))
        outputs = tuple(relate(whole, pieces) for whole, *pieces in values)
        nothing = (None,) * len(outputs)
        return Comparison(outputs, nothing, nothing, values)
    walk = _Walk(first, other, inputs, relate)
    count = range(len(first.jaxpr.outvars))
    return Comparison(
        outputs=tuple(walk.relation(first.jaxpr.outvars[index]) for index in count),
        breaks=tuple(walk.first_break(index) for index in count),
        origins=tuple(walk.origin(index) for index in count),
        values=tuple(walk.values_of(index) for index in count),
    )


def _form(program: Jaxpr) -> list[str]:
    return [equation.primitive.name for equation in program.eqns]


class _Walk:
    """Computes all values of two programs with the same equations, and relates the values."""

    def __init__(
        self,
        first: ClosedJaxpr,
        other: ClosedJaxpr,
        inputs: Sequence[Sequence[Any]],
        relate: Relate,
        reads_batch: Sequence[bool] | None = None,
    ):
        """Runs both programs; `reads_batch`: whether each input depends on the batch, None: all."""
        self.first, self.other, self.relate = first, other, relate
        given = zip(first.jaxpr.invars, reads_batch or (), strict=False)
        self.of_batch = {var for var, of in given if of} if reads_batch else {*first.jaxpr.invars}
        for equation in first.jaxpr.eqns:
            if self._reads_batch(equation.invars).count(True):
                self.of_batch.update(equation.outvars)
        runs = [_all_values(first, inputs[:1]), _all_values(other, inputs[1:])]
        self.values: list[list[Any]] = [*runs[0], *runs[1]]
        self.number = {var: i for i, var in enumerate(_variables(first))}
        self.maker = {var: eqn for eqn in first.jaxpr.eqns for var in eqn.outvars}
        self._relations: dict[Any, Relation] = {}

    def relation(self, atom: Operand) -> Relation:
        if isinstance(atom, Literal):
            return Relation.SAME
        if atom not in self._relations:
            number = self.number[atom]
            whole, *pieces = [run[number] for run in self.values]
            self._relations[atom] = self.relate(whole, pieces)
        return self._relations[atom]

    def _reads_batch(self, atoms: Sequence[Operand]) -> list[bool]:
        return [not isinstance(atom, Literal) and atom in self.of_batch for atom in atoms]

    def values_of(self, output: int) -> tuple[Any, ...]:
        atom, twin = (one.jaxpr.outvars[output] for one in (self.first, self.other))
        pieces = [self._value(run, atom, twin) for run in range(1, len(self.values))]
        return self._value(0, atom), *pieces

    def _needed(self, output: int) -> set[Any]:
        """Returns the variables that an output depends on."""
        needed = {self.first.jaxpr.outvars[output]}
        for equation in reversed(self.first.jaxpr.eqns):
            if not needed.isdisjoint(equation.outvars):
                needed.update(x for x in equation.invars if not isinstance(x, Literal))
        return needed

    def first_break(self, output: int) -> Break | None:
        """Returns the first break among the equations that an output depends on, or None."""
        target = self.first.jaxpr.outvars[output]
        if isinstance(target, Literal) or self.relation(target) is not Relation.OTHER:
            return None
        needed = self._needed(output)
        for number, equation in enumerate(self.first.jaxpr.eqns):
            made = [var for var in equation.outvars if var in needed]
            if Relation.OTHER not in [self.relation(var) for var in made]:
                continue
            given = tuple(self.relation(atom) for atom in equation.invars)
            if Relation.OTHER not in given:
                return self._inside(number, equation) or self._break_at(number, given, made)
        return None

    def _break_at(self, number: int, given: tuple[Relation, ...], made: list[Any]) -> Break:
        equation, twin = (one.jaxpr.eqns[number] for one in (self.first, self.other))
        # The number of rows is another literal of the program for fewer rows.
        counts = any(
            isinstance(atom, Literal) and str(atom) != str(other)
            for atom, other in zip(equation.invars, twin.invars, strict=True)
        )
        index = next(self.number[var] for var in made if self.relation(var) is Relation.OTHER)
        shapes = [jnp.shape(run[index]) for run in self.values[:2]]
        return Break(
            primitive=_function_of(equation),
            inputs=given,
            has_rows=shapes[0] != shapes[1],
            has_pairs=sum(a != b for a, b in zip(*shapes, strict=False)) > 1,
            of_place=counts or not any(self._reads_batch(equation.invars)),
            where=line_of_equation(equation),
        )

    def _inside(self, number: int, equation: Equation) -> Break | None:
        """Returns the break inside the subprogram of an equation (such as a scan), if located."""
        twin = self.other.jaxpr.eqns[number]
        kind = equation.primitive.name
        if kind not in _INSIDES or not _written_by_user(equation):
            return None
        given = [[self._value(run, atom) for atom in equation.invars] for run in (0,)]
        given += [
            [
                self._value(run, atom, twin.invars[place])
                for place, atom in enumerate(equation.invars)
            ]
            for run in range(1, len(self.values))
        ]
        inner = [_INSIDES[kind](eqn, given[index]) for index, eqn in enumerate((equation, twin))]
        if (
            inner[0] is None
            or inner[1] is None
            or _form(inner[0][0].jaxpr) != _form(inner[1][0].jaxpr)
        ):
            return None
        arguments = [inner[0][1]]
        for values in given[1:]:
            found = _INSIDES[kind](twin, values)
            if found is None:
                return None
            arguments.append(found[1])
        reads = self._reads_batch(equation.invars)[-len(arguments[0]) :]  # without a branch's index
        walk = _Walk(inner[0][0], inner[1][0], arguments, self.relate, reads)
        breaks = (walk.first_break(i) for i in range(len(inner[0][0].jaxpr.outvars)))
        return next((found for found in breaks if found is not None), None)

    def _value(self, run: int, atom: Operand, twin: object = None) -> Any:
        if isinstance(atom, Literal):
            own = twin if isinstance(twin, Literal) else atom
            return own.val
        return self.values[run][self.number[atom]]

    def origin(self, output: int) -> str | None:
        """Returns the line of the user's code that first gave a value the relation of an output.

        The search goes back from the output through values with the same relation.
        """
        atom = self.first.jaxpr.outvars[output]
        relation, where = self.relation(atom), None
        while not isinstance(atom, Literal) and atom in self.maker:
            equation = self.maker[atom]
            where = line_of_equation(equation) or where
            before = [x for x in equation.invars if self.relation(x) is relation]
            before = [x for x in before if not isinstance(x, Literal) and x in self.maker]
            if relation in (Relation.SAME, Relation.OTHER) or not before:
                break
            atom = before[0]
        return where


def _function_of(equation: Equation) -> str:
    """Returns the name of the jitted function that an equation calls, else of its primitive."""
    kind = equation.primitive.name
    called = equation.params.get("name") if kind in ("jit", "pjit") else None
    return str(called or kind).strip("_<>")


def _variables(closed: ClosedJaxpr) -> list[Any]:
    program = closed.jaxpr
    made = [var for equation in program.eqns for var in equation.outvars]
    return [*program.constvars, *program.invars, *made]


def _all_values(closed: ClosedJaxpr, inputs: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Computes every value of a program for each set of inputs, on the host; keys become None."""
    program = closed.jaxpr
    kept, seen = [], set()
    for equation in program.eqns:
        for var in equation.outvars:
            if type(var).__name__ != "DropVar" and _is_plain(var.aval) and var not in seen:
                seen.add(var)
                kept.append(var)
    # As program inputs, weights are not constant-folded by XLA.
    everything = program.replace(
        constvars=[], invars=[*program.constvars, *program.invars], outvars=kept
    )
    arguments = [[*closed.consts, *given] for given in inputs]
    result = []
    for given, made in zip(
        inputs, _run_together(ClosedJaxpr(everything, []), arguments), strict=True
    ):
        values = dict(zip(program.constvars, closed.consts, strict=True))
        values |= dict(zip(program.invars, given, strict=True))
        values |= dict(zip(kept, made, strict=True))
        result.append([values.get(var) for var in _variables(closed)])
    return result


def _run_together(closed: ClosedJaxpr, inputs: Sequence[Sequence[Any]]) -> list[Sequence[Any]]:
    """Runs a program on all sets of inputs together, and returns the outputs for each set.

    Sums over the batch (`zerojax.batch_sum`) cover all sets.
    """
    function, options = jaxpr_as_fun(closed), quick_options()
    if not holds_collectives(closed):
        run = jax.jit(function, compiler_options=options)
        return [run(*given) for given in inputs]
    # Inputs that all sets share are not stacked: weights, and keys, which cannot be stacked.
    columns = list(zip(*inputs, strict=True))
    common = [all(value is column[0] for value in column) for column in columns]
    axes = [None if same else 0 for same in common]
    mapped = jax.vmap(function, in_axes=axes, axis_size=len(inputs), axis_name=_PIECES)
    given = [
        column[0] if same else jnp.stack(column)
        for column, same in zip(columns, common, strict=True)
    ]
    outputs = jax.jit(mapped, compiler_options=options)(*given)
    return [[x[number] for x in outputs] for number in range(len(inputs))]


def _is_plain(aval: object) -> bool:
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and not jax.dtypes.issubdtype(dtype, jax.dtypes.extended)


def _relation_of_pieces(whole: object, pieces: Sequence[Any]) -> Relation:
    if whole is None or any(piece is None for piece in pieces) or not _is_plain(whole):
        return Relation.UNKNOWN
    full, parts = np.asarray(whole), [np.asarray(piece) for piece in pieces]
    exact = not jnp.issubdtype(full.dtype, jnp.floating)
    failed = Relation.UNKNOWN if exact else Relation.OTHER
    full, parts = full.astype(np.float64), [part.astype(np.float64) for part in parts]
    if full.shape == parts[0].shape:
        limit = 0.0 if exact else _RELATIVE * max(_largest(full), *map(_largest, parts))
        if all(_close(part, full, limit) for part in parts):
            return Relation.SAME
        total = np.sum(parts, axis=0)
        if _close(total / len(parts), full, limit):
            return Relation.MEAN
        return Relation.SUM if _close(total, full, limit) else failed
    differing = [
        axis
        for axis, sizes in enumerate(zip(full.shape, parts[0].shape, strict=False))
        if sizes[0] != sizes[1]
    ]
    if full.ndim != parts[0].ndim or len(differing) != 1:
        return failed
    joined = np.concatenate(parts, axis=differing[0])
    limit = 0.0 if exact else _RELATIVE * _largest(full)
    if joined.shape != full.shape:
        return failed
    if _close(joined, full, limit) or _close(np.sort(joined, None), np.sort(full, None), limit):
        return Relation.ROWS
    return failed


def _relation_of_scaled(whole: object, pieces: Sequence[Any]) -> Relation:
    (part,) = pieces
    if whole is None or part is None or not _is_plain(whole):
        return Relation.UNKNOWN
    full, part = np.asarray(whole), np.asarray(part)
    if not jnp.issubdtype(full.dtype, jnp.floating):
        return Relation.UNKNOWN
    full, part = full.astype(np.float64), part.astype(np.float64)
    limit = _RELATIVE * _largest(full)
    if _close(part, full, limit):
        return Relation.SAME
    return Relation.SCALED if _close(part, full * _SCALE, limit * _SCALE) else Relation.OTHER


def _largest(array: np.ndarray) -> float:
    finite = np.abs(array[np.isfinite(array)])
    return float(finite.max(initial=0.0))


def _close(first: np.ndarray, second: np.ndarray, limit: float) -> bool:
    with np.errstate(invalid="ignore"):
        differences = np.where(first == second, 0.0, np.abs(first - second))
    return bool(np.all((differences <= limit) | (np.isnan(first) & np.isnan(second))))


def _written_by_user(equation: Equation) -> bool:
    """Returns whether source lines inside an equation's subprogram belong to the user's code.

    A jitted library function is traced only at its first call, so its lines may belong to another
    call.
    """
    if equation.primitive.name not in ("jit", "pjit"):
        return True
    for program in inner_programs(equation.params):
        source = getattr(getattr(program, "debug_info", None), "func_src_info", None) or ""
        filename = source.rpartition(" at ")[2].rpartition(":")[0]
        return bool(filename) and is_of_users(filename)
    return False


def _closed(program: Jaxpr | ClosedJaxpr) -> ClosedJaxpr:
    return program if hasattr(program, "consts") else ClosedJaxpr(program, ())


def _called(equation: Equation, given: Sequence[Any]) -> tuple[ClosedJaxpr, list[Any]] | None:
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if name in equation.params:
            program = _closed(equation.params[name])
            if len(program.jaxpr.invars) == len(given):
                return program, list(given)
    return None


def _branch(equation: Equation, given: Sequence[Any]) -> tuple[ClosedJaxpr, list[Any]] | None:
    branches = equation.params["branches"]
    index = int(np.clip(int(given[0]), 0, len(branches) - 1))
    return _closed(branches[index]), list(given[1:])


def _iteration(equation: Equation, given: Sequence[Any]) -> tuple[ClosedJaxpr, list[Any]] | None:
    """Returns the body of a scan, and the inputs of its first iteration."""
    body = _closed(equation.params["jaxpr"])
    arguments = []
    variables: Sequence[Any] = body.jaxpr.invars
    for value, var in zip(given, variables, strict=True):
        sliced = jnp.ndim(value) != len(var.aval.shape)
        last = -1 if equation.params.get("reverse") else 0
        arguments.append(value[last] if sliced else value)
    return body, arguments


_INSIDES = {
    "jit": _called,
    "pjit": _called,
    "closed_call": _called,
    "core_call": _called,
    "checkpoint": _called,
    "remat": _called,
    "remat2": _called,
    "custom_jvp_call": _called,
    "custom_vjp_call": _called,
    "custom_vjp_call_jaxpr": _called,
    "cond": _branch,
    "scan": _iteration,
}
"""{primitive with a subprogram: function (equation, inputs) that returns (subprogram, its inputs)}.
"""


def line_of_error(error: BaseException) -> str | None:
    """Returns the innermost line of the user's code that raised, as "file:line: source"."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [i for i, frame in enumerate(frames) if frame.filename.startswith(_CHECK)]
    called = frames[ours[-1] + 1 :] if ours else frames  # earlier frames called the check
    return innermost_line((frame.filename, frame.lineno or 0) for frame in reversed(called))


def lines_of_rules(program: Jaxpr) -> list[tuple[str | None, str]]:
    """Lists (line of the call, line of its backward rule) for each `jax.custom_vjp` of the user.

    Includes calls in subprograms. Lines have the form "file:line: source".
    """
    found = []
    for equation in program.eqns:
        source = getattr(
            getattr(equation.params.get("bwd"), "debug_info", None), "func_src_info", None
        )
        filename, _, number = (source or "").rpartition(" at ")[2].rpartition(":")
        if number.isdigit() and is_of_users(filename):
            found.append((line_of_equation(equation), source_line(filename, int(number))))
        for inner in inner_programs(equation.params):
            found += lines_of_rules(inner)
    return found
