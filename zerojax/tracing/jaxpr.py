"""Traverses traced programs (jaxprs), and extracts parts of them.

The module supports each JAX version that zerojax supports.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var, jaxpr_as_fun

from zerojax.config.late_dataclasses import dataclass
from zerojax.operators.equations import Equation, Operand
from zerojax.operators.marks import LINEAR_RULE, batch_call, inner_programs


def has_side_effects(effects: Iterable[Any]) -> bool:
    """Returns whether any effect is a callback, such as `jax.debug.print`.

    Effects of operations over a mesh axis, such as a sum over the batch, do not count.
    """
    return any(not isinstance(effect, _of_axes()) for effect in effects)


@functools.cache
def _of_axes() -> type:
    """Returns the type of JAX's effect for named mesh axes, which has no public name."""
    program = jax.make_jaxpr(lambda x: lax.psum(x, "i"), axis_env=[("i", 2)])(1.0)
    return type(next(iter(program.effects)))


def has_own_rules(program: Jaxpr) -> bool:
    """Returns whether a program contains, at any depth, custom derivatives that may not be
    linear.
    """
    return any(
        is_own_rule(equation) or any(map(has_own_rules, inner_programs(equation.params)))
        for equation in program.eqns
    )


def is_own_rule(equation: Equation) -> bool:
    """Returns whether an equation calls a custom derivative that may not be linear."""
    called = equation.primitive.name.startswith("custom_vjp")
    return called and not any(map(_is_linear, inner_programs(equation.params)))


def _is_linear(rule: Jaxpr) -> bool:
    names = (e.params["name"] for e in rule.eqns if e.primitive.name == "name")
    return LINEAR_RULE in names


def is_checkpoint(equation: Equation) -> bool:
    """Returns whether an equation is a `jax.checkpoint`."""
    return equation.primitive.name in ("checkpoint", "remat", "remat2")


def program_of(equation: Equation) -> ClosedJaxpr:
    """Returns the program of a call or a checkpoint.

    The parameters of a checkpoint contain an open jaxpr, those of a call a closed one; JAX 0.12 has
    only one kind.
    """
    inner = equation.params["jaxpr"]
    return inner if hasattr(inner, "consts") else ClosedJaxpr(inner, ())


def free_variables(equations: Sequence[Any]) -> list[Any]:
    """Returns the variables that equations use and do not define."""
    made: set[Any] = set()
    taken: dict[Any, None] = {}
    for equation in equations:
        for atom in equation.invars:
            if not isinstance(atom, Literal) and atom not in made:
                taken[atom] = None
        made.update(equation.outvars)
    return list(taken)


def variables(atoms: Sequence[Any]) -> Iterator[Any]:
    """Returns the atoms that are not literals."""
    return (atom for atom in atoms if not isinstance(atom, Literal))


@dataclass(frozen=True, eq=False)
class Piece:
    """Part of a program between given variables, without dead code.

    Attributes:
      closed: program of the part. Its inputs are first the variables at the cut, then those inputs
        of the whole program that it needs.
      inputs: positions of the needed inputs among all inputs of the whole program.
    """

    closed: ClosedJaxpr
    inputs: tuple[int, ...]

    def __call__(self, values: Sequence[Any], inputs: Mapping[int, Any]) -> list[Any]:
        """Evaluates the piece on the values at the cut and on {position: input}."""
        return jaxpr_as_fun(self.closed)(*values, *(inputs[place] for place in self.inputs))


def cut_piece(closed: ClosedJaxpr, outputs: Sequence[Any], boundary: Sequence[Any] = ()) -> Piece:
    """Returns the part of a program that computes `outputs` from the variables in `boundary`.

    Args:
      closed: the whole program.
      outputs: variables or literals of the program.
      boundary: variables of the program whose values are inputs of the piece.
    """
    program, known = closed.jaxpr, set(boundary)
    needed = set(variables(outputs))
    kept = []
    for equation in reversed(program.eqns):
        made = set(equation.outvars)
        # What makes a variable of the boundary is on the other side of the cut.
        if made & needed and not made & known:
            kept.append(equation)
            needed.update(variables(equation.invars))
    consts = {
        variable: value
        for variable, value in zip(program.constvars, closed.consts, strict=True)
        if variable in needed
    }
    # An input that is also in `boundary` is passed only once.
    inputs = [i for i, v in enumerate(program.invars) if v in needed and v not in known]
    part = program.replace(
        constvars=list(consts),
        invars=[*boundary, *(program.invars[i] for i in inputs)],
        outvars=list(outputs),
        eqns=kept[::-1],
        effects=program.effects,
    )
    return Piece(ClosedJaxpr(part, list(consts.values())), tuple(inputs))


RunPiece = Callable[[Jaxpr, Sequence[Any], Sequence[Any], Sequence[Any]], Callable[..., Any]]
"""Builds a function for a part of a program: `(program, equations, taken, needed) -> function`.

`taken` are the variables that the function takes, and `needed` are the variables that it returns.
"""


