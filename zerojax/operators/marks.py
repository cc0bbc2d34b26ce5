"""Defines marks, which are named identity operations in traced programs.

Operators write marks, and the package `tracing` reads them. A mark is the name of a value
(`checkpoint_name`) or of a scope (`jax.named_scope`). It has no effect on the computation.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, Jaxpr

from zerojax.config.late_dataclasses import dataclass
from zerojax.operators.equations import Equation

BatchCall = typing.Literal["batch_sum", "batch_mean", "gather_batch", "row_numbers"]
"""Name of a function in `zerojax` that reads the rows of all devices."""

_READ = "zerojax.read:"
_OVER_BATCH = {f"zerojax.over_batch:{kind}": kind for kind in typing.get_args(BatchCall)}
_EIGHT_BITS = "/8"
_EXPERT_WEIGHTS = "zerojax.expert_weights:"
_EXPERT_CALL = "zerojax.expert_call:"
_WHOLE_SEQUENCES = "zerojax.whole_sequences:"
_WAIT = "zerojax.wait"


def mark_read(value: jax.Array, name: str, *, eight_bits: bool = False) -> jax.Array:
    """Marks `value` in the traced program as read from parameter `name`, and returns `value`.

    The mark records the shape that the model sees, because under `jax.vmap` the value in the
    program has additional, mapped dimensions. It also records whether the model uses only 8 bits of
    the value.
    """
    shape = "x".join(map(str, value.shape))
    return checkpoint_name(value, f"{_READ}{shape}{_EIGHT_BITS * eight_bits}:{name}")


def mark_wait(value: jax.Array) -> jax.Array:
    """Marks a number that orders computations: other values wait for it, but it does not change
    them. Returns the number."""
    return checkpoint_name(value, _WAIT)


def is_wait(equation: Equation) -> bool:
    """Returns whether an equation marks a number for which other values only wait."""
    return equation.primitive.name == "name" and equation.params["name"] == _WAIT


def read_name(equation: Equation) -> str | None:
    """Returns the name of the parameter that an equation marks as read; None if it marks none."""
    if equation.primitive.name != "name" or not equation.params["name"].startswith(_READ):
        return None
    return equation.params["name"].removeprefix(_READ).partition(":")[2]


def read_shape(equation: Equation) -> tuple[int, ...]:
    """Returns the shape that the model sees, from an equation that marks a read."""
    shape = equation.params["name"].removeprefix(_READ).partition(":")[0]
    # The text of a scalar's shape is empty, which `split` turns into one empty word.
    return tuple(map(int, filter(None, shape.removesuffix(_EIGHT_BITS).split("x"))))


def reads_eight_bits(equation: Equation) -> bool:
    """Returns whether the model uses only 8 bits of the value, from an equation that marks a
    read."""
    return equation.params["name"].removeprefix(_READ).partition(":")[0].endswith(_EIGHT_BITS)


def mark_batch_call(value: jax.Array, kind: BatchCall) -> jax.Array:
    """Marks `value` as an operand of a reduction over the batch, and returns `value`."""
    return checkpoint_name(value, f"zerojax.over_batch:{kind}")


def batch_call(equation: Equation) -> BatchCall | None:
    """Returns the reduction over the batch that an equation marks; None if it marks none."""
    return _OVER_BATCH.get(equation.params["name"]) if equation.primitive.name == "name" else None


def takes_over_batch(program: Jaxpr) -> bool:
    """Returns whether a traced program marks a function of the whole batch, at any nesting
    depth."""
    return _has(program, lambda equation: batch_call(equation) is not None)


def gathers_batch(program: Jaxpr) -> bool:
    """Returns whether a traced program marks a gather of all rows, at any nesting depth."""
    return _has(program, lambda equation: batch_call(equation) == "gather_batch")


def what_needs_all_rows(program: Jaxpr) -> BatchCall | None:
    """Returns the first marked function of a program that is not defined for one of several
    microbatches; None if there is none."""
    found: list[BatchCall] = []

    def is_mark(equation: Equation) -> bool:
        if (kind := batch_call(equation)) in ("gather_batch", "row_numbers"):
            found.append(kind)
        return bool(found)

    return found[0] if _has(program, is_mark) else None


def _has(program: Jaxpr, predicate: Callable[[Any], bool]) -> bool:
    """Returns whether any equation of a program satisfies the predicate, at any nesting depth."""
    return any(
        predicate(equation)
        or any(_has(inner, predicate) for inner in inner_programs(equation.params))
        for equation in program.eqns
    )


def mark_whole_sequences(value: jax.Array, why: str) -> jax.Array:
    """Marks `value` as mixing the tokens of a sequence, and returns `value`.

    Args:
      value: array to mark.
      why: option or call that mixes tokens; an error about split sequences names it.
    """
    return checkpoint_name(value, _WHOLE_SEQUENCES + why)


def what_takes_whole_sequences(program: Jaxpr) -> str | None:
    """Returns the option or call named by the first `mark_whole_sequences` in a program, or None.

    Subprograms are searched as well.
    """
    reasons: list[str] = []

    def is_mark(equation: Equation) -> bool:
        name = equation.params["name"] if equation.primitive.name == "name" else ""
        if name.startswith(_WHOLE_SEQUENCES):
            reasons.append(name.removeprefix(_WHOLE_SEQUENCES))
        return bool(reasons)

    return reasons[0] if _has(program, is_mark) else None


def mark_expert_weights(value: jax.Array) -> jax.Array:
    """Marks `value` as expert weights (one row per expert), and returns `value`."""
    return checkpoint_name(value, f"{_EXPERT_WEIGHTS}{value.ndim}")


def expert_weights_ndim(equation: Equation) -> int | None:
    """Returns `ndim` of marked expert weights, as the model sees them; None without a mark.

    Under `jax.vmap` the value in the program has more dimensions.
    """
    name = equation.params["name"] if equation.primitive.name == "name" else ""
    if not name.startswith(_EXPERT_WEIGHTS):
        return None
    return int(name.removeprefix(_EXPERT_WEIGHTS))


def mark_expert_call(gates: jax.Array, *numbers: int) -> jax.Array:
    """Marks `gates` as the gates of one call of `experts`, records their number and `numbers`, and
    returns `gates`."""
    return checkpoint_name(gates, _EXPERT_CALL + "x".join(map(str, (gates.size, *numbers))))


def expert_call(equation: Equation) -> tuple[int, ...] | None:
    """Returns the sizes that `mark_expert_call` recorded, or None; the first is the number of
    gates.

    The number is that of one call; under `jax.vmap` the value in the program has more gates.
    """
    if equation.primitive.name != "name" or not equation.params["name"].startswith(_EXPERT_CALL):
        return None
    return tuple(map(int, equation.params["name"].removeprefix(_EXPERT_CALL).split("x")))


def marks_experts(name: str) -> bool:
    """Returns whether a name in a traced program is a mark of experts."""
    return name.startswith((_EXPERT_WEIGHTS, _EXPERT_CALL))


@dataclass(frozen=True)
class MarkedRead:
    """Mark of a read of a parameter in a program.

    Attributes:
      name: name of the parameter.
      shape: shape that the model sees.
      loops: number of loops around the mark.
      mapped_dims: number of dimensions of the value that `jax.vmap` has added.
    """

    name: str
    shape: tuple[int, ...]
    loops: int
    mapped_dims: int


def marked_reads(program: Jaxpr) -> list[MarkedRead]:
    """Finds every mark of a read in a program, in program order."""
    reads: list[MarkedRead] = []

    def walk(program: Jaxpr, loops: int) -> None:
        for equation in program.eqns:
            name = read_name(equation)
            if name is not None:
                shape = read_shape(equation)
                value: Any = equation.invars[0]
                mapped = value.aval.ndim - len(shape)
                reads.append(MarkedRead(name, shape, loops, mapped))
            inside = loops + (equation.primitive.name in ("scan", "while"))
            for inner in inner_programs(equation.params):
                walk(inner, inside)

    walk(program, 0)
    return reads


LINEAR_RULE = "zerojax.linear_rule"
"""Name of the result of a function with a custom derivative (`jax.custom_vjp`) whose backward pass
is linear in its cotangent. Without this name the scale of the cotangent is assumed to matter."""

FURTHER_ROUNDS = "further_rounds_of_experts"
"""Scope (`jax.named_scope`) of a loop that runs zero iterations if experts have equal loads."""

_BRANCH = "taken_by_{}_of_{}_layers"
"""Scope (`jax.named_scope`) of a branch that is chosen by a constant table of the model."""
# JAX names the scopes of a conditional's branches branch_N_fun.
_SCOPE = re.compile(r"(?:/branch_\d+_fun/)?" + _BRANCH.format(r"(\d+)", r"(\d+)"))


def branch_scope(count: int, layers: int) -> str:
    """Returns the name of the scope of a branch that `count` of `layers` layers take."""
    return _BRANCH.format(count, layers)


def share_of_branch(scopes: Iterable[str], around: str = "") -> float | None:
    """Returns the fraction of layers that take a branch, from the name of its scope; None if no
    scope records it.

    Args:
      scopes: scopes of the operations in the branch, including operations that the compiler moved
        into it.
      around: scope of the conditional; the scopes of its branches begin with it.

    >>> inner = "jit(step)/while/cond/branch_0_fun/" + branch_scope(1, 4) + "/dot_general"
    >>> share_of_branch([inner, "jit(step)"], "jit(step)/while/cond")
    0.25
    """
    for scope in scopes:
        if scope.startswith(around) and (taken := _SCOPE.match(scope, len(around))):
            return int(taken[1]) / int(taken[2])
    return None


def cost_of_branches(costs: Sequence[int], shares: Sequence[float | None]) -> int:
    """Returns the mean cost of branches over layers; the maximum cost if shares are unknown.

    Args:
      costs: cost of each branch.
      shares: fraction of layers that take each branch (`share_of_branch`).

    >>> cost_of_branches([100, 20], [0.25, 0.75]), cost_of_branches([100, 20], [None, None])
    (40, 100)
    """
    weights = weights_of_branches(costs, shares)
    return round(sum(cost * weight for cost, weight in zip(costs, weights, strict=True)))


def weights_of_branches(costs: Sequence[float], shares: Sequence[float | None]) -> list[float]:
    """Returns how often each branch counts, as `cost_of_branches` does: its share of the layers, or
    1 for the branch with the maximum cost and 0 for the others if shares are unknown."""
    known = sum(share for share in shares if share is not None)
    if list(shares).count(None) == 1:  # a branch without operations has no scope
        shares = [max(1 - known, 0.0) if share is None else share for share in shares]
        known = sum(filter(None, shares))
    # Shares are quotients of whole numbers, whose sum may be rounded.
    if None in shares or abs(known - 1) > 1e-9:
        return [float(index == costs.index(max(costs))) for index in range(len(costs))]
    return [share or 0.0 for share in shares]


def inner_programs(params: Mapping[str, Any]) -> Iterator[Jaxpr]:
    """Yields the jaxprs among the parameters of an equation."""
    return _programs(params.values())


def _programs(values: Iterable[Any]) -> Iterator[Jaxpr]:
    for value in values:
        if isinstance(value, ClosedJaxpr):
            yield value.jaxpr
        elif isinstance(value, Jaxpr):
            yield value
        elif isinstance(value, tuple | list):
            yield from _programs(value)
