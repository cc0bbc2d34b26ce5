"""Walks over traced programs (jaxprs), and reads of parameters in them.

The module supports each JAX version that zerojax supports.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

BatchCall = typing.Literal["batch_sum", "batch_mean"]
"""What a model takes over the whole batch, by the function's name in `zerojax`."""

_READ = "zerojax.read:"
_OVER_BATCH = {f"zerojax.over_batch:{kind}": kind for kind in typing.get_args(BatchCall)}
_EIGHT_BITS = "/8"
_EXPERT_WEIGHTS = "zerojax.expert_weights:"
_EXPERT_CALL = "zerojax.expert_call:"
_WHOLE_SEQUENCES = "zerojax.whole_sequences:"


def mark_read(value: jax.Array, name: str, *, eight_bits: bool = False) -> jax.Array:
    """`value`, with a mark in the traced program that it was read as parameter `name`.

    The mark also tells the shape that the model sees: under `jax.vmap` the value in the program has
    the mapped dimensions as well; and whether 8 bits of the value are all that is used of it.
    """
    shape = "x".join(map(str, value.shape))
    return checkpoint_name(value, f"{_READ}{shape}{_EIGHT_BITS * eight_bits}:{name}")


def read_name(equation: Any) -> str | None:
    """The parameter whose read an equation marks, if it is such a mark."""
    if equation.primitive.name != "name" or not equation.params["name"].startswith(_READ):
        return None
    return equation.params["name"].removeprefix(_READ).partition(":")[2]


def read_shape(equation: Any) -> tuple[int, ...]:
    """The shape that the model sees, of an equation that marks a read."""
    shape = equation.params["name"].removeprefix(_READ).partition(":")[0]
    return tuple(map(int, filter(None, shape.removesuffix(_EIGHT_BITS).split("x"))))


def reads_eight_bits(equation: Any) -> bool:
    """Whether 8 bits are all that is used, of an equation that marks a read."""
    return equation.params["name"].removeprefix(_READ).partition(":")[0].endswith(_EIGHT_BITS)


def mark_batch_call(value: jax.Array, kind: BatchCall) -> jax.Array:
    """`value`, with a mark in the traced program: in a step its sum or mean over the batch."""
    return checkpoint_name(value, f"zerojax.over_batch:{kind}")


def batch_call(equation: Any) -> BatchCall | None:
    """What an equation takes over the batch in a step, if it is such a mark."""
    return _OVER_BATCH.get(equation.params["name"]) if equation.primitive.name == "name" else None


def takes_over_batch(program: Jaxpr) -> bool:
    """Whether a traced program has such a mark, at any depth."""
    return _has(program, lambda equation: batch_call(equation) is not None)


def _has(program: Jaxpr, is_wanted: Callable[[Any], bool]) -> bool:
    """Whether a program has such an equation, at any depth."""
    return any(
        is_wanted(equation)
        or any(_has(inner, is_wanted) for inner in inner_programs(equation.params))
        for equation in program.eqns
    )


def mark_whole_sequences(value: jax.Array, why: str) -> jax.Array:
    """`value`, with a mark in the traced program: it mixes tokens of a sequence.

    Args:
      why: option or call that does; of a mesh that splits sequences an error names it.
    """
    return checkpoint_name(value, _WHOLE_SEQUENCES + why)


def what_takes_whole_sequences(program: Jaxpr) -> str | None:
    """What a traced program has such a mark for, at any depth; None without one."""
    found: list[str] = []

    def is_mark(equation: Any) -> bool:
        name = equation.params["name"] if equation.primitive.name == "name" else ""
        if name.startswith(_WHOLE_SEQUENCES):
            found.append(name.removeprefix(_WHOLE_SEQUENCES))
        return bool(found)

    return found[0] if _has(program, is_mark) else None


def mark_expert_weights(value: jax.Array) -> jax.Array:
    """`value`, with a mark in the traced program: weights of experts, one for each row."""
    return checkpoint_name(value, f"{_EXPERT_WEIGHTS}{value.ndim}")


def expert_weights_ndim(equation: Any) -> int | None:
    """The number of dimensions that a model sees of weights of experts, if an equation marks any;
    under `jax.vmap` the value in the program has more."""
    name = equation.params["name"] if equation.primitive.name == "name" else ""
    if not name.startswith(_EXPERT_WEIGHTS):
        return None
    return int(name.removeprefix(_EXPERT_WEIGHTS))