def piece_function(
    program: Jaxpr, equations: Sequence[Any], taken: Sequence[Any], needed: Sequence[Any]
) -> Callable[..., Any]:
    """Returns a part of a program as a function, without changes; the default `RunPiece`."""
    piece = program.replace(
        constvars=[],
        invars=list(taken),
        outvars=list(needed),
        eqns=list(equations),
        effects=program.effects,
    )
    return jaxpr_as_fun(ClosedJaxpr(piece, ()))


def evaluate_in_pieces(
    closed: ClosedJaxpr,
    inputs: Sequence[Any],
    *,
    is_apart: Callable[[Any], bool],
    run_apart: Callable[[Any, Sequence[Any]], Sequence[Any]],
    run_piece: RunPiece = piece_function,
) -> list[Any]:
    """Evaluates a program in parts, with another implementation for some of its equations.

    Args:
      closed: program to evaluate.
      inputs: values of the inputs of the program.
      is_apart: function that returns whether an equation of the program itself, not of a program
        inside it, has another implementation. The equations between two such equations form one
        piece.
      run_apart: `(equation, values of its inputs) -> values of its outputs`, the other
        implementation.
      run_piece: builds the function that runs a piece; the default changes nothing.

    Returns:
      The outputs of the program.
    """
    program = closed.jaxpr
    values = dict(zip(program.constvars, closed.consts, strict=True))
    values |= dict(zip(program.invars, inputs, strict=True))

    def read(atom: Var | Literal) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for equations, needed, apart in _pieces(program, is_apart):
        if apart:
            (equation,) = equations
            outputs = run_apart(equation, [read(atom) for atom in equation.invars])
            values |= dict(zip(equation.outvars, outputs, strict=True))
        else:
            taken = free_variables(equations)
            outputs = run_piece(program, equations, taken, needed)(*map(read, taken))
            values |= dict(zip(needed, outputs, strict=True))
    return [read(atom) for atom in program.outvars]


def _pieces(
    program: Jaxpr, is_apart: Callable[[Any], bool]
) -> Iterator[tuple[list[Any], list[Any], bool]]:
    """Splits a program at the equations that have another implementation.

    Yields:
      (equations of a piece, results of the piece that later pieces need, whether the piece is a
      single equation with another implementation).
    """
    pieces: list[tuple[list[Any], bool]] = []
    for equation in program.eqns:
        apart = is_apart(equation)
        if pieces and not apart and not pieces[-1][1]:
            pieces[-1][0].append(equation)
        else:
            pieces.append(([equation], apart))
    needed = {atom for atom in program.outvars if not isinstance(atom, Literal)}
    later = []
    for equations, _ in reversed(pieces):
        later.append(needed)
        needed = needed | set(free_variables(equations))
    for (equations, apart), needed_later in zip(pieces, reversed(later), strict=True):
        made = [variable for equation in equations for variable in equation.outvars]
        yield equations, [variable for variable in made if variable in needed_later], apart


def constant_bytes(program: ClosedJaxpr) -> int:
    """Returns the bytes of all distinct arrays in a traced function's closure, also in nested
    programs.
    """
    # One array may be a constant of several programs inside of each other.
    arrays = {id(array): array for array in _constants([program])}
    return sum(getattr(array, "nbytes", 0) for array in arrays.values())


def _constants(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, ClosedJaxpr):
            yield from value.consts
            value = value.jaxpr
        if isinstance(value, Jaxpr):
            for equation in value.eqns:
                yield from (atom.val for atom in equation.invars if isinstance(atom, Literal))
                yield from _constants(equation.params.values())
        elif isinstance(value, tuple | list):
            yield from _constants(value)


def split_scan(equation: Equation) -> tuple[int, int]:
    """Returns (number of constants, number of carried values) of a `scan` equation.

    Its inputs are constants, carried values and stacks; its outputs are carried values and stacks.
    Stacks are recognized by their shape: they have one dimension less inside the loop. The
    parameters of the equation are not used, because they differ between versions of JAX.
    """
    body = equation.params["jaxpr"].jaxpr
    num_carry = _count_whole(equation.outvars, body.outvars)
    return _count_whole(equation.invars, body.invars) - num_carry, num_carry


def _count_whole(outside: Sequence[Operand], inside: Sequence[Operand]) -> int:
    """Counts the values that a loop does not slice: they have equal dimensions outside and
    inside.
    """
    pairs = zip(outside, inside, strict=True)
    return sum(outer.aval.ndim == inner.aval.ndim for outer, inner in pairs)


COLLECTIVES = (
    "psum",
    "pmax",
    "pmin",
    "ppermute",
    "pgather",
    "all_gather",
    "all_to_all",
    "ragged_all_to_all",
    "reduce_scatter",
    "unreduced_",
)
"""Prefixes of the names of JAX's collectives; they also match `psum_invariant` and
`all_gather_reduced`.
"""


def holds_collectives(program: ClosedJaxpr | Jaxpr) -> bool:
    """Returns whether a program contains a collective over manual axes, or will contain one in a
    step.

    Nested programs are included.
    """
    jaxpr: Jaxpr = getattr(program, "jaxpr", program)
    return any(
        equation.primitive.name.startswith(COLLECTIVES)
        or batch_call(equation) is not None
        or any(holds_collectives(inner) for inner in inner_programs(equation.params))
        for equation in jaxpr.eqns
    )
