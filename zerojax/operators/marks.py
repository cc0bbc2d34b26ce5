"""Marks in traced programs (jaxprs): operators and adapters write them, `tracing` reads them.

A mark is the name of a value (`checkpoint_name`) or of a scope (`jax.named_scope`). It computes
nothing.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, Jaxpr

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
