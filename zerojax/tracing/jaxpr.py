"""Walks over traced programs (jaxprs), and pieces cut out of them.

The module supports each JAX version that zerojax supports.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

from zerojax.operators.marks import LINEAR_RULE, batch_call, inner_programs


def has_side_effects(effects: Iterable[Any]) -> bool:
    """Returns whether one is a callback, such as `jax.debug.print`.

    What reads a mesh axis, as a sum over the batch does, has an effect for JAX, and none outside.
    """
    return any(not isinstance(effect, _of_axes()) for effect in effects)


@functools.cache
def _of_axes() -> type:
    """The type of the effect of a mesh axis, which has no public name."""
    program = jax.make_jaxpr(lambda x: lax.psum(x, "i"), axis_env=[("i", 2)])(1.0)
    return type(next(iter(program.effects)))


def has_own_rules(program: Jaxpr) -> bool:
    """Whether a traced program has derivatives of its own that may not be linear, at any depth."""
    return any(
        is_own_rule(equation) or any(map(has_own_rules, inner_programs(equation.params)))
        for equation in program.eqns
    )


def is_own_rule(equation: Any) -> bool:
    """Whether an equation is the call of a function with a derivative that may not be linear."""
    called = equation.primitive.name.startswith("custom_vjp")
    return called and not any(map(_is_linear, inner_programs(equation.params)))


def _is_linear(rule: Jaxpr) -> bool:
    names = (e.params["name"] for e in rule.eqns if e.primitive.name == "name")
    return LINEAR_RULE in names


def is_checkpoint(equation: Any) -> bool:
    """Whether an equation is a `jax.checkpoint`."""
    return equation.primitive.name in ("checkpoint", "remat", "remat2")


def program_of(equation: Any) -> ClosedJaxpr:
    """The program of a call or a checkpoint.

    A checkpoint holds an open program, a call a closed one; JAX 0.12 knows one kind only.
    """
    inner = equation.params["jaxpr"]
    return inner if hasattr(inner, "consts") else ClosedJaxpr(inner, ())


def free_variables(equations: Sequence[Any]) -> list[Any]:
    """The variables that equations take from before them."""
    made: set[Any] = set()
    taken: dict[Any, None] = {}
    for equation in equations:
        for atom in equation.invars:
            if not isinstance(atom, Literal) and atom not in made:
                taken[atom] = None
        made.update(equation.outvars)
    return list(taken)


def variables(atoms: Sequence[Any]) -> Iterator[Any]:
    """Those that are no literals."""
    return (atom for atom in atoms if not isinstance(atom, Literal))


@dataclasses.dataclass(frozen=True, eq=False)
class Piece:
    """A part of a program without dead code.

    Attributes:
      closed: takes the values it was cut at, then the inputs of the program that it needs.
      inputs: positions of the latter among all inputs of the program.
    """

    closed: ClosedJaxpr
    inputs: tuple[int, ...]

    def __call__(self, given: Sequence[Any], inputs: Mapping[int, Any]) -> list[Any]:
        """The values of the piece, from those it was cut at and {position: input}."""
        return jaxpr_as_fun(self.closed)(*given, *(inputs[place] for place in self.inputs))


def cut_piece(closed: ClosedJaxpr, outputs: Sequence[Any], given: Sequence[Any] = ()) -> Piece:
    """What a program computes of `outputs` when the variables `given` are known.

    Args:
      closed: the whole program.
      outputs: variables or literals of it.
      given: variables of it at which the search for what is needed ends.
    """
    program, known = closed.jaxpr, set(given)
    wanted = set(variables(outputs))
    kept = []
    for equation in reversed(program.eqns):
        made = set(equation.outvars)
        if made & wanted and not made & known:
            kept.append(equation)
            wanted.update(variables(equation.invars))
    consts = {
        variable: value
        for variable, value in zip(program.constvars, closed.consts, strict=True)
        if variable in wanted
    }
    # An input that is also `given` arrives as such.
    inputs = [i for i, v in enumerate(program.invars) if v in wanted and v not in known]
    part = program.replace(
        constvars=list(consts),
        invars=[*given, *(program.invars[i] for i in inputs)],
        outvars=list(outputs),
        eqns=kept[::-1],
        effects=program.effects,
    )
    return Piece(ClosedJaxpr(part, list(consts.values())), tuple(inputs))


RunPiece = Callable[[Jaxpr, Sequence[Any], Sequence[Any], Sequence[Any]], Callable[..., Any]]
"""(program, equations of a piece, what they take, what of theirs is needed) -> the piece as a
function of what it takes that gives what is needed."""


def piece_function(
    program: Jaxpr, equations: Sequence[Any], taken: Sequence[Any], needed: Sequence[Any]
) -> Callable[..., Any]:
    """A straight piece of a program as it is: the plain `RunPiece`."""
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
    """The outputs of a program, some of whose equations run otherwise.

    Args:
      closed: the program.
      inputs: what it is given.
      is_apart: whether an equation runs otherwise. All between two such are one piece.
      run_apart: (equation, its inputs) -> its outputs, for these.
      run_piece: what runs a piece.
    """
    program = closed.jaxpr
    values = dict(zip(program.constvars, closed.consts, strict=True))
    values |= dict(zip(program.invars, inputs, strict=True))

    def read(atom: Any) -> Any:
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
    """Cuts a program at the equations that run otherwise.

    Yields:
      (equations of a piece, those of its results that something after it needs, whether it is one
      equation that runs otherwise).
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
    for (equations, apart), wanted in zip(pieces, reversed(later), strict=True):
        made = [variable for equation in equations for variable in equation.outvars]
        yield equations, [variable for variable in made if variable in wanted], apart


def constant_bytes(program: ClosedJaxpr) -> int:
    """Bytes of the arrays that a traced function closes over, at any depth, each once."""
    arrays = {id(array): array for array in _constants([program])}
    return sum(getattr(array, "nbytes", 0) for array in arrays.values())


def _constants(values: Any) -> Iterator[Any]:
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


def split_scan(equation: Any) -> tuple[int, int]:
    """(number of constants, number of carried values) of a `scan` equation.

    Its inputs are constants, carried values and stacks; its outputs are carried values and stacks.
    Stacks have one dimension less inside, which, unlike the equation's parameters, is the same in
    every version of JAX.
    """
    body = equation.params["jaxpr"].jaxpr
    num_carry = _count_whole(equation.outvars, body.outvars)
    return _count_whole(equation.invars, body.invars) - num_carry, num_carry


def _count_whole(outside: Any, inside: Any) -> int:
    """How many values have the same number of dimensions outside and inside of a loop."""
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
"""How the names of JAX's collectives begin, `psum_invariant` and `all_gather_reduced` included."""


def holds_collectives(program: ClosedJaxpr | Jaxpr) -> bool:
    """Whether a traced program has a collective over manual axes, at any depth, or would have it
    in a step."""
    jaxpr: Any = getattr(program, "jaxpr", program)
    return any(
        equation.primitive.name.startswith(COLLECTIVES)
        or batch_call(equation) is not None
        or any(holds_collectives(inner) for inner in inner_programs(equation.params))
        for equation in jaxpr.eqns
    )