def mark_expert_call(gates: jax.Array, *numbers: int) -> jax.Array:
    """`gates`, with a mark in the traced program: a call of experts, and numbers of it."""
    return checkpoint_name(gates, _EXPERT_CALL + "x".join(map(str, (gates.size, *numbers))))


def expert_call(equation: Any) -> tuple[int, ...] | None:
    """What `mark_expert_call` was given, after the number of gates of one call, if an equation is
    such a mark; under `jax.vmap` there are more gates."""
    if equation.primitive.name != "name" or not equation.params["name"].startswith(_EXPERT_CALL):
        return None
    return tuple(map(int, equation.params["name"].removeprefix(_EXPERT_CALL).split("x")))


def marks_experts(name: str) -> bool:
    """Whether a name in a traced program is that of a mark of experts."""
    return name.startswith((_EXPERT_WEIGHTS, _EXPERT_CALL))


@dataclasses.dataclass(frozen=True)
class MarkedRead:
    """One mark of a read in a program.

    Attributes:
      name: of the parameter.
      shape: that the model sees.
      loops: how many loops are around the mark.
      mapped_dims: how many dimensions `jax.vmap` maps there, of the value in the program.
    """

    name: str
    shape: tuple[int, ...]
    loops: int
    mapped_dims: int


def marked_reads(program: Jaxpr) -> list[MarkedRead]:
    """Every mark of a read in a program, in order."""
    found: list[MarkedRead] = []

    def walk(program: Jaxpr, loops: int) -> None:
        for equation in program.eqns:
            name = read_name(equation)
            if name is not None:
                shape = read_shape(equation)
                value: Any = equation.invars[0]
                mapped = value.aval.ndim - len(shape)
                found.append(MarkedRead(name, shape, loops, mapped))
            inside = loops + (equation.primitive.name in ("scan", "while"))
            for inner in inner_programs(equation.params):
                walk(inner, inside)

    walk(program, 0)
    return found


LINEAR_RULE = "zerojax.linear_rule"
"""Names a value inside a function with a derivative of its own (`jax.custom_vjp`) that is linear in
what it is given: for all others its scale may matter."""

FURTHER_ROUNDS = "further_rounds_of_experts"
"""A scope (`jax.named_scope`) of a loop that runs no time where experts have equal loads."""

_BRANCH = "taken_by_{}_of_{}_layers"
"""A scope (`jax.named_scope`) of a branch that a table of the model's decides."""
_SCOPE = re.compile(r"(?:/branch_\d+_fun/)?" + _BRANCH.format(r"(\d+)", r"(\d+)"))


def branch_scope(count: int, layers: int) -> str:
    """The name of the scope of a branch that so many of all layers take."""
    return _BRANCH.format(count, layers)


def share_of_branch(scopes: Iterable[str], around: str = "") -> float | None:
    """Which share of layers takes a branch; None: it was not traced in a scope that says so.

    Args:
      scopes: of the operations of the branch, those that the compiler moved into it too.
      around: the scope of the branching, with which those of its branches begin.

    >>> inner = "jit(step)/while/cond/branch_0_fun/" + branch_scope(1, 4) + "/dot_general"
    >>> share_of_branch([inner, "jit(step)"], "jit(step)/while/cond")
    0.25
    """
    for scope in scopes:
        if scope.startswith(around) and (found := _SCOPE.match(scope, len(around))):
            return int(found[1]) / int(found[2])
    return None


def cost_of_branches(costs: Sequence[int], shares: Sequence[float | None]) -> int:
    """What a branching costs: the mean over layers where a table decides, else the dearest branch.

    Args:
      costs: of each branch.
      shares: of layers that take it (`share_of_branch`).

    >>> cost_of_branches([100, 20], [0.25, 0.75]), cost_of_branches([100, 20], [None, None])
    (40, 100)
    """
    known = [share for share in shares if share is not None]
    if len(known) < len(costs) or abs(sum(known) - 1) > 1e-9:
        return max(costs)
    return round(sum(cost * share for cost, share in zip(costs, known, strict=True)))


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


def inner_programs(params: Mapping[str, Any]) -> Iterator[Jaxpr]:
    """The programs among the parameters of an equation."""
    return _programs(params.values())


def _programs(values: Any) -> Iterator[Jaxpr]:
    for value in values:
        if isinstance(value, ClosedJaxpr):
            yield value.jaxpr
        elif isinstance(value, Jaxpr):
            yield value
        elif isinstance(value, tuple | list):
            yield from _programs(value)


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
